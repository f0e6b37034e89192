"""What a LeRobot data set on disk says about itself: version, features, instructions, episodes.

Reads the metadata of v3.0 (many episodes per file) and v2.1 (one file per episode) into one
description, so that nothing behind it asks for the version again. No frame is read here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

try:
    import pyarrow as pa
    import pyarrow.parquet as pq
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "LeRobot data sets need pyarrow: pip install 'torchrl_vla[lerobot]'"
    ) from error

SUPPORTED = ("v3.0", "v2.1")
"""Values of ``codebase_version`` that are understood."""
DEFAULT_COLUMNS = {
    "timestamp": "float32",
    "frame_index": "int64",
    "episode_index": "int64",
    "index": "int64",
    "task_index": "int64",
}
"""Columns that every data set has, with their dtype; all hold one number per frame."""
INFO_FILE = "meta/info.json"
DATA_PATH = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
VIDEO_PATH = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
EPISODES_FILE = "meta/episodes/chunk-000/file-000.parquet"
TASKS_FILE = "meta/tasks.parquet"
STATS_FILE = "meta/stats.json"


@dataclass(frozen=True)
class Feature:
    """One column: numbers per frame, or a camera."""

    dtype: str
    """NumPy name, ``"string"``, or for cameras ``"image"`` or ``"video"``."""
    shape: tuple[int, ...]
    """Shape of one frame's value; cameras ``(h, w, 3)``."""
    names: tuple[str, ...] | None = None
    """Names of the numbers of a vector, where the data set gives them."""

    @property
    def is_camera(self) -> bool:
        """Whether the values are pictures."""
        return self.dtype in ("image", "video")


@dataclass(frozen=True)
class EpisodeEntry:
    """Where one episode lies."""

    index: int
    """Its number, 0..n-1."""
    length: int
    """Its frames."""
    first_row: int
    """Global ``index`` of its first frame."""
    data_path: Path
    """Parquet file that should hold its rows (some converters name a wrong one)."""
    videos: dict[str, tuple[Path, int]]
    """Per video camera: mp4 file and number of the episode's first frame in it."""


@dataclass(frozen=True)
class Layout:
    """A data set's description."""

    folder: Path
    version: str
    fps: float
    robot_type: str | None
    features: dict[str, Feature]
    """Without the five default columns."""
    tasks: dict[int, str]
    """Instruction by the value of ``task_index``."""
    episodes: tuple[EpisodeEntry, ...]

    @property
    def cameras(self) -> dict[str, Feature]:
        """The camera features."""
        return {key: feature for key, feature in self.features.items() if feature.is_camera}


def read_layout(folder: Path) -> Layout:
    """Read the description of the data set in ``folder``.

    Raises:
        FileNotFoundError: ``folder`` holds no data set, or a file of its metadata is missing.
        ValueError: an unsupported version, or metadata that contradict each other.
    """
    path = folder / INFO_FILE
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no LeRobot data set: there is no {path}")
    info = json.loads(path.read_text())
    version = info.get("codebase_version")
    if version not in SUPPORTED:
        raise ValueError(
            f"{path}: codebase_version is {version!r}, readable are {', '.join(SUPPORTED)}: "
            "convert the data set with LeRobot's own converter"
        )
    features = {
        key: _feature(content)
        for key, content in info["features"].items()
        if key not in DEFAULT_COLUMNS
    }
    fps = float(info["fps"])
    read = _episodes_v30 if version == "v3.0" else _episodes_v21
    tasks = _tasks_v30(folder) if version == "v3.0" else _tasks_v21(folder)
    videos = [key for key, feature in features.items() if feature.dtype == "video"]
    episodes = read(folder, info, videos, fps)
    _check_counts(path, info, episodes, tasks)
    return Layout(folder, version, fps, info.get("robot_type"), features, tasks, episodes)


def _feature(content: dict[str, Any]) -> Feature:
    """Read one entry of ``features``; the axes of a camera are put in order by their names."""
    dtype, shape, names = (
        content["dtype"],
        tuple(content["shape"]),
        _flat_names(content.get("names")),
    )
    if dtype in ("image", "video"):
        axes = [name[:1] for name in names or ("height", "width", "channels")]
        return Feature(dtype, tuple(shape[axes.index(letter)] for letter in "hwc"))
    return Feature(dtype, shape, names if shape == (len(names or ()),) else None)


