"""A chunk becomes one transition: rewards, masks, flags, resets and initial states, by hand."""

import math

import pytest
import torch
from counter import SPLITS, CounterSuite, shown
from tensordict import TensorDict
from torchrl.data.vla import UniformActionTokenizer
from torchrl.envs.utils import check_env_specs

from torchrl_vla import schema
from torchrl_vla.envs.chunked import (
    IDS_PER_STREAM,
    ChunkedEnv,
    FixedInitStates,
    InitStateStream,
)
from torchrl_vla.envs.tabletop import TabletopSuite

TRAIN = SPLITS["train"]


def make(num_envs=2, *, ids=None, chunk_size=4, suite=None, env=None, **script):
    suite = suite or CounterSuite(**script)
    states = InitStateStream(TRAIN, 0) if ids is None else FixedInitStates(ids)
    return ChunkedEnv(suite.simulators(num_envs), states, chunk_size=chunk_size, **(env or {}))


def step(env, td, value=0.0):
    """Step with every number of the chunk set to ``value``; return ``(transition, next root)``."""
    shape = (env.batch_size[0], env.chunk_size, env.meta.action_dim)
    td[schema.CHUNK] = torch.full(shape, float(value))
    return env.step_and_maybe_reset(td)


def flags(td):
    return [
        (bool(a), bool(b), bool(c))
        for a, b, c in zip(
            td[schema.DONE], td[schema.TERMINATED], td[schema.TRUNCATED], strict=True
        )
    ]


@pytest.mark.parametrize("tokens", [False, True])
def test_specs_hold_on_both_suites(tokens: bool):
    tokenizer = UniformActionTokenizer(8, low=-1.0, high=1.0) if tokens else None
    for suite in (CounterSuite(lengths=(3, 5)), TabletopSuite()):
        env = make(2, suite=suite, env={"action_tokenizer": tokenizer})
        check_env_specs(env, seed=3)
        env.close()


def test_a_transition_of_a_real_rollout_fits_the_schema():
    suite = TabletopSuite(second_camera=True)
    env = make(2, suite=suite, ids=[1, 2], chunk_size=3, env={"max_steps": 7})
    td, rows = env.reset(), []
    for _ in range(3):
        moved, td = step(env, td, 0.1)
        rows.append(moved)
    rollout = torch.stack(rows, 1)
    rollout[schema.POLICY_VERSION] = torch.zeros(2, 3, 1, dtype=torch.int64)
    schema.check_transitions(rollout, where="test")
    # 7 steps in chunks of 3: 3 + 3 + 1, then the time limit
    assert rollout[schema.NUM_EXECUTED][..., 0].tolist() == [[3, 3, 1]] * 2
    assert rollout[schema.TRUNCATED][..., 0].tolist() == [[False, False, True]] * 2
    assert rollout[schema.IMAGE].shape == (2, 3, 2, 3, 64, 64)
    env.close()


@pytest.mark.parametrize("num_envs", [1, 2, 16])
@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_success_in_any_step_of_a_chunk_keeps_its_reward(num_envs: int, length: int):
    # All envs end at once: the case in which a chunk built from transforms loses the reward.
    env = make(num_envs, lengths=(length,), env={"gamma": 0.5})
    moved, _ = step(env, env.reset())
    # step t pays t + 1, discounted by 0.5^t: 1, 1 + 1, 2 + 3/4, 2.75 + 4/8
    wanted = {1: 1.0, 2: 2.0, 3: 2.75, 4: 3.25}[length]
    assert moved[schema.REWARD].flatten().tolist() == [wanted] * num_envs
    assert flags(moved) == [(True, True, False)] * num_envs
    assert moved[schema.SUCCESS].all()
    mask = [k < length for k in range(4)]
    assert moved[schema.EXECUTED_MASK].tolist() == [mask] * num_envs
    assert moved[schema.NUM_EXECUTED].flatten().tolist() == [length] * num_envs
    # exactly `length` control vectors reached each simulator
    assert [len(done) for done in env.simulators.actions] == [length] * num_envs
    assert env.num_successes == env.num_episodes == num_envs


