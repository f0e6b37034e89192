"""Metric names, their reduction over ranks, rates, and the writers of a run folder.

This room turns numbers into rows. It does not decide what is measured (loops do), draw
(:mod:`torchrl_vla.report`) or talk to a terminal (:mod:`torchrl_vla.progress`, same rank: the two
meet only in the strings of :data:`NAMES`). It opens no process group: collectives come in as
functions. Only one rank of a run may own a :class:`MetricLog`.

Names are ``room/thing``; the suffix says how ranks combine: ``_sum`` and ``_count`` add up,
``_max`` takes the largest, anything else is averaged.
"""

from __future__ import annotations

import json
import math
import numbers
import os
import time
import warnings
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import psutil
import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

ENV_STEPS = "env_steps"
EPISODES = "episodes"
TRAIN_SUCCESS = "train/success_rate"
EVAL_SUCCESS = "eval/success_rate"
EVAL_LOW = "eval/success_low"
EVAL_HIGH = "eval/success_high"
ENV_STEPS_RATE = "rate/env_steps"
UPDATES_RATE = "rate/updates"
WAIT_ACTORS = "wait/actors"
WAIT_LEARNER = "wait/learner"
RATIO_GAP = "ratio_gap"
TARGET_KL_STOPS = "target_kl_stops"
RSS = "memory/rss_gib"

NAMES: dict[str, str] = {
    ENV_STEPS: "control steps executed since the run began, all ranks",
    EPISODES: "training episodes finished since the run began, all ranks",
    TRAIN_SUCCESS: "success of the training episodes finished lately, 0..1",
    EVAL_SUCCESS: "success of the last evaluation, 0..1",
    EVAL_LOW: "lower Wilson bound of the last evaluation, 0..1",
    EVAL_HIGH: "upper Wilson bound of the last evaluation, 0..1",
    ENV_STEPS_RATE: "control steps per second, all ranks",
    UPDATES_RATE: "updates per second",
    WAIT_ACTORS: "share of wall time the learner waited for actors, 0..1",
    WAIT_LEARNER: "share of wall time the actors waited for the learner, 0..1",
    RSS: "resident memory of this rank and its children, GiB",
}
"""Names that the display and the report read. Runs may log any others beside them."""

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
        plain = {name: _as_number(name, value) for name, value in values.items()}
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


def reduce_metrics(
    values: Mapping[str, float | Tensor],
    all_reduce_sum: Callable[[Tensor], Tensor],
    world_size: int,
    rank: int | None = None,
) -> dict[str, float]:
    """Combine metrics of all ranks; every rank must call it with the same names.

    Ratios are best sent as a ``_sum`` and a ``_count`` and divided after: a mean of per-rank means
    weighs a rank with one episode like a rank with fifty. A NaN on one rank makes that metric NaN.

    Args:
        values: numbers of this rank by name.
        all_reduce_sum: returns the sum over ranks of a float64 CPU tensor ``[n]``.
        world_size: number of ranks, at least 1.
        rank: 0..world_size-1; needed for ``_max`` names only, which travel one slot per rank.

    Returns:
        The same names: ``_sum`` and ``_count`` added, ``_max`` the largest, the rest averaged.

    Raises:
        ValueError: ``world_size`` below 1, names that differ between ranks (raised on every rank,
            so none is left waiting), or a ``_max`` name without a ``rank`` in range.
        TypeError: a value is not a number.
    """
    if world_size < 1:
        raise ValueError(f"world_size={world_size} must be at least 1")
    names = sorted(values)
    plain = {name: float(_as_number(name, values[name])) for name in names}
    if world_size == 1:
        return plain
    maxima = [name for name in names if name.endswith("_max")]
    if maxima and (rank is None or not 0 <= rank < world_size):
        raise ValueError(f"{maxima} need rank=0..{world_size - 1}, got rank={rank}")
    _check_names(names, all_reduce_sum, world_size)
    added = [name for name in names if name not in maxima]
    slots = torch.zeros(world_size, len(maxima), dtype=torch.float64)
    if maxima:
        slots[rank] = torch.tensor([plain[name] for name in maxima], dtype=torch.float64)
    sums = torch.tensor([plain[name] for name in added], dtype=torch.float64)
    total = all_reduce_sum(torch.cat([sums, slots.flatten()]))
    out = dict(zip(added, total[: len(added)].tolist(), strict=True))
    for name in added:
        if not name.endswith(("_sum", "_count")):
            out[name] /= world_size
    if maxima:
        largest = total[len(added) :].view(world_size, -1).amax(0)
        out |= zip(maxima, largest.tolist(), strict=True)
    return {name: out[name] for name in names}


