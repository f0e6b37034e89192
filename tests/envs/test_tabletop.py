"""The tabletop suite on real MuJoCo physics and rendering."""

import hashlib
import os
import pickle
import subprocess
import sys
from itertools import combinations

import numpy as np
import pytest

from torchrl_vla.envs.simulator import SimulationError
from torchrl_vla.envs.tabletop import SPLITS, Tabletop, init_state_ids
from torchrl_vla.envs.tabletop.scene import BLOCK_HALF, COLOURS, IMAGE_SIZES
from torchrl_vla.envs.tabletop.tasks import (
    INSTRUCTIONS,
    TASK_KINDS,
    TASKS,
    evaluate,
    initial_state,
)

MAX_STEPS = 48


@pytest.fixture(scope="module")
def sims():
    made = Tabletop(2)
    yield made
    made.close()


def ids_of_kind(kind: str, count: int, split: str = "demo") -> list[int]:
    ids = (i for i in SPLITS[split] if TASKS[initial_state(i).task_id].kind == kind)
    return [next(ids) for _ in range(count)]


def run_expert(sims: Tabletop, init_state_id: int, sigma: float) -> bool:
    sims.reset(0, init_state_id)
    rng = np.random.default_rng(init_state_id)
    for _ in range(MAX_STEPS):
        noise = rng.normal(0.0, sigma, 4)
        action = np.clip(sims.expert_action(0) + noise, -1, 1).astype(np.float32)
        outcome = sims.step(0, action)
        if outcome.terminated:
            return outcome.success
    return False


def digest(sims: Tabletop, index: int, ids: list[int]) -> str:
    total = hashlib.sha256()
    for init_state_id in ids:
        sims.reset(index, init_state_id)
        rng = np.random.default_rng(0)
        for _ in range(6):
            total.update(sims.render(index).tobytes() + sims.state(index).tobytes())
            total.update(sims.block_positions(index).tobytes() + bytes([sims.task_id(index)]))
            if sims.step(index, rng.uniform(-1, 1, 4).astype(np.float32)).terminated:
                break
    return total.hexdigest()


def test_init_state_is_pure_across_instances_histories_and_processes(sims):
    ids = list(init_state_ids("train", 0, 5))
    expected = digest(sims, 0, ids)
    sims.reset(1, 77)
    for _ in range(10):
        sims.step(1, np.ones(4, np.float32))
    assert digest(sims, 1, ids) == expected
    fresh = Tabletop(1)
    assert digest(fresh, 0, ids) == expected
    fresh.close()
    code = (
        f"import sys; sys.path.insert(0, {os.path.dirname(__file__)!r})\n"
        "from test_tabletop import *\n"
        f"print(digest(Tabletop(1), 0, {ids}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.strip() == expected
    assert done.stderr == ""


def test_reset_after_diverged_physics_is_pure(sims, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # MuJoCo writes its warning log to the working directory
    expected = digest(sims, 0, [3])
    sims.reset(0, 9)
    sims._data[0].qvel[0] = np.nan
    with pytest.raises(SimulationError, match="simulator 0 diverged"):
        sims.step(0, np.zeros(4, np.float32))
    with pytest.raises(RuntimeError, match="call reset"):
        sims.step(0, np.zeros(4, np.float32))
    assert digest(sims, 0, [3]) == expected


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e12])
@pytest.mark.parametrize("field", ["qvel", "qpos"])
def test_bad_physics_raises(sims, field, value, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # MuJoCo writes its warning log to the working directory
    sims.reset(0, 4)
    getattr(sims._data[0], field)[8] = value
    with pytest.raises(SimulationError):
        sims.step(0, np.zeros(4, np.float32))


def test_splits_are_disjoint():
    assert set(SPLITS) == {"train", "eval", "ground", "demo"}
    for a, b in combinations(SPLITS.values(), 2):
        assert max(a.start, b.start) >= min(a.stop, b.stop)
    assert init_state_ids("eval", 5, 3) == SPLITS["eval"][5:8]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("test", 0, 1), "split is 'test', must be one of"),
        (("eval", -1, 1), "start is -1"),
        (("eval", 0, 0), "count is 0"),
        (("eval", len(SPLITS["eval"]) - 1, 2), "start [+] count is 1.*1, split 'eval' holds"),
    ],
)
def test_bad_split_requests(args, message):
    with pytest.raises(ValueError, match=message):
        init_state_ids(*args)


