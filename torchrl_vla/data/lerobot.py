"""Read episodes of a LeRobot data set (v3.0 or v2.1) from a local folder.

The room speaks LeRobot's own words: feature keys, rows, frames. What a suite makes of them is said
in ``lerobot_demonstrations.py``. Nothing is downloaded.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from PIL import Image

from torchrl_vla.data.lerobot_layout import DEFAULT_COLUMNS, EpisodeEntry, Feature, read_layout
from torchrl_vla.data.lerobot_video import read_frames

TIME_TOLERANCE = 1e-3
"""How far a row's time stamp may be from ``frame_index / fps`` [s]."""


@dataclass(frozen=True)
class Recording:
    """One episode of a data set, ``T`` frames."""

    columns: dict[str, np.ndarray]
    """``[T]`` for features of shape (1,), else ``[T, *shape]``, in the data set's dtype."""
    images: dict[str, np.ndarray]
    """Per camera, uint8 RGB ``[T, 3, h, w]``."""
    instructions: tuple[str, ...]
    """Instruction of every frame."""


class LeRobotDataset:
    """The episodes of one data set.

    Args:
        folder: The data set's folder, which holds ``meta/``.

    Raises:
        FileNotFoundError: no data set there.
        ValueError: see :func:`~torchrl_vla.data.lerobot_layout.read_layout`.
    """

    def __init__(self, folder: str | Path) -> None:
        self.layout = read_layout(Path(folder))
        self._open: tuple[Path, tuple[str, ...], pa.Table] | None = None
        self._found: dict[int, Path] | None = None

    def __len__(self) -> int:
        """Number of episodes."""
        return len(self.layout.episodes)

    def read(self, episode: int, features: Sequence[str] | None = None) -> Recording:
        """Read one episode.

        Args:
            episode: Its number, 0..len - 1.
            features: Which features (cameras too); all if ``None``.

        Raises:
            KeyError: the data set lacks one of ``features``.
            ValueError: rows, time stamps or video frames do not fit the episode table.
            FileNotFoundError: a file is missing.
        """
        known = self.layout.features
        wanted = list(known) if features is None else list(features)
        for key in wanted:
            if key not in known:
                raise KeyError(f"{self.layout.folder} has no feature {key!r}, only {sorted(known)}")
        entry = self.layout.episodes[episode]
        stored = [key for key in wanted if known[key].dtype != "video"]
        rows = self._rows(entry, (*stored, *DEFAULT_COLUMNS))
        self._check_rows(entry, rows)
        images, columns = {}, {}
        for key in wanted:
            if known[key].dtype == "video":
                path, first = entry.videos[key]
                images[key] = read_frames(path, first, entry.length, self.layout.fps)
            elif known[key].dtype == "image":
                images[key] = _pictures(rows[key])
            else:
                columns[key] = _numbers(rows[key], key, known[key])
        texts = tuple(self._instruction(entry, i) for i in rows["task_index"].to_pylist())
        return Recording(columns, images, texts)

    def _instruction(self, entry: EpisodeEntry, task_index: int) -> str:
        if task_index not in self.layout.tasks:
            raise ValueError(
                f"{self.layout.folder}: episode {entry.index} has task_index {task_index}, the "
                f"task table knows {sorted(self.layout.tasks)}"
            )
        return self.layout.tasks[task_index]

    def _rows(self, entry: EpisodeEntry, names: tuple[str, ...]) -> pa.Table:
        """Return the episode's rows; look for them where the episode table is wrong."""
        rows = self._rows_in(entry.data_path, entry, names)
        if rows is None:
            found = self._locations().get(entry.index)
            rows = None if found is None else self._rows_in(found, entry, names)
        if rows is None:
            raise ValueError(
                f"{self.layout.folder}: no data file holds the {entry.length} rows of episode "
                f"{entry.index}; the episode table names {entry.data_path}"
            )
        return rows

    def _rows_in(self, path: Path, entry: EpisodeEntry, names: tuple[str, ...]) -> pa.Table | None:
        if not path.is_file():
            return None
        # Episodes are mostly read in order, and many share a file.
        if self._open is None or self._open[:2] != (path, names):
            self._open = path, names, pq.read_table(path, columns=list(names))
        table = self._open[2]
        rows = table.filter(pc.equal(table["episode_index"], entry.index))
        return rows if len(rows) == entry.length else None

    def _locations(self) -> dict[int, Path]:
        """Which file holds which episode, from the rows themselves."""
        if self._found is None:
            self._found = {}
            for path in sorted((self.layout.folder / "data").glob("*/*.parquet")):
                numbers = pq.read_table(path, columns=["episode_index"])["episode_index"]
                for number in numbers.unique().to_pylist():
                    self._found.setdefault(number, path)
        return self._found

    def _check_rows(self, entry: EpisodeEntry, rows: pa.Table) -> None:
        where = f"{self.layout.folder}: episode {entry.index}"
        steps = np.arange(entry.length)
        index, frame = rows["index"].to_numpy(), rows["frame_index"].to_numpy()
        if not (np.array_equal(index, entry.first_row + steps) and np.array_equal(frame, steps)):
            raise ValueError(
                f"{where} should have rows {entry.first_row}..{entry.first_row + entry.length - 1} "
                f"and frames 0..{entry.length - 1}, found rows {index[0]}..{index[-1]} and frames "
                f"{frame[0]}..{frame[-1]}"
            )
        wrong = np.abs(rows["timestamp"].to_numpy() - steps / self.layout.fps)
        if wrong.max() > TIME_TOLERANCE:
            at = int(wrong.argmax())
            raise ValueError(
                f"{where}, frame {at}: timestamp is {rows['timestamp'][at].as_py():.4f} s, "
                f"frame_index / fps is {at / self.layout.fps:.4f} s: frames cannot be matched"
            )


def _numbers(column: pa.ChunkedArray, key: str, feature: Feature) -> np.ndarray:
    """Return a column as NumPy, whichever list type stores its vectors."""
    if column.null_count:
        raise ValueError(f"{key!r} has {column.null_count} empty rows: every frame needs a value")
    flat = column.combine_chunks()
    while pa.types.is_nested(flat.type) or isinstance(flat, pa.ExtensionArray):
        flat = flat.storage if isinstance(flat, pa.ExtensionArray) else flat.flatten()
    values = flat.to_numpy(zero_copy_only=False)
    if feature.dtype != "string":
        values = values.astype(feature.dtype)
    shape = () if feature.shape == (1,) else feature.shape
    expected = len(column) * int(np.prod(shape))
    if values.size != expected:
        raise ValueError(
            f"{key!r} holds {values.size} numbers in {len(column)} frames, its shape "
            f"{feature.shape} asks for {expected}"
        )
    return values.reshape(len(column), *shape)


def _pictures(column: pa.ChunkedArray) -> np.ndarray:
    """Decode pictures stored in the table, to uint8 RGB ``[T, 3, h, w]``."""
    coded = [item["bytes"] for item in column.to_pylist()]
    images = [np.asarray(Image.open(io.BytesIO(data)).convert("RGB")) for data in coded]
    return np.stack(images).transpose(0, 3, 1, 2)
