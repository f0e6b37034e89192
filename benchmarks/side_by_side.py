"""Measure variants side by side: taken in turn, medians, ratios beside their bars.

Two variants timed one after the other measure the machine's mood as much as themselves. Here every
turn runs each variant once, in alternating order, and a ratio is the median over turns of the ratio
*within* a turn.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch

Sample = dict[str, float]
"""What one turn of one variant measured: number by unit, e.g. ``{"decisions/s": 612.0}``."""


@dataclass(frozen=True)
class Ratio:
    """One claim: ``of / over`` in ``unit`` must be on the right side of ``bar``."""

    name: str
    of: str
    """Variant in the numerator."""
    over: Sequence[str]
    """Variants in the denominator; the one with the best median counts."""
    unit: str
    bar: float | None
    """``None``: shown for comparison only."""
    at_least: bool
    """Whether the ratio must be at least ``bar`` (a speed), or at most (a time)."""


def command_line(description: str, *, turns: int) -> argparse.ArgumentParser:
    """Return a parser with what every benchmark takes: ``--turns`` and ``--out``."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=turns, help="measured turns per variant")
    parser.add_argument("--out", type=Path, default=None, help="write the result here as JSON")
    return parser


def take_turns(
    variants: Mapping[str, Callable[[], Sample]], turns: int, *, warm_up: int = 1
) -> dict[str, list[Sample]]:
    """Run every variant ``warm_up + turns`` times, interleaved, every other turn in reverse.

    Args:
        variants: by name; each call measures itself once.
        turns: measured turns, at least 1.
        warm_up: turns that are thrown away.

    Raises:
        ValueError: ``turns`` is below 1.
    """
    if turns < 1:
        raise ValueError(f"turns is {turns}; at least 1 is needed for a median")
    samples: dict[str, list[Sample]] = {name: [] for name in variants}
    for turn in range(-warm_up, turns):
        names = list(variants) if turn % 2 == 0 else list(reversed(variants))
        for name in names:
            sample = variants[name]()
            if turn >= 0:
                samples[name].append(sample)
    return samples


def medians(samples: Mapping[str, Sequence[Sample]]) -> dict[str, Sample]:
    """Return the median of every unit of every variant."""
    return {
        name: {unit: statistics.median(s[unit] for s in taken) for unit in taken[0]}
        for name, taken in samples.items()
    }


def judge(samples: Mapping[str, Sequence[Sample]], ratio: Ratio) -> dict[str, object] | None:
    """Return one row of the table of ratios; ``None`` if a variant of it was not measured."""
    rivals = [name for name in ratio.over if name in samples]
    if ratio.of not in samples or not rivals:
        return None
    middle = medians(samples)
    best = max if ratio.at_least else min
    rival = best(rivals, key=lambda name: middle[name][ratio.unit])
    within = [
        a[ratio.unit] / b[ratio.unit]
        for a, b in zip(samples[ratio.of], samples[rival], strict=True)
    ]
    value = statistics.median(within)
    met = None
    if ratio.bar is not None:
        met = value >= ratio.bar if ratio.at_least else value <= ratio.bar
    return {
        "name": ratio.name,
        "of": ratio.of,
        "over": rival,
        "unit": ratio.unit,
        "ratio": value,
        "low": min(within),
        "high": max(within),
        "bar": ratio.bar,
        "at_least": ratio.at_least,
        "met": met,
    }


def machine() -> dict[str, object]:
    """Return what a figure depends on besides the code: processor, load, versions, time."""
    model = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text().splitlines()
        model = next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), model)
    packages = ("torch", "torchrl", "tensordict", "mujoco", "numpy")
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "load_1min_at_start": os.getloadavg()[0],
        "torch_threads": torch.get_num_threads(),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS", "unset"),
        "versions": {name: version(name) for name in packages},
        "utc": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def report(
    title: str,
    samples: Mapping[str, Sequence[Sample]],
    ratios: Sequence[Ratio],
    *,
    settings: Mapping[str, object],
    conditions: Mapping[str, object],
    out: Path | None,
) -> list[dict[str, object]]:
    """Print the table of a benchmark and write it as JSON.

    Args:
        title: first line.
        samples: from :func:`take_turns`.
        ratios: the claims; those whose variants were left out are not shown.
        settings: what was run.
        conditions: :func:`machine`, read before the first turn.
        out: JSON file, or ``None``.

    Returns:
        The rows of ratios.
    """
    judged = [row for row in (judge(samples, ratio) for ratio in ratios) if row is not None]
    print(f"\n{title}")
    print(f"{conditions['cpu']}, {conditions['cores']} cores, load {os.getloadavg()[0]:.1f}")
    for name, middle in medians(samples).items():
        numbers = "  ".join(
            f"{value:10,.2f} {unit} ({_spread(samples[name], unit)})"
            for unit, value in middle.items()
        )
        print(f"  {name:42s}{numbers}")
    print("  ratio, median over turns (min-max)")
    for row in judged:
        print(f"  {row['name']:42s}{_verdict(row)}   [{row['of']} / {row['over']}]")
    if out is not None:
        content = {
            "title": title,
            "settings": dict(settings),
            "machine": dict(conditions),
            "medians": medians(samples),
            "samples": {name: list(taken) for name, taken in samples.items()},
            "ratios": judged,
        }
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(content, indent=1))
        print(f"  written to {out}")
    return judged


def _spread(taken: Sequence[Sample], unit: str) -> str:
    values = [sample[unit] for sample in taken]
    return f"{min(values):,.2f}-{max(values):,.2f}"


def _verdict(row: Mapping[str, object]) -> str:
    text = f"{row['ratio']:10.3f} ({row['low']:.2f}-{row['high']:.2f})"
    if row["bar"] is None:
        return text
    sign = ">=" if row["at_least"] else "<="
    return f"{text}   bar {sign} {row['bar']:.2f}: {'met' if row['met'] else 'MISSED'}"
