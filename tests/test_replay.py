"""The learner's draws: shares, cached features, the ring, several writers, dead writers, resume."""

import multiprocessing
import os
import signal

import pytest
import torch
from envs.counter import SPLITS, CounterSuite
from tensordict import TensorDict
from torch import nn

from torchrl_vla import schema
from torchrl_vla.actors import to_transitions
from torchrl_vla.data.demonstrations import decision_transitions, record
from torchrl_vla.envs.chunked import ChunkedEnv, InitStateStream
from torchrl_vla.objectives.critics import FEATURES, OUTCOME
from torchrl_vla.policies.tiny import make_policy
from torchrl_vla.replay import ReplayFeed, Sampling, make_replay
from torchrl_vla.storage.buffer import STEPS, walk
from torchrl_vla.storage.lane import LaneWriter
from torchrl_vla.storage.layout import transition_layout

CAPACITY = 20
SUITE = CounterSuite(lengths=(7, 3))
LAYOUT = transition_layout(SUITE.meta, 2)


def collect(decisions, seed=0):
    """Return ``decisions`` real transitions of one counter, in order."""
    env = ChunkedEnv(
        SUITE.simulators(1), InitStateStream(SPLITS["train"], seed), chunk_size=2, gamma=0.5
    )
    td, rows = env.reset(), []
    generator = torch.Generator().manual_seed(seed)
    for number in range(decisions):
        td[schema.CHUNK] = 2 * torch.rand(1, 2, 2, generator=generator) - 1
        moved, td = env.step_and_maybe_reset(td)
        moved[schema.POLICY_VERSION] = torch.tensor([[number]])
        rows.append(to_transitions(moved))
    return torch.cat(rows)


def demonstrations():
    suite = CounterSuite(goal=5.0)  # the expert adds 1 per step: five steps, success
    return decision_transitions(record(suite.simulators(1), range(4)), 2, 0.5)


def make(tmp_path, replay=None, **settings):
    if replay is None:
        replay = make_replay(tmp_path / "replay", CAPACITY, LAYOUT)
    names = Sampling.__dataclass_fields__
    rule = {"batch_size": 8, "demonstration_share": 0.5}
    rule |= {key: value for key, value in settings.items() if key in names}
    given = {
        "demonstrations": demonstrations(),
        "encode": None,
        "seed": 0,
        "tasks": len(SUITE.meta.instructions),
    }
    given |= {key: value for key, value in settings.items() if key not in names}
    return replay, ReplayFeed(replay, rule=Sampling(**rule), **given)


def read_state(rows):
    """Features that name the row: state (id, step, sum of actions) and task."""
    return torch.cat([rows[schema.STATE], rows[schema.TASK_ID].float()], -1)


@pytest.mark.parametrize(("share", "demonstrated"), [(0.0, 0), (0.25, 2), (0.5, 4), (1.0, 8)])
@pytest.mark.parametrize("encode", [None, read_state])
def test_every_minibatch_has_its_share_of_demonstrations(tmp_path, share, demonstrated, encode):
    replay, feed = make(tmp_path, demonstration_share=share, encode=encode)
    replay.extend(collect(10))
    feed.absorb()
    for _ in range(5):
        batch = feed.sample()
        assert batch.shape == (8,)
        versions = batch[schema.POLICY_VERSION].flatten()
        assert (versions == -1).tolist() == [False] * (8 - demonstrated) + [True] * demonstrated


def test_a_minibatch_with_images_is_in_the_schema(tmp_path):
    replay, feed = make(tmp_path)
    replay.extend(collect(10))
    feed.absorb()
    batch = feed.sample()
    schema.check_transitions(batch, where="test")
    assert batch["next", *schema.IMAGE].dtype == torch.uint8
    # rows are whole: the picture, the state and the ids of a row belong together
    state = batch[schema.STATE]
    assert torch.equal(state[:, 1], batch[schema.IMAGE][:, 0, 0, 0, 0].float())
    assert torch.equal(state[:, :1].long(), batch[schema.INIT_STATE_ID] % 10**6)


def test_online_rows_are_drawn_uniformly(tmp_path):
    replay, feed = make(tmp_path, demonstration_share=0.0, encode=read_state)
    replay.extend(collect(10))
    feed.absorb()
    drawn = torch.cat([feed.sample()[schema.POLICY_VERSION].flatten() for _ in range(250)])
    # 2000 draws of 10 rows: 200 each, standard deviation sqrt(2000 * 0.1 * 0.9) = 13.4
    counts = drawn.bincount(minlength=10)
    assert len(counts) == 10
    assert (counts - 200).abs().max() < 5 * 13.4


