"""What the writer writes is what the reader reads, and nothing half-written is left."""

import json
from pathlib import Path

import av
import numpy as np
import pyarrow.parquet as pq
import pytest

from torchrl_vla.data.lerobot import LeRobotDataset
from torchrl_vla.data.lerobot_layout import Feature
from torchrl_vla.data.lerobot_write import LeRobotWriter

FEATURES = {
    "observation.state": Feature("float32", (2,), ("x", "y")),
    "reward": Feature("float32", (1,)),
    "count": Feature("int64", (1,)),
    "success": Feature("bool", (1,)),
}
LENGTHS = (5, 8, 3)
TEXTS = ("open the drawer", "close the drawer", "open the drawer")


def episode(number: int, length: int) -> dict[str, np.ndarray]:
    step = np.arange(length)
    return {
        "observation.state": np.stack([step, step + number], 1).astype(np.float32),
        "reward": (step == length - 1).astype(np.float32),
        "count": 10**15 + step,
        "success": step == length - 1,
    }


def pictures(number: int, length: int, size: int = 64) -> np.ndarray:
    """Smooth pictures whose mean says episode and step: red 8 per step, green 40 per episode."""
    ramp = np.linspace(0, 40, size)
    image = np.zeros((length, 3, size, size), np.uint8)
    for step in range(length):
        image[step, 0] = 8 * step + ramp
        image[step, 1] = 40 * number + ramp
    return image


def written(folder: Path, kind: str, **settings) -> LeRobotDataset:
    cameras = {key: Feature(kind, (64, 64, 3)) for key in ("front", "wrist")} if kind else {}
    with LeRobotWriter(folder, fps=20, features=FEATURES | cameras, **settings) as writer:
        for number, (length, text) in enumerate(zip(LENGTHS, TEXTS, strict=True)):
            images = {"front": pictures(number, length), "wrist": 255 - pictures(number, length)}
            writer.add_episode(episode(number, length), images if kind else {}, text)
    return LeRobotDataset(folder)


@pytest.mark.parametrize("kind", ["image", "video"])
def test_round_trip(kind: str, tmp_path: Path):
    dataset = written(tmp_path / "set", kind, robot_type="two_joints")
    layout = dataset.layout
    assert (layout.version, layout.fps, layout.robot_type) == ("v3.0", 20.0, "two_joints")
    assert [entry.length for entry in layout.episodes] == list(LENGTHS)
    assert [entry.first_row for entry in layout.episodes] == [0, 5, 13]
    assert layout.tasks == {0: "open the drawer", 1: "close the drawer"}
    assert layout.features["observation.state"].names == ("x", "y")
    for number, (length, text) in enumerate(zip(LENGTHS, TEXTS, strict=True)):
        back, want = dataset.read(number), episode(number, length)
        assert back.instructions == (text,) * length
        for key, values in want.items():
            assert back.columns[key].dtype == values.dtype
            assert np.array_equal(back.columns[key], values), key
        for key, sent in (("front", pictures(number, length)), ("wrist", None)):
            got = back.images[key].astype(int)
            sent = 255 - pictures(number, length) if sent is None else sent
            assert got.shape == sent.shape
            if kind == "image":
                assert np.array_equal(got, sent)
            # One step is 8 in the red mean: half of it tells neighbours apart.
            wrong = (got - sent.astype(int)).reshape(length, 3, -1).mean(axis=2)
            assert np.abs(wrong).max() < 3


def test_an_episode_of_several_instructions(tmp_path: Path):
    with LeRobotWriter(tmp_path / "set", fps=10, features=FEATURES) as writer:
        writer.add_episode(episode(0, 4), {}, ["a", "a", "b", "a"])
    assert LeRobotDataset(tmp_path / "set").read(0).instructions == ("a", "a", "b", "a")


def test_every_episode_begins_with_a_key_frame(tmp_path: Path):
    dataset = written(tmp_path / "set", "video")
    path, first = dataset.layout.episodes[2].videos["front"]
    assert first == 13
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        keys = {
            round(packet.pts * stream.time_base * 20)
            for packet in container.demux(stream)
            if packet.size and packet.is_keyframe
        }
    assert {0, 5, 13} <= keys


def test_files_roll_over_each_by_its_own_size(tmp_path: Path):
    # With 0 MB every episode fills its file; the parquet file stays below its megabyte.
    dataset = written(tmp_path / "set", "video", video_mb=0, data_mb=1, chunks_size=2)
    places = [entry.videos["front"] for entry in dataset.layout.episodes]
    names = [str(path.relative_to(tmp_path / "set/videos/front")) for path, _ in places]
    wanted = ["chunk-000/file-000.mp4", "chunk-000/file-001.mp4", "chunk-001/file-000.mp4"]
    assert names == wanted
    assert [first for _, first in places] == [0, 0, 0]
    assert {entry.data_path.name for entry in dataset.layout.episodes} == {"file-000.parquet"}
    assert dataset.read(2).images["front"].shape == (3, 3, 64, 64)
    dataset = written(tmp_path / "other", "", data_mb=0)
    names = [entry.data_path.name for entry in dataset.layout.episodes]
    assert names == [f"file-00{i}.parquet" for i in range(3)]


