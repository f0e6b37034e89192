"""What overlapping simulation and inference gains with a policy server: 1 group against 2.

Simulators and policy are calibrated: a row of a forward pass and a decision of a simulator take a
given time of the one policy and of one core (waiting, so that the figures do not depend on how many
cores this machine has). With 1 group all simulators stand still while the policy works. With 2,
every core has two processes with half of the simulators each.

    python benchmarks/server.py [ROUNDS]
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from functools import partial

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModuleBase
from torch import nn

from torchrl_vla import schema
from torchrl_vla.serving import PolicyServer, examples

CORES, SIMULATORS = 2, 8
SIMULATION = 0.010
"""Seconds per decision of a simulator."""
CHUNK = (4, 7)


class SlowPolicy(TensorDictModuleBase):
    """Takes ``per_row`` seconds per observation."""

    def __init__(self, per_row: float) -> None:
        super().__init__()
        self.per_row = per_row
        self.scale = nn.Parameter(torch.ones(1))
        self.in_keys = [schema.IMAGE, schema.STATE]
        self.out_keys = [schema.CHUNK]

    def forward(self, td: TensorDict) -> TensorDict:
        started = time.perf_counter()
        td[schema.CHUNK] = self.scale * torch.zeros(*td.batch_size, *CHUNK)
        time.sleep(max(0.0, self.per_row * td.numel() - (time.perf_counter() - started)))
        return td


def observe(simulators: int) -> TensorDict:
    td = TensorDict(batch_size=[simulators])
    td[schema.IMAGE] = torch.zeros(simulators, 1, 3, 224, 224, dtype=torch.uint8)
    td[schema.STATE] = torch.zeros(simulators, 8)
    return td


def simulate(policy, simulators: int, rounds: int, core, barrier, seconds) -> None:
    """Let ``simulators`` take ``rounds`` decisions; they need the core, the policy does not."""
    torch.set_num_threads(1)
    td = observe(simulators)
    for measured in (False, True):
        barrier.wait()
        started = time.perf_counter()
        for _ in range(rounds if measured else 3):
            with torch.no_grad():
                td = policy(td)
            with core:
                time.sleep(SIMULATION * simulators)
    seconds.put(time.perf_counter() - started)


def measure(groups: int, rounds: int, per_row: float) -> tuple[float, float]:
    """Return decisions per second and the mean number of rows per forward pass."""
    context = multiprocessing.get_context("spawn")
    clients, simulators = CORES * groups, SIMULATORS // groups
    make = partial(SlowPolicy, per_row)
    request, response = examples(SlowPolicy(0.0), observe(simulators))
    barrier, seconds = context.Barrier(clients), context.Queue()
    cores = [context.Lock() for _ in range(CORES)]
    with PolicyServer(make, request, response, clients=clients, groups=groups) as server:
        processes = [
            context.Process(
                target=simulate,
                args=(server.policy(i), simulators, rounds, cores[i % CORES], barrier, seconds),
            )
            for i in range(clients)
        ]
        for process in processes:
            process.start()
        slowest = max(seconds.get(timeout=600) for _ in processes)
        for process in processes:
            process.join()
        rows = server.stats()["avg_batch_size"] * simulators
    return clients * simulators * rounds / slowest, rows


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 30
    # as long for all observations as the simulators of a core need for all of their decisions
    per_row = SIMULATION / CORES
    print(f"{CORES} cores x {SIMULATORS} simulators, {rounds} decisions each, 224 x 224 images")
    print("groups  decisions/s  rows per forward pass")
    speeds = {}
    for groups in (1, 2):
        speeds[groups], rows = measure(groups, rounds, per_row)
        print(f"{groups:6d}  {speeds[groups]:11.0f}  {rows:8.1f}", flush=True)
    print(f"two groups / one group: {speeds[2] / speeds[1]:.2f}")


if __name__ == "__main__":
    main()