def test_draws_follow_the_seed(tmp_path):
    drawn = []
    for number, seed in enumerate((3, 3, 4)):
        replay, feed = make(tmp_path / str(number), seed=seed, encode=read_state)
        replay.extend(collect(10))
        feed.absorb()
        drawn.append(torch.cat([feed.sample()[FEATURES] for _ in range(5)]))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def test_features_are_those_of_the_rows(tmp_path):
    replay, feed = make(tmp_path, encode=read_state, encode_rows=3)
    rows, shown = collect(10), demonstrations()
    replay.extend(rows)
    feed.absorb()
    following = rows["next"].select("observation")
    following[schema.TASK_ID] = rows[schema.TASK_ID]
    now, after = read_state(rows), read_state(following)
    for _ in range(10):
        batch = feed.sample()
        assert schema.IMAGE not in batch.keys(True, True)
        for row in batch.unbind(0):
            version = int(row[schema.POLICY_VERSION])
            if version >= 0:
                wanted = rows[version]
                assert torch.equal(row[FEATURES], now[version])
                # the next features keep the task of the episode
                assert torch.equal(row["next", FEATURES], after[version])
            else:
                same = (read_state(shown) == row[FEATURES]).all(-1)
                wanted = shown[same][0]
            for key in (schema.CHUNK, schema.REWARD, schema.TERMINATED, schema.EXECUTED_MASK):
                assert torch.equal(row[key], wanted[key])


def test_cached_features_equal_the_policys_own(tmp_path):
    torch.manual_seed(0)
    policy = make_policy(
        SUITE.meta, head="gaussian", weights=None, chunk_size=2, width=16, heads=2, keypoints=2
    )
    nn.init.normal_(policy.model.model.queries)
    replay, feed = make(
        tmp_path, encode=policy.features, demonstration_share=0.0, batch_size=16, encode_rows=4
    )
    rows = collect(10)
    replay.extend(rows)
    feed.absorb()
    batch = feed.sample()
    own = policy.features(rows).detach()
    assert own.std(0).max() > 0.1
    index = batch[schema.POLICY_VERSION].flatten()
    torch.testing.assert_close(batch[FEATURES], own[index], atol=1e-5, rtol=1e-5)
    assert not batch[FEATURES].requires_grad


@pytest.mark.parametrize("encode", [None, read_state])
def test_the_ring_wraps(tmp_path, encode):
    replay, feed = make(tmp_path, demonstration_share=0.0, encode=encode)
    rows = collect(75)
    # 75 rows through 20 places, noted in uneven steps, once more than the ring holds (25)
    for start, end in ((0, 13), (13, 20), (20, 31), (31, 56), (56, 75)):
        for part in rows[start:end].split(9):
            replay.extend(part)
        noted = feed.absorb()
        first = max(start, end - CAPACITY)
        assert noted[schema.POLICY_VERSION].flatten().tolist() == list(range(first, end))
        assert feed.absorb() is None
        assert len(feed) == min(end, CAPACITY)
        alive = set(range(max(0, end - CAPACITY), end))
        drawn = set()
        for _ in range(40):
            batch = feed.sample()
            versions = batch[schema.POLICY_VERSION].flatten()
            drawn |= set(versions.tolist())
            if encode is not None:
                assert torch.equal(batch[FEATURES], read_state(rows[versions]))
            assert torch.equal(batch[schema.CHUNK], rows[versions][schema.CHUNK])
        assert drawn <= alive
        assert len(drawn) > len(alive) // 2


def die_inside(replay, rows):
    """Be killed in the middle of the second write."""
    replay.extend(rows[:4])
    place = LaneWriter._place

    def die(*args):
        placed = place(*args)
        os.kill(os.getpid(), signal.SIGKILL)
        return placed

    LaneWriter._place = die
    replay.extend(rows[4:])


@pytest.mark.parametrize("encode", [None, read_state])
def test_a_writer_that_dies_inside_a_write_blocks_nobody(tmp_path, encode):
    replay = make_replay(tmp_path / "replay", CAPACITY, LAYOUT, lanes=2)
    _, feed = make(tmp_path, replay, demonstration_share=0.0, encode=encode)
    rows = collect(12)
    writer = multiprocessing.get_context("fork").Process(target=die_inside, args=(replay, rows))
    writer.start()
    writer.join(timeout=100)
    assert writer.exitcode == -signal.SIGKILL
    assert feed.absorb()[schema.POLICY_VERSION].flatten().tolist() == [0, 1, 2, 3]
    assert set(feed.sample()[schema.POLICY_VERSION].flatten().tolist()) <= {0, 1, 2, 3}
    replay.extend(rows[4:8])  # this process takes over the dead one's lane
    assert feed.absorb()[schema.POLICY_VERSION].flatten().tolist() == [4, 5, 6, 7]
    assert len(feed) == 8