def test_what_other_readers_need(tmp_path: Path):
    written(tmp_path / "set", "image")
    info = json.loads((tmp_path / "set/meta/info.json").read_text())
    assert {k: v for k, v in info.items() if k.startswith("total")} == {
        "total_episodes": 3,
        "total_frames": 16,
        "total_tasks": 2,
    }
    assert info["splits"] == {"train": "0:3"}
    assert info["video_path"] is None
    assert list(info["features"])[-5:] == [
        "timestamp",
        "frame_index",
        "episode_index",
        "index",
        "task_index",
    ]
    tasks = pq.read_schema(tmp_path / "set/meta/tasks.parquet")
    # Without the index hint LeRobot takes row numbers for instructions.
    assert json.loads(tasks.metadata[b"pandas"])["index_columns"] == ["task"]
    data = pq.ParquetFile(tmp_path / "set/data/chunk-000/file-000.parquet")
    assert data.metadata.num_row_groups == 3
    assert [data.metadata.row_group(i).num_rows for i in range(3)] == list(LENGTHS)
    hint = json.loads(data.schema_arrow.metadata[b"huggingface"])
    assert hint["info"]["features"]["front"] == {"_type": "Image"}
    episodes = pq.read_table(tmp_path / "set/meta/episodes/chunk-000/file-000.parquet")
    assert episodes["dataset_to_index"].to_pylist() == [5, 13, 16]
    assert episodes["stats/reward/max"].to_pylist() == [[1.0]] * 3


def test_statistics_are_those_of_all_frames(tmp_path: Path):
    written(tmp_path / "set", "image")
    stats = json.loads((tmp_path / "set/meta/stats.json").read_text())
    # x counts 0..4, 0..7, 0..2: sum 10 + 28 + 3 = 41 in 16 frames.
    assert stats["observation.state"]["mean"][0] == pytest.approx(41 / 16)
    assert stats["observation.state"]["max"] == [7.0, 8.0]
    assert stats["observation.state"]["count"] == [16]
    # Sorted x: 0 0 0 1 1 1 2 2 2 3 3 4 4 5 6 7; between the 8th and the 9th lies 2.
    assert stats["observation.state"]["q50"][0] == 2.0
    assert stats["success"]["mean"] == [3 / 16]
    assert stats["count"]["min"] == [10**15]
    assert stats["front"]["count"] == [16]
    assert stats["front"]["max"][0] == [[(8 * 7 + 40) / 255]]  # brightest red: step 7, ramp end
    assert stats["front"]["max"][2] == [[0.0]]


def test_an_exception_leaves_nothing(tmp_path: Path):
    def interrupted():
        with LeRobotWriter(tmp_path / "set", fps=20, features=FEATURES) as writer:
            writer.add_episode(episode(0, 5), {}, "a")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(tmp_path.iterdir()) == []
    with (
        pytest.raises(ValueError, match="would hold no episode"),
        LeRobotWriter(tmp_path / "set", fps=20, features=FEATURES),
    ):
        pass
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(tmp_path: Path):
    written(tmp_path / "set", "")
    with pytest.raises(FileExistsError, match="choose a new folder"):
        LeRobotWriter(tmp_path / "set", fps=20, features=FEATURES)
    first = LeRobotWriter(tmp_path / "new", fps=20, features=FEATURES)
    with pytest.raises(FileExistsError, match=r"\.new\.part is being written"):
        LeRobotWriter(tmp_path / "new", fps=20, features=FEATURES)
    assert not (tmp_path / "new").exists()
    first.add_episode(episode(0, 2), {}, "a")
    first.close()
    first.close()
    with pytest.raises(RuntimeError, match="is closed"):
        first.add_episode(episode(0, 2), {}, "a")


def changed(**values) -> dict[str, np.ndarray]:
    return {k: v for k, v in (episode(0, 4) | values).items() if v is not None}


@pytest.mark.parametrize(
    ("columns", "texts", "message"),
    [
        (changed(reward=None), "a", r"missing \['reward'\]"),
        (changed(force=np.zeros(4)), "a", r"unknown \['force'\]"),
        (changed(reward=np.zeros(4)), "a", "'reward' is float64"),
        (changed(reward=np.zeros(3, np.float32)), "a", "'reward' is float32 .3,."),
        (changed(reward=np.full(4, np.nan, np.float32)), "a", "'reward' has 4 values"),
        (changed(), "", "empty ones: 4"),
        (changed(), ["a", "b"], "2 instructions for 4 frames"),
        ({key: values[:0] for key, values in episode(0, 4).items()}, "a", "at least 1"),
    ],
)
def test_bad_episodes_are_refused(columns: dict, texts, message: str, tmp_path: Path):
    with LeRobotWriter(tmp_path / "set", fps=20, features=FEATURES) as writer:
        with pytest.raises(ValueError, match=message):
            writer.add_episode(columns, {}, texts)
        writer.add_episode(episode(0, 4), {}, "a")
    assert len(LeRobotDataset(tmp_path / "set")) == 1


@pytest.mark.parametrize(
    ("key", "feature"),
    [
        ("a/b", Feature("float32", (1,))),
        ("index", Feature("int64", (1,))),
        ("matrix", Feature("float32", (2, 2))),
        ("camera", Feature("video", (64, 64))),
        ("text", Feature("string", (1,))),
    ],
)
def test_features_that_the_format_cannot_hold(key: str, feature: Feature, tmp_path: Path):
    with pytest.raises(ValueError, match=f"feature '{key}'"):
        LeRobotWriter(tmp_path / "set", fps=20, features={key: feature})
    assert list(tmp_path.iterdir()) == []


def test_odd_pictures_do_not_fit_into_video(tmp_path: Path):
    def record():
        feature = {"front": Feature("video", (65, 64, 3))}
        with LeRobotWriter(tmp_path / "set", fps=20, features=feature) as writer:
            writer.add_episode({}, {"front": np.zeros((2, 3, 65, 64), np.uint8)}, "a")

    with pytest.raises(ValueError, match="65x64 px, video needs even numbers"):
        record()
    assert list(tmp_path.iterdir()) == []