def test_initial_states_cover_all_tasks_evenly_and_stay_apart():
    states = [initial_state(i) for i in range(1500)]
    counts = np.bincount([s.task_id for s in states], minlength=12).reshape(4, 3).sum(axis=1)
    assert np.allclose(counts / 1500, [1 / 3, 1 / 6, 1 / 6, 1 / 3], atol=0.04)
    positions = np.stack([s.positions for s in states])
    lanes = np.sort(positions[:, :, 1], axis=1)
    assert np.diff(lanes, axis=1).min() > 0.0599
    assert np.abs(positions[:, :, :2]).max() <= 0.1
    assert max(np.abs(s.yaw).max() for s in states) <= 0.2
    # Every colour is in every lane equally often: neither place nor task gives colour away.
    middle = (positions[:, :, 1] == lanes[:, 1:2]).mean(axis=0)
    assert np.allclose(middle, 1 / 3, atol=0.05)
    with pytest.raises(ValueError, match="init_state_id is -1"):
        initial_state(-1)


def test_instructions_are_distinct_lower_case_and_from_a_small_vocabulary(sims):
    assert len(set(INSTRUCTIONS)) == 12
    assert len({word for text in INSTRUCTIONS for word in text.split()}) <= 16
    assert all(text == text.lower() for text in INSTRUCTIONS)
    assert sims.meta.instructions == INSTRUCTIONS
    assert set(sims.meta.task_names) == set(TASK_KINDS)
    assert (sims.meta.state_dim, sims.meta.action_dim, sims.meta.control_hz) == (6, 4, 20.0)


@pytest.mark.parametrize("sigma", [0.0, 0.3])
@pytest.mark.parametrize("kind", TASK_KINDS)
def test_expert_solves_a_sample(sims, kind, sigma):
    assert sum(run_expert(sims, i, sigma) for i in ids_of_kind(kind, 20)) >= 19


@pytest.mark.slow
@pytest.mark.parametrize("sigma", [0.0, 0.3])
@pytest.mark.parametrize("kind", TASK_KINDS)
def test_expert_solves_98_percent(sims, kind, sigma):
    assert sum(run_expert(sims, i, sigma) for i in ids_of_kind(kind, 300)) >= 294


def test_expert_recovers_from_a_slip(sims):
    init_state_id = ids_of_kind("pick_up", 1)[0]
    sims.reset(0, init_state_id)
    colour = TASKS[sims.task_id(0)].colour
    start = sims.block_positions(0)[colour]
    lifted = dropped = False
    for _ in range(MAX_STEPS):
        action = sims.expert_action(0)
        height = sims.target_position(0)[2]
        lifted = lifted or height > 0.035
        if lifted and not dropped:
            action[3] = 1.0
            dropped = height < 0.025
        outcome = sims.step(0, action)
        if outcome.terminated:
            break
    assert dropped
    assert outcome.success
    assert sims.target_position(0)[2] > start[2] + 0.04


@pytest.mark.parametrize("kind", TASK_KINDS)
def test_handling_the_wrong_block_fails(sims, kind):
    for init_state_id in ids_of_kind(kind, 5):
        sims.reset(0, init_state_id)
        task = TASKS[sims.task_id(0)]
        wrong = TASKS.index(type(task)(task.kind, (task.colour + 1) % 3))
        for _ in range(MAX_STEPS):
            sims._task_ids[0] = wrong  # the expert is told the wrong colour
            action = sims.expert_action(0)
            sims._task_ids[0] = TASKS.index(task)
            outcome = sims.step(0, action)
            if outcome.terminated:
                break
        assert outcome.terminated
        assert not outcome.success
        assert outcome.reward == 0.0