def test_rows_of_several_writers_are_drawn_alike(tmp_path):
    replay = make_replay(tmp_path / "replay", CAPACITY, LAYOUT, lanes=2)
    _, feed = make(tmp_path, replay, demonstration_share=0.0, encode=read_state, batch_size=1000)
    rows = collect(10)
    lanes = [replay.for_lane(lane) for lane in (1, 0)]
    lanes[0].extend(rows[:8])
    lanes[1].extend(rows[8:])
    # lane by lane, whoever wrote first
    assert feed.absorb()[schema.POLICY_VERSION].flatten().tolist() == [8, 9, *range(8)]
    drawn = feed.sample()[schema.POLICY_VERSION].flatten().bincount(minlength=10)
    # 1000 draws of 10 rows: 100 each, standard deviation 9.5
    assert (drawn - 100).abs().max() < 5 * 9.5
    with pytest.raises(RuntimeError, match=r"lane 1 of .* is written by process"):
        replay.for_lane(1).extend(rows[:1])


def test_a_feed_goes_on_with_the_rows_that_were_counted(tmp_path):
    rule = {"demonstration_share": 0.0, "encode": read_state}
    replay, feed = make(tmp_path, **rule)
    rows = collect(14)
    replay.extend(rows[:6])
    feed.absorb()
    replay.extend(rows[6:8])  # written, and not yet counted
    cursor = feed.cursor()
    replay.extend(rows[8:12])
    replay.storage.release()
    again = make_replay(tmp_path / "replay", CAPACITY, LAYOUT, existing="reuse", cursor=cursor)
    _, other = make(tmp_path, again, **rule)
    assert other.absorb()[schema.POLICY_VERSION].flatten().tolist() == list(range(6))
    assert set(other.sample()[schema.POLICY_VERSION].flatten().tolist()) <= set(range(6))
    again.extend(rows[6:9])  # the episode goes on where the cursor cut it
    assert len(other.absorb()) == 3
    assert len(other) == 9
    again.storage.release()
    emptied = make_replay(tmp_path / "replay", CAPACITY, LAYOUT, existing="empty")
    assert len(emptied) == 0
    emptied.extend(rows)
    assert len(emptied) == 14


def test_draws_after_a_restart_are_those_of_an_uninterrupted_feed(tmp_path):
    rule = {"demonstration_share": 0.25, "encode": read_state, "n_steps": 3, "gamma": 0.5}
    rows = collect(18)
    taken = []
    for restarts in (False, True):
        replay, feed = make(tmp_path / str(restarts), **rule)
        replay.extend(rows[:12])
        feed.absorb()
        for _ in range(3):
            feed.sample()
        if restarts:
            cursor, state = feed.cursor(), feed.generator.get_state()
            replay.extend(rows[12:])  # lost
            replay.storage.release()
            folder = replay.storage.folder
            replay = make_replay(folder, CAPACITY, LAYOUT, existing="reuse", cursor=cursor)
            _, feed = make(tmp_path, replay, **rule)
            feed.absorb()
            feed.generator.set_state(state)
        replay.extend(rows[12:16])
        feed.absorb()
        taken.append(torch.cat([feed.sample() for _ in range(5)]))
    assert (taken[0] == taken[1]).all()


