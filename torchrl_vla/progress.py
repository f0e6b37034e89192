"""What a person sees while a run goes on and when it ends.

A room of the same rank as :mod:`torchrl_vla.metrics`: it is handed numbers under the names of
``metrics.NAMES`` and shows them; it measures nothing but its own elapsed time and stores nothing.
On a terminal one block redraws itself; elsewhere (CI, sbatch) a plain line is printed now and then.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

STEPS = "env_steps"
STEPS_RATE = "rate/env_steps"
SHOWN = (
    "train/success_rate",
    "eval/success_rate",
    "eval/success_low",
    "eval/success_high",
    STEPS,
    STEPS_RATE,
    "rate/updates",
    "episodes",
    "wait/actors",
    "wait/learner",
    "memory/rss_gib",
    "actors/restarts",
    "actors/remote",
)
"""Metric names the display reads, beside ``update``. Others are ignored."""


class ProgressDisplay:
    """One live block: budget used and time left, then the numbers that matter.

    Args:
        total_seconds: wall-time budget of this display, or None.
        total_steps: budget in env steps, or None. With two budgets the one nearer its end counts.
        enabled: False shows nothing at all, for ranks other than the first.
        console: where to draw; the standard output by default.
        every: seconds between two plain lines when the console is no terminal.
        clock: seconds, never going back.

    Raises:
        ValueError: a budget that is not positive.
    """

    def __init__(
        self,
        total_seconds: float | None,
        total_steps: int | None,
        enabled: bool,
        *,
        console: Console | None = None,
        every: float = 20.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        for name, total in (("total_seconds", total_seconds), ("total_steps", total_steps)):
            if total is not None and not total > 0:
                raise ValueError(f"{name}={total} must be positive, or None for no such budget")
        self._total_seconds = total_seconds
        self._total_steps = total_steps
        self._enabled = enabled
        self._console = console or Console()
        self._every = every
        self._clock = clock
        self._began = clock()
        self._printed = -math.inf
        self._values: dict[str, float] = {}
        self._live: Live | None = None

    def update(self, values: Mapping[str, float]) -> None:
        """Take new numbers; names that are absent keep their last value on show.

        Args:
            values: numbers under the names of :data:`SHOWN`, and ``update``. Missing or
                non-finite shows as a dash.
        """
        if not self._enabled:
            return
        self._values |= {k: float(v) for k, v in values.items() if k in SHOWN or k == "update"}
        if self._live is None and self._clock() - self._printed >= self._every:
            self._print_line()

    def __enter__(self) -> Self:
        self._began = self._clock()
        drawable = self._console.is_terminal and not self._console.is_dumb_terminal
        if self._enabled and drawable:
            self._live = Live(
                get_renderable=self._block, console=self._console, refresh_per_second=2
            )
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            # Shows the cursor again and leaves the last block standing above any traceback.
            self._live.stop()
            self._live = None
        elif self._enabled and self._values:
            self._print_line()

    def _elapsed(self) -> float:
        return self._clock() - self._began

    def _used(self) -> float | None:
        """Share of the nearer budget that is gone, 0..1; None without a budget."""
        shares = []
        if self._total_seconds is not None:
            shares.append(self._elapsed() / self._total_seconds)
        if self._total_steps is not None:
            shares.append(self._values.get(STEPS, 0.0) / self._total_steps)
        return min(1.0, max(shares)) if shares else None

    def _left(self) -> float | None:
        """Seconds until the nearer budget ends; None while that cannot be told."""
        ends = []
        if self._total_seconds is not None:
            ends.append(self._total_seconds - self._elapsed())
        rate = self._values.get(STEPS_RATE, 0.0)
        if self._total_steps is not None and rate > 0:
            ends.append((self._total_steps - self._values.get(STEPS, 0.0)) / rate)
        return max(0.0, min(ends)) if ends else None

    def _budget(self) -> str:
        used, left = self._used(), self._left()
        if used is None:
            return f"{_clock_text(self._elapsed())} elapsed, no budget set"
        rest = "-" if left is None else _clock_text(left)
        return f"{100 * used:.0f}%  {_clock_text(self._elapsed())} elapsed, {rest} left"

    def _cells(self) -> list[tuple[str, str]]:
        get = self._values.get
        nan = math.nan
        evaluation = _percent(get("eval/success_rate", nan))
        if "eval/success_low" in self._values and "eval/success_high" in self._values:
            low, high = self._values["eval/success_low"], self._values["eval/success_high"]
            evaluation += f" [{_percent(low)}, {_percent(high)}]"
        waits = f"actors {_percent(get('wait/actors', nan))}"
        waits += f", learner {_percent(get('wait/learner', nan))}"
        cells = [
            ("success, training", _percent(get("train/success_rate", nan))),
            ("success, evaluation", evaluation),
            ("env steps", _count(get(STEPS, nan), get(STEPS_RATE, nan))),
            ("updates", _count(get("update", nan), get("rate/updates", nan))),
            ("episodes", _number(get("episodes", nan))),
            ("waiting for", waits),
            ("memory", f"{_number(get('memory/rss_gib', nan))} GiB"),
        ]
        if "actors/remote" in self._values:
            cells.append(("remote actors", _number(get("actors/remote", nan))))
        if restarts := get("actors/restarts", 0):
            cells.append(("actors replaced", _number(restarts)))
        return cells

    def _block(self) -> Group:
        used = self._used()
        head = Table.grid(padding=(0, 1))
        head.add_row(
            ProgressBar(total=1.0, completed=used or 0.0, width=32, pulse=used is None),
            Text(self._budget(), style="bold"),
        )
        body = Table.grid(padding=(0, 2))
        cells = self._cells()
        # Two columns of pairs stay readable in a terminal of 80 characters.
        half = -(-len(cells) // 2)
        for row in range(half):
            pairs = cells[row::half]
            texts = [(Text(name, style="dim"), Text(value, style="bold")) for name, value in pairs]
            body.add_row(*(text for pair in texts for text in pair))
        return Group(head, body)

    def _print_line(self) -> None:
        self._printed = self._clock()
        cells = " | ".join(f"{name} {value}" for name, value in self._cells())
        # soft_wrap keeps one line one line, whatever width the log file pretends to have.
        self._console.print(Text(f"{self._budget()} | {cells}"), soft_wrap=True)


def summary(
    history: Sequence[Mapping[str, Any]],
    *,
    curve: str | os.PathLike[str] | None = None,
    video: str | os.PathLike[str] | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    console: Console | None = None,
) -> None:
    """Print the closing block: what was learned, and where its evidence lies.

    The overall claim is only made when the intervals of the first and the last evaluation do not
    overlap, which is stricter than a test of their difference at the same confidence.

    Args:
        history: evaluations in order, the ``"history"`` of ``eval.json``: each with
            ``success_rate`` (0..1), ``interval`` (low, high), ``episodes``, ``env_steps``,
            ``minutes`` and ``per_task`` (name to a mapping with the first three).
        curve: the picture of the success curve or the report page, if made.
        video: a video or the folder of them, if made.
        checkpoint: the last checkpoint, if made.
        console: where to print; the standard output by default.
    """
    console = console or Console()
    console.print(Text(_verdict(history), style="bold"), soft_wrap=True)
    if history:
        first, last = history[0], history[-1]
        table = Table.grid(padding=(0, 2))
        names = {**first["per_task"], **last["per_task"]}
        for name in names if len(names) > 1 else ():
            starts, ends = first["per_task"].get(name), last["per_task"].get(name)
            row = (f"  {name}", _with_interval(starts), "->", _with_interval(ends))
            table.add_row(*map(Text, row))
        if table.row_count:
            console.print(table)
    for name, place in (("curve", curve), ("video", video), ("checkpoint", checkpoint)):
        shown = "not made" if place is None else os.fspath(place)
        console.print(Text(f"{name:<10} {shown}"), soft_wrap=True)


def _verdict(history: Sequence[Mapping[str, Any]]) -> str:
    if not history:
        return "The policy was never evaluated, so nothing is known about what it learned."
    first, last = history[0], history[-1]
    if len(history) == 1:
        return (
            f"Evaluation success {_with_interval(last)}, {last['episodes']} episodes; evaluated "
            "once, so there is no start to compare with."
        )
    cost = f"{last['env_steps'] - first['env_steps']:,} env steps"
    cost += f", {last['minutes'] - first['minutes']:.1f} min"
    change = f"{_with_interval(first)} -> {_with_interval(last)}"
    (low_0, high_0), (low_1, high_1) = first["interval"], last["interval"]
    word = "Not settled: the intervals overlap."
    if low_1 > high_0:
        word = "Learned."
    elif high_1 < low_0:
        word = "Got worse."
    return f"{word} Evaluation success {change} in {cost}; {last['episodes']} episodes at the end."


def _with_interval(result: Mapping[str, Any] | None) -> str:
    if result is None:
        return "-"
    low, high = result["interval"]
    return f"{_percent(result['success_rate'])} [{_percent(low)}, {_percent(high)}]"


def _percent(share: float) -> str:
    return "-" if not math.isfinite(share) else f"{100 * share:.0f}%"


def _number(value: float) -> str:
    if not math.isfinite(value):
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


def _count(value: float, rate: float) -> str:
    return f"{_number(value)} ({_number(rate)}/s)"


def _clock_text(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