def test_each_env_ends_in_its_own_step():
    env = make(3, lengths=(2, math.inf, 4), successes=(False, True, True), env={"gamma": 0.5})
    moved, _ = step(env, env.reset())
    # 1 + 2/2; 1 + 2/2 + 3/4 + 4/8 twice
    assert moved[schema.REWARD].flatten().tolist() == [2.0, 3.25, 3.25]
    assert flags(moved) == [(True, True, False), (False, False, False), (True, True, False)]
    assert moved[schema.SUCCESS].flatten().tolist() == [False, False, True]
    assert moved[schema.NUM_EXECUTED].flatten().tolist() == [2, 4, 4]
    assert (env.num_episodes, env.num_successes) == (2, 1)


def test_time_limit_inside_a_chunk_truncates():
    env = make(2, chunk_size=4, env={"max_steps": 6})
    moved, td = step(env, env.reset())
    assert flags(moved) == [(False, False, False)] * 2
    moved, td = step(env, td)
    assert flags(moved) == [(True, False, True)] * 2
    assert moved[schema.EXECUTED_MASK].tolist() == [[True, True, False, False]] * 2
    # gamma 1: steps 4 and 5 pay 5 and 6
    assert moved[schema.REWARD].flatten().tolist() == [11.0] * 2
    assert not moved[schema.SUCCESS].any()
    # the last observation of the episode, not the one after the reset (field case B12)
    assert shown(moved["next", "observation", "image"][0]) == (TRAIN.start, 6)
    assert shown(td["observation", "image"][0]) == (TRAIN.start + 2, 0)


@pytest.mark.parametrize("chunk_size", [3, 4])
def test_an_end_at_the_time_limit_is_terminated_not_truncated(chunk_size: int):
    env = make(1, lengths=(6,), chunk_size=chunk_size, env={"max_steps": 6})
    td = env.reset()
    _, td = step(env, td)
    moved, _ = step(env, td)
    assert flags(moved) == [(True, True, False)]
    assert moved[schema.SUCCESS].item()


def test_a_suite_may_cut_an_episode_off():
    # id % 2: 0 is cut off in step 3, 1 never; the third step of the other is none's end
    env = make(2, chunk_size=4, cuts=(3, math.inf))
    moved, td = step(env, env.reset())
    assert flags(moved) == [(True, False, True), (False, False, False)]
    assert moved[schema.EXECUTED_MASK].tolist() == [[True, True, True, False], [True] * 4]
    assert moved[schema.REWARD].flatten().tolist() == [6.0, 10.0]  # gamma 1: 1 + 2 + 3 (+ 4)
    assert not moved[schema.SUCCESS].any()
    # what is bootstrapped is the episode's own last observation
    assert shown(moved["next", "observation", "image"][0]) == (TRAIN.start, 3)
    assert shown(td["observation", "image"][0]) == (TRAIN.start + 2, 0)
    assert env.num_episodes == 1


def test_an_end_beats_a_cut_in_one_step():
    env = make(1, chunk_size=4, lengths=(3,), cuts=(3,))
    moved, _ = step(env, env.reset())
    assert flags(moved) == [(True, True, False)]
    assert moved[schema.SUCCESS].item()


def test_the_suites_own_limit_is_the_default():
    env = make(1, chunk_size=12)
    moved, _ = step(env, env.reset())
    assert flags(moved) == [(True, False, True)]  # the counter's limit is 12


def test_autoreset_makes_no_dead_transition():
    # Field case B15: episodes of length 3, 8 decisions of one step; what a buffer would hold.
    env = make(1, chunk_size=1, lengths=(3,))
    td, pairs = env.reset(), []
    for _ in range(8):
        moved, td = step(env, td)
        pairs.append((shown(moved[schema.IMAGE][0]), shown(moved["next", *schema.IMAGE][0])))
    wanted = [((e, t), (e, t + 1)) for e in range(3) for t in range(3)][:8]
    assert pairs == wanted
    assert env.simulators.resets == [[0, 1, 2]]


def test_a_chunk_is_never_carried_over_into_the_next_episode():
    # Field case B11: env 0 ends in step 3 of its chunk; its next episode starts with the new chunk.
    env = make(2, ids=[0, 1, 2], chunk_size=8, lengths=(3, 100, 100), env={"max_steps": 100})
    td = env.reset()
    for call in (0.0, 0.25):
        moved, td = step(env, td, call)
    first, second = ([float(a[0]) for a in done] for done in env.simulators.actions)
    assert first == [0.0] * 3 + [0.25] * 8
    assert second == [0.0] * 8 + [0.25] * 8
    assert moved[schema.DECISION].flatten().tolist() == [0, 1]


