"""When a run stops, looks at itself and saves: three settings, checked when they are made."""

from __future__ import annotations

from dataclasses import dataclass


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
    every_minutes: float | None = 1.5
    """``None``: the clock asks for none."""
    every_updates: int | None = None
    """Updates between two; ``None``: their number asks for none."""
    num_envs: int = 8
    videos: int = 6
    """Episodes filmed at the end."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is None and name.startswith("every_"):
                continue
            if value < 0 or (value == 0 and name not in ("videos", "every_minutes")):
                raise ValueError(f"evaluation.{name} is {value}; it is too small")


@dataclass(frozen=True)
class CheckpointPlan:
    """How often a run saves, how, and what it keeps. It saves at its end in any case."""

    every_minutes: float | None = 2.0
    """``None``: the clock asks for none."""
    every_updates: int | None = None
    """Updates between two; ``None``: their number asks for none."""
    asynchronous: bool = False
    """Write in a thread while training goes on with the next update."""
    keep_last: int = 3
    """Of the newest."""
    keep_best: int = 1
    """Of those with the highest success, beside them."""

    def __post_init__(self) -> None:
        for name in ("every_minutes", "every_updates"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"checkpoint.{name} is {value}; it must be above 0, or null")


def check_deterministic(
    budget: Budget, evaluation: EvaluationPlan, saves: CheckpointPlan, actors: str = "local"
) -> None:
    """Refuse a deterministic run in which the clock decides something.

    Args:
        budget, evaluation, saves: of the run.
        actors: where its actors choose actions (``topology.actors``).

    Raises:
        ValueError: names every such setting.
    """
    if actors == "server":
        raise ValueError(
            "topology.deterministic=true and topology.actors=server: which requests share a batch, "
            "and so their noise, would depend on who is faster; use topology.actors=local"
        )
    clocks = {
        "budget.minutes": budget.minutes,
        "evaluation.every_minutes": evaluation.every_minutes,
        "checkpoint.every_minutes": saves.every_minutes,
    }
    if found := {name: value for name, value in clocks.items() if value is not None}:
        given = ", ".join(f"{name}={value}" for name, value in found.items())
        fix = " ".join(f"{name}=null" for name in found)
        raise ValueError(
            f"topology.deterministic=true and {given}: the clock would decide what is computed. "
            f"Set {fix}, and budget.updates or budget.env_steps, evaluation.every_updates and "
            "checkpoint.every_updates as you need them"
        )
