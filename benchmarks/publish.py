"""Publishing weights: shared memory against a state_dict sent to every actor through a queue.

A policy of ``--megabytes`` float32 weights goes from a learner to 1, 2 and 4 actor processes, which
do nothing but look for newer weights. Variants:

- ``queue``: ``SimpleQueue.put(state_dict)`` of multiprocessing per actor, which loads it.
- ``torch queue``: the same with torch.multiprocessing, which copies each tensor to shared memory
  once and sends every actor its descriptor.
- ``blocking``: ``Publisher`` of ``torchrl_vla.actors``, all weights.
- ``background``: the same in a thread.
- ``adapters``: ``blocking``, only a hundredth of the weights is trained.

Two times per publish: ``stall``, how long the learner cannot go on; ``until there``, until the last
actor has loaded the weights. The learner's gathering of shards is the same for all and left out.

    OMP_NUM_THREADS=1 python benchmarks/publish.py --out benchmarks/results/publish.json
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
from side_by_side import Ratio, Sample, command_line, machine, report, take_turns
from tensordict import TensorDict

from torchrl_vla.actors.memory import SharedMemory
from torchrl_vla.actors.weights import Publisher, Subscriber

STALL, THERE = "stall ms", "until there ms"
LAYERS, ACTORS = 50, (1, 2, 4)
FORK = multiprocessing.get_context("fork")  # nothing runs in the parent yet; no imports
RIVALS = ("queue", "torch queue")
KINDS = ("blocking", "background", "adapters")
RATIOS = tuple(
    Ratio(
        f"{kind} / best queue, {number} actors, {unit}",
        f"{kind} {number}",
        [f"{rival} {number}" for rival in RIVALS],
        unit,
        None,
        at_least=False,
    )
    for number in ACTORS
    for kind in KINDS
    for unit in (STALL, THERE)
)


def weights_of(megabytes: float, value: float = 0.0) -> TensorDict:
    """Return ``LAYERS`` equal float32 tensors and, beside them, a hundredth as adapters."""
    size = int(megabytes * 2**20 / 4 / LAYERS)
    return TensorDict(
        {
            "trunk": {f"layer{k}": torch.full((size,), value) for k in range(LAYERS)},
            "adapters": {f"layer{k}": torch.full((size // 100,), value) for k in range(LAYERS)},
        }
    )


def watch_memory(memory: SharedMemory, megabytes: float, pipe: Connection) -> None:
    """An actor that takes published weights and says so."""
    torch.set_num_threads(1)
    subscriber, mine = Subscriber(memory), weights_of(megabytes)
    pipe.send(None)
    while not pipe.poll(0.0005):
        if subscriber.take(mine) is not None:
            pipe.send(time.monotonic())


def watch_queue(queue: Any, megabytes: float, pipe: Connection) -> None:
    """An actor that loads every state_dict from its queue and says so."""
    torch.set_num_threads(1)
    mine = weights_of(megabytes).flatten_keys(".")
    pipe.send(None)
    while not pipe.poll(0.0005):
        if not queue.empty():
            mine.update_(TensorDict({k: torch.as_tensor(v) for k, v in queue.get().items()}))
            pipe.send(time.monotonic())


class Sender:
    """Starts ``number`` actors and publishes to them in the way ``kind`` says."""

    def __init__(self, kind: str, number: int, megabytes: float, stack: ExitStack) -> None:
        self.kind, self.megabytes, self.version = kind, megabytes, 0
        self.memory = SharedMemory("weights")
        self.publisher = Publisher(self.memory, background=kind == "background")
        stack.callback(self.publisher.close)
        self.queues = [FORK.SimpleQueue() for _ in range(number)] if kind in RIVALS else []
        self.pipes = []
        for actor in range(number):
            mine, theirs = FORK.Pipe()
            what = (watch_queue, self.queues[actor]) if self.queues else (watch_memory, self.memory)
            process = FORK.Process(target=what[0], args=(what[1], megabytes, theirs), daemon=True)
            process.start()
            stack.callback(process.join)
            stack.callback(mine.send, None)
            self.pipes.append(mine)
        for pipe in self.pipes:
            pipe.recv()
        self.send()

    def send(self) -> Sample:
        """Publish once and wait until every actor has it."""
        self.version += 1
        weights = weights_of(self.megabytes, float(self.version))
        if self.kind == "adapters" and self.version > 1:
            weights = weights.select("adapters")
        started = time.monotonic()
        if self.queues:
            state = dict(weights.flatten_keys(".").items())
            if self.kind == "queue":
                state = {name: weight.numpy() for name, weight in state.items()}
            for queue in self.queues:
                queue.put(state)
        else:
            self.publisher.publish(weights, self.version)
        stalled = time.monotonic()
        there = max(pipe.recv() for pipe in self.pipes)
        return {STALL: 1e3 * (stalled - started), THERE: 1e3 * (there - started)}


def main() -> None:
    """Measure and report."""
    parser = command_line(__doc__.splitlines()[0], turns=7)
    parser.add_argument("--megabytes", type=float, default=100.0, help="of the policy's weights")
    args = parser.parse_args()
    torch.set_num_threads(1)
    conditions = machine()
    samples: dict[str, list[Sample]] = {}
    for number in ACTORS:
        with ExitStack() as stack:
            variants: dict[str, Callable[[], Sample]] = {
                f"{kind} {number}": partial(
                    Sender.send, Sender(kind, number, args.megabytes, stack)
                )
                for kind in (*RIVALS, *KINDS)
            }
            samples |= take_turns(variants, args.turns)
    settings = {"megabytes": args.megabytes, "turns": args.turns}
    report("publish", samples, RATIOS, settings=settings, conditions=conditions, out=args.out)


if __name__ == "__main__":
    main()