def judge(kind, tip=(0, 0, 0.2), **moves):
    """Evaluate task (kind, red) after moving blocks from a fixed layout."""
    start = np.array([[0.0, -0.07, 0.02], [0.0, 0.0, 0.02], [0.0, 0.07, 0.02]])
    blocks = start.copy()
    for colour, move in moves.items():
        blocks[COLOURS.index(colour)] += move
    task = TASKS[TASK_KINDS.index(kind) * 3]
    return evaluate(task, np.asarray(tip, float), blocks, start)


@pytest.mark.parametrize(
    ("expected", "kind", "moves"),
    [
        ((True, False), "pick_up", {"red": (0, 0, 0.041)}),
        ((False, False), "pick_up", {"red": (0, 0, 0.039)}),
        ((False, True), "pick_up", {"green": (0.031, 0, 0)}),
        ((False, False), "pick_up", {"green": (0.029, 0, 0)}),
        ((False, True), "pick_up", {"red": (0, 0, 0.05), "blue": (0, 0.04, 0)}),
        ((True, False), "push_right", {"red": (0.061, 0, 0)}),
        ((False, False), "push_right", {"red": (0.059, 0, 0)}),
        ((False, True), "push_right", {"red": (-0.031, 0, 0)}),
        ((False, True), "push_right", {"red": (0.02, 0.061, 0)}),
        ((True, False), "push_left", {"red": (-0.061, 0, 0)}),
        ((False, True), "push_left", {"red": (0.031, 0, 0)}),
        ((False, True), "push_left", {"blue": (0, -0.031, 0)}),
        ((True, False), "reach", {"tip": (0.0, -0.07, 0.084)}),
        ((False, False), "reach", {"tip": (0.0, -0.07, 0.086)}),
        ((False, True), "reach", {"tip": (0.0, 0.0, 0.055)}),
        ((False, True), "reach", {"tip": (0.029, 0.07, 0.055)}),
    ],
)
def test_success_and_failure_conditions(expected, kind, moves):
    assert judge(kind, **moves) == expected


def test_random_policy_rarely_succeeds(sims):
    rng = np.random.default_rng(0)
    wins = dict.fromkeys(TASK_KINDS, 0)
    for kind in TASK_KINDS:
        for init_state_id in ids_of_kind(kind, 30, "train"):
            sims.reset(0, init_state_id)
            for _ in range(MAX_STEPS):
                outcome = sims.step(0, rng.uniform(-1, 1, 4).astype(np.float32))
                if outcome.terminated:
                    wins[kind] += outcome.success
                    break
    assert wins["push_left"] + wins["push_right"] + wins["pick_up"] <= 1
    assert wins["reach"] <= 6


def test_blocks_rest_still_at_reset(sims):
    sims.reset(0, 11)
    before = sims.block_positions(0)
    assert np.array_equal(before, initial_state(11).positions.astype(np.float32))
    for _ in range(10):
        sims.step(0, np.array([0, 0, 0, 0], np.float32))
    assert np.abs(sims.block_positions(0) - before).max() < 1e-3
    assert abs(sims.state(0)[2] - 0.15) < 1e-3


@pytest.mark.parametrize("bad", [np.full(4, np.nan), np.zeros(3), np.zeros((1, 4))])
def test_bad_actions_are_refused(sims, bad):
    sims.reset(0, 0)
    with pytest.raises(ValueError, match="must be 4 finite numbers"):
        sims.step(0, bad)


def test_actions_are_clipped_and_the_workspace_is_closed(sims):
    sims.reset(0, 0)
    for _ in range(40):
        sims.step(0, np.array([50.0, 50.0, 50.0, -50.0], np.float32))
    assert np.allclose(sims.state(0), [0.2, 0.14, 0.2, 0, 0, 40 / 48], atol=2e-3)
    sims.reset(0, 0)
    sims.step(0, np.array([50.0, 0, 0, 0], np.float32))
    assert sims._data[0].ctrl[0] == pytest.approx(0.02)