def test_a_folder_with_something_in_it_is_refused(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "old.memmap").write_bytes(b"x")
    with pytest.raises(FileExistsError, match=r"full is not empty and no replay"):
        make_replay(tmp_path / "full", 10, LAYOUT)
    assert (tmp_path / "full" / "old.memmap").read_bytes() == b"x"
    (tmp_path / "empty").mkdir()
    make_replay(tmp_path / "empty", 10, LAYOUT).extend(collect(2))
    with pytest.raises(FileExistsError, match="holds the replay of an earlier run"):
        make_replay(tmp_path / "empty", 10, LAYOUT)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"demonstration_share": -0.1}, "demonstration_share is -0.1"),
        ({"demonstration_share": 1.1}, "demonstration_share is 1.1"),
        ({"demonstrations": None}, "there are no demonstrations"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"tasks": 0, "balance_tasks": True}, "tasks is 0"),
        ({"n_steps": 2}, "n_steps is 2"),
    ],
)
def test_settings_out_of_range(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        make(tmp_path, **settings)


def test_capacity_below_one(tmp_path):
    with pytest.raises(ValueError, match="capacity is 0"):
        make_replay(tmp_path / "replay", 0, LAYOUT)


def test_an_empty_replay_has_nothing_to_draw(tmp_path):
    _, feed = make(tmp_path)
    assert feed.absorb() is None
    assert len(feed) == 0
    with pytest.raises(RuntimeError, match="the replay is empty"):
        feed.sample()


def test_void_rows_are_refused_at_both_doors(tmp_path):
    void = demonstrations()
    void[schema.SIM_ERROR][3] = True
    with pytest.raises(ValueError, match=r"demonstrations into the replay: .*diverged"):
        make(tmp_path / "a", demonstrations=void)
    replay, feed = make(tmp_path / "b")
    assert feed.absorb() is None
    rows = collect(4)
    rows[schema.SIM_ERROR][2] = True
    replay.extend(rows)
    with pytest.raises(ValueError, match=r"actors into the replay: .*diverged"):
        feed.absorb()


def rows_of(episodes: list[list[tuple[float, int, bool]]]) -> TensorDict:
    """Decisions of several episodes in time order: (reward, executed steps, done) each."""
    flat = [(e, d, *row) for e, rows in enumerate(episodes) for d, row in enumerate(rows)]
    episode, decision, reward, executed, done = (
        torch.tensor(x)[:, None] for x in zip(*flat, strict=True)
    )
    out = TensorDict(batch_size=[len(flat)])
    out[schema.EPISODE_ID], out[schema.DECISION] = episode, decision
    out[schema.REWARD], out[schema.NUM_EXECUTED] = reward.float(), executed
    out[schema.DONE] = done
    return out


def walked(rows, n, gamma):
    """Walk over all rows, where a row is followed by the next one of its episode."""
    episode, decision = rows[schema.EPISODE_ID][:, 0], rows[schema.DECISION][:, 0]

    def following(index):
        then = (index + 1).clamp(max=len(rows) - 1)
        there = (episode[then] == episode[index]) & (decision[then] == decision[index] + 1)
        return then, there

    def columns(index, keys):
        return rows.select(*keys)[index]

    total, steps, last = walk(columns, following, torch.arange(len(rows)), n, gamma)
    return total[:, 0].tolist(), steps[:, 0].tolist(), last.tolist()


def test_a_walk_stays_inside_an_episode():
    # gamma 0.5 per control step; episode 0: rewards 0, 0, 1 with 2, 2, 1 steps; episode 1 goes on.
    rows = rows_of([[(0, 2, False), (0, 2, False), (1, 1, True)], [(0, 2, False), (3, 2, False)]])
    # row 0: 0 + 0.5^2 * 0 = 0 over 4 steps, to row 1; row 1: 0 + 0.5^2 * 1 over 3 steps, to row 2;
    # row 2: its own; row 3: 0 + 0.5^2 * 3 over 4 steps; row 4 is the last: its own.
    total, steps, last = walked(rows, 2, 0.5)
    assert total == [0.0, 0.25, 1.0, 0.75, 3.0]
    assert steps == [4, 3, 1, 4, 2]
    assert last == [1, 2, 2, 4, 4]
    # n = 3 from row 0: 0 + 0.5^4 * 1 over 5 steps.
    total, steps, last = walked(rows, 3, 0.5)
    assert (total[0], steps[0], last[0]) == (0.0625, 5, 2)
    assert rows[schema.REWARD][:, 0].tolist() == [0, 0, 1, 0, 3]  # the input is left alone
    assert walked(rows, 1, 0.9)[0] == [0, 0, 1, 0, 3]
    with pytest.raises(ValueError, match="n is 0"):
        walked(rows, 0, 0.9)


def test_a_walk_does_not_bridge_a_gap():
    rows = rows_of([[(0, 4, False), (5, 4, False), (7, 4, False)]])
    rows = rows[torch.tensor([0, 2])]  # the decision between them was void
    assert walked(rows, 2, 0.9)[0] == [0.0, 7.0]


@pytest.mark.parametrize("part", [1, 4, 30])
def test_online_rows_look_ahead_however_they_arrived(tmp_path, part):
    n, gamma = 3, 0.5
    replay, feed = make(tmp_path, encode=read_state, n_steps=n, gamma=gamma)
    rows = collect(27)
    for few in rows.split(part):
        replay.extend(few)
        feed.absorb()
    for _ in range(20):
        for row in feed.sample().unbind(0):
            start = int(row[schema.POLICY_VERSION])
            if start < 0:  # demonstrations do not look ahead
                assert int(row[STEPS]) == int(row[schema.NUM_EXECUTED])
                continue
            total, steps, last = 0.0, 0, start
            for last in range(start, min(start + n, 27)):
                total += gamma**steps * float(rows[last][schema.REWARD])
                steps += int(rows[last][schema.NUM_EXECUTED])
                if rows[last][schema.DONE]:
                    break
            assert float(row[schema.REWARD]) == pytest.approx(total)
            assert int(row[STEPS]) == steps
            assert torch.equal(row["next", FEATURES][:3], rows[last]["next", *schema.STATE])
            assert torch.equal(row[schema.TERMINATED], rows[last][schema.TERMINATED])
            assert torch.equal(row[schema.CHUNK], rows[start][schema.CHUNK])


def test_rows_carry_the_outcome_of_their_episode(tmp_path):
    replay, feed = make(tmp_path, demonstration_share=0.25, encode=read_state)
    rows = collect(10)
    expected = outcomes_by_hand(rows)
    for part in rows.split(3):  # episodes end in a later part than they begin in
        replay.extend(part)
        feed.absorb()
    for _ in range(10):
        batch = feed.sample()
        versions = batch[schema.POLICY_VERSION].flatten()
        online = versions >= 0
        assert batch[OUTCOME][online, 0].tolist() == [expected[v] for v in versions[online]]
        assert (batch[OUTCOME][~online] == 1).all()  # the expert always succeeds


def outcomes_by_hand(rows: TensorDict) -> list[int]:
    """Outcome of every row's episode, one row after the other."""
    out = []
    for episode in rows[schema.EPISODE_ID].flatten().tolist():
        mine = (rows[schema.EPISODE_ID] == episode).flatten()
        ended = rows[schema.DONE][mine].any()
        out.append(int(rows[schema.SUCCESS][mine].any()) if ended else -1)
    return out


def test_metrics_tell_what_was_drawn(tmp_path):
    replay, feed = make(tmp_path, demonstration_share=0.5, encode=read_state)
    replay.extend(collect(10))  # versions 0..9
    feed.absorb()
    versions = feed.sample()[schema.POLICY_VERSION].flatten()
    metrics = feed.metrics(12)
    assert metrics["replay/rows"] == 10
    online = versions[versions >= 0]
    assert metrics["policy_lag"] == pytest.approx(float((12 - online).float().mean()))
    assert metrics["policy_lag_max"] == 12 - online.min()


def test_old_policies_are_not_drawn(tmp_path):
    replay, feed = make(
        tmp_path, demonstration_share=0.0, encode=read_state, max_policy_lag=3, batch_size=64
    )
    replay.extend(collect(10))  # versions 0..9
    feed.absorb()
    # newest 9: 6, 7, 8, 9 are at most 3 publishes old
    versions = feed.sample(version=9)[schema.POLICY_VERSION].flatten()
    assert set(versions.tolist()) == {6, 7, 8, 9}
    with pytest.raises(RuntimeError, match="older than max_policy_lag=3"):
        feed.sample(version=13)


def test_the_demonstration_share_is_annealed(tmp_path):
    replay, feed = make(
        tmp_path,
        encode=read_state,
        demonstration_share=0.5,
        demonstration_share_end=0.0,
        demonstration_anneal_updates=100,
    )
    replay.extend(collect(10))
    feed.absorb()
    for update, shown in ((0, 4), (50, 2), (75, 1), (100, 0), (1000, 0)):
        versions = feed.sample(update)[schema.POLICY_VERSION]
        assert int((versions == -1).sum()) == shown


def test_the_rule_says_whether_there_is_anything_to_draw(tmp_path):
    plain, ended = {}, {"positive_share": 0.5}
    for number, (settings, rows, version, expected) in enumerate(
        [
            (plain, 0, 0, False),
            (plain, 1, 0, True),
            (ended, 1, 0, False),  # lengths 7 and 3 in chunks of 2: the first episode ends in row 3
            (ended, 4, 0, True),
            ({"max_policy_lag": 2}, 2, 3, True),  # row 1 is of version 1, as old as is allowed
            ({"max_policy_lag": 2}, 2, 4, False),
        ]
    ):
        replay, feed = make(tmp_path / str(number), encode=read_state, **settings)
        if rows:
            replay.extend(collect(rows))
        feed.absorb()
        assert feed.can_draw(version) is expected, number