def _flat_names(names: Any) -> tuple[str, ...] | None:
    """Names come as a list, as ``{group: [names]}`` or as ``{name: position}``."""
    if isinstance(names, dict):
        values = list(names.values())
        if all(isinstance(value, int) for value in values):
            return tuple(sorted(names, key=names.__getitem__))
        return tuple(str(name) for group in values for name in group)
    return None if names is None else tuple(map(str, names))


def _tasks_v30(folder: Path) -> dict[int, str]:
    table = pq.read_table(folder / TASKS_FILE)
    text = "task" if "task" in table.column_names else "__index_level_0__"
    if text not in table.column_names:
        raise ValueError(
            f"{folder / TASKS_FILE} has columns {table.column_names}, none of which holds the "
            "instructions ('task' or '__index_level_0__')"
        )
    indices, texts = table["task_index"].to_pylist(), table[text].to_pylist()
    return dict(zip(indices, texts, strict=True))


def _tasks_v21(folder: Path) -> dict[int, str]:
    return {row["task_index"]: row["task"] for row in _json_lines(folder / "meta/tasks.jsonl")}


def _json_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def _episodes_v30(
    folder: Path, info: dict[str, Any], videos: list[str], fps: float
) -> tuple[EpisodeEntry, ...]:
    """Read the episode table, without the statistics that make up most of it."""
    files = sorted((folder / "meta/episodes").glob("*/*.parquet"))
    if not files:
        raise FileNotFoundError(f"{folder}/meta/episodes holds no parquet file")
    wanted = [n for n in pq.read_schema(files[0]).names if not n.startswith("stats/")]
    table = pa.concat_tables([pq.read_table(file, columns=wanted) for file in files])

    def video(row: dict[str, Any], key: str) -> tuple[Path, int]:
        place = {k: row[f"videos/{key}/{k}"] for k in ("chunk_index", "file_index")}
        first = round(row[f"videos/{key}/from_timestamp"] * fps)
        return folder / info["video_path"].format(video_key=key, **place), first

    return tuple(
        EpisodeEntry(
            index=row["episode_index"],
            length=row["length"],
            first_row=row["dataset_from_index"],
            data_path=folder
            / info["data_path"].format(
                chunk_index=row["data/chunk_index"], file_index=row["data/file_index"]
            ),
            videos={key: video(row, key) for key in videos},
        )
        for row in sorted(table.to_pylist(), key=lambda row: row["episode_index"])
    )


def _episodes_v21(
    folder: Path, info: dict[str, Any], videos: list[str], fps: float
) -> tuple[EpisodeEntry, ...]:
    rows = sorted(_json_lines(folder / "meta/episodes.jsonl"), key=lambda r: r["episode_index"])
    entries, first = [], 0
    for row in rows:
        number = row["episode_index"]
        place = {"episode_chunk": number // info["chunks_size"], "episode_index": number}
        paths = {
            key: (folder / info["video_path"].format(video_key=key, **place), 0) for key in videos
        }
        data = folder / info["data_path"].format(**place)
        entries.append(EpisodeEntry(number, row["length"], first, data, paths))
        first += row["length"]
    return tuple(entries)


def _check_counts(
    path: Path, info: dict[str, Any], episodes: tuple[EpisodeEntry, ...], tasks: dict[int, str]
) -> None:
    """Compare the totals of ``info.json`` with the tables; an unfinished recording differs."""
    found = {
        "total_episodes": len(episodes),
        "total_frames": sum(entry.length for entry in episodes),
        "total_tasks": len(tasks),
    }
    for name, count in found.items():
        if info.get(name, count) != count:
            raise ValueError(
                f"{path}: {name} is {info[name]}, the tables hold {count}: the data set is not "
                "complete, was its recording closed?"
            )
    if [entry.index for entry in episodes] != list(range(len(episodes))):
        raise ValueError(
            f"{path}: episodes are numbered {[entry.index for entry in episodes][:8]}..., they "
            "must be 0, 1, 2, ...: the episode table has gaps"
        )
