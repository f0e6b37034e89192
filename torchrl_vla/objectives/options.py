"""What can be set in the on-policy family, and which settings do not belong together.

A setting that the chosen advantage estimator cannot use is an error at start-up, never ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Literal

from torch import nn

from torchrl_vla.objectives.credit import Estimator


@dataclass(eq=False)
class Options:
    """Options of :class:`~torchrl_vla.objectives.policy_gradient.PolicyGradient`.

    Raises:
        ValueError: an option is outside its range, is missing, or is one that the advantage
            estimator does not use; the message names option, estimator and remedy.
        TypeError: the policy stores no log-probs.
    """

    policy: nn.Module
    """Stores log-probs per number, and has ``score``, ``get_dist``, ``value``, ``action_key``."""
    _: KW_ONLY
    advantage: Estimator
    """How a decision is judged."""
    gamma: float
    """Discount per control step, in (0, 1]."""
    ratio: Literal["token", "chunk"] = "token"
    """Importance ratio per number of the chunk, or of all its executed numbers together."""
    clip_low: float = 0.2
    """Ratio clip below 1, in (0, 1]."""
    clip_high: float = 0.2
    """Ratio clip above 1; larger than ``clip_low`` is DAPO's "clip higher"."""
    dual_clip: float | None = None
    """Bound c > 1 of the loss of a negative advantage (usually 3); ``None``: none."""
    weighting: Literal["entry", "trajectory"] = "entry"
    """Mean of the policy loss over all entries, or each entry divided by how many its trajectory
    has, so that long trajectories do not count more."""
    entropy_weight: float = 0.0
    """Weight of the entropy bonus, per number."""
    value_weight: float | None = None
    """Weight of the value loss; needed by estimators that use a value, refused by others."""
    value_clip: float | None = None
    """Clip of the value around its estimate at collection, in units of the return."""
    value_only_rounds: int = 0
    """Rounds that train the value alone before the policy moves."""
    kl_weight: float = 0.0
    """Weight of the KL penalty to the frozen start policy, per number."""
    kl_kind: Literal["k1", "k2", "k3"] | None = None
    """Its estimator. The gradient of k1 is zero on average (it only adds noise); k2 or k3 pull."""
    behaviour_cap: float | None = None
    """Decoupled PPO (Hilton et al., arXiv:2110.00641, eq. 2): the ratio is clipped around the
    version that the round starts from, and each entry is weighted by that version over the
    behaviour policy, truncated at this cap. ``None``: clip around the behaviour policy."""
    max_hold: int | None = None
    """Versions that a decision may wait for its trajectory or group, beyond ``max_lag``."""
    dynamic_sampling: bool = False
    """Drop groups whose trajectories all have the same return."""
    min_groups: int = 0
    """Complete groups (trajectories, without groups) per rank, on average over ranks, that a round
    waits for; with ``dynamic_sampling`` only those with contrast count, so others are re-drawn."""
    group_size: int = 1
    """Trajectories per initial state; its home is ``actors.group_size``."""
    max_lag: int = 0
    """Versions that a decision may be old when it is collected; its home is the loop."""
    make_reference: Callable[[], nn.Module] | None = None
    """Builds the frozen start policy; called if ``kl_weight`` is above 0."""

    def __post_init__(self) -> None:
        if not getattr(self.policy, "stores_log_probs", False):
            raise TypeError(
                f"{type(self.policy).__name__} stores no log-probs with its actions; use "
                "policy.head=tokens, or policy.store_log_probs=true with policy.head=gaussian"
            )
        self._check_ranges()
        self._refuse_unused()
        self._check_needed()

    @property
    def name(self) -> str:
        """The advantage estimator's name, for messages."""
        return type(self.advantage).__name__

    @property
    def uses_value(self) -> bool:
        """Whether a value is trained."""
        return self.advantage.uses_value

    @property
    def largest_lag(self) -> int:
        """Versions beyond which a decision is dropped from the loss."""
        return self.max_lag + (self.max_hold or 0)

    def _check_ranges(self) -> None:
        for name, limit in (("gamma", 1), ("clip_low", 1)):
            value = getattr(self, name)
            if not 0 < value <= limit:
                raise ValueError(f"{name} is {value}; it must be in (0, {limit}]")
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise ValueError(f"dual_clip is {self.dual_clip}; it must exceed 1, or be null")
        for name in ("clip_high", "value_clip", "behaviour_cap"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} is {value}; it must be above 0")
        least = ("value_weight", "value_only_rounds", "entropy_weight", "kl_weight", "max_hold")
        for name in (*least, "min_groups", "max_lag"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"{name} is {value}; it must be at least 0")
        for name, choices in (
            ("ratio", ("token", "chunk")),
            ("weighting", ("entry", "trajectory")),
            ("kl_kind", (None, "k1", "k2", "k3")),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} is {getattr(self, name)!r}; use one of {choices}")

    def _refuse_unused(self) -> None:
        estimator = self.advantage
        no_value = "it estimates no value"
        on_rounds = "it judges rounds as they come, not whole trajectories"
        no_groups = "it compares no trajectories of one initial state"
        for option, given, used, why in (
            ("value_weight", self.value_weight is not None, estimator.uses_value, no_value),
            ("value_clip", self.value_clip is not None, estimator.uses_value, no_value),
            ("value_only_rounds", self.value_only_rounds > 0, estimator.uses_value, no_value),
            ("max_hold", self.max_hold is not None, estimator.whole_trajectories, on_rounds),
            ("min_groups", self.min_groups > 0, estimator.whole_trajectories, on_rounds),
            ("weighting", self.weighting != "entry", estimator.whole_trajectories, on_rounds),
            ("dynamic_sampling", self.dynamic_sampling, estimator.compares_groups, no_groups),
            ("group_size", self.group_size > 1, estimator.compares_groups, no_groups),
            (
                "behaviour_cap",
                self.behaviour_cap is not None,
                not estimator.corrects_behaviour,
                "its advantages carry that weight already",
            ),
            (
                "kl_kind",
                self.kl_kind is not None,
                self.kl_weight > 0,
                "kl_weight is 0, so there is no KL penalty",
            ),
        ):
            if given and not used:
                raise ValueError(
                    f"{option}={getattr(self, option)!r} has no use with {self.name}: {why}; "
                    f"remove {option} from the configuration or choose another algorithm"
                )

    def _check_needed(self) -> None:
        estimator = self.advantage
        for needed, missing, remedy in (
            (estimator.uses_value, self.value_weight is None, "value_weight (0.5, say)"),
            (estimator.whole_trajectories, self.max_hold is None, "max_hold (3 versions, say)"),
            (estimator.compares_groups, self.group_size < 2, "actors.group_size of 2 or more"),
            (self.kl_weight > 0, self.kl_kind is None, "kl_kind (k3, say) beside kl_weight"),
            (self.kl_weight > 0, self.make_reference is None, "make_reference beside kl_weight"),
        ):
            if needed and missing:
                raise ValueError(f"{self.name} needs {remedy}; set it")
        if estimator.compares_groups and self.gamma != 1:
            raise ValueError(
                f"gamma is {self.gamma}, but {self.name} compares undiscounted returns, and two "
                "successes of one group would differ by when they came; set gamma=1.0"
            )
