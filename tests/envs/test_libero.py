"""LIBERO on its real scenes: ``pytest -m libero``. Scenes take seconds, so most tests share one."""

import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate

from torchrl_vla.envs.chunked import ChunkedEnv, FixedInitStates
from torchrl_vla.envs.libero import Libero, LiberoSuite, step_limit
from torchrl_vla.envs.simulator import SimulationError
from torchrl_vla.envs.splits import SPLITS

pytestmark = pytest.mark.libero
EVAL, TRAIN = SPLITS["eval"].start, SPLITS["train"].start
CLOSE_DRAWER = 0
"""Task of libero_90: close the top drawer of the cabinet."""
HOLD = np.array([0, 0, 0, 0, 0, 0, -1], np.float32)


@pytest.fixture(scope="module")
def suite():
    return LiberoSuite("libero_90", [CLOSE_DRAWER], image_size=64)


@pytest.fixture(scope="module")
def sims(suite):
    made = suite.simulators(1)
    yield made
    made.close()


def trace(sims: Libero, init_state_id: int, steps: int = 6) -> np.ndarray:
    """Positions and velocities of everything, over some random steps."""
    sims.reset(0, init_state_id)
    data = sims._scene(0).data
    rng = np.random.default_rng(0)
    rows = [np.concatenate([data.qpos, data.qvel])]
    for _ in range(steps):
        sims.step(0, rng.uniform(-1, 1, 7).astype(np.float32))
        rows.append(np.concatenate([data.qpos, data.qvel]))
    return np.stack(rows)


def reach(sims: Libero, target: np.ndarray, steps: int = 60) -> bool:
    """Move the closed hand straight to ``target``; return whether the task got solved."""
    for _ in range(steps):
        error = target - sims.state(0)[:3]
        if np.abs(error).max() < 0.01:
            return False
        action = np.append(np.clip(error / 0.05, -1, 1), [0, 0, 0, 1]).astype(np.float32)
        outcome = sims.step(0, action)
        if outcome.terminated:
            assert (outcome.reward, outcome.success) == (1.0, True)
            return True
    return False


@pytest.mark.parametrize(
    ("name", "tasks", "limit", "number", "sentence"),
    [
        (
            "libero_spatial",
            10,
            220,
            0,
            "pick up the black bowl between the plate and the ramekin and place it on the plate",
        ),
        ("libero_object", 10, 280, 0, "pick up the alphabet soup and place it in the basket"),
        ("libero_goal", 10, 300, 7, "turn on the stove"),
        ("libero_10", 10, 520, 2, "turn on the stove and put the moka pot on it"),
        ("libero_90", 90, 400, 0, "close the top drawer of the cabinet"),
    ],
)
def test_the_published_suites(name, tasks, limit, number, sentence):
    suite = LiberoSuite(name)
    assert (suite.meta.name, suite.meta.max_steps) == (name, limit)
    assert len(suite.meta.instructions) == tasks
    assert suite.meta.instructions[number] == sentence
    assert len(suite.splits["eval"]) == 50 * tasks
    assert suite.meta.cameras == ("agentview", "robot0_eye_in_hand")
    assert (suite.meta.state_dim, suite.meta.action_dim) == (8, 7)
    assert LiberoSuite(name, [number]).meta.instructions == (sentence,)


def test_variants_have_their_bases_limit():
    assert step_limit("libero_goal_swap") == 300
    assert step_limit("libero_10_with_mug") == 520
    with pytest.raises(ValueError, match="no step limit is published for 'libero_mine'"):
        step_limit("libero_mine")


def test_an_initial_state_does_not_depend_on_history(sims):
    expected = {i: trace(sims, i) for i in (EVAL, EVAL + 1, TRAIN, TRAIN + 1)}
    for init_state_id in reversed(expected):
        assert np.array_equal(trace(sims, init_state_id), expected[init_state_id])
    starts = {rows[0].tobytes() for rows in expected.values()}
    assert len(starts) == 4


def test_numpys_generator_is_left_alone(sims):
    np.random.seed(3)
    before = np.random.get_state()[1].copy()
    sims.reset(0, TRAIN)
    assert np.array_equal(np.random.get_state()[1], before)


