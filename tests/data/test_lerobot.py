"""Data sets written by LeRobot itself read back to the values they were made of."""

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from torchrl_vla.data.lerobot import LeRobotDataset

GOLDEN = Path(__file__).parent.parent / "golden" / "lerobot"
SETS = sorted(path.name for path in GOLDEN.iterdir())
STATE, ACTION = "observation.state", "action"


def expected(name: str) -> dict:
    return json.loads((GOLDEN / name / "expected.json").read_text())


def copied(name: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN / name, tmp_path / name))


def edit_info(folder: Path, **changes) -> None:
    path = folder / "meta/info.json"
    info = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in info.items() if value != "absent"}))


def test_there_are_fixtures_of_every_kind():
    assert SETS == [
        "v21_images",
        "v21_video",
        "v30_h264",
        "v30_images",
        "v30_multifile",
        "v30_stale_index",
        "v30_video",
        "v30_video_061",
    ]


@pytest.mark.parametrize("name", SETS)
def test_episodes_and_numbers(name: str):
    want, dataset = expected(name), LeRobotDataset(GOLDEN / name)
    layout = dataset.layout
    assert (layout.version, layout.fps) == (want["codebase_version"], want["fps"])
    assert layout.robot_type == want["robot_type"]
    assert {text: index for index, text in layout.tasks.items()} == want["tasks"]
    assert sorted(layout.cameras) == sorted(want["cameras"])
    assert [entry.length for entry in layout.episodes] == want["episode_lengths"]
    assert [entry.first_row for entry in layout.episodes] == want["dataset_from_index"]
    assert len(dataset) == want["num_episodes"] == 3
    for row in want["first_last_per_episode"]:
        recording = dataset.read(row["episode_index"], [STATE, ACTION])
        assert recording.images == {}
        state, action = recording.columns[STATE], recording.columns[ACTION]
        assert (state.dtype, state.shape[1], action.shape[1]) == (np.float32, 8, 7)
        assert state[[0, -1]].tolist() == [row["first_state"], row["last_state"]]
        assert action[[0, -1]].tolist() == [row["first_action"], row["last_action"]]
        text = want["instruction_per_episode"][row["episode_index"]]
        assert recording.instructions == (text,) * len(state)


@pytest.mark.parametrize("name", SETS)
def test_every_frame_is_the_right_one(name: str):
    want, dataset = expected(name), LeRobotDataset(GOLDEN / name)
    tolerance = want["tolerance"]
    # Neighbouring frames differ by 6 in their means, so a frame too early or late is outside.
    assert tolerance["channel_mean_abs"] <= 2.5
    for frame in want["frames"]:
        recording = dataset.read(frame["episode_index"])
        for camera in want["cameras"]:
            image = recording.images[camera][frame["frame_index"]]
            assert (image.shape, image.dtype) == ((3, 64, 64), np.uint8)
            mean = image.reshape(3, -1).mean(axis=1)
            wrong = np.abs(mean - frame["mean_rgb_0_255"][camera])
            assert wrong.max() <= tolerance["channel_mean_abs"]
            pixel = image[:, 8, 40].astype(int)
            wrong = np.abs(pixel - frame["pixel_y8_x40_rgb"][camera])
            assert wrong.max() <= tolerance["pixel_abs"]


def test_all_frames_of_an_episode_differ_as_they_should():
    # The fixtures' frames grow brighter in red by 6 from frame to frame, in every episode.
    for name in ("v30_video", "v30_h264", "v21_video", "v30_multifile"):
        images = LeRobotDataset(GOLDEN / name).read(2).images["observation.images.front"]
        steps = np.diff(images[:, 0].reshape(13, -1).mean(axis=1))
        assert np.abs(steps - 6).max() < 2.5, name


