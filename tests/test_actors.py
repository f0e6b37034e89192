"""Actors as real processes: complete streams, exact versions, counters that agree with the rows."""

import math
import os
import signal
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from envs.counter import SPLITS, CounterSuite
from steer import LAYOUT, Steer, nothing_left, start, weights

from torchrl_vla import schema
from torchrl_vla.actors import actor_streams, load_full_weights, make_actor_env
from torchrl_vla.actors.board import Heartbeat, end_wait, idle_seconds, lines_of, make_board
from torchrl_vla.envs.chunked import IDS_PER_STREAM
from torchrl_vla.envs.splits import SPLIT_SIZE
from torchrl_vla.replay import make_replay

KEYS = (schema.EPISODE_ID, schema.DECISION)


@pytest.fixture(scope="module")
def rounds(tmp_path_factory):
    """Five sync rounds of 2 workers x 3 simulators x 5 decisions, under versions 1, 1, 2, 3, 4."""
    suite = CounterSuite(lengths=(5, 9, math.inf, 2))
    facts = {"batches": [], "idle": []}
    with nothing_left():
        actors = start(tmp_path_factory.mktemp("sync"), suite)
        with actors:
            for value, noise, version in (
                (0.25, 0.0, 1),
                (None, None, 1),
                (0.5, 0.0, 2),
                (0.0, 0.0, 3),
                (0.0, 0.3, 4),
            ):
                if value is not None:
                    actors.publish(weights(value, noise), version)
                facts["batches"].append(actors.collect().clone())
                facts["idle"].append(actors.idle_share())
            facts["counts"], facts["positions"] = actors.counts(), actors.positions()
            assert not actors.pending
        actors.close()
    return facts


def test_sync_rows_have_no_gap_and_no_duplicate(rounds):
    for batch in rounds["batches"]:
        assert batch.shape == (2 * 3, 5)
        schema.check_transitions(batch, where="test")
    stream = torch.cat(rounds["batches"], dim=1)
    before, after = stream[:, :-1], stream[:, 1:]
    done = before[schema.DONE].squeeze(-1)
    assert done.any()
    # the next observation of a decision is the root of the following one, unless the episode ended
    for key in (schema.IMAGE, schema.STATE, schema.EPISODE_ID, schema.INIT_STATE_ID):
        following = ("next", *key) if isinstance(key, tuple) else ("next", key)
        assert torch.equal(before[following][~done], after[key][~done]), key
    assert torch.equal(before[schema.DECISION][~done] + 1, after[schema.DECISION][~done])
    assert not after[schema.DECISION][done].any()
    assert (before[schema.EPISODE_ID][done] != after[schema.EPISODE_ID][done]).all()
    rows = torch.cat([stream[key] for key in KEYS], -1).flatten(0, 1)
    assert len(rows.unique(dim=0)) == len(rows) == 2 * 3 * 25
    # each worker hands out its stream's ids one after the other
    for worker, part in enumerate(stream.split(3)):
        ids = part[schema.INIT_STATE_ID].unique()
        first = SPLITS["train"].start + worker * 10**6
        assert ids.tolist() == list(range(first, first + len(ids)))


def test_sync_versions_are_true_and_change_between_rounds_only(rounds):
    versions = [batch[schema.POLICY_VERSION].unique().tolist() for batch in rounds["batches"]]
    assert versions == [[1], [1], [2], [3], [4]]
    chunks = [batch[schema.CHUNK].unique().tolist() for batch in rounds["batches"][:4]]
    # zero weights, zero actions: the weights really reached every worker (field case B33)
    assert chunks == [[0.25], [0.25], [0.5], [0.0]]


def test_workers_draw_different_noise(rounds):
    noise = rounds["batches"][4][schema.CHUNK].flatten(1)
    assert noise.std() > 0.1
    assert len(noise.unique(dim=0)) == 6


