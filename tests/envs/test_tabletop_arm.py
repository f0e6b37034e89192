"""The seven-joint arm of the tabletop suite, on real MuJoCo physics and rendering."""

import pickle

import numpy as np
import pytest
from test_tabletop import colour_at, ids_of_kind

from torchrl_vla.envs.gl import import_mujoco
from torchrl_vla.envs.tabletop import Tabletop, TabletopSuite
from torchrl_vla.envs.tabletop.arm import MAX_TILT, MAX_TURN
from torchrl_vla.envs.tabletop.scene import HOME, WORKSPACE_HIGH, WORKSPACE_LOW
from torchrl_vla.envs.tabletop.tasks import INSTRUCTIONS, TASK_KINDS

mujoco = import_mujoco()
MAX_STEPS = 48
OPEN, CLOSED = -1.0, 1.0


@pytest.fixture(scope="module")
def sims():
    made = Tabletop(2, embodiment="arm")
    yield made
    made.close()


def act(sims: Tabletop, count: int, **numbers: float) -> np.ndarray:
    """Repeat an action in simulator 0, then hold for 15 steps; return the state."""
    action = np.zeros(7, np.float32)
    for name, value in ({"gripper": CLOSED} | numbers).items():
        action[["x", "y", "z", "rx", "ry", "rz", "gripper"].index(name)] = value
    for _ in range(count):
        sims.step(0, action)
    action[:6] = 0.0
    for _ in range(15):
        sims.step(0, action)
    return sims.state(0)


def rotation(vector: np.ndarray) -> np.ndarray:
    """Rotation matrix of an axis-angle vector (Rodrigues)."""
    angle = np.linalg.norm(vector)
    x, y, z = vector / angle
    cross = np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]])
    return np.eye(3) + np.sin(angle) * cross + (1 - np.cos(angle)) * cross @ cross


def run_expert(sims: Tabletop, init_state_id: int, sigma: float) -> bool:
    sims.reset(0, init_state_id)
    rng = np.random.default_rng(init_state_id)
    for _ in range(MAX_STEPS):
        noise = rng.normal(0.0, sigma, 7)
        action = np.clip(sims.expert_action(0) + noise, -1, 1).astype(np.float32)
        outcome = sims.step(0, action)
        if outcome.terminated:
            return outcome.success
    return False


def test_the_suite_describes_the_arm(sims):
    meta = TabletopSuite(embodiment="arm").meta
    assert meta == sims.meta
    assert (meta.name, meta.state_dim, meta.action_dim) == ("tabletop_arm", 9, 7)
    assert meta.instructions == INSTRUCTIONS
    assert meta.action_names[6] == "gripper, -1 open, 1 closed"
    assert TabletopSuite().meta.name == "tabletop"
    for make in (TabletopSuite, lambda **settings: Tabletop(1, **settings)):
        with pytest.raises(ValueError, match="embodiment is 'crane', must be one of"):
            make(embodiment="crane")
    assert pickle.loads(pickle.dumps(sims)).meta == meta
    assert TabletopSuite(64, True, embodiment="arm").simulators(1).meta.action_dim == 7


def test_it_starts_over_the_middle_pointing_down(sims):
    sims.reset(0, 3)
    state = sims.state(0)
    assert np.allclose(state[:3], HOME, atol=1e-6)
    assert np.allclose(state[3:6], 0, atol=1e-6)
    assert np.allclose(state[6:8], 0.018)
    assert state[8] == 0


@pytest.mark.parametrize(("axis", "name"), enumerate("xyz"))
def test_positions_are_in_units_of_two_centimetres(sims, axis: int, name: str):
    # Two steps of -1 are -4 cm; nothing else moves.
    sims.reset(0, 3)
    state = act(sims, 2, **{name: -1.0})
    wanted = HOME.copy()
    wanted[axis] -= 0.04
    assert np.allclose(state[:3], wanted, atol=1.5e-3)
    assert np.allclose(state[3:6], 0, atol=5e-3)
    assert state[8] == np.float32(17 / 48)


@pytest.mark.parametrize(("axis", "name"), enumerate(("rx", "ry", "rz")))
def test_turns_are_about_world_axes_in_units_of_a_tenth(sims, axis: int, name: str):
    sims.reset(0, 3)
    state = act(sims, 3, **{name: 1.0})
    wanted = np.zeros(3)
    wanted[axis] = 3 * MAX_TURN
    assert np.allclose(state[3:6], wanted, atol=8e-3)
    assert np.allclose(state[:3], HOME, atol=2e-3)  # the tip stays where it is


def test_turns_add_up_in_world_axes(sims):
    # First 0.3 about z, then 0.2 about world x: R = Rx(0.2) Rz(0.3), not the other way round.
    sims.reset(0, 3)
    for _ in range(3):
        sims.step(0, np.array([0, 0, 0, 0, 0, 1, CLOSED], np.float32))
    state = act(sims, 2, rx=1.0)
    wanted = rotation(np.array([0.2, 0, 0])) @ rotation(np.array([0, 0, 0.3]))
    other = rotation(np.array([0, 0, 0.3])) @ rotation(np.array([0.2, 0, 0]))
    got = rotation(state[3:6].astype(float))
    assert np.abs(got - wanted).max() < 8e-3
    assert np.abs(got - other).max() > 0.03


def test_the_gripper_opens_at_minus_one_and_closes_at_plus_one(sims):
    sims.reset(0, 3)
    assert np.allclose(act(sims, 1, gripper=OPEN)[6:8], 0.036, atol=1e-3)
    assert np.allclose(act(sims, 1, gripper=CLOSED)[6:8], 0.0, atol=1e-3)


