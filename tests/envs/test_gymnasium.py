"""Foreign Gymnasium environments as simulators of ours, in every autoreset mode."""

import pickle
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate

from torchrl_vla.envs.chunked import ChunkedEnv, FixedInitStates
from torchrl_vla.envs.gymnasium import GymnasiumSuite
from torchrl_vla.envs.gymnasium_actions import Actions
from torchrl_vla.envs.simulator import SimulationError

gymnasium = pytest.importorskip("gymnasium", reason="the extra [gymnasium] is not installed")
spaces = gymnasium.spaces

UNSEEDED = 7
"""Episode number that a reset without seed shows: an automatic one, which must not be seen."""


class Film(gymnasium.Env):
    """Episodes of three steps; everything shows ``100 * episode + step`` (field case B15).

    The episode's number is the seed. The picture is 4 x 6 pixels, red = step, green = episode.
    """

    metadata: ClassVar = {"render_modes": ["rgb_array"], "render_fps": 5}

    def __init__(self, render_mode=None, length=3, cut=False, succeed=False):
        self.render_mode, self.length, self.cut, self.succeed = render_mode, length, cut, succeed
        self.observation_space = spaces.Dict(
            pixels=spaces.Box(0, 255, (4, 6, 3), np.uint8),
            arm=spaces.Dict(count=spaces.Box(-1e9, 1e9, (1,), np.float64)),
        )
        self.action_space = spaces.Box(np.array([0.0, -2.0]), np.array([1.0, 2.0]))
        self.actions = []

    def _observe(self):
        count = np.array([100.0 * self.episode + self.time])
        return {"pixels": self.render(), "arm": {"count": count}}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode, self.time = UNSEEDED if seed is None else seed, 0
        return self._observe(), {}

    def step(self, action):
        assert self.time < self.length, "an episode was stepped past its end"
        self.actions.append(np.array(action))
        self.time += 1
        ended = self.time == self.length
        info = {"solved": self.succeed and self.time == 2}
        return self._observe(), 1.0, ended and not self.cut, ended and self.cut, info

    def render(self):
        frame = np.zeros((4, 6, 3), np.uint8)
        frame[..., 0], frame[..., 1] = self.time, 10 * self.episode
        return frame


def film(episode_limit=None, **kwargs):
    """Register the film anew, as a user's module would."""
    gymnasium.registry.pop("Film-v0", None)
    gymnasium.register(
        "Film-v0", entry_point=lambda **kw: Film(**kw), max_episode_steps=episode_limit
    )
    given = {"image_size": 32, "image_from": "pixels", "state_from": "arm.count"}
    return GymnasiumSuite("Film-v0", "count", **({"max_steps": 10} | given | kwargs))


MODES = {
    "single": {},
    "single, Autoreset": {},
    "next step": {"vectorization": "sync", "autoreset_mode": "NextStep"},
    "same step": {"vectorization": "sync", "autoreset_mode": "SameStep"},
    "disabled": {"vectorization": "sync", "autoreset_mode": "Disabled"},
}


@pytest.mark.parametrize("mode", MODES)
def test_no_autoreset_mode_puts_a_false_step_into_the_data(mode, monkeypatch):
    if mode == "single, Autoreset":
        make = gymnasium.make
        monkeypatch.setattr(
            gymnasium, "make", lambda *a, **k: gymnasium.wrappers.Autoreset(make(*a, **k))
        )
    suite = film(**MODES[mode])
    env = ChunkedEnv(suite.simulators(1), FixedInitStates([0, 1, 2]), chunk_size=1)
    rollout = env.rollout(6, break_when_any_done=False)[0]
    pairs = zip(
        rollout["observation", "state"].flatten().tolist(),
        rollout["next", "observation", "state"].flatten().tolist(),
        strict=True,
    )
    # two episodes of three steps, the last observation of each its own, no pair (3, 100)
    assert list(pairs) == [(0, 1), (1, 2), (2, 3), (100, 101), (101, 102), (102, 103)]
    assert rollout["next", "terminated"].flatten().tolist() == [False, False, True] * 2
    # pictures tell the same: red is the step, green the episode; row 16 is in the padded picture
    shown = rollout["next", "observation", "image"][:, 0, :2, 16, 16].tolist()
    assert shown == [[1, 0], [2, 0], [3, 0], [1, 10], [2, 10], [3, 10]]
    env.close()


