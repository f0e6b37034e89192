"""Learning curves: every algorithm from its shipped start, several seeds, a fixed time each.

Each run is the real command in its own processes and folder, one after the other. A run whose
folder holds a finished result is read, not repeated, so a long series can be cut and continued.

The off-policy algorithms run from two starts: the shipped one (cloned from 120 demonstrations;
little is left to gain below what a head on the frozen trunk can reach), and, as ``NAME_few``, a
head cloned from ``FEW`` demonstrations for each of three verbs, with ``FEW_IN_REPLAY`` in the
replay.

    OMP_NUM_THREADS=1 python benchmarks/learning.py --out benchmarks/results/learning.json
    python benchmarks/learning.py --only ppo sac --seeds 0 --minutes 2     # a try
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from safetensors import safe_open
from safetensors.torch import save_file
from side_by_side import machine

from torchrl_vla.metrics import read_metrics
from torchrl_vla.policies.tiny import SHIPPED_WEIGHTS

ROOT = Path(__file__).resolve().parent.parent
FEW, FEW_IN_REPLAY = 10, 40
"""Demonstrations per verb of the weaker start; all that the learner draws half of its rows from."""
UTILISATION = ("wait/actors", "wait/learner", "policy_lag", "approx_kl")


@dataclass(frozen=True)
class Case:
    """One line of the table: what to run and how much it must gain."""

    overrides: tuple[str, ...]
    bar: float | None
    """Points of success over the start; ``None``: shown for comparison."""
    few: bool = False
    """From a head that was cloned from ``FEW`` demonstrations per verb."""


def _off_policy(algorithm: str) -> dict[str, Case]:
    """Return an off-policy algorithm's cases: from the shipped start and from the weaker one."""
    unlimited = (f"algo={algorithm}", "budget.env_steps=null")
    few = (*unlimited, f"algo.replay.demonstration_episodes={FEW_IN_REPLAY}")
    return {algorithm: Case(unlimited, None), f"{algorithm}_few": Case(few, 15, few=True)}


def _lag(bound: int) -> Case:
    return Case(("algo=ppo_async", f"algo.max_lag={bound}"), None)


CASES = {
    "ppo": Case(("algo=ppo",), 20),
    "grpo": Case(("algo=grpo",), 20),
    "rloo": Case(("algo=rloo",), 20),
    "reinforce_pp": Case(("algo=reinforce_pp",), 20),
    "ppo_gaussian": Case(("algo=ppo_gaussian",), None),
    **_off_policy("sac"),
    **_off_policy("rlpd"),
    **_off_policy("td3_bc"),
    **_off_policy("cql"),
    "lag_0": _lag(0),
    "lag_1": _lag(1),
    "lag_2": _lag(2),
    "lag_4": _lag(4),
    "lag_8": _lag(8),
}
DEFAULT = tuple(name for name in CASES if not name.startswith("lag_"))


