"""Demonstrations to disk and back, and foreign data sets fitted to a suite."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf

from torchrl_vla import schema
from torchrl_vla.data.demonstrations import (
    Episode,
    cloning_samples,
    decision_transitions,
    record,
)
from torchrl_vla.data.lerobot import LeRobotDataset
from torchrl_vla.data.lerobot_demonstrations import (
    read_demonstrations,
    suite_features,
    write_demonstrations,
)
from torchrl_vla.data.lerobot_layout import Feature
from torchrl_vla.data.lerobot_write import LeRobotWriter
from torchrl_vla.data.mapping import DatasetMapping, convert, sources
from torchrl_vla.envs.simulator import SuiteMeta
from torchrl_vla.envs.tabletop import TabletopSuite

GOLDEN = Path(__file__).parent.parent / "golden" / "lerobot"
TOY = SuiteMeta(
    name="toy",
    instructions=("put the bowl on the plate", "pick up the red cube"),
    task_names=("put", "pick"),
    cameras=("scene", "hand"),
    image_size=64,
    state_names=("height [m]", "angle [rad]", "gripper [m]"),
    action_names=("dx", "dy", "gripper, -1 open, 1 closed"),
    max_steps=20,
    control_hz=10.0,
)
MAPPING = DatasetMapping(
    cameras={"scene": "observation.images.front", "hand": "observation.images.wrist"},
    state=(
        {"feature": "observation.state", "entry": "s1", "unit": "cm"},
        {"feature": "observation.state", "entry": 2, "unit": "deg"},
        {"feature": "observation.state", "entry": "s3", "scale": 2.0, "offset": -1.0},
    ),
    action=(
        {"feature": "action", "entry": "x", "scale": 0.5},
        {"feature": "action", "entry": "roll", "scale": -0.5},
        {
            "feature": "action",
            "entry": "gripper",
            "opened": 1.0,
            "closed": -1.0,
            "suite_opened": -1.0,
            "suite_closed": 1.0,
        },
    ),
    instructions={"put the blue bowl on the plate": "put the bowl on the plate"},
)


@pytest.fixture(scope="module")
def tabletop():
    suite = TabletopSuite(image_size=64, second_camera=True)
    simulators = suite.simulators(1)
    first = suite.splits["demo"].start
    yield suite.meta, record(simulators, range(first, first + 4), noise=0.3)
    simulators.close()


@pytest.mark.parametrize("name", ["v30_video", "v30_images", "v21_video", "v30_stale_index"])
def test_a_foreign_data_set_is_mapped(name: str):
    episodes = read_demonstrations(TOY, folder=GOLDEN / name, mapping=MAPPING)
    assert [len(e.expert) for e in episodes] == [5, 8, 13]
    assert [e.task_id for e in episodes] == [1, 0, 1]
    # Episode 1 begins with state 1.0, 1.125, 1.25, 1.375 and action -0.5, -0.25, 0, 0.25, ..., 1.
    state, action = episodes[1].state[0], episodes[1].expert[0]
    wanted = [0.01125, 1.25 * np.pi / 180, 2 * 1.375 - 1]
    assert np.allclose(state, wanted)
    assert np.allclose(action, [-0.25, -0.125, -1.0])
    # Its last action has gripper -1 there, which is closed: 1 here.
    assert episodes[1].expert[-1, 2] == 1.0
    assert torch.equal(episodes[1].executed, episodes[1].expert)
    assert episodes[1].reward.tolist() == [0.0] * 7 + [1.0]
    assert episodes[1].init_state_id == -1
    assert episodes[1].image.shape == (9, 2, 3, 64, 64)
    assert torch.equal(episodes[1].image[-1], episodes[1].image[-2])
    # The first frames' means, front and wrist (expected.json): red 45.5 and 65.5.
    means = episodes[0].image[0, :, 0].float().mean((1, 2))
    assert torch.allclose(means, torch.tensor([45.5, 65.5]), atol=2.5)


def refused(meta: SuiteMeta = TOY, mapping: DatasetMapping = MAPPING) -> str:
    with pytest.raises(ValueError, match=r"cannot serve suite|episode 0") as error:
        read_demonstrations(meta, folder=GOLDEN / "v30_images", mapping=mapping)
    return str(error.value)


def entry(field: str, position: int, **changes) -> DatasetMapping:
    items = [dict(item) for item in getattr(MAPPING, field)]
    items[position] |= changes
    return replace(MAPPING, **{field: items})


def test_every_reason_is_named_with_both_sides():
    # Field case B45: dimensions, rate, names: found and wanted in one message.
    message = refused(replace(TOY, control_hz=20.0), DatasetMapping())
    for part in (
        "v30_images cannot serve suite 'toy'",
        "fps: the data set has 10, the suite runs at 20",
        "the suite's camera 'scene' should be 'observation.images.scene'",
        "['observation.images.front', 'observation.images.wrist']",
        "'observation.state' has 8 numbers (s0, s1,",
        "wants 3 (height [m], angle [rad], gripper [m])",
        "'action' has 7 numbers (x, y, z, roll, pitch, yaw, gripper)",
        "wants 3 (dx, dy, gripper, -1 open, 1 closed)",
        "instructions ['put the blue bowl on the plate'] are none of the suite's 2 (put the bowl",
    ):
        assert part in message, part


@pytest.mark.parametrize(
    ("meta", "mapping", "message"),
    [
        ({"image_size": 128}, {}, "'observation.images.front' are 64x64 px, the suite's are 128"),
        ({}, {"cameras": {"left": "x"}}, "names cameras ['left'], the suite has ('scene', 'hand')"),
        ({}, {"state": "observation.pose"}, "no vector 'observation.pose', only ['action',"),
        ({}, {"state": MAPPING.state[:2]}, "lists 2 numbers, the suite wants 3"),
        ({"action_names": tuple("abcdefg")}, {"action": None}, "names the numbers of 'action'"),
        ({"cameras": ("scene",)}, {}, "names cameras ['hand']"),
    ],
)
def test_what_does_not_fit_is_refused(meta: dict, mapping: dict, message: str):
    assert message in refused(replace(TOY, **meta), replace(MAPPING, **mapping))


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        (entry("state", 0, unit="deg"), "unit 'deg' cannot become the suite's 'height [m]'"),
        (entry("state", 0, unit="furlong"), "unit 'furlong' cannot become"),
        (entry("state", 0, entry="s9"), "'observation.state' has no 's9', only (s0, s1"),
        (entry("state", 0, entry=8), "has 8 numbers, the mapping asks for number 8"),
        # Episode 0 begins with dx 0.0 and reaches roll 0.75; unscaled, pitch reaches 1.0, yaw 1.25.
        (entry("action", 0, entry="yaw", scale=1.0), "action 'dx' reaches 1.25 in the data"),
        (entry("action", 2, opened=0.0, closed=0.5), "0 is open and 0.5 closed"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(mapping: DatasetMapping, message: str):
    assert message in refused(mapping=mapping)


def test_misspelt_mappings_are_refused():
    with pytest.raises(TypeError, match="sclae"):
        read_demonstrations(TOY, folder=GOLDEN / "v30_images", mapping=entry("state", 0, sclae=1.0))
    assert "open and closed are one value" in refused(mapping=entry("action", 2, opened=-1.0))


def test_instructions_mapped_to_null_leave_their_episodes_out():
    mapping = replace(MAPPING, instructions={"put the blue bowl on the plate": None})
    with pytest.warns(UserWarning, match="1 of instructions mapped to null are left out, 2 are"):
        episodes = read_demonstrations(TOY, folder=GOLDEN / "v30_images", mapping=mapping)
    assert [len(e.expert) for e in episodes] == [5, 13]


def test_another_rate_and_size_are_taken_when_the_mapping_says_so():
    meta = replace(TOY, control_hz=20.0, image_size=32)
    mapping = replace(MAPPING, accept_fps=10, resize=True)
    episodes = read_demonstrations(meta, folder=GOLDEN / "v30_images", mapping=mapping, limit=1)
    assert len(episodes) == 1
    assert episodes[0].image.shape == (6, 2, 3, 32, 32)
    mean = episodes[0].image[0, 0, 0].float().mean()
    assert mean == pytest.approx(45.5, abs=1)  # resizing keeps the mean


def test_the_mapping_comes_from_yaml():
    text = """
    cameras: {scene: observation.images.front, hand: observation.images.wrist}
    state:
      - {feature: observation.state, entry: s1, unit: cm}
      - {feature: observation.state, entry: 2, unit: deg}
      - {feature: observation.state, entry: s3, scale: 2.0, offset: -1.0}
    action:
      - {feature: action, entry: x, scale: 0.5}
      - {feature: action, entry: roll, scale: -0.5}
      - {feature: action, entry: gripper, opened: 1, closed: -1, suite_opened: -1, suite_closed: 1}
    instructions: {put the blue bowl on the plate: put the bowl on the plate}
    """
    mapping = DatasetMapping(**OmegaConf.to_container(OmegaConf.create(text)))
    ours = read_demonstrations(TOY, folder=GOLDEN / "v30_images", mapping=mapping)
    theirs = read_demonstrations(TOY, folder=GOLDEN / "v30_images", mapping=MAPPING)
    assert torch.equal(ours[2].state, theirs[2].state)
    assert torch.equal(ours[2].expert, theirs[2].expert)


def same(a: Episode, b: Episode, pixels: float) -> bool:
    numbers = all(
        torch.equal(getattr(a, name), getattr(b, name)) for name in ("expert", "executed", "reward")
    )
    pictures = (a.image[:-1].float() - b.image[:-1].float()).abs().mean() <= pixels
    ids = (a.task_id, a.init_state_id) == (b.task_id, b.init_state_id)
    return numbers and bool(pictures) and ids and torch.equal(a.state[:-1], b.state[:-1])


@pytest.mark.parametrize(("video", "pixels"), [(False, 0.0), (True, 6.0)])
def test_demonstrations_survive_the_trip(tabletop, tmp_path: Path, video: bool, pixels: float):
    meta, episodes = tabletop
    folder = tmp_path / "set"
    assert write_demonstrations(folder, iter(episodes), meta, video=video) == len(episodes)
    back = read_demonstrations(meta, folder=folder)
    assert len(back) == len(episodes)
    assert all(same(a, b, pixels) for a, b in zip(episodes, back, strict=True))
    # A neighbouring frame would be told apart from the right one.
    moved = (episodes[0].image[1:].float() - episodes[0].image[:-1].float()).abs().mean()
    assert video or moved > 0.1
    dataset = LeRobotDataset(folder)
    assert dataset.layout.fps == meta.control_hz
    texts = [dataset.read(i, ["action"]).instructions[0] for i in range(len(back))]
    assert texts == [meta.instructions[e.task_id] for e in episodes]


def test_chunks_and_transitions_survive_the_trip(tabletop, tmp_path: Path):
    meta, episodes = tabletop
    write_demonstrations(tmp_path / "set", episodes, meta)
    back = read_demonstrations(meta, folder=tmp_path / "set")
    ours, theirs = cloning_samples(episodes, 4), cloning_samples(back, 4)
    assert bool((ours == theirs).all())
    ours, theirs = (decision_transitions(e, 4, 0.98) for e in (episodes, back))
    schema.check_transitions(theirs, where="the test")
    for key in ours.keys(True, True):
        same_rows = (ours[key] == theirs[key]).flatten(1).all(1)
        if key[:2] == ("next", "observation"):
            # Only what follows the last action is not stored; nothing is bootstrapped from it.
            assert bool(same_rows[~ours[schema.TERMINATED][:, 0]].all())
        else:
            assert bool(same_rows.all()), key


def test_names_of_another_suite_are_refused(tabletop, tmp_path: Path):
    meta, episodes = tabletop
    write_demonstrations(tmp_path / "set", episodes[:1], meta)
    other = replace(meta, action_names=(*meta.action_names[:3], "gripper, -1 open, 1 closed"))
    with pytest.raises(ValueError, match="names the numbers of 'action'"):
        read_demonstrations(other, folder=tmp_path / "set")
    with pytest.raises(ValueError, match=r"'action' has 4 numbers.*suite wants 3"):
        read_demonstrations(
            replace(meta, action_names=meta.action_names[:3]), folder=tmp_path / "set"
        )
    with pytest.raises(ValueError, match=r"control_hz of suite 'tabletop' is 12\.5"):
        write_demonstrations(tmp_path / "new", episodes, replace(meta, control_hz=12.5))


def test_episodes_without_success_are_left_out(tmp_path: Path):
    features = suite_features(TOY, video=False)
    columns = {
        key: np.zeros((2, *(() if f.shape == (1,) else f.shape)), f.dtype)
        for key, f in features.items()
        if not f.is_camera
    }
    images = {key: np.zeros((2, 3, 64, 64), np.uint8) for key, f in features.items() if f.is_camera}
    with LeRobotWriter(tmp_path / "set", fps=10, features=features) as writer:
        writer.add_episode(columns, images, TOY.instructions[0])
        solved = np.array([False, True])
        writer.add_episode(columns | {"next.success": solved}, images, TOY.instructions[0])
    with pytest.warns(UserWarning, match="1 episodes without success"):
        assert len(read_demonstrations(TOY, folder=tmp_path / "set")) == 1


def test_the_template_of_a_foreign_data_set_becomes_a_mapping():
    cfg = OmegaConf.load(GOLDEN.parents[2] / "conf" / "dataset" / "libero.yaml")
    cfg.folder = "somewhere"
    read = instantiate(cfg)
    mapping = read.keywords["mapping"]
    assert isinstance(mapping, DatasetMapping)
    features = {"actions": Feature("float32", (7,)), "state": Feature("float32", (8,))}
    names = ("dx", "dy", "dz", "drx", "dry", "drz", "gripper, -1 open, 1 closed")
    listed = sources(mapping.action, "action", names, features)
    data = np.tile(np.float32([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, -1.0]), (2, 1))
    # LIBERO's own conventions on both sides: every number stays what it is.
    assert np.array_equal(convert(listed, names, {"actions": data}, features), data)
    states = sources(mapping.state, "observation.state", tuple("abcdefgh"), features)
    assert [source.entry for source in states] == list(range(8))
