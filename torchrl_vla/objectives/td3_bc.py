"""TD3 with behaviour cloning over whole action chunks, as an objective of the learner."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule
from torch import Tensor, nn

from torchrl_vla import schema
from torchrl_vla.objectives.critics import (
    ACTOR_ROWS,
    CHUNK,
    FEATURES,
    NEXT_FEATURES,
    STEPS,
    ClonedRows,
    Ensemble,
    Reduction,
    ReductionKind,
    check_common,
    cloned_steps,
    encoded,
    fill_unexecuted,
    loss_rows,
    q_statistics,
    row_counts,
)
from torchrl_vla.objectives.masks import action_mask, decision_discount
from torchrl_vla.objectives.off_policy import td_target
from torchrl_vla.objectives.reduction import masked_sum


class TD3BC:
    """TD3+BC (Fujimoto and Gu 2021, arXiv:2106.06860) on TD3 (Fujimoto et al., arXiv:1802.09477).

    The policy is the actor without exploration noise: the squashed location of a Gaussian head, the
    ODE's end of a flow actor from a fresh first state. Targets come from a delayed copy of it plus
    clipped noise. The actor maximises ``lambda Q - cloning error`` with
    ``lambda = q_weight / mean |Q|``; the cloning error is ``(pi - a)^2``, or flow matching. Actors
    explore with their own samples; no term here moves a Gaussian's scale.

    Differs: TorchRL's ``TD3BCLoss`` takes the mean |Q| and the cloning term over the local batch
    and over every number. Here both are global (equal for any micro-batch split and number of
    ranks) and never-executed numbers are missing from them, so the pure functions of
    ``off_policy.py`` are used. The targets' ensemble may be reduced as in REDQ.

    Args:
        actor: TorchRL actor reading ``"features"``, with ``noiseless`` and ``cloning_error``.
        q_heads: E critics ``(features, chunk) -> [*, 1]``, each with its own initialisation.
        encode: maps a batch to features ``[B, F]``, used when the batch holds none.
        gamma: discount per control step.
        q_weight: the paper's alpha, > 0; larger trusts Q more.
        cloned_rows: whose chunks the actor stays close to: ``"all"`` rows of the replay as in the
            paper, or fewer (:func:`~torchrl_vla.objectives.critics.cloned_steps`).
        target_noise: standard deviation of the noise on the target's chunk, action units.
        noise_clip: its bound, action units.
        target_reduction: how the targets of the ensemble make one value.
        target_subset: members drawn per update with ``"subset"``.
        tau: target network step, in (0, 1].
        critic_only_updates: updates before the actor moves.
        actor_interval: updates per step of the actor and of all targets.

    Raises:
        ValueError: a setting is out of its range or is not used by the others.
    """

    def __init__(
        self,
        actor: TensorDictModule,
        q_heads: Sequence[nn.Module],
        encode: Callable[[TensorDictBase], Tensor],
        *,
        gamma: float,
        q_weight: float = 2.5,
        cloned_rows: ClonedRows = "all",
        target_noise: float = 0.1,
        noise_clip: float = 0.2,
        target_reduction: ReductionKind = "min",
        target_subset: int | None = None,
        tau: float = 0.01,
        critic_only_updates: int = 400,
        actor_interval: int = 2,
    ) -> None:
        check_common(gamma, tau, critic_only_updates, actor_interval)
        if q_weight <= 0:
            raise ValueError(f"q_weight is {q_weight}; it must be above 0")
        if cloned_rows not in ("all", "demonstrations", "successes"):
            raise ValueError(
                f"cloned_rows is {cloned_rows!r}; use 'all', 'demonstrations' or 'successes'"
            )
        if target_noise < 0 or noise_clip < 0:
            raise ValueError(
                f"target_noise is {target_noise} and noise_clip {noise_clip}; both are at least 0"
            )
        self.encode, self.actor = encode, actor
        self.gamma, self.tau, self.q_weight = gamma, tau, q_weight
        self.cloned_rows = cloned_rows
        self.target_noise, self.noise_clip = target_noise, noise_clip
        self.critic_only_updates, self.actor_interval = critic_only_updates, actor_interval
        self.updates = 0
        self.ensemble = Ensemble(q_heads)
        self.of_target = Reduction(target_reduction, target_subset, len(q_heads))
        self.target_actor = copy.deepcopy(actor).requires_grad_(False)
        self.state = nn.Module()
        self.state.q, self.state.target = self.ensemble.online, self.ensemble.target
        self.state.target_actor = self.target_actor
        self._moving = (
            [*self.ensemble.target.parameters(), *self.target_actor.parameters()],
            [*self.ensemble.online.parameters(), *actor.parameters()],
        )

    @property
    def actor_parameters(self) -> list[nn.Parameter]:
        """Trainable parameters of the actor's head."""
        return [p for p in self.actor.parameters() if p.requires_grad]

    @property
    def critic_parameters(self) -> list[nn.Parameter]:
        """Trainable parameters of the Q ensemble."""
        return list(self.ensemble.online.parameters())

    @property
    def alpha_parameters(self) -> list[nn.Parameter]:
        """No entropy coefficient here."""
        return []

    @property
    def _actor_due(self) -> bool:
        return self.updates >= self.critic_only_updates and not self.updates % self.actor_interval

    @torch.no_grad()
    def after_step(self) -> None:
        """Move all targets every ``actor_interval`` updates; call after every optimizer step."""
        if not self.updates % self.actor_interval:
            targets, sources = self._moving
            torch._foreach_lerp_([p.data for p in targets], [p.data for p in sources], self.tau)
        self.updates += 1

    def counts(self, batch: TensorDictBase) -> dict[str, Tensor]:
        """Return the numbers of rows and of cloned numbers, and the sum of |Q| of the policy.

        The last needs one pass without gradient: the weight of the Q term is a ratio of global
        means, and has to be known before the first backward.
        """
        counts = row_counts(batch, self.cloned_rows)
        if not self._actor_due:
            return counts
        source = batch.get(ACTOR_ROWS, batch)
        with torch.no_grad():
            features, _ = encoded(source, self.encode, following=False)
            chunk = self.actor.noiseless(_at(features))
            counts["abs_q"] = self._q(features, chunk).abs().sum()
        return counts

    def _q(self, features: Tensor, chunk: Tensor) -> Tensor:
        """Return the first member's value ``[B, 1]``, without gradient to its parameters."""
        return Ensemble.values(self.ensemble.frozen, features, chunk, [0])[0]

    def __call__(self, batch: TensorDictBase, totals: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return ``loss_critic``, and ``loss_actor``, ``loss_cloning`` when due; statistics."""
        features, following = encoded(batch, self.encode)
        with torch.no_grad():
            fresh = self.actor.noiseless(_at(features))
        chunk = fill_unexecuted(batch[schema.CHUNK], batch[schema.EXECUTED_MASK], fresh)
        rows = loss_rows(batch, features, following, chunk)
        out = self._critic_terms(rows, batch, totals)
        if not self._actor_due:
            return out
        source = batch.get(ACTOR_ROWS, None)
        if source is None:
            return out | self._actor_terms(features.detach(), batch, totals)
        with torch.no_grad():
            features, _ = encoded(source, self.encode, following=False)
        return out | self._actor_terms(features, source, totals)

    @torch.no_grad()
    def target(self, rows: TensorDictBase) -> Tensor:
        """Return the Bellman target ``[B, 1]``: delayed policy, clipped noise, reduced targets."""
        features = rows[NEXT_FEATURES]
        chunk = self.target_actor.noiseless(_at(features))
        noise = (self.target_noise * torch.randn_like(chunk)).clamp(
            -self.noise_clip, self.noise_clip
        )
        members = self.of_target.members(self.updates)
        q = Ensemble.values(self.ensemble.target, features, (chunk + noise).clamp(-1, 1), members)
        return td_target(
            rows["reward"],
            self.of_target(q),
            rows["terminated"],
            decision_discount(rows[STEPS], self.gamma),
        )

    def _critic_terms(
        self, rows: TensorDictBase, batch: TensorDictBase, totals: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        q = Ensemble.values(self.ensemble.online, rows[FEATURES], rows[CHUNK])
        error = q - self.target(rows)
        return {
            "loss_critic": error.square().sum() / totals["rows"],
            "td_error": error.detach().abs().amax(0).sum() / totals["rows"],
            **q_statistics(q, batch, totals),
        }

    def _actor_terms(
        self, features: Tensor, batch: TensorDictBase, totals: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        at = _at(features)
        chunk = self.actor.noiseless(at)
        weight = self.q_weight * totals["rows"] / totals["abs_q"]
        error = self.actor.cloning_error(at, batch[schema.CHUNK])
        cloned = action_mask(cloned_steps(batch, self.cloned_rows), error.shape[-1])
        return {
            "loss_actor": -weight * self._q(features, chunk).sum() / totals["rows"],
            "loss_cloning": masked_sum(error, cloned) / totals["cloned"].clamp_min(1),
            "q_weight": weight * len(batch) / totals["rows"],
        }


def _at(features: Tensor) -> TensorDict:
    return TensorDict({FEATURES: features}, batch_size=features.shape[:-1])