def test_the_members_of_a_batch_end_on_their_own():
    suite = film(vectorization="sync", autoreset_mode="SameStep")
    env = ChunkedEnv(suite.simulators(2), FixedInitStates([0, 1, 2, 3]), chunk_size=2)
    rollout = env.rollout(2, break_when_any_done=False)
    # 3 steps in chunks of 2: two, then one
    assert rollout["next", "num_executed"][..., 0].tolist() == [[2, 1], [2, 1]]
    assert rollout["next", "observation", "state"][..., 0].tolist() == [[2, 3], [102, 103]]
    env.close()


def test_the_step_limit_is_ours_and_truncates():
    suite = film(episode_limit=2, max_steps=None, kwargs={"length": 9})
    assert suite.meta.max_steps == 2
    env = ChunkedEnv(suite.simulators(1), FixedInitStates([4, 5]), chunk_size=1)
    rollout = env.rollout(3, break_when_any_done=False)[0]
    assert rollout["next", "truncated"].flatten().tolist() == [False, True, False]
    assert not rollout["next", "terminated"].any()
    assert rollout["next", "observation", "state"].flatten().tolist() == [401, 402, 501]
    env.close()
    with pytest.raises(ValueError, match="Film-v0 has no registered step limit"):
        film(max_steps=None)


@pytest.mark.parametrize("mode", ["single", "next step"])
def test_a_longer_limit_than_the_registered_one_holds(mode):
    suite = film(episode_limit=2, max_steps=4, kwargs={"length": 9}, **MODES[mode])
    env = ChunkedEnv(suite.simulators(1), FixedInitStates([0]), chunk_size=1)
    rollout = env.rollout(4, break_when_any_done=False)[0]
    assert rollout["next", "truncated"].flatten().tolist() == [False, False, False, True]
    env.close()


@pytest.mark.parametrize("mode", ["single", "next step", "same step"])
def test_an_environment_may_cut_its_episodes_off(mode):
    # after 3 steps of 10, in chunks of 2
    suite = film(kwargs={"cut": True}, **MODES[mode])
    env = ChunkedEnv(suite.simulators(1), FixedInitStates([1, 2]), chunk_size=2)
    rollout = env.rollout(4, break_when_any_done=False)[0]
    assert rollout["next", "truncated"].flatten().tolist() == [False, True] * 2
    assert not rollout["next", "terminated"].any()
    assert rollout["next", "num_executed"].flatten().tolist() == [2, 1, 2, 1]
    assert rollout["next", "observation", "state"].flatten().tolist() == [102, 103, 202, 203]
    env.close()


@pytest.mark.parametrize("mode", ["single", "next step", "same step"])
def test_success_comes_from_info_and_ends_the_episode(mode):
    suite = film(success_key="solved", kwargs={"succeed": True}, **MODES[mode])
    sims = suite.simulators(1)
    sims.reset(0, 0)
    outcomes = [sims.step(0, np.zeros(2, np.float32)) for _ in range(2)]
    assert [(o.terminated, o.success) for o in outcomes] == [(False, False), (True, True)]


@pytest.mark.parametrize("mode", ["single", "next step", "same step"])
def test_success_in_the_last_step_is_read_from_that_step(mode):
    suite = film(success_key="solved", kwargs={"succeed": True, "length": 2}, **MODES[mode])
    sims = suite.simulators(1)
    sims.reset(0, 3)
    sims.step(0, np.zeros(2, np.float32))
    outcome = sims.step(0, np.zeros(2, np.float32))
    assert (outcome.terminated, outcome.success) == (True, True)
    assert sims.state(0).tolist() == [302.0]


def test_a_missing_success_key_is_named():
    sims = film(success_key="won").simulators(1)
    sims.reset(0, 0)
    for _ in range(2):
        sims.step(0, np.zeros(2, np.float32))
    with pytest.raises(KeyError, match=r"has no 'won', only \['solved'\]"):
        sims.step(0, np.zeros(2, np.float32))


