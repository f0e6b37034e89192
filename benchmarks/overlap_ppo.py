"""What actors beside the learner buy: PPO overlapped in two processes against the same in turn.

Both sides do the same work with ``conf/algo/ppo.yaml`` and one actor's simulators: the same rounds,
the same credit, the same epochs of updates, the same publishes.

- ``overlapped``: one actor process collects the next round while the learner updates on this one
  (policy lag 1).
- ``in turn``: one process collects a round, then takes its updates (policy lag 0).

A turn starts with nothing pending and ends when its last update is done, so the overlapped side
pays for the first round and the last updates, which nothing hides. Start-up is not timed.

    OMP_NUM_THREADS=1 python benchmarks/overlap_ppo.py --out benchmarks/results/overlap_ppo.json
"""

from __future__ import annotations

import argparse
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from configuration import arguments, settings_of
from hydra.utils import instantiate
from side_by_side import Ratio, Sample, command_line, machine, report, take_turns
from tensordict import TensorDictBase
from torch import nn
from torchrl.collectors import Collector

from torchrl_vla import schema, topology
from torchrl_vla.actors import ActorSettings, Behaviour, load_full_weights, start_actors
from torchrl_vla.envs.chunked import ChunkedEnv, InitStateStream
from torchrl_vla.envs.tabletop import TabletopSuite
from torchrl_vla.learner import Learner
from torchrl_vla.loops import on_policy
from torchrl_vla.policies.shard import full_weights
from torchrl_vla.policies.tiny import make_policy

CHUNK = 4
STEPS = "env steps/s"
RATIOS = (Ratio("overlapped / in turn", "overlapped", ["in turn"], STEPS, 1.4, at_least=True),)


@dataclass
class Side:
    """What either side owns: policy, objective, learner."""

    make_policy: Any
    policy: nn.Module
    goal: Any
    learner: Learner
    updates: on_policy.UpdateSettings
    actors: ActorSettings
    gamma: float
    version: int = 0
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))

    def train_on(self, rollout: TensorDictBase) -> int:
        """Take all updates of a round; return its env steps."""
        # Both sides train on every decision; how old it is makes no difference to the time.
        rows, _ = self.goal.credit(rollout, int(rollout[schema.POLICY_VERSION].max()))
        on_policy.update_epochs(self.learner, rows, self.updates, self.generator)
        return int(rollout[schema.NUM_EXECUTED].sum())


def make_side(conf: dict[str, Any], ranks: topology.Topology) -> Side:
    """Build policy, objective and learner as the training loop does."""
    algo, gamma, suite = conf["algo"], conf["gamma"], TabletopSuite()
    chosen = {key: conf["policy"][key] for key in ("head", "temperature")}
    make = partial(make_policy, suite.meta, **chosen)
    torch.manual_seed(0)
    policy = make()
    updates = on_policy.UpdateSettings(**arguments(algo["updates"]))
    objective = instantiate(algo["objective"])
    learner, goal = on_policy.make_learner(ranks, policy, objective, updates, gamma=gamma)
    actors = replace(ActorSettings(**arguments(algo["actors"])), num_workers=1)
    return Side(make, policy, goal, learner, updates, actors, gamma)


class Overlapped:
    """An actor process beside the learner."""

    def __init__(self, side: Side, folder: Path, stack: ExitStack) -> None:
        self.side = side
        actors = start_actors(
            TabletopSuite(),
            side.make_policy,
            side.actors,
            chunk_size=CHUNK,
            gamma=side.gamma,
            seed=0,
            rank=0,
            folder=folder,
        )
        self.actors = stack.enter_context(actors)

    def work(self, rounds: int) -> Sample:
        """Do ``rounds`` rounds; return the rate and the share of it that the learner waited."""
        side, env_steps, waiting = self.side, 0, 0.0
        started = time.perf_counter()
        for number in range(rounds):
            asked = time.perf_counter()
            if number == 0:
                self.publish()
            rollout = self.actors.collect()
            waiting += time.perf_counter() - asked
            if number + 1 < rounds:
                self.publish()
                self.actors.request()
            env_steps += side.train_on(rollout)
        seconds = time.perf_counter() - started
        return {STEPS: env_steps / seconds, "s": seconds, "learner waited": waiting / seconds}

    def publish(self) -> None:
        """Give the actor the learner's weights."""
        self.actors.publish(full_weights(self.side.policy), self.side.version)
        self.side.version += 1


class InTurn:
    """One process that collects and updates in turn."""

    def __init__(self, side: Side, stack: ExitStack) -> None:
        self.side = side
        suite, settings = TabletopSuite(), side.actors
        env = ChunkedEnv(
            suite.simulators(settings.envs_per_worker),
            InitStateStream(suite.splits["train"], 0),
            chunk_size=CHUNK,
            gamma=side.gamma,
        )
        self.behaviour = Behaviour(side.make_policy())
        collector = Collector(
            env,
            self.behaviour,
            frames_per_batch=settings.envs_per_worker * settings.decisions_per_env,
            total_frames=-1,
            auto_register_policy_transforms=False,
        )
        stack.callback(collector.shutdown)
        self.rollouts = iter(collector)

    def work(self, rounds: int) -> Sample:
        """Do ``rounds`` rounds; return the rate and the share of it spent collecting."""
        side, env_steps, collecting = self.side, 0, 0.0
        started = time.perf_counter()
        for _ in range(rounds):
            load_full_weights(self.behaviour.policy, full_weights(side.policy))
            self.behaviour.version = side.version
            side.version += 1
            asked = time.perf_counter()
            rollout = next(self.rollouts)
            collecting += time.perf_counter() - asked
            env_steps += side.train_on(rollout)
        seconds = time.perf_counter() - started
        return {STEPS: env_steps / seconds, "s": seconds, "collecting": collecting / seconds}


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = command_line(__doc__.splitlines()[0], turns=5)
    parser.add_argument("--rounds", type=int, default=12, help="per turn and side")
    return parser.parse_args()


def main() -> None:
    """Measure and report."""
    args = parse()
    ranks = topology.start("cpu", threads=1)
    conditions = machine()
    conf = settings_of("ppo")
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="overlap-")))
        overlapped = Overlapped(make_side(conf, ranks), root, stack)
        in_turn = InTurn(make_side(conf, ranks), stack)
        for side in (overlapped, in_turn):
            side.work(2)
        variants = {
            "overlapped": partial(overlapped.work, args.rounds),
            "in turn": partial(in_turn.work, args.rounds),
        }
        samples = take_turns(variants, args.turns, warm_up=0)
    settings = {key: value for key, value in vars(args).items() if key != "out"}
    report("overlap_ppo", samples, RATIOS, settings=settings, conditions=conditions, out=args.out)
    ranks.stop()


if __name__ == "__main__":
    main()