def test_ids_count_decisions_and_name_episodes():
    env = make(2, lengths=(3, 9), chunk_size=3)
    td, seen = env.reset(), []
    for _ in range(4):
        moved, td = step(env, td)
        keys = (schema.EPISODE_ID, schema.DECISION, schema.INIT_STATE_ID, schema.TASK_ID)
        seen.append([[int(moved[key][i]) for key in keys] for i in range(2)])
        assert torch.equal(moved[schema.GROUP_ID], moved[schema.INIT_STATE_ID])
    # even ids last 3 steps, odd ones 9: env 0 runs 0, 2 and starts 3; env 1 runs 1 and starts 4
    assert [row[0] for row in seen] == [[0, 0, 0, 0], [2, 0, 2, 2], [3, 0, 3, 0], [3, 1, 3, 0]]
    assert [row[1] for row in seen] == [[1, 0, 1, 1], [1, 1, 1, 1], [1, 2, 1, 1], [4, 0, 4, 1]]


def test_partial_reset_leaves_the_others_bit_equal():
    env = make(3, suite=TabletopSuite(), ids=[5, 6, 7, 8])
    td = env.reset()
    moved, td = step(env, td, 0.3)
    root = moved["next"].exclude("reward").clone()
    positions = env.simulators.block_positions(0), env.simulators.block_positions(2)
    root["_reset"] = torch.tensor([[False], [True], [False]])
    after = env.reset(root)
    for i in (0, 2):
        assert torch.equal(after[schema.IMAGE][i], moved["next", *schema.IMAGE][i])
        assert torch.equal(after[schema.STATE][i], moved["next", *schema.STATE][i])
        assert (env.simulators.block_positions(i) == positions[i // 2]).all()
    assert after[schema.INIT_STATE_ID].flatten().tolist() == [5, 8, 7]
    assert after[schema.DECISION].flatten().tolist() == [1, 0, 1]
    env.close()


def test_reset_of_all_after_steps_starts_everything_anew():
    env = make(2, ids=[0, 1, 2, 3], lengths=(100,))
    _, td = step(env, env.reset())
    td = env.reset()
    assert [shown(image) for image in td[schema.IMAGE]] == [(2, 0), (3, 0)]
    assert td[schema.DECISION].flatten().tolist() == [0, 0]
    moved, _ = step(env, td)
    assert moved[schema.REWARD].flatten().tolist() == [10.0] * 2  # 1 + 2 + 3 + 4 again


def test_what_was_returned_does_not_change_later():
    env = make(2, lengths=(6,))
    td = env.reset()
    kept, copies = [], []
    for _ in range(4):
        moved, td = step(env, td)
        kept.append(moved)
        copies.append(moved.clone())
    for row, copy in zip(kept, copies, strict=True):
        assert (row == copy).all()


def test_set_seed_reproduces_and_seeds_differ():
    def first_states(seed):
        env = make(4, suite=TabletopSuite())
        env.set_seed(seed)
        td = env.reset()
        moved, _ = step(env, td, 0.2)
        env.close()
        return moved[schema.INIT_STATE_ID].flatten().tolist(), moved["next", *schema.IMAGE]

    ids, images = first_states(7)
    again, images_again = first_states(7)
    other, _ = first_states(8)
    assert ids == again
    assert torch.equal(images, images_again)
    assert not set(ids) & set(other)
    # also in an environment that has been used
    env = make(4)
    starts = []
    for _ in range(2):
        env.set_seed(7)
        starts.append(env.reset()[schema.INIT_STATE_ID].flatten().tolist())
    assert starts[0] == starts[1] == [TRAIN.start + 7 * IDS_PER_STREAM + i for i in range(4)]


def test_diverged_physics_voids_its_episode_and_nothing_else():
    # ids 1, 5, 9, ... diverge in their third step
    env = make(
        4, ids=list(range(12)), broken=(False, True, False, False), fault_step=2, lengths=(8,)
    )
    td = env.reset()
    moved, td = step(env, td)
    assert moved[schema.SIM_ERROR].flatten().tolist() == [False, True, False, False]
    assert flags(moved) == [
        (False, False, False),
        (True, False, True),
        (False, False, False),
        (False, False, False),
    ]
    assert moved[schema.REWARD].flatten().tolist() == [10.0, 0.0, 10.0, 10.0]
    assert moved[schema.NUM_EXECUTED].flatten().tolist() == [4, 2, 4, 4]
    assert not moved[schema.SUCCESS].any()
    # its last good observation stays (the counter refuses to be rendered now)
    assert shown(moved["next", *schema.IMAGE][1]) == (1, 0)
    assert torch.isfinite(moved["next", *schema.STATE]).all()
    assert (env.num_sim_errors, env.num_episodes, env.num_successes) == (1, 1, 0)
    # the others go on, and the void simulator starts the next episode
    moved, td = step(env, td)
    assert moved[schema.INIT_STATE_ID].flatten().tolist() == [0, 4, 2, 3]
    assert flags(moved)[0] == (True, True, False)
    assert moved[schema.NUM_EXECUTED].flatten().tolist() == [4] * 4
    # id 5 took simulator 0 and diverges there
    moved, _ = step(env, td)
    assert moved[schema.SIM_ERROR].any()
    moved[schema.POLICY_VERSION] = torch.zeros(4, 1, dtype=torch.int64)
    with pytest.raises(ValueError, match="diverged simulation"):
        schema.check_transitions(moved, where="test")


def test_divergence_of_every_simulator_at_once():
    env = make(2, ids=[0, 1, 2, 3], broken=(True,))
    moved, td = step(env, env.reset())
    assert moved[schema.SIM_ERROR].all()
    assert moved[schema.NUM_EXECUTED].flatten().tolist() == [0, 0]
    assert [shown(image) for image in td[schema.IMAGE]] == [(2, 0), (3, 0)]


def test_tokens_mean_the_same_as_the_chunk_they_decode_to():
    tokenizer = UniformActionTokenizer(8, low=-1.0, high=1.0)
    tokens = torch.randint(0, 8, (2, 4, 4), generator=torch.Generator().manual_seed(0))
    results = []
    for given in (tokenizer, None):
        env = make(2, suite=TabletopSuite(), ids=[3, 4], env={"action_tokenizer": given})
        td = env.reset()
        if given is None:
            td[schema.CHUNK] = tokenizer.decode(tokens)
        else:
            td[schema.TOKENS] = tokens
        results.append(env.step(td)["next"].select("observation", "reward", "executed_mask"))
        env.close()
    assert (results[0] == results[1]).all()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (math.nan, r"actions of simulators \[1\] are not finite"),
        (math.inf, r"actions of simulators \[1\] are not finite"),
        (1.25, "an action is 1.2500 in magnitude; the limit is 1"),
        (-3.0, "an action is 3.0000 in magnitude"),
    ],
)
def test_bad_actions_are_refused_before_anything_moves(value: float, message: str):
    env = make(2)
    td = env.reset()
    td[schema.CHUNK] = torch.zeros(2, 4, 2)
    td[schema.CHUNK][1, 3, 0] = value
    with pytest.raises(ValueError, match=message):
        env.step(td)
    assert env.simulators.actions == [[], []]


