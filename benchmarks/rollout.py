"""Decisions per second: the chunked environment and the actors against TorchRL's compositions.

Everything runs the same tabletop suite, the same tiny token policy with the shipped weights,
sampling, H = 4, 64-pixel images, one torch thread per process:

- ``collector``: :class:`ChunkedEnv` in TorchRL's ``Collector``, one process.
- ``collector, random chunks``: the same without a policy; what is lost is the policy's share.
- ``serial``: ``SerialEnv`` of one environment per simulator, TorchRL's chunk transforms around it,
  rendering every control step (eager) or once per chunk (lazy).
- ``actors``: two of our actor processes, each as large as the one process, one round ahead.
- ``bare``: two processes with the one process's loop and nothing in common, which is what two cores
  of the host give: the bound of what two actors can reach.
- ``parallel``: ``ParallelEnv`` with eight spawned workers, transforms outside or inside.

    OMP_NUM_THREADS=1 python benchmarks/rollout.py --out benchmarks/results/rollout.json
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from composition import CONTROL_STEPS, composed_env
from side_by_side import Ratio, Sample, command_line, machine, report, take_turns
from tensordict import TensorDictBase
from torchrl.collectors import Collector
from torchrl.envs import EnvBase

from torchrl_vla import schema
from torchrl_vla.actors import Actors, ActorSettings, start_actors
from torchrl_vla.envs.chunked import ChunkedEnv, InitStateStream
from torchrl_vla.envs.tabletop import TabletopSuite
from torchrl_vla.policies.tiny import make_policy

DECISIONS, STEPS = "decisions/s", "control steps/s"
CHUNK, BINS = 4, 64
STEPS_PER_BATCH = 12
"""Decisions per simulator and batch: one episode that runs to its time limit."""
SERIAL = {
    f"serial E={size} {'lazy' if lazy else 'eager'}": (size, lazy)
    for size in (8, 16)
    for lazy in (False, True)
}
"""Simulators and whether they render once per chunk, by variant; transforms outside (faster)."""
PARALLEL = {f"parallel E=8 {placement} lazy": placement for placement in ("outer", "inner")}
"""Where the chunk transforms are, by variant."""
OURS, RANDOM, ACTORS = "collector", "collector, random chunks", "2 actor processes"
BARE = "2 bare loops"
RATIOS = (
    Ratio("with / without policy", OURS, [RANDOM], DECISIONS, 0.70, at_least=True),
    Ratio("one process / best SerialEnv", OURS, list(SERIAL), DECISIONS, 2.0, at_least=True),
    Ratio("two actors / best ParallelEnv", ACTORS, list(PARALLEL), DECISIONS, 5.0, at_least=True),
    Ratio("two actors / one process", ACTORS, [OURS], DECISIONS, 1.8, at_least=True),
    Ratio("two bare loops / one process: the host", BARE, [OURS], DECISIONS, None, at_least=True),
    Ratio("two actors / two bare loops", ACTORS, [BARE], DECISIONS, None, at_least=True),
)


def chunked(num_envs: int) -> ChunkedEnv:
    """Return our environment over ``num_envs`` simulators on training states."""
    suite = TabletopSuite()
    init_states = InitStateStream(suite.splits["train"], 0)
    return ChunkedEnv(suite.simulators(num_envs), init_states, chunk_size=CHUNK)


def collected(env: EnvBase, stack: ExitStack, *, with_policy: bool = True) -> Collector:
    """Put ``env`` into TorchRL's single-process collector."""
    collector = Collector(
        env,
        make_policy(TabletopSuite().meta) if with_policy else None,
        frames_per_batch=env.batch_size[0] * STEPS_PER_BATCH,
        total_frames=-1,
        auto_register_policy_transforms=False,
    )
    stack.callback(collector.shutdown)
    return collector


def control_steps(batch: TensorDictBase) -> int:
    """Return how many control steps the decisions of a batch executed."""
    if (executed := batch.get(schema.NUM_EXECUTED, None)) is not None:
        return int(executed.sum())
    return int((batch["next", CONTROL_STEPS] - batch[CONTROL_STEPS]).sum())


def timed(batches: Iterator[TensorDictBase], decisions: int) -> Sample:
    """Take batches until ``decisions`` were collected; return rates."""
    seen = executed = 0
    started = time.perf_counter()
    while seen < decisions:
        batch = next(batches)
        seen += batch.numel()
        executed += control_steps(batch)
    seconds = time.perf_counter() - started
    return {DECISIONS: seen / seconds, STEPS: executed / seconds}


