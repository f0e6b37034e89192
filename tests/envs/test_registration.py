"""Our suites as Gymnasium environments, held to Gymnasium's own checker."""

import numpy as np
import pytest
from counter import CounterSuite

gymnasium = pytest.importorskip("gymnasium", reason="the extra [gymnasium] is not installed")

from gymnasium.utils.env_checker import check_env, data_equivalence  # noqa: E402
from gymnasium.vector import AutoresetMode, SyncVectorEnv  # noqa: E402

from torchrl_vla.envs import registration  # noqa: E402
from torchrl_vla.envs.gymnasium import GymnasiumSuite  # noqa: E402
from torchrl_vla.envs.tabletop import SPLITS, TabletopSuite  # noqa: E402

TABLETOP = "torchrl_vla.envs.registration:torchrl_vla/Tabletop-v0"


@pytest.fixture
def env():
    made = gymnasium.make(TABLETOP, render_mode="rgb_array", split="eval").unwrapped
    yield made
    made.close()


def test_the_tabletop_passes_the_checker(env):
    check_env(env)


@pytest.mark.metaworld
def test_metaworld_passes_the_checker():
    name = "torchrl_vla.envs.registration:torchrl_vla/MetaWorld-v0"
    made = gymnasium.make(name, task="reach-v3", image_size=64, render_mode="rgb_array").unwrapped
    check_env(made)
    made.close()


@pytest.mark.libero
def test_libero_passes_the_checker():
    name = "torchrl_vla.envs.registration:torchrl_vla/Libero-v0"
    made = gymnasium.make(name, tasks=[0], image_size=64, render_mode="rgb_array").unwrapped
    check_env(made)
    made.close()


def test_a_named_initial_state_is_the_suites_own(env):
    init_state_id = SPLITS["eval"].start + 3
    observation, info = env.reset(options={"init_state_id": init_state_id})
    sims = TabletopSuite().simulators(1)
    sims.reset(0, init_state_id)
    assert np.array_equal(observation["image"]["front"], sims.render(0)[0].transpose(1, 2, 0))
    assert np.array_equal(observation["state"], sims.state(0))
    assert info["instruction"] == sims.meta.instructions[sims.task_id(0)]
    assert info["init_state_id"] == init_state_id
    assert np.array_equal(env.render(), observation["image"]["front"])


def test_seeds_draw_from_the_split(env):
    ids = [env.reset(seed=seed)[1]["init_state_id"] for seed in (1, 2, 1)]
    assert ids[0] == ids[2] != ids[1]
    assert all(i in SPLITS["eval"] for i in ids)
    # without a seed the draws go on
    assert env.reset()[1]["init_state_id"] not in ids


def test_an_expert_episode_ends_with_success(env):
    env.reset(options={"init_state_id": SPLITS["demo"].start})
    for _ in range(env.meta.max_steps):
        action = env.simulators.expert_action(0)
        _, reward, terminated, truncated, info = env.step(action)
        if terminated or truncated:
            break
    assert (reward, terminated, truncated, info["success"]) == (1.0, True, False, True)


def test_the_step_limit_truncates_and_counts_from_the_reset():
    env = registration.SimulatorEnv(CounterSuite())  # never ends by itself; 12 steps
    env.reset(seed=0)
    for _ in range(5):
        env.step(np.zeros(2, np.float32))
    env.reset()
    ends = [env.step(np.zeros(2, np.float32))[2:4] for _ in range(12)]
    assert ends == [(False, False)] * 11 + [(False, True)]


def test_a_diverged_simulation_is_cut_off(env, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # MuJoCo writes its warning log to the working directory
    env.reset(seed=0)
    env.simulators._data[0].qvel[0] = np.nan
    _, reward, terminated, truncated, info = env.step(np.zeros(4, np.float32))
    assert (reward, terminated, truncated, info["sim_error"]) == (0.0, False, True, True)


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_the_vector_environment_is_the_single_one_n_times(mode):
    ours = gymnasium.make_vec(TABLETOP, 2, autoreset_mode=mode)
    assert len({id(member.simulators) for member in ours.unwrapped.envs}) == 1
    singles = SyncVectorEnv([lambda: gymnasium.make(TABLETOP).unwrapped] * 2, autoreset_mode=mode)
    assert data_equivalence(ours.reset(seed=5), singles.reset(seed=5), exact=True)
    rng = np.random.default_rng(0)
    for _ in range(50):  # past the step limit of 48
        action = rng.uniform(-1, 1, (2, 4)).astype(np.float32)
        step, other = ours.step(action), singles.step(action)
        assert np.array_equal(step[0]["image"]["front"], other[0]["image"]["front"])
        assert np.array_equal(step[0]["state"], other[0]["state"])
        assert [np.array_equal(a, b) for a, b in zip(step[1:4], other[1:4], strict=True)] == [
            True
        ] * 3
        assert step[4].keys() == other[4].keys()
        ended = step[2] | step[3]
        if mode == AutoresetMode.DISABLED and ended.any():
            options = {"reset_mask": ended}
            ours.reset(options=dict(options))
            singles.reset(options=dict(options))
    ours.close()
    singles.close()


def test_out_and_in_again_is_the_suite_itself():
    suite = GymnasiumSuite(
        TABLETOP,
        "whatever it says",
        max_steps=48,
        image_from="image.front",
        state_from="state",
        success_key="success",
    )
    sims, direct = suite.simulators(1), TabletopSuite().simulators(1)
    sims.reset(0, 11)
    direct.reset(0, sims._envs[0].env.unwrapped._init_state_id)
    for _ in range(5):
        action = direct.expert_action(0)
        assert sims.step(0, action) == direct.step(0, action)
        assert np.array_equal(sims.render(0), direct.render(0))
        assert np.array_equal(sims.state(0), direct.state(0))


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="split is 'test'"):
        registration.SimulatorEnv(TabletopSuite(), split="test")
    with pytest.raises(ValueError, match="render_mode is 'human'"):
        registration.SimulatorEnv(TabletopSuite(), render_mode="human")