def test_actions_at_the_limits_are_fine():
    env = make(1)
    for value in (-1.0, 1.0):
        step(env, env.reset(), value)
    assert {float(a[0]) for a in env.simulators.actions[0]} == {-1.0, 1.0}


def test_hooks_see_every_step():
    decisions, controls = [], []
    env = make(
        2,
        lengths=(3, 9),
        env={
            "on_step": lambda env, steps: decisions.append((env.num_episodes, steps)),
            "on_control_step": controls.append,
        },
    )
    step(env, env.reset())
    # env 0 runs 3 steps, then env 1 runs 4
    assert controls == [0] * 3 + [1] * 4
    assert decisions == [(1, 7)]


def test_close_frees_the_simulators():
    env = make(1)
    env.close()
    assert env.simulators.closed == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"chunk_size": 0}, "chunk_size is 0"),
        ({"env": {"gamma": 0.0}}, "gamma is 0.0"),
        ({"env": {"gamma": 1.5}}, "gamma is 1.5"),
        ({"env": {"max_steps": 0}}, "max_steps is 0"),
    ],
)
def test_settings_out_of_range(settings: dict, message: str):
    with pytest.raises(ValueError, match=message):
        make(1, **settings)


def draws(stream, count):
    return [stream.draw() for _ in range(count)]


