"""What actors beside the learner buy: SAC overlapped in two processes against the same in turn.

Both sides do the same work with ``conf/algo/sac.yaml``: the same number of decisions, the same
number of updates, the same publishes, on replays and demonstrations of their own.

- ``overlapped``: an actor process writes the replay while the learner samples it, paced as in
  training (``loops/off_policy.py``).
- ``in turn``: one process collects a batch, then takes the updates it is good for.

A turn starts with nothing pending and ends when its last update is done, so the overlapped side
pays for the first batch and the last updates, which nothing hides. Start-up is not timed.

    OMP_NUM_THREADS=1 python benchmarks/overlap.py --out benchmarks/results/overlap.json
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from configuration import arguments, settings_of
from side_by_side import Ratio, Sample, command_line, machine, report, take_turns
from torch import nn
from torchrl.collectors import Collector

from torchrl_vla import schema, topology
from torchrl_vla.actors import (
    ActorSettings,
    Behaviour,
    load_full_weights,
    start_actors,
    to_transitions,
)
from torchrl_vla.envs.chunked import ChunkedEnv, InitStateStream
from torchrl_vla.envs.tabletop import TabletopSuite
from torchrl_vla.learner import Learner
from torchrl_vla.loops import actor_critic, intake, off_policy, pacing
from torchrl_vla.loops.replay_folder import layout_of
from torchrl_vla.metrics import WAIT_ACTORS, Stopwatch
from torchrl_vla.objectives.soft_actor_critic import SoftActorCritic
from torchrl_vla.policies.shard import full_weights
from torchrl_vla.policies.tiny import make_policy
from torchrl_vla.replay import ReplayFeed, make_replay

CHUNK = 4
STEPS, UPDATES = "env steps/s", "updates/s"
RATIOS = (
    Ratio("overlapped / in turn", "overlapped", ["in turn"], STEPS, 1.4, at_least=True),
    Ratio("overlapped / in turn, updates", "overlapped", ["in turn"], UPDATES, None, at_least=True),
)


@dataclass
class FixedWork(pacing.Pacer):
    """The training pace, up to a fixed number of decisions."""

    limit: int = 0

    def may_update(self) -> bool:
        """Whether the data of this turn allows one more update."""
        return self.decisions > 0 and super().may_update()

    def may_request(self, pending: int) -> bool:
        """Whether to ask for one more batch: the pace allows it and work is left."""
        left = self.decisions + pending * self.batch < self.limit
        return left and super().may_request(pending)


@dataclass
class Side:
    """What either side owns: policy, learner, replay."""

    policy: nn.Module
    learner: Learner
    feed: ReplayFeed
    buffer: Any
    pace: pacing.PaceSettings
    gamma: float
    actors: ActorSettings
    version: int = 0

    @property
    def batch(self) -> int:
        """Decisions of one batch."""
        return self.actors.envs_per_worker * self.actors.decisions_per_env

    def updates_of(self, decisions: int) -> int:
        """Return the updates that so many decisions are good for."""
        return int(self.pace.updates_per_decision * decisions)


def make_side(
    conf: dict[str, Any], ranks: topology.Topology, folder: Path, updates_per_decision: float | None
) -> Side:
    """Build policy, learner and replay as the training loop does."""
    algo, gamma = conf["algo"], conf["gamma"]
    run = SimpleNamespace(topology=ranks, suite=TabletopSuite(), chunk_size=CHUNK)
    torch.manual_seed(0)
    policy = make_policy(run.suite.meta, head="gaussian")
    objective = partial(SoftActorCritic, **arguments(algo["objective"]))
    updates = actor_critic.UpdateSettings(**arguments(algo["updates"]))
    learner, goal = actor_critic.make_learner(run, policy, objective, updates, gamma)
    goal.updates = goal.critic_only_updates  # updates that have every term
    replay = off_policy.ReplaySettings(**arguments(algo["replay"]))
    buffer = make_replay(
        folder / "replay",
        replay.capacity,
        layout_of(policy, run),
        lanes=algo["actors"]["num_workers"],
    )
    feed = off_policy.make_feed(
        run, policy, buffer, replay, frozen=not updates.trunk_lr, seed=0, gamma=gamma
    )
    pace = pacing.PaceSettings(**arguments(algo["pace"]))
    pace = replace(pace, warm_up_updates=0)  # the steady state is measured
    if updates_per_decision is not None:
        pace = replace(pace, updates_per_decision=updates_per_decision)
    actors = ActorSettings(**arguments(algo["actors"]))
    return Side(policy, learner, feed, buffer, pace, gamma, actors)


class Overlapped:
    """An actor process beside the learner."""

    def __init__(self, side: Side, folder: Path, stack: ExitStack) -> None:
        self.side = side
        suite = TabletopSuite()
        actors = start_actors(
            suite,
            partial(make_policy, suite.meta, head="gaussian"),
            side.actors,
            chunk_size=CHUNK,
            gamma=side.gamma,
            seed=0,
            rank=0,
            folder=folder / "actors",
            replay=side.buffer,
        )
        self.actors = stack.enter_context(actors)
        self.publish()

    def publish(self) -> None:
        """Give the actors the learner's weights."""
        self.actors.publish(full_weights(self.side.policy), self.side.version)
        self.side.version += 1

    def work(self, decisions: int) -> Sample:
        """Do the work of ``decisions`` decisions; return rates and who waited."""
        side, recent, watch = self.side, intake.Recent(deque(maxlen=200)), Stopwatch()
        batch = side.batch * side.actors.num_workers
        pacer = FixedWork(side.pace, side.batch, 0, limit=-(-decisions // batch) * batch)
        self.actors.idle_share()
        started = time.perf_counter()
        while pacer.updates < side.updates_of(pacer.limit):
            intake.drain(self.actors, side.feed, recent, pacer, watch)
            side.learner.update(side.feed.sample())
            pacer.updates += 1
            if pacer.updates % side.pace.publish_updates == 0:
                self.publish()
        seconds = time.perf_counter() - started
        return {
            STEPS: recent.env_steps / seconds,
            UPDATES: pacer.updates / seconds,
            "s": seconds,
            "learner waited": watch.pop_shares()[WAIT_ACTORS],
            "actors waited": self.actors.idle_share(),
        }


class InTurn:
    """One process that collects and updates in turn."""

    def __init__(self, side: Side, stack: ExitStack) -> None:
        self.side = side
        suite, settings = TabletopSuite(), side.actors
        num_envs = settings.envs_per_worker * settings.num_workers
        env = ChunkedEnv(
            suite.simulators(num_envs),
            InitStateStream(suite.splits["train"], 0),
            chunk_size=CHUNK,
            gamma=side.gamma,
        )
        self.behaviour = Behaviour(make_policy(suite.meta, head="gaussian"))
        collector = Collector(
            env,
            self.behaviour,
            frames_per_batch=num_envs * settings.decisions_per_env,
            total_frames=-1,
            auto_register_policy_transforms=False,
        )
        stack.callback(collector.shutdown)
        self.batches = iter(collector)
        self.publish()

    def publish(self) -> None:
        """Give the behaviour policy the learner's weights."""
        load_full_weights(self.behaviour.policy, full_weights(self.side.policy))
        self.behaviour.version = self.side.version
        self.side.version += 1

    def work(self, decisions: int) -> Sample:
        """Do the work of ``decisions`` decisions; return rates and the share spent collecting."""
        side, env_steps, seen, updates, collecting = self.side, 0, 0, 0, 0.0
        started = time.perf_counter()
        while seen < decisions:
            asked = time.perf_counter()
            side.buffer.extend(to_transitions(next(self.batches)))
            rows = side.feed.absorb()
            collecting += time.perf_counter() - asked
            seen += len(rows)
            env_steps += int(rows[schema.NUM_EXECUTED].sum())
            while updates < side.updates_of(seen):
                side.learner.update(side.feed.sample())
                updates += 1
                if updates % side.pace.publish_updates == 0:
                    self.publish()
        seconds = time.perf_counter() - started
        return {
            STEPS: env_steps / seconds,
            UPDATES: updates / seconds,
            "s": seconds,
            "collecting": collecting / seconds,
        }


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = command_line(__doc__.splitlines()[0], turns=3)
    parser.add_argument("--decisions", type=int, default=2048, help="per turn and side")
    parser.add_argument("--warm-up", type=int, default=256, help="decisions before the first turn")
    parser.add_argument(
        "--updates-per-decision", type=float, default=None, help="another ratio than conf's"
    )
    return parser.parse_args()


def main() -> None:
    """Measure and report."""
    args = parse()
    ranks = topology.start("cpu", threads=1)
    conditions = machine()
    conf = settings_of("sac")
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="overlap-")))
        ratio = args.updates_per_decision
        sides = [make_side(conf, ranks, root / name, ratio) for name in ("a", "b")]
        overlapped = Overlapped(sides[0], root, stack)
        in_turn = InTurn(sides[1], stack)
        for side in (overlapped, in_turn):
            side.work(args.warm_up)
        variants = {
            "overlapped": partial(overlapped.work, args.decisions),
            "in turn": partial(in_turn.work, args.decisions),
        }
        samples = take_turns(variants, args.turns, warm_up=0)
    settings = {key: value for key, value in vars(args).items() if key != "out"}
    settings["updates_per_decision"] = sides[0].pace.updates_per_decision
    report("overlap", samples, RATIOS, settings=settings, conditions=conditions, out=args.out)
    ranks.stop()


if __name__ == "__main__":
    main()