def test_the_scene_stays_when_the_task_does(sims):
    sims.reset(0, EVAL)
    scene, model = sims._scene(0), sims._scene(0).model
    sims.reset(0, EVAL + 1)
    assert sims._scene(0) is scene
    assert scene.env.sim.model._model is model


def test_published_states_are_applied_and_settle_for_ten_steps(sims):
    from torchrl_vla.envs.libero_package import initial_states

    published = initial_states(sims._tasks[0])
    sims.reset(0, EVAL + 4)
    data = sims._scene(0).data
    # time of the state plus ten control steps of 50 ms
    assert np.isclose(data.time, published[4][0] + 10 * 0.05)
    # columns are time, qpos, qvel; the first seven joints are the arm's, which only holds still
    assert np.allclose(data.qpos[:7], published[4][1:8], atol=0.02)
    assert not np.allclose(published[4][1:8], published[3][1:8], atol=1e-6)
    with pytest.raises(ValueError, match=r"state 50 of KITCHEN_SCENE10.*has 50 published"):
        sims.reset(0, EVAL + 50)  # ids of one task go up by one


def test_settling_is_not_counted(suite):
    env = ChunkedEnv(suite.simulators(1), FixedInitStates([EVAL]), chunk_size=4, max_steps=6)
    rollout = env.rollout(2)[0]
    assert rollout["next", "num_executed"].flatten().tolist() == [4, 2]
    assert rollout["next", "truncated"].flatten().tolist() == [False, True]
    assert rollout["observation", "image"].shape == (2, 2, 3, 64, 64)
    env.close()


def test_a_script_closes_the_drawer_and_is_paid(sims):
    sims.reset(0, EVAL)
    scene = sims._scene(0)
    drawer = scene.model.joint("wooden_cabinet_1_top_level")
    body = scene.model.jnt_bodyid[drawer.id]
    parts = scene.data.geom_xpos[scene.model.geom_bodyid == body]
    handle = parts[parts[:, 1].argmax()]
    opened = scene.data.qpos[drawer.qposadr[0]]
    assert opened < -0.1
    # the drawer opens along y: come down in front of the handle, then push it in, just above it
    x, y, z = handle
    assert not reach(sims, np.array([x, y + 0.12, z + 0.25]))
    assert not reach(sims, np.array([x, y + 0.12, z + 0.03]))
    assert reach(sims, np.array([x, y - 0.3, z + 0.03]))
    assert scene.data.qpos[drawer.qposadr[0]] > opened + 0.1


def test_the_state_is_the_hands_pose_and_fingers(sims):
    sims.reset(0, EVAL)
    for _ in range(3):
        sims.step(0, HOLD)
    scene = sims._scene(0)
    state = sims.state(0)
    site = scene.model.site("gripper0_grip_site").id
    assert np.allclose(state[:3], scene.data.site_xpos[site], atol=2e-3)
    # rotation vector -> matrix (Rodrigues); the hand points down, about pi around x
    angle = np.linalg.norm(state[3:6])
    x, y, z = state[3:6] / angle
    cross = np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]])
    matrix = np.eye(3) + np.sin(angle) * cross + (1 - np.cos(angle)) * cross @ cross
    hand = scene.data.xmat[scene.model.body("robot0_right_hand").id].reshape(3, 3)
    assert np.allclose(matrix, hand, atol=0.02)
    assert abs(angle - np.pi) < 0.2
    left, right = (scene.model.joint(f"gripper0_finger_joint{i}").qposadr[0] for i in (1, 2))
    assert np.allclose(state[6:], scene.data.qpos[[left, right]], atol=1e-3)


