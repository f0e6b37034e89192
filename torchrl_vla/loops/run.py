"""What every training run has around its loop: folder, budget, log, display, evaluation, saves.

The loops decide what is learned; a :class:`Run` decides when to look, when to save and when to
stop, the same way on every rank.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchrl_vla.checkpoint import Checkpointer, rng_state, set_rng_state
from torchrl_vla.envs.simulator import Suite
from torchrl_vla.evaluate import EpisodeResult, as_rows, film, fingerprint, run_episodes, summarise
from torchrl_vla.metrics import (
    ENV_STEPS,
    ENV_STEPS_RATE,
    EPISODES,
    EVAL_HIGH,
    EVAL_LOW,
    EVAL_SUCCESS,
    RSS,
    UPDATES_RATE,
    MetricLog,
    Rate,
    rss_gib,
)
from torchrl_vla.progress import ProgressDisplay, summary
from torchrl_vla.topology import Topology


@dataclass(frozen=True)
class Budget:
    """When a run ends: whichever limit comes first; ``None`` is no limit."""

    minutes: float | None = None
    env_steps: int | None = None
    updates: int | None = None

    def __post_init__(self) -> None:
        limits = (self.minutes, self.env_steps, self.updates)
        if all(limit is None for limit in limits):
            raise ValueError("budget has no limit; set budget.minutes, .env_steps or .updates")
        for name, limit in zip(("minutes", "env_steps", "updates"), limits, strict=True):
            if limit is not None and limit <= 0:
                raise ValueError(f"budget.{name} is {limit}; it must be above 0")


@dataclass(frozen=True)
class EvaluationPlan:
    """How often and on what a run looks at itself."""

    episodes: int = 100
    """Held-out initial states of the evaluations during the run."""
    final_episodes: int = 200
    """Held-out initial states of the first and the last evaluation."""
    every_minutes: float = 1.5
    num_envs: int = 8
    videos: int = 6
    """Episodes filmed at the end."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 0 or (value == 0 and name not in ("videos", "every_minutes")):
                raise ValueError(f"evaluation.{name} is {value}; it is too small")


