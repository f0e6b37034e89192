"""Write LeRobot data sets, format v3.0: one row per frame, pictures in parquet or as video.

The folder appears complete or not at all: everything is written beside it under a temporary name
and renamed by :meth:`LeRobotWriter.close`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from torchrl_vla.data.lerobot_layout import (
    DATA_PATH,
    DEFAULT_COLUMNS,
    EPISODES_FILE,
    INFO_FILE,
    STATS_FILE,
    TASKS_FILE,
    VIDEO_PATH,
    Feature,
)
from torchrl_vla.data.lerobot_statistics import describe, describe_pixels, histogram
from torchrl_vla.data.lerobot_tables import (
    check_episode,
    check_features,
    row_array,
    row_schema,
    task_table,
)
from torchrl_vla.data.lerobot_video import CODECS, VideoFile, choose_encoder

MEGABYTE = 1024 * 1024


class LeRobotWriter:
    """A new data set. Use it as a context manager: an exception inside leaves nothing behind.

    Args:
        folder: The data set's folder; it must not exist yet.
        fps: Frames per second.
        features: Features without the five default columns. Vectors are ``[D]``, single numbers
            ``(1,)``, cameras ``(h, w, 3)`` of dtype ``"image"`` or ``"video"``.
        robot_type: Free text.
        crf: Quality of video: lower is better and larger.
        data_mb: Size [MB] from which on a parquet file is followed by another.
        video_mb: The same for mp4 files.
        chunks_size: Files per ``chunk-...`` folder.

    Raises:
        FileExistsError: the folder, or its unfinished twin, is there already.
        ValueError: a feature that the format cannot hold.
        RuntimeError: video is asked for and PyAV has no encoder for it.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        fps: int,
        features: Mapping[str, Feature],
        robot_type: str | None = None,
        crf: int = 20,
        data_mb: float = 100,
        video_mb: float = 200,
        chunks_size: int = 1000,
    ) -> None:
        self.folder = Path(folder)
        self.features = dict(features)
        check_features(self.features)
        self._fps, self._robot_type, self._crf = fps, robot_type, crf
        self._limits = {"data": data_mb * MEGABYTE, "video": video_mb * MEGABYTE}
        self._megabytes, self._chunks_size = (data_mb, video_mb), chunks_size
        videos = [key for key, feature in self.features.items() if feature.dtype == "video"]
        self._encoder = choose_encoder() if videos else ""
        self._part = self.folder.with_name(f".{self.folder.name}.part")
        if self.folder.exists():
            raise FileExistsError(f"{self.folder} exists: choose a new folder or remove it")
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._part.mkdir()
        except FileExistsError as error:
            raise FileExistsError(
                f"{self._part} is being written, or was left by a recording that was killed: "
                "remove it"
            ) from error
        self._schema = row_schema(self.features)
        self._numbers = dict.fromkeys(("data", *videos), 0)
        self._data: pq.ParquetWriter | None = None
        self._videos: dict[str, VideoFile] = {}
        self._tasks: dict[str, int] = {}
        self._episodes: list[dict[str, Any]] = []
        self._frames = 0
        self._seen: dict[str, list[np.ndarray]] = {}
        self._open = True

    def add_episode(
        self,
        columns: Mapping[str, np.ndarray],
        images: Mapping[str, np.ndarray],
        instructions: str | Sequence[str],
    ) -> None:
        """Append one episode of ``T`` frames.

        Args:
            columns: Per feature that is no camera, ``[T]`` for shape ``(1,)``, else ``[T, D]``, in
                the feature's dtype.
            images: Per camera, uint8 RGB ``[T, 3, h, w]``.
            instructions: Of the episode, or of every frame.

        Raises:
            ValueError: a feature is missing or unknown, or its values have another length, shape or
                dtype, or are not finite; the instruction is empty.
            RuntimeError: the writer is closed.
        """
        if not self._open:
            raise RuntimeError(f"{self.folder} is closed: open a new writer")
        texts = [instructions] if isinstance(instructions, str) else list(instructions)
        given = {**columns, **images}
        length = check_episode(self.features, given)
        texts = texts * length if len(texts) == 1 else texts
        if len(texts) != length or not all(texts):
            raise ValueError(
                f"{len(texts)} instructions for {length} frames, empty ones: "
                f"{texts.count('')}: give one text, or one per frame"
            )
        number = len(self._episodes)
        for text in texts:
            self._tasks.setdefault(text, len(self._tasks))
        frame = np.arange(length)
        rows = dict(columns) | {
            "timestamp": (frame / self._fps).astype(np.float32),
            "frame_index": frame,
            "episode_index": np.full(length, number),
            "index": self._frames + frame,
            "task_index": np.array([self._tasks[text] for text in texts]),
        }
        entry = {
            "episode_index": number,
            "tasks": list(dict.fromkeys(texts)),
            "length": length,
            "dataset_from_index": self._frames,
            "dataset_to_index": self._frames + length,
        }
        entry |= self._write_rows(rows | dict(images))
        for key, pictures in images.items():
            if self.features[key].dtype == "video":
                entry |= self._write_video(key, pictures)
        self._episodes.append(entry | self._describe(rows, images))
        self._frames += length

    def _place(self, kind: str) -> dict[str, int]:
        chunk, file = divmod(self._numbers[kind], self._chunks_size)
        return {"chunk_index": chunk, "file_index": file}

    def _write_rows(self, rows: Mapping[str, np.ndarray]) -> dict[str, int]:
        """Write one row group, in a new file if there is none open."""
        place = self._place("data")
        path = self._part / DATA_PATH.format(**place)
        if self._data is None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._data = pq.ParquetWriter(path, self._schema, compression="snappy")
        table = pa.Table.from_arrays(
            [row_array(rows[field.name], field.type) for field in self._schema], schema=self._schema
        )
        self._data.write_table(table, row_group_size=len(table))
        if path.stat().st_size >= self._limits["data"]:
            self._data.close()
            self._data = None
            self._numbers["data"] += 1
        return {f"data/{name}": value for name, value in place.items()}

    def _write_video(self, key: str, pictures: np.ndarray) -> dict[str, Any]:
        place = self._place(key)
        if key not in self._videos:
            path = self._part / VIDEO_PATH.format(video_key=key, **place)
            height, width, _ = self.features[key].shape
            self._videos[key] = VideoFile(
                path, (height, width), self._fps, self._encoder, self._crf
            )
        video = self._videos[key]
        first = video.add_episode(pictures)
        span = {
            "from_timestamp": first / self._fps,
            "to_timestamp": (first + len(pictures)) / self._fps,
        }
        if video.bytes >= self._limits["video"]:
            self._videos.pop(key).close()
            self._numbers[key] += 1
        return {f"videos/{key}/{name}": value for name, value in (place | span).items()}

    def _describe(
        self, rows: Mapping[str, np.ndarray], images: Mapping[str, np.ndarray]
    ) -> dict[str, Any]:
        """Statistics of one episode as columns of the episode table; remember them for the set."""
        stats = {}
        for key, values in rows.items():
            if values.dtype.kind in "biuf":
                self._seen.setdefault(key, []).append(values)
                stats[key] = describe(values)
        for key, pictures in images.items():
            counts = histogram(pictures)
            self._seen.setdefault(key, []).append(counts)
            stats[key] = describe_pixels(counts, len(pictures))
        return {f"stats/{key}/{name}": v for key, s in stats.items() for name, v in s.items()}

    def close(self) -> None:
        """Write tables and totals, then give the folder its name. Safe to call twice.

        Raises:
            ValueError: no episode was added; nothing is left on disk.
        """
        if not self._open:
            return
        if not self._episodes:
            self.discard()
            raise ValueError(f"{self.folder} would hold no episode: add one before close()")
        self._open = False
        if self._data is not None:
            self._data.close()
        for video in self._videos.values():
            video.close()
        place = {"meta/episodes/chunk_index": 0, "meta/episodes/file_index": 0}
        episodes = pa.Table.from_pylist([entry | place for entry in self._episodes])
        (self._part / EPISODES_FILE).parent.mkdir(parents=True)
        pq.write_table(episodes, self._part / EPISODES_FILE)
        pq.write_table(task_table(self._tasks), self._part / TASKS_FILE)
        _write_json(self._part / STATS_FILE, self._statistics())
        _write_json(self._part / INFO_FILE, self._info())
        self._part.rename(self.folder)

    def discard(self) -> None:
        """Give up: nothing stays on disk."""
        if not self._open:
            return
        self._open = False
        if self._data is not None:
            self._data.close()
        for video in self._videos.values():
            video.discard()
        shutil.rmtree(self._part)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()

    def _statistics(self) -> dict[str, Any]:
        out = {}
        for key, parts in self._seen.items():
            if key in self.features and self.features[key].is_camera:
                out[key] = describe_pixels(np.sum(parts, axis=0), self._frames)
            else:
                out[key] = describe(np.concatenate(parts))
        return out

    def _info(self) -> dict[str, Any]:
        data_mb, video_mb = self._megabytes
        has_video = any(feature.dtype == "video" for feature in self.features.values())
        features = {key: self._feature_info(feature) for key, feature in self.features.items()}
        features |= {
            key: {"dtype": dtype, "shape": [1], "names": None}
            for key, dtype in DEFAULT_COLUMNS.items()
        }
        return {
            "codebase_version": "v3.0",
            "robot_type": self._robot_type,
            "total_episodes": len(self._episodes),
            "total_frames": self._frames,
            "total_tasks": len(self._tasks),
            "chunks_size": self._chunks_size,
            "data_files_size_in_mb": data_mb,
            "video_files_size_in_mb": video_mb,
            "fps": self._fps,
            "splits": {"train": f"0:{len(self._episodes)}"},
            "data_path": DATA_PATH,
            "video_path": VIDEO_PATH if has_video else None,
            "features": features,
        }

    def _feature_info(self, feature: Feature) -> dict[str, Any]:
        names = None if feature.names is None else list(feature.names)
        if feature.is_camera:
            names = ["height", "width", "channels"]
        content = {"dtype": feature.dtype, "shape": list(feature.shape), "names": names}
        if feature.dtype == "video":
            content["info"] = {
                "video.height": feature.shape[0],
                "video.width": feature.shape[1],
                "video.codec": CODECS[self._encoder],
                "video.pix_fmt": "yuv420p",
                "video.is_depth_map": False,
                "video.fps": self._fps,
                "video.channels": 3,
                "has_audio": False,
            }
        return content


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=4))