def test_the_grippers_sign_is_a_choice(sims, monkeypatch):
    def gap_after_closing(sign: float) -> float:
        sims.reset(0, EVAL)
        for _ in range(15):
            sims.step(0, np.array([0, 0, 0, 0, 0, 0, sign], np.float32))
        return float(sims.state(0)[6] - sims.state(0)[7])

    assert gap_after_closing(1.0) < 0.03 < 0.07 < gap_after_closing(-1.0)
    monkeypatch.setattr(sims, "_settings", replace(sims._settings, gripper="plus_opens"))
    assert gap_after_closing(-1.0) < 0.03 < 0.07 < gap_after_closing(1.0)
    meanings = [LiberoSuite(gripper=g).meta.action_names[-1] for g in ("plus_closes", "plus_opens")]
    assert meanings == ["gripper, -1 opens, 1 closes", "gripper, -1 closes, 1 opens"]


def test_pictures_are_the_packages_own_turned_by_180_degrees_without_shadows(sims):
    from torchrl_vla.envs.libero_package import load

    sims.reset(0, EVAL)
    scene = sims._scene(0)
    package = load(None)
    problem = package["problem_of"](str(scene.task.bddl_file))["problem_name"]
    theirs = package["problems"][problem](
        str(scene.task.bddl_file), robots=["Panda"], controller_configs=package["controller"],
        gripper_types="default", initialization_noise=None, use_camera_obs=False,
        has_offscreen_renderer=False, hard_reset=False, ignore_done=True, control_freq=20,
    )  # fmt: skip
    theirs.sim.model.body_pos[:] = scene.model.body_pos
    theirs.sim.model.body_quat[:] = scene.model.body_quat
    theirs.sim.data.qpos[:] = scene.data.qpos
    theirs.visualize(dict.fromkeys(theirs._visualizations, False))
    theirs.sim.forward()
    ours = sims.render(0)
    for image, raw in zip(ours, robosuite_pictures(theirs.sim, sims.meta.cameras, 64), strict=True):
        turned = raw[::-1, ::-1].astype(int)
        difference = np.abs(image.transpose(1, 2, 0).astype(int) - turned).mean(-1)
        mirrored = np.abs(image.transpose(1, 2, 0).astype(int) - turned[:, ::-1]).mean(-1)
        assert np.median(difference) < 6
        assert difference.mean() < 0.5 * mirrored.mean()
    theirs.close()


def robosuite_pictures(sim, cameras: tuple[str, ...], size: int) -> list[np.ndarray]:
    """Draw with robosuite's own context, as its image observation does."""
    from mujoco.egl import GLContext
    from robosuite.utils import binding_utils

    # Our import of robosuite leaves its backend out; two EGL displays in a process do not get on.
    binding_utils.GLContext = lambda max_width, max_height, device_id: GLContext(size, size)
    context = binding_utils.MjRenderContextOffscreen(sim, device_id=0)
    context.vopt.geomgroup[0] = 0
    context.gl_ctx.make_current()
    return [sim.render(width=size, height=size, camera_name=camera) for camera in cameras]


def test_pictures_follow_the_state(sims):
    sims.reset(0, EVAL)
    first = sims.render(0)
    assert first.shape == (2, 3, 64, 64)
    assert first.dtype == np.uint8
    assert all(image.std() > 15 for image in first)
    for _ in range(8):
        sims.step(0, np.array([1, 1, -1, 0, 0, 0, -1], np.float32))
    assert (np.abs(sims.render(0).astype(int) - first) > 30).mean(axis=(1, 2, 3)).min() > 0.01
    sims.reset(0, EVAL)
    assert np.array_equal(sims.render(0), first)


def test_diverged_physics_is_a_simulation_error_and_the_scene_recovers(sims, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # MuJoCo writes its warning log to the working directory
    expected = trace(sims, TRAIN, steps=2)
    sims._scene(0).data.qvel[0] = np.nan
    with pytest.raises(SimulationError, match="KITCHEN_SCENE10"):
        sims.step(0, HOLD)
    with pytest.raises(RuntimeError, match="call reset"):
        sims.step(0, HOLD)
    assert np.array_equal(trace(sims, TRAIN, steps=2), expected)


def test_what_is_not_there_is_said(sims):
    sims.reset(0, EVAL)
    with pytest.raises(NotImplementedError, match="no scripted expert"):
        sims.expert_action(0)
    with pytest.raises(ValueError, match=r"shape \(4,\), must be \(7,\)"):
        sims.step(0, np.zeros(4, np.float32))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"suite": "libero_moon"}, "suite 'libero_moon' is unknown"),
        ({"tasks": [10]}, "name tasks of libero_spatial by 0..9"),
        ({"tasks": []}, "name tasks"),
        ({"tasks": [1, 1]}, "each once"),
        ({"image_size": 8}, "image_size is 8"),
        ({"cameras": []}, "cameras is empty"),
        ({"gripper": "open"}, "gripper is 'open'"),
        ({"max_steps": 0}, "max_steps is 0"),
        ({"keep_scenes": -1}, "keep_scenes is -1"),
    ],
)
def test_wrong_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        LiberoSuite(**settings)


