"""Predicts decisions per second for 1-512 GPUs and 1-10,000 simulators from the costs of the parts.

    python benchmarks/scaling.py                      the tables of docs/scaling.md
    python benchmarks/scaling.py check [--minutes M]  real runs beside the prediction (idle machine)

A round of the on-policy loop is: every simulator decides T times, every decision is trained on
``epochs`` times, new weights are published. Parts that overlap are bounded by the slower one.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median

from torchrl_vla.metrics import WAIT_ACTORS

GB = 1e9


@dataclass(frozen=True)
class Costs:
    """What the parts cost, each alone.

    Times in seconds, sizes in bytes, rates in bytes per second.
    """

    simulate: float
    """Core time of one decision of a simulator (H control steps, rendering)."""
    act: float
    """Policy time of one decision in a batch: of a core with local copies, of a GPU at a server."""
    train_row: float
    """Learner time of one row, forward and backward."""
    train_update: float
    """Learner time of an update that does not depend on its rows."""
    weights: float
    """Float32 masters."""
    trained: float
    """Of them, what is trained (gradients; what a publish carries)."""
    inside: float
    """Rate between the GPUs of a node, per GPU."""
    between: float
    """Rate between nodes, per GPU."""
    copy: float
    """Rate at which a rank hands whole weights to its actors."""
    rows_per_pass: int
    """Micro-batch of a rank."""
    jitter: float
    """Round time that waiting for the slowest adds per doubling of the ranks (share)."""


@dataclass(frozen=True)
class Shape:
    """What a run consists of."""

    ranks: int
    ranks_per_node: int
    cores_per_node: int
    """For simulators."""
    simulators: int
    """In all."""
    decisions: int = 8
    """T."""
    epochs: int = 2
    minibatch: int = 128
    """Rows of an update, per rank."""
    server: bool = False
    overlapped: bool = False
    """``max_lag`` 1: actors collect while the learner updates."""
    shard_across_nodes: bool = False

    @property
    def nodes(self) -> int:
        return -(-self.ranks // self.ranks_per_node)


def parts(costs: Costs, shape: Shape) -> dict[str, float]:
    """Return seconds of a round, by part."""
    total = shape.simulators * shape.decisions
    mine = total / shape.ranks
    cores = min(shape.cores_per_node * shape.nodes, shape.simulators)
    simulate = total * costs.simulate / cores
    if shape.server:
        act = mine * costs.act
        collect = max(simulate, act)  # two groups in flight
    else:
        act = total * costs.act / cores
        collect = simulate + act
    rows = mine * shape.epochs
    updates = max(1.0, rows / shape.minibatch)
    passes = max(updates, rows / costs.rows_per_pass)
    update = rows * costs.train_row + updates * costs.train_update
    # per pass: gather for forward and for backward; per update: gradients, and over replicas
    in_group = 0.0 if shape.ranks == 1 else 1.0
    rate = costs.between if shape.shard_across_nodes and shape.nodes > 1 else costs.inside
    exchange = in_group * (2 * passes * costs.weights + updates * costs.trained) / rate
    if shape.nodes > 1 and not shape.shard_across_nodes:
        exchange += updates * 2 * costs.trained / shape.ranks_per_node / costs.between
    publish = costs.trained / costs.copy
    return {
        "simulate": simulate,
        "act": act,
        "collect": collect,
        "update": update,
        "exchange": exchange,
        "publish": publish,
    }


def rate(costs: Costs, shape: Shape) -> tuple[float, str]:
    """Return decisions per second, and the part that takes the most time of a round."""
    seconds = parts(costs, shape)
    learn = seconds["update"] + seconds["exchange"]
    halves = (seconds["collect"], learn)
    busy = (max(halves) if shape.overlapped else sum(halves)) + seconds["publish"]
    doublings = max(0, shape.ranks - 1).bit_length()
    busy *= 1 + costs.jitter * doublings
    own = {k: seconds[k] for k in ("simulate", "act", "update", "exchange", "publish")}
    return shape.simulators * shape.decisions / busy, max(own, key=own.get)


TINY = Costs(
    simulate=0.75 * 1.49e-3,
    act=0.25 * 1.49e-3,
    train_row=1.27e-3,
    train_update=0.0,
    weights=0.5e6 * 4,
    trained=0.5e6 * 4,
    inside=1 * GB,
    between=1 * GB,
    copy=1 * GB,
    rows_per_pass=128,
    jitter=0.0,
)
"""Measured: three PPO runs on 2 cores (docs/scaling.md)."""
LARGE = Costs(
    simulate=8 / 16.0,
    act=0.023,
    train_row=0.092,
    train_update=0.1,
    weights=7.5e9 * 4,
    trained=7.5e9 * 4,
    inside=300 * GB,
    between=40 * GB,
    copy=20 * GB,
    rows_per_pass=32,
    jitter=0.03,
)
"""Assumed, but for the simulator: 7.5 G parameters, 600 tokens, 40 % of 990 TFLOP/s; LIBERO's 16
control steps per second and core, H = 8, are measured (docs/log.md)."""
ADAPTERS = replace(LARGE, train_row=0.069, trained=0.11e9 * 4)
"""LoRA of rank 32: no weight gradients of the base, and only adapters travel."""
NODE = {"ranks_per_node": 8, "cores_per_node": 96, "server": True, "overlapped": True}


def predict() -> None:
    """Print the tables of docs/scaling.md."""
    print("decisions/s of a 7.5 G policy, nodes of 8 GPUs and 96 cores, and what takes longest\n")
    ranks = (1, 8, 16, 64, 128, 512)
    print(f"| simulators | {' | '.join(f'{n} GPUs' for n in ranks)} |")
    print(f"|{' --- |' * (len(ranks) + 1)}")
    for simulators in (1, 64, 256, 1_000, 4_000, 10_000):
        cells = []
        for count in ranks:
            speed, part = rate(LARGE, Shape(count, simulators=simulators, **NODE))
            cells.append(f"{speed:,.3g} {part}" if simulators >= count else "-")
        print(f"| {simulators:,} | {' | '.join(cells)} |")
    print("\n64 GPUs, 1,000 simulators:")
    base = Shape(64, simulators=1_000, **NODE)
    for name, costs, shape in (
        ("as above", LARGE, base),
        ("sharded across nodes instead of one replica per node", LARGE,
         replace(base, shard_across_nodes=True)),
        ("actors and learner in turn", LARGE, replace(base, overlapped=False)),
        ("LoRA", ADAPTERS, base),
    ):  # fmt: skip
        speed, part = rate(costs, shape)
        print(f"  {name}: {speed:,.0f} decisions/s, most of it {part}")


@dataclass(frozen=True)
class Measured:
    """A real PPO run, medians over its rounds."""

    rate: float
    """Decisions per second."""
    waiting: float
    """Share of the time in which the learner waited for its actors."""


def measured(ranks: int, workers: int, minutes: float) -> Measured:
    """Train for ``minutes``, 64 simulators in all."""
    with tempfile.TemporaryDirectory() as folder:
        program = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        subprocess.run(
            [*program, f"--nproc-per-node={ranks}", "launch/train.py", "algo=ppo",
             f"run_dir={folder}/run", f"budget.minutes={minutes}", "evaluation.every_minutes=99",
             f"algo.actors.num_workers={workers}",
             f"algo.actors.envs_per_worker={64 // (ranks * workers)}", "topology.device=cpu",
             f"algo.updates.minibatch_size={128 // ranks}", "evaluation.videos=0",
             "evaluation.episodes=8", "evaluation.final_episodes=8", "logger.display=false"],
            check=True,
        )  # fmt: skip
        rows = [json.loads(line) for line in (Path(folder) / "run/metrics.jsonl").open()]
    return Measured(
        median(
            (b["decisions"] - a["decisions"]) / (b["time"] - a["time"])
            for a, b in pairwise(rows[1:])
        ),
        median(row[WAIT_ACTORS] for row in rows[1:] if WAIT_ACTORS in row),
    )


def calibrated(costs: Costs, one: Measured, shape: Shape) -> Costs:
    """Return ``costs`` with this machine's times: those of a run of one rank with one actor."""
    decision, acting = one.waiting / one.rate, costs.act / (costs.simulate + costs.act)
    return replace(
        costs,
        simulate=(1 - acting) * decision,
        act=acting * decision,
        train_row=(1 - one.waiting) / one.rate / shape.epochs,
    )


