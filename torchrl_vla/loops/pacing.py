"""How updates and decisions keep step: two predicates, one for each side."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PaceSettings:
    """How updates and decisions keep step."""

    updates_per_decision: float
    slack_decisions: int
    """Decisions that actors may be ahead of what the learner has used."""
    publish_updates: int
    """Updates between publishes."""
    average_share: float = 1.0
    """Share of the newest weights in the average that is evaluated, per publish; 1: no average."""
    warm_up_updates: int = 0
    """Updates on the first ``min_decisions`` alone, before the ratio counts."""

    def __post_init__(self) -> None:
        for name in ("updates_per_decision", "slack_decisions", "publish_updates"):
            if getattr(self, name) <= 0:
                raise ValueError(f"pace.{name} is {getattr(self, name)}; it must be above 0")
        if not 0 < self.average_share <= 1:
            raise ValueError(
                f"pace.average_share is {self.average_share}; it must be in (0, 1] (at 0 the "
                "evaluated policy would never move)"
            )
        if self.warm_up_updates < 0:
            raise ValueError(f"pace.warm_up_updates is {self.warm_up_updates}; it is at least 0")

    def check(self, workers: int, batch: int) -> None:
        """Check that all ``workers`` may collect a batch of ``batch`` decisions at the same time.

        Raises:
            ValueError: the slack is too small for that, so that some would always be idle.
        """
        if self.slack_decisions < workers * batch:
            raise ValueError(
                f"pace.slack_decisions is {self.slack_decisions}, but {workers} workers collect "
                f"{workers * batch} decisions at a time ({batch} each), so that some would always "
                f"wait; set it to {workers * batch} or more, or use fewer actors.num_workers, "
                "envs_per_worker or decisions_per_env"
            )


@dataclass
class Pacer:
    """Keeps ``updates ≈ ratio × decisions``: two predicates, one for each side."""

    settings: PaceSettings
    batch: int
    """Decisions that one request brings."""
    min_decisions: int
    updates: int = 0
    decisions: int = 0

    def may_update(self) -> bool:
        """Whether the data so far allows one more update."""
        new = self.decisions - self.min_decisions
        allowed = self.settings.warm_up_updates + self.settings.updates_per_decision * new
        return new >= 0 and self.updates < max(allowed, 1)

    def may_request(self, pending: int) -> bool:
        """Whether actors may collect one more batch beyond ``pending`` ones."""
        paced = max(0, self.updates - self.settings.warm_up_updates)
        used = self.min_decisions + paced / self.settings.updates_per_decision
        return self.decisions + pending * self.batch < used + self.settings.slack_decisions