def test_counters_agree_with_the_rows(rounds):
    stream, counts = torch.cat(rounds["batches"], dim=1), rounds["counts"]
    assert counts.decisions == stream.numel() == 150
    assert counts.env_steps == stream[schema.NUM_EXECUTED].sum()
    assert counts.episodes == stream[schema.DONE].sum()
    assert counts.successes == stream[schema.SUCCESS].sum()
    assert counts.sim_errors == 0
    # one id per simulator at the start and one per episode that ended before the last decision;
    # an id that was drawn after it has no data yet and is handed out again on resume
    ended = [3 + int(part[:, :-1][schema.DONE].sum()) for part in stream.split(3)]
    assert rounds["positions"] == {"positions": ended}
    assert all(0.0 <= share <= 1.0 for share in rounds["idle"])


@pytest.mark.slow
def test_the_idle_share_is_that_of_the_time_since_the_last_call(tmp_path: Path):
    with nothing_left(), start(tmp_path, CounterSuite(), max_restarts=1) as actors:
        actors.publish(weights(0.0), 1)
        actors.collect()
        while not (actors.board["idle"] < 0).all():  # both have begun to wait
            time.sleep(0.01)
        assert actors.idle_share() < 1  # they worked, and were started
        time.sleep(0.2)
        assert actors.idle_share() == pytest.approx(1.0)
        os.kill(actors.pids[1], signal.SIGKILL)
        actors.collect()
        assert actors.restarts == 1
        assert 0 <= actors.idle_share() < 1


def test_idle_seconds_are_added_up_over_waits(monkeypatch):
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    board = make_board(2)
    lines, beats = lines_of(board), [Heartbeat(board, worker) for worker in range(2)]
    beats[0].begin_wait()
    now += 3
    beats[1].begin_wait()
    now += 4
    assert idle_seconds(lines, now) == 7 + 4
    end_wait(lines[:1])
    now += 5
    end_wait(lines[:1])  # it does not wait
    assert idle_seconds(lines, now) == 7 + 9
    beats[0].begin_wait()
    now += 1
    assert idle_seconds(lines, now) == 8 + 10


def test_async_rows_reach_the_replay_once_and_none_is_lost(tmp_path: Path):
    # ids 4, 9, 14, ... diverge in their first decision and must leave no row
    suite = CounterSuite(
        lengths=(5, 9, math.inf, 2, 7), broken=(False,) * 4 + (True,), fault_step=2
    )
    with nothing_left():
        replay = make_replay(tmp_path / "replay", 4000, LAYOUT, lanes=2)
        with start(tmp_path / "actors", suite, envs=2, steps=4, replay=replay) as actors:
            for version in range(1, 13):
                actors.publish(weights(version / 64), version)
                for _ in range(2):
                    actors.request()
                while actors.pending:
                    assert actors.receive() is True
            counts = actors.counts()
            # nobody asks any more: the workers wait
            assert replay.write_count == 24 * 8 - counts.sim_errors
            time.sleep(1.0)
            assert actors.counts() == counts
            assert 0.0 <= actors.idle_share() <= 1.0
    rows = replay[: len(replay)]
    schema.check_transitions(rows, where="test")
    assert len(rows) == 24 * 8 - counts.sim_errors
    assert counts.sim_errors > 0
    assert not (rows[schema.INIT_STATE_ID] % 5 == 4).any()
    ids = torch.cat([rows[key] for key in KEYS], -1)
    assert len(ids.unique(dim=0)) == len(ids)
    # every decision carries the version that really chose it, at any moment of the publish
    assert torch.equal(
        rows[schema.CHUNK], (rows[schema.POLICY_VERSION] / 64)[..., None].expand(-1, 4, 2)
    )
    assert len(rows[schema.POLICY_VERSION].unique()) > 6
    check_streams(rows)