def test_streams_hand_out_disjoint_ids():
    # Field case B32: streams of neighbouring seeds and workers share nothing.
    seen: list[int] = []
    episodes: list[int] = []
    for stream in range(16):
        drawn = draws(InitStateStream(TRAIN, stream), 50)
        seen += [init_state for init_state, _, _ in drawn]
        episodes += [episode for _, _, episode in drawn]
    assert len(set(seen)) == len(set(episodes)) == 16 * 50
    assert all(i in TRAIN for i in seen)


def test_a_stream_is_a_pure_function_of_its_position():
    whole = draws(InitStateStream(TRAIN, 3, group_size=2), 9)
    resumed = InitStateStream(TRAIN, 3, group_size=2, position=4)
    assert draws(resumed, 5) == whole[4:]
    assert resumed.position == 9


def test_groups_start_from_one_state_and_stay_separate_episodes():
    drawn = draws(InitStateStream(TRAIN, 0, group_size=3), 7)
    start = TRAIN.start
    assert [i for i, _, _ in drawn] == [start + k // 3 for k in range(7)]
    assert [g for _, g, _ in drawn] == [start + k // 3 for k in range(7)]
    assert [e for _, _, e in drawn] == list(range(7))


def test_a_used_up_stream_says_so():
    stream = InitStateStream(TRAIN, 1, position=IDS_PER_STREAM - 1)
    init_state, _, _ = stream.draw()
    assert init_state == TRAIN.start + 2 * IDS_PER_STREAM - 1
    with pytest.raises(RuntimeError, match="stream 1 handed out all 1000000 ids"):
        stream.draw()
    # with groups the ids last longer, by the size of a group
    stream = InitStateStream(TRAIN, 1, group_size=2, position=2 * IDS_PER_STREAM - 1)
    stream.draw()
    with pytest.raises(RuntimeError, match="handed out all"):
        stream.draw()


def test_stream_settings_out_of_range():
    limit = len(TRAIN) // IDS_PER_STREAM
    InitStateStream(TRAIN, limit - 1)
    for stream in (-1, limit):
        with pytest.raises(ValueError, match=f"stream {stream} is outside 0..{limit - 1}"):
            InitStateStream(TRAIN, stream)
    with pytest.raises(ValueError, match="group_size is 0"):
        InitStateStream(TRAIN, 0, group_size=0)


def test_fixed_states_come_once_each_and_then_the_last_again():
    states = FixedInitStates([7, 3, 9])
    assert draws(states, 5) == [(7, 7, 0), (3, 3, 1), (9, 9, 2), (9, 9, 3), (9, 9, 4)]
    with pytest.raises(ValueError, match="at least one"):
        FixedInitStates([])


@pytest.mark.parametrize("num_envs", [1, 3, 4])
@pytest.mark.parametrize("value", [0.0, 1.0])
def test_fixed_states_cover_their_list_whatever_the_batch(num_envs: int, value: float):
    # Field case B37: a policy that succeeds at once (sum of actions 2) and one that never does.
    ids = list(range(50, 60))
    env = make(num_envs, ids=ids, goal=2.0)
    td, ended, starts = env.reset(), {}, {}
    while len(ended) < 10:
        moved, td = step(env, td, value)
        for row in moved.unbind(0):
            episode = int(row[schema.EPISODE_ID])
            if int(row[schema.DECISION]) == 0:
                starts[episode] = shown(row[schema.IMAGE])
            if bool(row[schema.DONE]) and episode < 10:
                ended[episode] = (int(row[schema.INIT_STATE_ID]), bool(row[schema.SUCCESS]))
    # value 1: two steps of 1; value 0: the time limit
    assert ended == {i: (ids[i], value == 1.0) for i in range(10)}
    # the state is set after the reset of the physics, so the first picture already shows it
    assert {i: starts[i] for i in range(10)} == {i: (ids[i], 0) for i in range(10)}


def test_next_and_root_share_no_memory_after_autoreset():
    env = make(1, lengths=(4,))
    moved, td = step(env, env.reset())
    before = moved["next"].clone()
    assert isinstance(td, TensorDict)
    td["observation", "image"].fill_(255)
    assert (moved["next"] == before).all()