def on_few_cores(costs: Costs, ranks: int, cores: int) -> Costs:
    """Return what rows cost if ranks take turns on the cores that there are."""
    return replace(costs, train_row=costs.train_row * max(1.0, ranks / cores))


def check(minutes: float, cores: int) -> None:
    """Print prediction and measurement for 1, 2 and 4 ranks, and for 1, 2, 4 and 8 actors.

    What the parts cost is taken from the first run, so the others are what is checked.
    """
    print("ranks  actors each  predicted  measured  measured / predicted  waiting", flush=True)
    costs = TINY
    for ranks, workers in ((1, 1), (1, 2), (1, 4), (1, 8), (2, 1), (2, 2), (4, 1)):
        shape = Shape(
            ranks,
            ranks_per_node=ranks,
            cores_per_node=min(cores, ranks * workers),
            simulators=64,
            minibatch=128 // ranks,
        )
        found = measured(ranks, workers, minutes)
        if costs is TINY:
            costs = calibrated(costs, found, shape)
        wanted = rate(on_few_cores(costs, ranks, cores), shape)[0]
        line = f"{ranks:5d}  {workers:11d}  {wanted:9.0f}  {found.rate:8.0f}"
        print(f"{line}  {found.rate / wanted:20.2f}  {found.waiting:6.0%}", flush=True)
    print(
        f"a decision {1e3 * (costs.simulate + costs.act):.2f} ms, a row {1e3 * costs.train_row:.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="?", choices=("predict", "check"), default="predict")
    parser.add_argument("--minutes", type=float, default=1.0, help="length of each real run")
    parser.add_argument("--cores", type=int, default=2, help="of this machine")
    given = parser.parse_args()
    if given.what == "check":
        check(given.minutes, given.cores)
    else:
        predict()


if __name__ == "__main__":
    main()
