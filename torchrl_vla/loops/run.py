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
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchrl_vla.checkpoint import Checkpointer, check_space, rng_state, set_rng_state
from torchrl_vla.envs.simulator import Suite
from torchrl_vla.evaluate import (
    EpisodeResult,
    Judge,
    as_rows,
    describe_environment,
    film,
    fingerprint,
    list_of,
    run_on_ranks,
    state_value,
    summarise,
)
from torchrl_vla.loops.plans import (
    Budget,
    CheckpointPlan,
    EvaluationPlan,
    check_deterministic,
)
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
from torchrl_vla.policies.description import check_description, described
from torchrl_vla.progress import ProgressDisplay, summary
from torchrl_vla.topology import Topology


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
        saves: when and how to save.
        deterministic: actors and learner in lock-step, and nothing that the clock decides: a run
            that was killed and resumed equals an uninterrupted one bit for bit
            (docs/decisions/011-lock-step.md).
        stop_asked: whether this process was asked to stop (:mod:`torchrl_vla.signals`).
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
    saves: CheckpointPlan = field(default_factory=CheckpointPlan)
    deterministic: bool = False
    stop_asked: Callable[[], bool] = lambda: False
    display: bool = True
    report: Callable[[Path, str], Path] | None = None

    def __post_init__(self) -> None:
        if self.deterministic:
            check_deterministic(
                self.budget, self.evaluation, self.saves, self.topology.layout.actors
            )
        self.started = time.monotonic()
        names = ("updates", ENV_STEPS, "decisions", EPISODES, "version")
        self.counters: dict[str, int] = dict.fromkeys(names, 0)
        self._steps_rate, self._update_rate = Rate(), Rate()
        self.history: list[dict[str, Any]] = []
        self.checkpoints = Checkpointer(
            self.folder / "checkpoints", self.saves.keep_last, self.saves.keep_best
        )
        self._simulators = None
        self._environment: dict[str, Any] | None = None
        self._looked = self._saved = (0.0, 0)  # seconds and updates when that was done last
        self._before = 0.0
        self.interrupted = False
        """Whether all ranks agreed to stop because one was asked to: save, and nothing more."""
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

    def would_stop(self) -> bool:
        """Whether this rank by itself would stop now; :meth:`finished` is what all agree on."""
        return self._spent() or self.stop_asked()

    def _spent(self) -> bool:
        budget, counters = self.budget, self.counters
        return any(
            limit is not None and value >= limit
            for value, limit in (
                (self.seconds / 60, budget.minutes),
                (counters["env_steps"], budget.env_steps),
                (counters["updates"], budget.updates),
            )
        )

    def finished(self) -> bool:
        """Whether to stop now; collective, so that no rank waits for one that left."""
        self.interrupted = self.topology.any_true(self.stop_asked())
        return self.topology.any_true(self._spent()) or self.interrupted

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
        mine = self.topology.all_reduce_sum(torch.tensor([env_steps, decisions, episodes]))
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
        with self.checkpoints.naming_a_full_disk(f"a row of {self.log.path}"):
            self.log.log(row, step=updates)
        self.screen.update({**row, "update": updates})

    def evaluation_due(self, over: bool = False) -> bool:
        """Whether an evaluation interval has passed, or the run is over by itself; collective."""
        if over:
            return not self.interrupted
        plan = self.evaluation
        return self.topology.any_true(
            self._passed(self._looked, plan.every_minutes, plan.every_updates)
        )

    def save_due(self) -> bool:
        """Whether a checkpoint interval has passed; collective."""
        plan = self.saves
        return self.topology.any_true(
            self._passed(self._saved, plan.every_minutes, plan.every_updates)
        )

    def _now(self) -> tuple[float, int]:
        return self.seconds, self.counters["updates"]

    def _passed(self, since: tuple[float, int], minutes: float | None, updates: int | None) -> bool:
        seconds, done = since
        return (minutes is not None and self.seconds - seconds >= 60 * minutes) or (
            updates is not None and self.counters["updates"] - done >= updates
        )

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
        ids = range(first, first + count)
        results = run_on_ranks(
            policy, self._simulators, ids, self.topology, chunk_size=self.chunk_size
        )
        self._looked = self._now()
        table = self._append(results)
        if self.topology.is_main:
            report = self._report(table, results, policy) | described({"evaluated": policy})
            with self.checkpoints.naming_a_full_disk("eval.json"):
                write_json(self.folder / "eval.json", report)
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

    def _report(
        self, table: dict[str, Any], results: list[EpisodeResult], policy: nn.Module
    ) -> dict[str, Any]:
        if self._environment is None:  # hashes the suite's assets, which do not change in a run
            self._environment = describe_environment(self.suite, policy)
        return table | {
            "algorithm": self.algorithm,
            "settings": dict(self.settings),
            "versions": fingerprint(),
            "environment": self._environment,
            "list": list_of(results, self.suite.meta),
            "history": self.history,
            "results": as_rows(results),
        }

    def save(self, state: Mapping[str, Any], *, last: bool = False) -> Path:
        """Save a checkpoint: ``state`` of the loop plus the run's own; collective.

        Args:
            state: as for :meth:`torchrl_vla.checkpoint.Checkpointer.save`.
            last: nothing follows, so that it is complete on return in any case.
        """
        plain, tensors = rng_state()
        score = self.history[-1]["success_rate"] if self.history else None
        own = {
            "json": {
                "counters": self.counters,
                "history": self.history,
                "seconds": self.seconds,
                **described(state.get("modules", {})),
            },
            "rank_json": {"rng": plain},
            "rank_tensors": {f"rng.{name}": value for name, value in tensors.items()},
        }
        merged = {key: {**state.get(key, {}), **own.get(key, {})} for key in {*state, *own}}
        path = self.checkpoints.save(
            self.counters["updates"],
            merged,
            score=score,
            topology=self.topology,
            background=self.saves.asynchronous and not last,
        )
        self._saved = self._now()
        return path

    def begin(
        self,
        state: Mapping[str, Any],
        resume: bool,
        replay_bytes: int = 0,
        replay_folder: Path | None = None,
    ) -> dict[str, Any] | None:
        """Check that the disk has room, and :meth:`resume` if that is wanted; collective.

        Args:
            state: what checkpoints hold.
            resume: go on from the last complete checkpoint if there is one.
            replay_bytes: what this rank's replay is going to take on the disk.
            replay_folder: on that disk, if it is not the run's.
        """
        check_space(self.folder, state, self.topology, replay_bytes, replay_folder)
        return self.resume(state) if resume else None

    def resume(self, state: Mapping[str, Any]) -> dict[str, Any] | None:
        """Load the last complete checkpoint into ``state``.

        Returns:
            What it holds beside that; ``None`` if none was reached, and then the log is empty.
        """
        path = self.checkpoints.latest(self.topology)
        if path is None:
            if self.log is not None:
                self.log.truncate_after(-1)
                print(f"{self.folder} reached no checkpoint: it starts anew", flush=True)
            return None
        loaded = self.checkpoints.load(path, state, self.topology)
        plain = loaded["json"]
        if "policy" in plain:
            own = described(state.get("modules", {}))
            check_description(plain["policy"], own["policy"], path)
        self.counters, self.history = plain["counters"], plain["history"]
        self._before, self.started = plain["seconds"], time.monotonic()
        if self.history:
            self._looked = self.seconds, self.history[-1]["update"]
        self._saved = self._now()
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

    def finish(self, policy: nn.Module, judge: Judge = state_value) -> None:
        """Leave curve, video and page in the folder and print the closing block (rank 0).

        Args:
            policy: acts in the video.
            judge: says in the video what is expected of a decision.
        """
        self.checkpoints.wait()
        if self.log is None:
            return
        self.log.close()
        video = self._film(policy, judge) if self.evaluation.videos else None
        if self.history:
            curve = self.report(self.folder, self.algorithm) if self.report is not None else None
            summary(
                self.history,
                curve=curve,
                video=video,
                checkpoint=self.checkpoints.latest(),
            )

    def _film(self, policy: nn.Module, judge: Judge) -> Path | None:
        path = self.folder / "videos" / "evaluation.mp4"
        first = self.suite.splits["eval"].start
        ids = range(first, first + self.evaluation.videos)
        simulators = self.suite.simulators(1)
        film(policy, simulators, ids, path, chunk_size=self.chunk_size, judge=judge)
        return path if path.exists() else None


def in_segments(loop: Callable[..., bool]) -> Callable[..., None]:
    """Let a deterministic run go on after every checkpoint as a resumed one does.

    Open episodes, simulators, action noise and whatever else lives in the processes of a run are in
    no checkpoint. So a deterministic run gives them up at every checkpoint, and loads it.

    Args:
        loop: ``loop(run, resume=..., **settings)`` trains until the run is over, or, if it is
            deterministic, until it has saved; returns whether it is over.
    """

    @wraps(loop)
    def train(run: Run, *, resume: bool, **settings: Any) -> None:
        while not loop(run, resume=resume, **settings):
            resume = True

    return train


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write JSON so that a reader never sees half of it."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(content, indent=1))
    os.replace(temporary, path)
