"""The rows of a run folder: written once per update, read back for reports and a resume."""

from __future__ import annotations

import json
import math
import numbers
import os
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

WRITERS = ("jsonl", "tensorboard")
METRICS_FILE = "metrics.jsonl"
_ROW_KEYS = ("update", "time", "non_finite")


class MetricLog:
    """Writes one row of metrics per update into a run folder.

    A row of ``metrics.jsonl`` is ``{"update": int, "time": seconds, name: number, ...}``. ``time``
    is seconds since the run began; a run that resumes continues from its last row, so the pause
    between two jobs is not counted. TensorBoard events go to ``run_dir/tensorboard``.

    Args:
        run_dir: folder of the run, created when missing.
        writers: ``"jsonl"`` (the record that resume and the report read, always needed) and
            optionally ``"tensorboard"``.

    Raises:
        ValueError: an unknown writer, no ``"jsonl"``, or a damaged row before the last one.
    """

    def __init__(self, run_dir: str | os.PathLike[str], writers: Sequence[str] = WRITERS) -> None:
        unknown = sorted(set(writers) - set(WRITERS))
        if unknown or "jsonl" not in writers:
            raise ValueError(
                f"writers={tuple(writers)}: choose from {WRITERS} and keep 'jsonl', which resume "
                "and the report read"
            )
        self.run_dir = Path(run_dir)
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self.path = self.run_dir / METRICS_FILE
        self._use_tensorboard = "tensorboard" in writers
        self._tensorboard: SummaryWriter | None = None
        self._open(_read_rows(self.path), purge_step=None)

    def log(self, values: Mapping[str, float | Tensor], *, step: int) -> None:
        """Append one row and flush it.

        Args:
            values: numbers by name; a tensor must hold one element. NaN and infinities become
                ``null`` in the row and their names are listed under ``"non_finite"``; TensorBoard
                gets them as they are.
            step: the update this row describes, larger than every step before it.

        Raises:
            ValueError: ``step`` does not grow, a name is one the row uses itself, or a tensor has
                more than one element.
            TypeError: a value is not a number.
            RuntimeError: the log is closed.
        """
        if self._file.closed:
            raise RuntimeError(f"{self.path} is closed; open a new MetricLog to write to it")
        if step <= self._last_step:
            raise ValueError(
                f"step {step} must be larger than the last logged step {self._last_step} in "
                f"{self.path}; after a resume call truncate_after(step of the checkpoint) first"
            )
        taken = sorted(set(values) & set(_ROW_KEYS))
        if taken:
            raise ValueError(f"metric names {taken} are columns of the row itself; rename them")
        plain = {name: as_number(name, value) for name, value in values.items()}
        bad = sorted(name for name, value in plain.items() if not math.isfinite(value))
        seconds = round(self._seconds_before + time.monotonic() - self._opened_at, 3)
        row: dict[str, Any] = {"update": step, "time": seconds} | plain | dict.fromkeys(bad)
        if bad:
            row["non_finite"] = bad
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self._file.flush()
        self._last_step = step
        if self._tensorboard is not None:
            for name, value in plain.items():
                self._tensorboard.add_scalar(name, value, global_step=step)
            self._tensorboard.flush()

    def truncate_after(self, step: int) -> None:
        """Forget every row with ``update > step``, for a resume from the checkpoint of ``step``.

        The file is rewritten beside itself and renamed, so a crash leaves the old or the new one.
        TensorBoard is told to drop the same steps. A half-written last line counts as forgotten.
        ``step = 0`` or less forgets rows of every positive update.
        """
        self.close()
        rows, _ = _read_rows(self.path)
        kept = [row for row in rows if row["update"] <= step]
        _write_rows(self.path, kept)
        self._open((kept, False), purge_step=step + 1)

    def close(self) -> None:
        """Close the files. Safe to call twice."""
        self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
            self._tensorboard = None

    def _open(self, found: tuple[list[dict[str, Any]], bool], purge_step: int | None) -> None:
        rows, torn = found
        if torn:
            warnings.warn(f"{self.path}: repaired a last line cut in writing", stacklevel=3)
            _write_rows(self.path, rows)
        self._last_step: int = rows[-1]["update"] if rows else -1
        self._seconds_before: float = rows[-1]["time"] if rows else 0.0
        self._opened_at = time.monotonic()
        self._file = self.path.open("a", encoding="utf-8")
        if self._use_tensorboard:
            # Imported here because it takes about a second, which runs without it need not pay.
            from torch.utils.tensorboard import SummaryWriter

            folder = str(self.run_dir / "tensorboard")
            self._tensorboard = SummaryWriter(folder, purge_step=purge_step)


def read_metrics(run_dir: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Rows of ``run_dir/metrics.jsonl`` in order, while a run is writing or after it.

    A half-written last line is left out: a live or killed run may have one.

    Raises:
        FileNotFoundError: the run folder has no such file.
        ValueError: a damaged row before the last one.
    """
    path = Path(run_dir) / METRICS_FILE
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; is {run_dir} the folder of a run?")
    return _read_rows(path)[0]


def as_number(name: str, value: float | Tensor) -> int | float:
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(
                f"{name!r} has shape {tuple(value.shape)}; log one number, say .mean()"
            )
        value = value.item()
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    raise TypeError(f"{name!r} is {value!r} of type {type(value).__name__}, not a number")


def _read_rows(path: Path) -> tuple[list[dict[str, Any]], bool]:
    """Rows of ``path`` (none if it does not exist) and whether the last line is half-written."""
    if not path.exists():
        return [], False
    # A write cut inside a multi-byte character must not make the whole file unreadable.
    text = path.read_bytes().decode("utf-8", errors="replace")
    lines = text.splitlines()
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number == len(lines):
                return rows, True
            raise ValueError(
                f"{path}, line {number} is not JSON ({error}); only the last line may be cut. "
                "Repair or remove that line"
            ) from error
    return rows, bool(text) and not text.endswith("\n")


def _write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Replace ``path`` by ``rows`` in one step."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, allow_nan=False) + "\n" for row in rows)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