def train(overrides: Sequence[str], folder: Path) -> None:
    """Run the real command with ``overrides`` in ``folder``; its log is beside the folder.

    Raises:
        subprocess.CalledProcessError: the run failed.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "launch/train.py"]
    command += [*overrides, f"run_dir={folder}", "evaluation.videos=1", "resume=never"]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".log").open("w") as log:
        subprocess.run(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, check=True)


def few_start(folder: Path) -> Path:
    """Return the weights of a head cloned from few demonstrations on the shipped trunk."""
    weights = folder / "policy.safetensors"
    if not weights.exists():
        trunk = folder.with_name("trunk.safetensors")
        trunk.parent.mkdir(parents=True, exist_ok=True)
        with safe_open(SHIPPED_WEIGHTS, "pt") as shipped:
            names = [name for name in shipped.keys() if not name.startswith("gaussian.")]  # noqa: SIM118
            kept = {name: shipped.get_tensor(name) for name in names}
            save_file(kept, trunk, metadata=shipped.metadata())
        fresh = ("algo=bc_gaussian", f"algo.demonstrations_per_task={FEW}", "seed=0")
        train((*fresh, f"policy.weights={trunk}"), folder)
    return weights


def run(name: str, seed: int, minutes: float, folder: Path) -> dict[str, Any]:
    """Run one case in ``folder`` unless it is there, and return its curve and end.

    Raises:
        subprocess.CalledProcessError: the run failed; its log is beside the folder.
    """
    case = CASES[name]
    if not (folder / "videos").exists():
        overrides = [*case.overrides, f"seed={seed}", f"budget.minutes={minutes}"]
        if case.few:
            overrides.append(f"policy.weights={few_start(folder.with_name('few'))}")
        train(overrides, folder)
    history = json.loads((folder / "eval.json").read_text())["history"]
    rows = read_metrics(folder)
    keys = ("minutes", "env_steps", "success_rate", "episodes")
    waits = {
        key: statistics.fmean(values)
        for key in UTILISATION
        if (values := [row[key] for row in rows if isinstance(row.get(key), float)])
    }
    return {
        "curve": [{key: point[key] for key in keys} for point in history],
        "start": history[0]["success_rate"],
        "end": history[-1]["success_rate"],
        "interval": history[-1]["interval"],
        "minutes": rows[-1]["time"] / 60,
        "env_steps": rows[-1]["env_steps"],
        "episodes": rows[-1]["episodes"],
        "means": waits,
    }


def table(results: dict[str, dict[int, dict[str, Any]]]) -> list[str]:
    """Return the lines of the table, one per case."""
    lines = [f"{'case':14s}{'start':>8s}  {'end per seed':28s}{'least gain':>11s}  bar"]
    for name, seeds in results.items():
        ends = "  ".join(f"{100 * r['end']:.1f}" for r in seeds.values())
        gain = min(100 * (r["end"] - r["start"]) for r in seeds.values())
        start = 100 * statistics.fmean(r["start"] for r in seeds.values())
        bar = CASES[name].bar
        verdict = "" if bar is None else f">= {bar:.0f}: {'met' if gain >= bar else 'MISSED'}"
        lines.append(f"{name:14s}{start:8.1f}  {ends:28s}{gain:+11.1f}  {verdict}")
        means = statistics.fmean(r["env_steps"] / r["minutes"] / 60 for r in seeds.values())
        detail = "  ".join(
            f"{key} {statistics.fmean(r['means'][key] for r in seeds.values()):.3g}"
            for key in UTILISATION
            if all(key in r["means"] for r in seeds.values())
        )
        lines.append(f"{'':14s}{means:,.0f} env steps/s  {detail}")
    return lines


def draw(results: dict[str, dict[int, dict[str, Any]]], path: Path) -> None:
    """Draw success against minutes: a panel per case, a line per seed."""
    columns = min(4, len(results))
    rows = -(-len(results) // columns)
    figure = Figure(figsize=(3.2 * columns, 2.6 * rows), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flat
    for axes, (name, seeds) in zip(panels, results.items(), strict=False):
        for seed, result in seeds.items():
            curve = result["curve"]
            minutes = [point["minutes"] for point in curve]
            rates = [point["success_rate"] for point in curve]
            axes.plot(minutes, rates, marker=".", label=f"seed {seed}")
        axes.set_title(name)
        axes.grid(alpha=0.3)
        axes.set_ylim(0, 1)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    panels = figure.axes
    panels[0].legend(fontsize="small")
    for axes in panels[len(results) :]:
        axes.set_visible(False)
    figure.supxlabel("minutes")
    figure.supylabel("success on held-out states")
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=CASES, default=DEFAULT, metavar="CASE")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--minutes", type=float, default=6.0, help="of every run")
    parser.add_argument("--runs", type=Path, default=ROOT / "build" / "learning")
    parser.add_argument("--out", type=Path, default=None, help="write JSON here, a PNG beside it")
    args = parser.parse_args()
    conditions = machine()
    results: dict[str, dict[int, dict[str, Any]]] = {}
    for name in args.only:
        for seed in args.seeds:
            folder = args.runs.resolve() / f"{name}-{seed}"
            results.setdefault(name, {})[seed] = run(name, seed, args.minutes, folder)
            end = results[name][seed]
            print(f"{name} seed {seed}: {end['start']:.3f} -> {end['end']:.3f}", flush=True)
    print("\n".join(table(results)))
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        content = {"minutes": args.minutes, "machine": conditions, "results": results}
        args.out.write_text(json.dumps(content, indent=1))
        draw(results, args.out.with_suffix(".png"))
        print(f"written to {args.out} and {args.out.with_suffix('.png')}")


if __name__ == "__main__":
    main()