def timed_rounds(actors: Actors, num_envs: int, at_least: int) -> Sample:
    """Let the actors collect at least ``at_least`` decisions, a round ahead of what is received.

    So no actor waits for the slower one until the last round. Nothing is under way before or after.
    """
    size = 2 * num_envs * STEPS_PER_BATCH
    left = -(-at_least // size)
    started = time.perf_counter()
    seen = executed = 0
    while left or actors.pending:
        while left and actors.pending < 2:
            actors.request()
            left -= 1
        batch = actors.receive()
        seen += batch.numel()
        executed += control_steps(batch)
    seconds = time.perf_counter() - started
    return {DECISIONS: seen / seconds, STEPS: executed / seconds}


def two_actors(num_envs: int, stack: ExitStack) -> Actors:
    """Start two actor processes with ``num_envs`` simulators each."""
    suite = TabletopSuite()
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="rollout-"))
    settings = ActorSettings(
        num_workers=2, envs_per_worker=num_envs, decisions_per_env=STEPS_PER_BATCH
    )
    actors = start_actors(
        suite,
        partial(make_policy, suite.meta),
        settings,
        chunk_size=CHUNK,
        gamma=1.0,
        seed=0,
        rank=0,
        folder=Path(folder),
    )
    stack.enter_context(actors).collect()  # not timed: what a process does once
    return actors


def bare_loop(pipe: Connection, num_envs: int) -> None:
    """Run the one process's loop for every number of decisions that comes; a child process."""
    torch.set_num_threads(1)
    with ExitStack() as stack:
        batches = iter(collected(chunked(num_envs), stack))
        next(batches)
        pipe.send(None)
        while (decisions := pipe.recv()) is not None:
            pipe.send(timed(batches, decisions))


def timed_pair(pipes: Sequence[Connection], decisions: int) -> Sample:
    """Let bare loops run side by side; return the sum of their rates."""
    for pipe in pipes:
        pipe.send(decisions // len(pipes))
    rates = [pipe.recv() for pipe in pipes]
    return {name: sum(rate[name] for rate in rates) for name in rates[0]}


def two_bare_loops(num_envs: int, stack: ExitStack) -> list[Connection]:
    """Start two processes with nothing in common: what this host's two cores can give."""
    context, pipes = multiprocessing.get_context("spawn"), []
    for _ in range(2):
        ours, theirs = context.Pipe()
        process = context.Process(target=bare_loop, args=(theirs, num_envs), daemon=True)
        process.start()
        stack.callback(process.join)
        stack.callback(ours.send, None)
        pipes.append(ours)
    for pipe in pipes:
        pipe.recv()
    return pipes


def starts(num_envs: int, stack: ExitStack) -> dict[str, Callable[[], Callable[[int], Sample]]]:
    """Return, by variant, what starts it and returns what times a number of its decisions."""

    def alone(with_policy: bool) -> Callable[[int], Sample]:
        return partial(timed, iter(collected(chunked(num_envs), stack, with_policy=with_policy)))

    def composed(kind: str, size: int, placement: str, lazy: bool) -> Callable[[int], Sample]:
        env = composed_env(
            kind, size, placement=placement, lazy=lazy, chunk_size=CHUNK, num_bins=BINS
        )
        return partial(timed, iter(collected(env, stack)))

    known: dict[str, Callable[[], Callable[[int], Sample]]] = {
        OURS: partial(alone, True),
        RANDOM: partial(alone, False),
        ACTORS: lambda: partial(timed_rounds, two_actors(num_envs, stack), num_envs),
        BARE: lambda: partial(timed_pair, two_bare_loops(num_envs, stack)),
    }
    for name, (size, lazy) in SERIAL.items():
        known[name] = partial(composed, "serial", size, "outer", lazy)
    for name, placement in PARALLEL.items():
        known[name] = partial(composed, "parallel", 8, placement, True)
    return known


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = command_line(__doc__.splitlines()[0], turns=5)
    parser.add_argument("--envs", type=int, default=64, help="simulators per process of ours")
    parser.add_argument("--decisions", type=int, default=1536, help="per turn, at least")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=["collector", "serial", "actors", "parallel"],
        default=["collector", "serial", "actors", "parallel"],
        help="families of variants to measure",
    )
    return parser.parse_args()


def main() -> None:
    """Measure and report."""
    args = parse()
    torch.set_num_threads(1)
    conditions = machine()
    with ExitStack() as stack:
        known = starts(args.envs, stack)
        families = {
            "collector": [OURS, RANDOM],
            "serial": list(SERIAL),
            "actors": [ACTORS, BARE],
            "parallel": list(PARALLEL),
        }
        names = [name for family in args.only for name in families[family]]
        variants = {}
        for name in names:
            print(f"starting {name}", flush=True)
            variants[name] = partial(known[name](), args.decisions)
        samples = take_turns(variants, args.turns)
    settings = {"envs": args.envs, "decisions": args.decisions, "turns": args.turns}
    report("rollout", samples, RATIOS, settings=settings, conditions=conditions, out=args.out)


if __name__ == "__main__":
    main()