def test_workspace_and_tilt_are_closed(sims):
    sims.reset(0, 0)
    for _ in range(30):
        sims.step(0, np.full(7, 50.0, np.float32))
    state = sims.state(0)
    assert np.allclose(state[:3], [0.2, 0.14, 0.2], atol=2e-3)
    assert np.linalg.norm(state[3:6]) == pytest.approx(MAX_TILT, abs=0.01)


def test_every_pose_of_the_workspace_is_reached(sims):
    rng = np.random.default_rng(0)
    corners = np.stack(np.meshgrid([0, 1], [0, 1], [0.2, 1]), -1).reshape(-1, 3)
    for corner in corners:
        sims.reset(0, 0)
        goal = WORKSPACE_LOW + corner * (WORKSPACE_HIGH - WORKSPACE_LOW)
        turn = rng.normal(size=3)
        turn *= MAX_TILT / np.linalg.norm(turn)
        action = np.zeros(7, np.float32)
        position = HOME.copy()
        for step in range(24):
            action[:3] = np.clip((goal - position) / 0.02, -1, 1)
            position += 0.02 * action[:3]
            action[3:6] = turn / (4 * MAX_TURN) if step < 4 else 0.0
            sims.step(0, action)
        state = sims.state(0)
        assert np.linalg.norm(state[:3] - goal) < 3e-3
        assert np.linalg.norm(rotation(state[3:6].astype(float)) - rotation(turn)) < 0.03


def test_joints_stay_in_their_ranges_and_slow_under_random_actions(sims):
    low, high = sims._model.jnt_range[:7].T
    for init_state_id in range(6):
        sims.reset(0, init_state_id)
        rng = np.random.default_rng(init_state_id)
        bias = rng.uniform(-1, 1, 7)
        for _ in range(MAX_STEPS):
            action = np.clip(bias + rng.uniform(-1, 1, 7), -1, 1).astype(np.float32)
            ended = sims.step(0, action).terminated
            joints = sims._data[0].qpos[:7]
            assert (joints > low).all()
            assert (joints < high).all()
            assert np.abs(sims._data[0].qvel[:7]).max() < 10  # rad/s
            if ended:
                break


def episode(sims: Tabletop, index: int, init_state_id: int) -> list[bytes]:
    sims.reset(index, init_state_id)
    rng = np.random.default_rng(1)
    out = []
    for _ in range(10):
        out.append(sims.state(index).tobytes() + sims.render(index).tobytes())
        if sims.step(index, rng.uniform(-1, 1, 7).astype(np.float32)).terminated:
            break
    return out


def test_episodes_do_not_depend_on_what_came_before(sims):
    expected = episode(sims, 0, 5)
    sims.reset(1, 9)
    for _ in range(8):
        sims.step(1, np.ones(7, np.float32))
    assert episode(sims, 1, 5) == expected
    fresh = Tabletop(1, embodiment="arm")
    assert episode(fresh, 0, 5) == expected
    fresh.close()


@pytest.mark.parametrize("sigma", [0.0, 0.3])
@pytest.mark.parametrize("kind", TASK_KINDS)
def test_expert_solves_a_sample(sims, kind, sigma):
    assert sum(run_expert(sims, i, sigma) for i in ids_of_kind(kind, 15)) >= 14


@pytest.mark.slow
@pytest.mark.parametrize("sigma", [0.0, 0.3])
@pytest.mark.parametrize("kind", TASK_KINDS)
def test_expert_solves_95_percent(sims, kind, sigma):
    assert sum(run_expert(sims, i, sigma) for i in ids_of_kind(kind, 120)) >= 114


def test_the_expert_comes_back_upright(sims):
    sims.reset(0, ids_of_kind("pick_up", 1)[0])
    act(sims, 3, rx=1.0)
    before = np.linalg.norm(sims.state(0)[3:6])
    for _ in range(6):
        sims.step(0, sims.expert_action(0))
    assert before > 0.25
    assert np.linalg.norm(sims.state(0)[3:6]) < 0.03


def test_random_actions_rarely_succeed(sims):
    rng = np.random.default_rng(0)
    wins = 0
    for kind in ("push_left", "push_right", "pick_up"):
        for init_state_id in ids_of_kind(kind, 8, "train"):
            sims.reset(0, init_state_id)
            for _ in range(MAX_STEPS):
                outcome = sims.step(0, rng.uniform(-1, 1, 7).astype(np.float32))
                if outcome.terminated:
                    wins += outcome.success
                    break
    assert wins <= 1


@pytest.mark.parametrize("bad", [np.zeros(4), np.full(7, np.nan), np.zeros((1, 7))])
def test_bad_actions_are_refused(sims, bad):
    sims.reset(0, 0)
    with pytest.raises(ValueError, match="must be 7 finite numbers"):
        sims.step(0, bad)


def test_the_arm_hides_no_block_and_is_made_of_boxes(sims):
    for init_state_id in range(20):
        sims.reset(0, init_state_id)
        assert min(colour_at(sims.render(0)[0])) >= 25
    model = sims._model
    drawn = model.geom_group < 3
    # Boxes are the cheapest bodies to draw: 8 links, 4 of the gripper, 3 blocks, the table.
    assert drawn.sum() == 16
    box = int(mujoco.mjtGeom.mjGEOM_BOX)
    assert all(int(kind) == box for kind in model.geom_type[drawn])
    assert (model.site_group >= 3).all()
