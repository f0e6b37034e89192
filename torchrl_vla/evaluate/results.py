"""What an evaluation says: rates with intervals, the episodes, and the list that was evaluated."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from torchrl_vla.envs.simulator import SuiteMeta
from torchrl_vla.evaluate.episodes import EpisodeResult
from torchrl_vla.metrics import wilson_interval

LIST_VERSION = 1
"""Raised when a case of the evaluation list comes to mean another episode."""


def summarise(results: Sequence[EpisodeResult], meta: SuiteMeta) -> dict[str, Any]:
    """Return success rates with 95 % Wilson intervals, in all, per task and per instruction.

    Returns:
        ``success_rate``, ``successes``, ``episodes``, ``interval``, ``per_task`` (the same per task
        name), ``per_instruction`` and ``outcomes`` (count of each outcome). A diverged simulation
        counts as a failure and is visible in ``outcomes``.
    """

    def rate(part: Sequence[EpisodeResult]) -> dict[str, Any]:
        successes = sum(result.success for result in part)
        return {
            "success_rate": successes / len(part),
            "successes": successes,
            "episodes": len(part),
            "interval": list(wilson_interval(successes, len(part))),
        }

    def split(names: Sequence[str]) -> dict[str, Any]:
        parts: dict[str, list[EpisodeResult]] = {}
        for result in results:
            parts.setdefault(names[result.task_id], []).append(result)
        return {name: rate(part) for name, part in sorted(parts.items())}

    outcomes = [result.outcome for result in results]
    return rate(results) | {
        "per_task": split(meta.task_names),
        "per_instruction": split(meta.instructions),
        "outcomes": {name: outcomes.count(name) for name in sorted(set(outcomes))},
    }


def as_rows(results: Sequence[EpisodeResult]) -> list[dict[str, Any]]:
    """Return the episodes as plain dicts, for JSON."""
    return [asdict(result) for result in results]


def list_of(results: Sequence[EpisodeResult], meta: SuiteMeta) -> dict[str, Any]:
    """Name the evaluation list that ``results`` are about, for JSON.

    A case is (instruction, initial state, seed). Two results are comparable case by case exactly
    when the hashes of their lists are equal; the order of the cases does not matter.

    Returns:
        ``version``, ``suite``, ``max_steps``, ``cases`` (how many) and ``sha256`` over all of it.
    """
    cases = sorted((meta.instructions[r.task_id], r.init_state_id, r.seed) for r in results)
    head = {"version": LIST_VERSION, "suite": meta.name, "max_steps": meta.max_steps}
    text = json.dumps([head, cases])
    return {
        **head,
        "cases": len(cases),
        "sha256": hashlib.sha256(text.encode()).hexdigest(),
    }