def test_step_before_reset_and_bad_configs_are_refused():
    made = Tabletop(1)
    with pytest.raises(RuntimeError, match="call reset"):
        made.step(0, np.zeros(4, np.float32))
    for kwargs in ({"num_envs": 0}, {"image_size": 100}, {"render_quality": "ultra"}):
        with pytest.raises(ValueError, match=next(iter(kwargs))):
            Tabletop(**({"num_envs": 1} | kwargs))


def colour_at(image: np.ndarray) -> list[int]:
    """Number of pixels [3] where red, green, blue dominates; image is [3, h, w]."""
    image = image.astype(int)
    return [int((2 * image[c] - image.sum(axis=0) > 40).sum()) for c in range(3)]


def test_fast_frames_show_all_blocks_in_rgb_order(sims):
    for init_state_id in range(20):
        sims.reset(0, init_state_id)
        frame = sims.render(0)
        assert (frame.shape, frame.dtype) == ((1, 3, 64, 64), np.uint8)
        assert frame.flags.c_contiguous
        assert min(colour_at(frame[0])) >= 25
    # The red block is where the red pixels are: left blocks on the left, near ones below.
    where = []
    for init_state_id in range(30):
        sims.reset(0, init_state_id)
        image = sims.render(0)[0].astype(int)
        rows, columns = np.nonzero(2 * image[0] - image.sum(axis=0) > 40)
        where.append([*sims.block_positions(0)[0, :2], columns.mean(), -rows.mean()])
    correlation = np.corrcoef(np.array(where).T)
    assert correlation[0, 2] > 0.95
    assert correlation[1, 3] > 0.95


def test_frames_are_new_arrays(sims):
    sims.reset(0, 1)
    first = sims.render(0)
    copy = first.copy()
    sims.reset(1, 2)
    assert not np.array_equal(sims.render(1), first)
    assert np.array_equal(first, copy)


@pytest.mark.parametrize("size", IMAGE_SIZES)
def test_image_sizes_and_second_camera(size):
    made = Tabletop(1, image_size=size, second_camera=True)
    made.reset(0, 2)
    frame = made.render(0)
    assert frame.shape == (2, 3, size, size)
    assert made.meta.cameras == ("front", "wrist")
    assert not np.array_equal(frame[0], frame[1])
    assert frame[1].std() > 10
    made.close()


def test_high_quality_and_video_frames(sims):
    high = Tabletop(1, render_quality="high")
    high.reset(0, 5)
    sims.reset(0, 5)
    pretty, fast = high.render(0), sims.render(0)
    assert not np.array_equal(pretty, fast)
    assert np.abs(pretty.astype(int) - fast).mean() < 40
    frame = sims.render_frame(0, 240)
    assert (frame.shape, frame.dtype) == ((240, 240, 3), np.uint8)
    assert min(colour_at(frame.transpose(2, 0, 1))) > 300
    assert np.array_equal(sims.render(0), fast)  # filming leaves observations alone
    high.close()
    with pytest.raises(ValueError, match="size is 5000"):
        sims.render_frame(0, 5000)


def test_close_is_idempotent_and_pickling_keeps_the_configuration():
    made = Tabletop(3, image_size=96)
    made.reset(0, 1)
    frame = made.render(0)
    made.close()
    made.close()
    assert np.array_equal(made.render(0), frame)
    made.close()
    copy = pickle.loads(pickle.dumps(made))
    assert (copy.num_envs, copy.meta) == (3, made.meta)


def test_a_forked_child_cannot_use_the_parents_renderer(sims):
    sims.reset(0, 1)
    sims.render(0)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            sims.render(0)
        except RuntimeError as error:
            code = 0 if "fork" in str(error) else 2
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_privileged_labels(sims):
    sims.reset(0, 8)
    positions = sims.block_positions(0)
    assert (positions.shape, positions.dtype) == ((3, 3), np.float32)
    assert np.allclose(positions[:, 2], BLOCK_HALF)
    assert np.array_equal(sims.target_position(0), positions[TASKS[sims.task_id(0)].colour])