@dataclass
class Run:
    """One training run on one rank.

    Args:
        folder: the run's folder, the same on all ranks.
        topology: the learner ranks.
        suite: what is learned.
        chunk_size: ``H``.
        budget: when to stop.
        evaluation: when to evaluate.
        algorithm: name for the results.
        settings: what an evaluation depends on besides the policy (decode, temperature, ...).
        save_minutes: minutes between checkpoints.
        display: show the live display (rank 0).
        report: called as ``report(folder, algorithm)`` when a run with evaluations ends; leaves
            curve and page in the folder and returns the curve (rank 0).
    """

    folder: Path
    topology: Topology
    suite: Suite
    chunk_size: int
    budget: Budget
    evaluation: EvaluationPlan
    algorithm: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    save_minutes: float = 2.0
    display: bool = True
    report: Callable[[Path, str], Path] | None = None

    def __post_init__(self) -> None:
        fewest = min(self.evaluation.episodes, self.evaluation.final_episodes)
        if fewest < self.topology.world_size:
            raise ValueError(
                f"an evaluation has {fewest} episodes for {self.topology.world_size} ranks; every "
                "rank needs one: raise evaluation.episodes and evaluation.final_episodes"
            )
        self.started = time.monotonic()
        names = ("updates", ENV_STEPS, "decisions", EPISODES, "version")
        self.counters: dict[str, int] = dict.fromkeys(names, 0)
        self._steps_rate, self._update_rate = Rate(), Rate()
        self.history: list[dict[str, Any]] = []
        self.checkpoints = Checkpointer(self.folder / "checkpoints")
        self._simulators = None
        self._looked = self._saved = 0.0
        self._before = 0.0
        self._wants_stop = False
        self.log = MetricLog(self.folder) if self.topology.is_main else None
        self.screen = ProgressDisplay(
            None if self.budget.minutes is None else 60 * self.budget.minutes,
            None if self.budget.minutes is not None else self.budget.env_steps,
            enabled=self.display and self.topology.is_main,
        )

    @property
    def seconds(self) -> float:
        """Seconds spent in the run, earlier attempts included."""
        return self._before + time.monotonic() - self.started

    def stop(self) -> None:
        """Ask the loop to end at its next look (all ranks follow)."""
        self._wants_stop = True

    def finished(self) -> bool:
        """Whether to stop now; collective, so that no rank waits for one that left."""
        budget, counters = self.budget, self.counters
        over = self._wants_stop or any(
            limit is not None and value >= limit
            for value, limit in (
                (self.seconds / 60, budget.minutes),
                (counters["env_steps"], budget.env_steps),
                (counters["updates"], budget.updates),
            )
        )
        return self._agreed(over)

    def _agreed(self, flag: bool) -> bool:
        return self.topology.any_true(flag) if self.topology.world_size > 1 else flag

    def count(
        self, env_steps: int, decisions: int, episodes: int, *, updates: int, published: bool = True
    ) -> None:
        """Add this rank's new data to the counters; collective.

        Args:
            env_steps: control steps executed since the last call.
            decisions: decisions since the last call.
            episodes: episodes that ended since the last call.
            updates: optimizer steps in all.
            published: new weights follow (version + 1).
        """
        mine = torch.tensor([env_steps, decisions, episodes])
        if self.topology.world_size > 1:
            mine = self.topology.all_reduce_sum(mine)
        for name, value in zip((ENV_STEPS, "decisions", EPISODES), mine.tolist(), strict=True):
            self.counters[name] += value
        self._steps_rate.add(mine[0].item())
        self._update_rate.add(updates - self.counters["updates"])
        self.counters["updates"] = updates
        self.counters["version"] += int(published)

    def record(self, metrics: Mapping[str, float]) -> None:
        """Log one row of metrics under the current counters and refresh the display."""
        if self.log is None:
            return
        row = {
            **metrics,
            **self.counters,
            RSS: rss_gib(),
            ENV_STEPS_RATE: self._steps_rate.per_second(),
            UPDATES_RATE: self._update_rate.per_second(),
        }
        updates = row.pop("updates")
        self.log.log(row, step=updates)
        self.screen.update({**row, "update": updates})

    def evaluation_due(self) -> bool:
        """Whether the evaluation interval has passed; collective."""
        return self._agreed(self.seconds - self._looked >= 60 * self.evaluation.every_minutes)

    def save_due(self) -> bool:
        """Whether the checkpoint interval has passed; collective."""
        return self._agreed(self.seconds - self._saved >= 60 * self.save_minutes)

    def evaluate(self, policy: nn.Module, *, final: bool = False) -> dict[str, float]:
        """Evaluate on the held-out states, append to ``eval.json``; collective.

        Args:
            policy: unsharded, acts by itself on this rank.
            final: use the larger number of states.

        Returns:
            Metrics for the log.
        """
        plan = self.evaluation
        count = plan.final_episodes if final or not self.history else plan.episodes
        if self._simulators is None:
            self._simulators = self.suite.simulators(plan.num_envs)
        first = self.suite.splits["eval"].start
        ids = range(first, first + count)[self.topology.rank :: self.topology.world_size]
        mine = run_episodes(policy, self._simulators, ids, chunk_size=self.chunk_size)
        results = sorted(
            (r for part in self.topology.gather_objects(mine) for r in part),
            key=lambda result: result.init_state_id,
        )
        self._looked = self.seconds
        table = self._append(results)
        if self.topology.is_main:
            write_json(self.folder / "eval.json", self._report(results))
        low, high = table["interval"]
        return {EVAL_SUCCESS: table["success_rate"], EVAL_LOW: low, EVAL_HIGH: high}

    def _append(self, results: list[EpisodeResult]) -> dict[str, Any]:
        table = summarise(results, self.suite.meta)
        entry = {
            "update": self.counters["updates"],
            "env_steps": self.counters["env_steps"],
            "episodes_seen": self.counters["episodes"],
            "minutes": self.seconds / 60,
            **{key: value for key, value in table.items() if key != "per_instruction"},
        }
        self.history.append(entry)
        return table

    def _report(self, results: list[EpisodeResult]) -> dict[str, Any]:
        return summarise(results, self.suite.meta) | {
            "algorithm": self.algorithm,
            "settings": dict(self.settings),
            "versions": fingerprint(),
            "history": self.history,
            "results": as_rows(results),
        }

    def save(self, state: Mapping[str, Any]) -> Path:
        """Save a checkpoint: ``state`` of the loop plus the run's own; collective."""
        plain, tensors = rng_state()
        score = self.history[-1]["success_rate"] if self.history else None
        own = {
            "json": {"counters": self.counters, "history": self.history, "seconds": self.seconds},
            "rank_json": {"rng": plain},
            "rank_tensors": {f"rng.{name}": value for name, value in tensors.items()},
        }
        merged = {key: {**state.get(key, {}), **own.get(key, {})} for key in {*state, *own}}
        path = self.checkpoints.save(
            self.counters["updates"], merged, score=score, topology=self.topology
        )
        self._saved = self.seconds
        return path

    def resume(self, state: Mapping[str, Any]) -> dict[str, Any] | None:
        """Load the last complete checkpoint into ``state``; ``None`` if there is none."""
        path = self.checkpoints.latest(self.topology)
        if path is None:
            return None
        loaded = self.checkpoints.load(path, state, self.topology)
        plain = loaded["json"]
        self.counters, self.history = plain["counters"], plain["history"]
        self._before = plain["seconds"]
        if self.history:
            self._looked = self.seconds
        self._saved = self.seconds
        if loaded["rank_json"] is not None:
            tensors = {
                key.removeprefix("rng."): value
                for key, value in loaded["rank_tensors"].items()
                if key.startswith("rng.")
            }
            set_rng_state(loaded["rank_json"]["rng"], tensors)
        if self.log is not None:
            self.log.truncate_after(self.counters["updates"])
            print(f"resumed {path.name} at {self.counters[ENV_STEPS]} env steps", flush=True)
        return loaded

    def finish(self, policy: nn.Module) -> None:
        """Leave curve, video and page in the folder and print the closing block (rank 0)."""
        if self.log is None:
            return
        self.log.close()
        video = self._film(policy) if self.evaluation.videos else None
        if self.history:
            curve = self.report(self.folder, self.algorithm) if self.report is not None else None
            summary(
                self.history,
                curve=curve,
                video=video,
                checkpoint=self.checkpoints.latest(),
            )

    def _film(self, policy: nn.Module) -> Path:
        path = self.folder / "videos" / "evaluation.mp4"
        path.parent.mkdir(exist_ok=True)
        first = self.suite.splits["eval"].start
        ids = range(first, first + self.evaluation.videos)
        film(policy, self.suite.simulators(1), ids, path, chunk_size=self.chunk_size)
        return path


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write JSON so that a reader never sees half of it."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(content, indent=1))
    os.replace(temporary, path)