def check_streams(rows):
    """Check that each worker's episodes are complete, apart from those that still run."""
    for worker in range(2):
        first = worker * 10**6
        mine = rows[(rows[schema.INIT_STATE_ID] // 10**6 == worker).squeeze(-1)]
        ids = mine[schema.INIT_STATE_ID].unique().tolist()
        assert ids == [i for i in range(first, ids[-1] + 1) if i % 5 != 4]
        running = 0
        for init_state in ids:
            episode = mine[(mine[schema.INIT_STATE_ID] == init_state).squeeze(-1)]
            order = episode[schema.DECISION].flatten().argsort()
            episode = episode[order]
            assert episode[schema.DECISION].flatten().tolist() == list(range(len(episode)))
            ends = episode[schema.DONE].flatten().tolist()
            assert not any(ends[:-1])
            running += not ends[-1]
        assert running <= 2  # simulators of a worker


def test_actors_leave_this_process_its_threads(tmp_path: Path):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with start(tmp_path, CounterSuite(), workers=1) as actors:
            actors.collect()
            assert torch.get_num_threads() == 2  # TorchRL's collectors set it to 1
    finally:
        torch.set_num_threads(before)


def test_streams_of_seeds_ranks_and_workers_never_meet():
    # Field case B32.
    found = [
        stream
        for seed in (0, 1, 2, 200_000)
        for rank in (0, 1, 63, 64, 511, 1023)
        if seed < 3 or rank < 64
        for stream in actor_streams(seed, rank, 64)
    ]
    assert len(set(found)) == (3 * 6 + 3) * 64
    # what runs of up to 64 ranks have recorded stays theirs
    assert actor_streams(2, 63, 2) == [(2 * 64 + 63) * 64, (2 * 64 + 63) * 64 + 1]
    assert max(actor_streams(200_000, 63, 64)) < min(actor_streams(0, 64, 64))
    assert max(actor_streams(2_900, 1023, 64)) < SPLIT_SIZE // IDS_PER_STREAM


@pytest.mark.parametrize(
    ("seed", "rank", "workers"),
    [(-1, 0, 1), (200_001, 0, 1), (2_901, 64, 1), (0, 1024, 1), (0, -1, 1), (0, 0, 65)],
)
def test_a_seed_or_rank_without_streams_of_its_own_is_refused(seed: int, rank: int, workers: int):
    with pytest.raises(ValueError, match=r"is -?\d+; on rank -?\d+ it must be in 0\.\."):
        actor_streams(seed, rank, workers)


def test_streams_go_on_where_a_checkpoint_says():
    make = partial(
        make_actor_env,
        CounterSuite(),
        num_envs=2,
        chunk_size=4,
        gamma=1.0,
        streams=[5, 6],
        group_size=2,
        on_step=lambda env, steps: None,
    )
    start_of = SPLITS["train"].start
    env = make(worker=1, position=0)
    assert env.reset()[schema.INIT_STATE_ID].flatten().tolist() == [start_of + 6 * 10**6] * 2
    # 4 episodes handed out, 2 per state: the third state comes next
    env = make(worker=1, position=4)
    assert env.reset()[schema.INIT_STATE_ID].flatten().tolist() == [start_of + 6 * 10**6 + 2] * 2
    # 3 handed out: the second group lost its first episode with the processes, so it is skipped
    env = make(worker=1, position=3)
    first = env.reset()
    assert first[schema.INIT_STATE_ID].flatten().tolist() == [start_of + 6 * 10**6 + 2] * 2
    assert first[schema.GROUP_ID].unique().numel() == 1
    assert first[schema.EPISODE_ID].unique().numel() == 2


def test_a_copy_has_the_weights_and_its_own_memory():
    given = weights(0.5, 0.25)
    policy = Steer()
    load_full_weights(policy, given)
    assert (policy.value.item(), policy.noise.item()) == (0.5, 0.25)
    given["value"].zero_()
    assert policy.value.item() == 0.5
    assert policy.value.requires_grad