def test_a_row_is_looked_for_where_the_table_is_wrong(tmp_path: Path):
    layout = LeRobotDataset(GOLDEN / "v30_stale_index").layout
    named = layout.episodes[2].data_path
    assert 2 not in pq.read_table(named)["episode_index"].to_pylist()  # the fault is there
    folder = copied("v30_stale_index", tmp_path)
    (folder / "data/chunk-000/file-001.parquet").unlink()
    dataset = LeRobotDataset(folder)
    dataset.read(1)
    with pytest.raises(ValueError, match="no data file holds the 13 rows of episode 2"):
        dataset.read(2)


@pytest.mark.parametrize("version", ["v1.6", "v2.0", "v9.9", "absent"])
def test_other_versions_are_refused(version: str, tmp_path: Path):
    # Field case B45: found and supported versions and the path, before anything else is read.
    folder = copied("v30_images", tmp_path)
    shutil.rmtree(folder / "data")
    edit_info(folder, codebase_version=version)
    found = "None" if version == "absent" else f"'{version}'"
    with pytest.raises(ValueError, match=f"codebase_version is {found}, readable are v3.0, v2.1"):
        LeRobotDataset(folder)


def test_a_folder_without_a_data_set_is_refused(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="no LeRobot data set"):
        LeRobotDataset(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"total_episodes": 4}, "total_episodes is 4, the tables hold 3"),
        ({"total_frames": 25}, "total_frames is 25, the tables hold 26"),
        ({"total_tasks": 1}, "total_tasks is 1, the tables hold 2"),
    ],
)
def test_an_unfinished_recording_is_refused(changes: dict, message: str, tmp_path: Path):
    folder = copied("v21_images", tmp_path)
    edit_info(folder, **changes)
    with pytest.raises(ValueError, match=message):
        LeRobotDataset(folder)


def test_damaged_sets_are_refused_with_the_place(tmp_path: Path):
    folder = copied("v21_video", tmp_path)
    videos = folder / "videos/chunk-000/observation.images.front"
    # Episode 2 has 13 frames; the mp4 of episode 1 has 8.
    shutil.copy(videos / "episode_000001.mp4", videos / "episode_000002.mp4")
    with pytest.raises(ValueError, match=r"episode_000002.mp4: frame 8 .* is missing"):
        LeRobotDataset(folder).read(2)
    (videos / "episode_000002.mp4").unlink()
    with pytest.raises(FileNotFoundError, match=r"episode_000002\.mp4 is missing"):
        LeRobotDataset(folder).read(2)
    with pytest.raises(KeyError, match=r"no feature 'observation\.force'"):
        LeRobotDataset(folder).read(0, ["observation.force"])
    path = folder / "data/chunk-000/episode_000001.parquet"
    table = pq.read_table(path)
    shifted = table.set_column(
        table.schema.get_field_index("timestamp"), "timestamp", [np.arange(8, dtype="f4") / 5]
    )
    pq.write_table(shifted, path)
    # fps is 10: frame 7 should be at 0.7 s, the table now says 1.4 s.
    with pytest.raises(ValueError, match=r"episode 1, frame 7: timestamp is 1.4000 s.*0.7000 s"):
        LeRobotDataset(folder).read(1)


def test_axes_and_names_come_in_several_forms(tmp_path: Path):
    folder = copied("v30_images", tmp_path)
    info = json.loads((folder / "meta/info.json").read_text())
    features = info["features"]
    camera = features["observation.images.front"]
    camera |= {"shape": [3, 48, 64], "names": ["channel", "height", "width"]}
    features[STATE]["names"] = {"motors": [f"s{i}" for i in range(8)]}
    features[ACTION]["names"] = {"b": 1, "a": 0, "c": 2, "d": 3, "e": 4, "f": 5, "g": 6}
    del features["observation.images.wrist"]["names"]
    edit_info(folder, features=features)
    read = LeRobotDataset(folder).layout.features
    assert read["observation.images.front"].shape == (48, 64, 3)
    assert read["observation.images.wrist"].shape == (64, 64, 3)
    assert read[STATE].names == tuple(f"s{i}" for i in range(8))
    assert read[ACTION].names == ("a", "b", "c", "d", "e", "f", "g")