def test_the_suite_travels(suite):
    copy = pickle.loads(pickle.dumps(suite))
    assert (copy.meta, copy.splits) == (suite.meta, suite.splits)
    again = pickle.loads(pickle.dumps(Libero(1, suite._settings)))
    assert again.meta == suite.meta


def test_the_command_line_names_the_suite():
    conf = str(Path(__file__).parents[2] / "conf")
    with initialize_config_dir(conf, version_base="1.3"):
        cfg = compose("train", ["env=libero", "env.suite=libero_goal", "env.tasks=[7]"])
    assert instantiate(cfg.env).meta.instructions == ("turn on the stove",)


QUIET = """
import numpy as np
from torchrl_vla.envs.libero import LiberoSuite

suite = LiberoSuite("libero_object", [0], image_size=64, render_gpu=0)
sims = suite.simulators(1)
sims.reset(0, suite.splits["eval"].start)
sims.step(0, np.zeros(7, np.float32))
print(sims.render(0).std() > 10)
"""


def test_no_question_no_foreign_file_and_no_trouble_with_gpu_numbers(tmp_path):
    # CUDA's physical number beside MuJoCo's position makes robosuite's own import fail (case B34).
    env = os.environ | {
        "HOME": str(tmp_path),
        "TMPDIR": str(tmp_path),
        "CUDA_VISIBLE_DEVICES": "3",
        "MUJOCO_EGL_DEVICE_ID": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    log = Path("/tmp/robosuite.log")
    before = log.stat().st_mtime if log.exists() else None
    done = subprocess.run(
        [sys.executable, "-c", QUIET],
        env=env,
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.stdout == "True\n", done.stderr
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert (log.stat().st_mtime if log.exists() else None) == before


def test_idle_scenes_are_dropped_beyond_the_limit():
    sims = LiberoSuite("libero_goal", [0, 1], image_size=64, keep_scenes=1).simulators(1)
    sims.reset(0, EVAL)
    first = sims._scene(0)
    sims.reset(0, EVAL + 1)
    assert (sims.task_id(0), sims._idle) == (1, [first])
    sims.reset(0, EVAL + 2)  # the first task again
    assert sims._scene(0) is first
    sims._settings = replace(sims._settings, keep_scenes=0)
    sims.reset(0, EVAL + 3)
    sims.reset(0, EVAL + 4)
    assert sims._scene(0) is not first
    assert sims._idle == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["libero_spatial", "libero_object", "libero_goal", "libero_10"])
def test_one_task_of_each_suite_plays_and_replays(name):
    sims = LiberoSuite(name, [2], image_size=64).simulators(1)
    starts = set()
    for number in range(5):
        runs = []
        for _ in range(2):
            env = ChunkedEnv(sims, FixedInitStates([EVAL + number]), chunk_size=4)
            env.set_seed(0)
            rng = np.random.default_rng(number)
            td = env.reset()
            for _ in range(20):
                chunk = rng.uniform(-1, 1, (1, 4, 7)).astype(np.float32)
                td["vla_action", "chunk"] = td["observation", "state"].new_tensor(chunk)
                td = env.step(td)["next"]
            data = sims._scene(0).data
            runs.append(np.concatenate([data.qpos, data.qvel]))
        assert np.array_equal(*runs)
        starts.add(runs[0].tobytes())
    assert len(starts) == 5