def test_actions_are_scaled_into_the_box():
    # low (0, -2), span (1, 4): -1 -> (0, -2), 0.5 -> (0.75, 1), 1 -> (1, 2)
    actions = Actions(Film().action_space)
    assert actions.names == ("0..1", "-2..2")
    for value, expected in ((-1.0, (0, -2)), (0.5, (0.75, 1)), (1.0, (1, 2))):
        assert actions.decode(np.full(2, value, np.float32)).tolist() == list(expected)
    with pytest.raises(ValueError, match=r"shape \(3,\)"):
        actions.decode(np.zeros(3, np.float32))


def test_the_largest_of_n_numbers_chooses_a_discrete_action():
    actions = Actions(spaces.Discrete(3, start=-1))
    assert len(actions.names) == 3
    assert actions.decode(np.array([-0.5, 0.1, 0.9], np.float32)) == 1
    assert actions.decode(np.array([0.5, 0.1, -0.9], np.float32)) == -1


@pytest.mark.parametrize(
    "space", [spaces.Box(-np.inf, 1.0, (2,)), spaces.MultiDiscrete([2, 2]), spaces.MultiBinary(3)]
)
def test_other_action_spaces_are_refused(space):
    with pytest.raises(ValueError, match="does not fit"):
        Actions(space)


def test_pictures_are_padded_not_stretched():
    sims = film(image_from="render").simulators(1)
    sims.reset(0, 2)
    image = sims.render(0)
    # 4 x 6 in 32 x 32: scaled by 32/6 to 21.3 rows, so about 5 black rows above and below
    assert image.shape == (1, 3, 32, 32)
    assert (image[0, 1, :5] == 0).all()
    assert (image[0, 1, 7:25] == 20).all()
    assert (image[0, 1, 27:] == 0).all()
    assert sims.render_frame(0, 12).shape == (12, 12, 3)


def test_a_diverged_environment_is_a_simulation_error(monkeypatch):
    sims = film().simulators(1)
    sims.reset(0, 0)
    observe = Film._observe
    monkeypatch.setattr(
        Film, "_observe", lambda self: observe(self) | {"arm": {"count": np.array([np.nan])}}
    )
    with pytest.raises(SimulationError):
        sims.step(0, np.zeros(2, np.float32))


def test_what_the_suite_says_about_itself():
    suite = film()
    meta = suite.meta
    assert (meta.name, meta.instructions, meta.cameras) == ("Film-v0", ("count",), ("pixels",))
    assert (meta.state_dim, meta.action_dim, meta.control_hz) == (1, 2, 5.0)
    named = film(state_names=("ticks [1]",))
    assert named.meta.state_names == ("ticks [1]",)
    assert film(state_from=None).meta.state_dim == 1
    sims = film(state_from=None).simulators(1)
    sims.reset(0, 5)
    assert sims.state(0).tolist() == [0.0]
    with pytest.raises(NotImplementedError, match="no scripted expert"):
        sims.expert_action(0)
    assert pickle.loads(pickle.dumps(suite)).meta == meta


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"image_size": 8}, "image_size is 8"),
        ({"max_steps": 0}, "max_steps is 0"),
        ({"autoreset_mode": "Never"}, "autoreset_mode is 'Never'"),
        ({"vectorization": "threads"}, "vectorization is 'threads'"),
        ({"state_names": ("a", "b")}, "2 names for 1 numbers"),
        (
            {"vectorization": "sync", "autoreset_mode": "SameStep", "image_from": "render"},
            "then shows the next episode",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        film(**settings)


def test_a_config_is_enough():
    film()
    conf = str(Path(__file__).parents[2] / "conf")
    overrides = ["env.env_id=Film-v0", "env.instruction=count", "env.max_steps=3"]
    with initialize_config_dir(conf, version_base="1.3"):
        cfg = compose("train", ["env=gymnasium", *overrides, "+env.kwargs.length=2"])
    sims = instantiate(cfg.env).simulators(2)
    sims.reset(1, 9)
    outcomes = [sims.step(1, np.zeros(2, np.float32)) for _ in range(2)]
    assert [outcome.terminated for outcome in outcomes] == [False, True]
    assert sims.render(1).shape == (1, 3, 64, 64)


def test_a_source_that_is_no_picture_is_named():
    sims = film(image_from="arm.count").simulators(1)
    sims.reset(0, 0)
    with pytest.raises(ValueError, match=r"image_from='arm\.count'.*must be uint8"):
        sims.render(0)