def wilson_interval(successes: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson score interval of a success probability.

    With ``p = successes / n`` and ``z`` the normal quantile of ``(1 + confidence) / 2``::

        (p + z^2/2n  -+  z * sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2/n)

    Unlike the usual ``p -+ z * sqrt(p (1 - p) / n)`` it does not collapse at 0/n and n/n.
    It assumes independent trials.

    Source: E. B. Wilson, "Probable inference, the law of succession, and statistical inference",
    JASA 22 (1927) 209-212; without continuity correction.

    Args:
        successes: 0..n.
        n: number of trials, at least 1.
        confidence: in (0, 1).

    Returns:
        ``(low, high)`` in [0, 1]; ``low`` is exactly 0 at 0/n, ``high`` exactly 1 at n/n.

    Raises:
        ValueError: an argument outside its range.
    """
    if n < 1:
        raise ValueError(f"n={n}: an interval needs at least 1 trial; evaluate first")
    if not 0 <= successes <= n:
        raise ValueError(f"successes={successes} must lie in 0..n={n}")
    if not 0.0 < confidence < 1.0:
        raise ValueError(f"confidence={confidence} must lie in (0, 1), for example 0.95")
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    p = successes / n
    centre = p + z * z / (2 * n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    low = 0.0 if successes == 0 else (centre - half) / scale
    high = 1.0 if successes == n else (centre + half) / scale
    return low, high


class Rate:
    """Events per second over a sliding window of wall time.

    Args:
        window: seconds the rate looks back. A single longer gap between two events still counts.
        clock: seconds, never going back.

    Raises:
        ValueError: ``window`` is not positive.
    """

    def __init__(self, window: float = 60.0, clock: Callable[[], float] = time.monotonic) -> None:
        if not window > 0:
            raise ValueError(f"window={window} s must be positive")
        self.total: float = 0
        self._window = window
        self._clock = clock
        self._marks: deque[tuple[float, float]] = deque([(clock(), 0.0)])

    def add(self, count: float) -> None:
        """Count ``count`` more events, now."""
        self.total += count
        self._marks.append((self._clock(), self.total))

    def per_second(self) -> float:
        """Events per second lately; 0 while no time has passed or nothing happened."""
        now = self._clock()
        while len(self._marks) > 1 and self._marks[1][0] <= now - self._window:
            self._marks.popleft()
        since, before = self._marks[0]
        return (self.total - before) / (now - since) if now > since else 0.0


class Stopwatch:
    """Adds up named waits and gives them as shares of wall time.

    Not for use from several threads.

    Args:
        names: waits that are reported even when they never happened, as 0.
        clock: seconds, never going back.
    """

    def __init__(
        self,
        names: Sequence[str] = (WAIT_ACTORS, WAIT_LEARNER),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._since = clock()
        self._spent: dict[str, float] = dict.fromkeys(names, 0.0)
        self._running: dict[str, float] = {}

    @contextmanager
    def wait(self, name: str) -> Iterator[None]:
        """Time the body and add it to ``name``, also when the body raises.

        Raises:
            RuntimeError: ``name`` is already being timed, so its time would count twice.
        """
        if name in self._running:
            raise RuntimeError(f"{name!r} is already being timed; use another name inside it")
        self._running[name] = self._clock()
        try:
            yield
        finally:
            spent = self._clock() - self._running.pop(name)
            self._spent[name] = self._spent.get(name, 0.0) + spent

    def pop_shares(self) -> dict[str, float]:
        """Share of the wall time since the last pop spent in each wait, in [0, 1]; starts anew.

        A wait that is still running counts up to now, and its rest in the next pop.
        """
        now = self._clock()
        for name, began in self._running.items():
            self._spent[name] = self._spent.get(name, 0.0) + now - began
            self._running[name] = now
        elapsed = now - self._since
        shares = {name: s / elapsed if elapsed > 0 else 0.0 for name, s in self._spent.items()}
        self._since = now
        self._spent = dict.fromkeys(self._spent, 0.0)
        return shares


def rss_gib() -> float:
    """Resident memory of this process and all its children, GiB.

    Pages shared between them count once per process, so this is an upper bound.
    """
    this = psutil.Process()
    total = 0
    for process in (this, *this.children(recursive=True)):
        try:
            total += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue  # ended between the listing and the look: it holds no memory any more
    return total / 2**30


def _as_number(name: str, value: float | Tensor) -> int | float:
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


def _check_names(
    names: Sequence[str], all_reduce_sum: Callable[[Tensor], Tensor], world_size: int
) -> None:
    """Collectives match by position: differing names would mix metrics without a word."""
    own = zlib.crc32("\n".join(names).encode()) % 2**16
    sent = torch.tensor([own, own * own], dtype=torch.float64)
    total, squares = all_reduce_sum(sent).tolist()
    # Equal on every rank if and only if the spread is zero (exact in float64 to 1,448 ranks), so
    # every rank comes to the same answer and none is left in the next collective.
    if world_size * squares != total * total:
        raise ValueError(f"ranks disagree on the metric names; this one has {list(names)}")


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
