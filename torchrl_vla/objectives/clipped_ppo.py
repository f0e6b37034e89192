"""Clipped PPO as an objective of the learner: credit once per rollout, loss per micro-batch.

The surrogate is TorchRL's ``ClipPPOLoss`` (``functional=False``, elementwise), so an FSDP2 module
stays whole; masks and means are ours, because a global mean over executed numbers cannot be written
as a mean of rank means. Policy and value come from one pass of the trunk.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torchrl.objectives import ClipPPOLoss

from torchrl_vla import schema
from torchrl_vla.objectives.advantages import gae, normalise
from torchrl_vla.objectives.masks import action_mask, decision_discount
from torchrl_vla.objectives.ppo import (
    approx_kl,
    clip_fraction,
    explained_variance,
    log_ratio,
    value_loss,
)
from torchrl_vla.objectives.reduction import masked_mean

ADVANTAGE, TARGET, VALID, VALUE = "advantage", "value_target", "valid", "state_value"


def void_episodes(rollout: TensorDictBase) -> Tensor:
    """Return ``[N, T, 1]`` bool: decisions of episodes that a diverged simulation made void."""
    bad = rollout[schema.EPISODE_ID][rollout[schema.SIM_ERROR]]
    return torch.isin(rollout[schema.EPISODE_ID], bad)


class ClippedPPO:
    """PPO-clip (Schulman et al. 2017, arXiv:1707.06347, eq. 7 and 9) with GAE on decisions.

    Args:
        policy: token policy with ``score`` (logits and value in one pass) and ``value``.
        gamma: discount per control step; a decision is discounted by ``gamma ** num_executed``.
        lmbda: GAE's lambda, per decision.
        clip_low: ratio clip below 1.
        clip_high: ratio clip above 1.
        value_weight: weight of the value loss.
        entropy_weight: weight of the entropy bonus, per number.
        value_only_rounds: rounds that train the value alone before the policy moves.
    """

    def __init__(
        self,
        policy: nn.Module,
        *,
        gamma: float,
        lmbda: float = 0.95,
        clip_low: float = 0.2,
        clip_high: float = 0.2,
        value_weight: float = 0.5,
        entropy_weight: float = 0.0,
        value_only_rounds: int = 1,
    ) -> None:
        if not 0 < gamma <= 1:
            raise ValueError(f"gamma is {gamma}; it must be in (0, 1]")
        if not hasattr(policy, "score"):
            raise TypeError(f"{type(policy).__name__} stores no log-probs; use policy.head=tokens")
        self.policy = policy
        self.gamma, self.lmbda = gamma, lmbda
        self.clip = (clip_low, clip_high)
        self.value_weight, self.entropy_weight = value_weight, entropy_weight
        self.value_only_rounds = value_only_rounds
        self.rounds = 0
        self.surrogate = ClipPPOLoss(
            policy,
            None,
            clip_epsilon=self.clip,
            entropy_bonus=False,
            functional=False,
            reduction="none",
        )
        self.surrogate.set_keys(action=schema.TOKENS, sample_log_prob=schema.LOG_PROBS)
        self.surrogate.loss_mask_key = None

    def credit(self, rollout: TensorDictBase) -> dict[str, float]:
        """Write advantage, value target and validity into a rollout ``[N, T]``; collective.

        The stored state values are the behaviour policy's own; only states that no later decision
        of the rollout shows (cut off or last in the row) are evaluated here.

        Returns:
            Metrics of the rollout.
        """
        self.rounds += 1
        valid = ~void_episodes(rollout)
        next_value = torch.zeros_like(rollout[VALUE])
        next_value[:, :-1] = rollout[VALUE][:, 1:]
        unseen = rollout[schema.TRUNCATED].squeeze(-1).clone()
        unseen[:, -1] = True
        with torch.no_grad():
            rows = rollout["next"][unseen]
            rows = rows.select("observation", schema.TASK_ID)
            next_value[unseen] = self.policy.value(rows)
        advantage, target = gae(
            rollout[schema.REWARD],
            rollout[VALUE],
            next_value,
            rollout[schema.DONE],
            rollout[schema.TERMINATED],
            decision_discount(rollout[schema.NUM_EXECUTED], self.gamma),
            self.lmbda,
            valid,
        )
        rollout[ADVANTAGE] = normalise(advantage, valid)
        rollout[TARGET], rollout[VALID] = target, valid
        return {
            "explained_variance": float(explained_variance(rollout[VALUE], target, valid)),
            "valid_fraction": float(valid.float().mean()),
            "value_mean": float(rollout[VALUE].mean()),
        }

    def numbers(self, batch: TensorDictBase) -> Tensor:
        """Return ``[B, H, A]`` bool: numbers of the chunk that were executed and are data."""
        mask = action_mask(batch[schema.EXECUTED_MASK], batch[schema.CHUNK].shape[-1])
        return mask & batch[VALID].unsqueeze(-1)

    def counts(self, batch: TensorDictBase) -> dict[str, Tensor]:
        """Return the number of executed numbers and of valid decisions."""
        return {"numbers": self.numbers(batch).sum(), "decisions": batch[VALID].sum()}

    def __call__(self, batch: TensorDictBase, totals: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return ``loss_policy``, ``loss_value``, ``loss_entropy`` and the usual PPO metrics."""
        batch = self.policy.score(batch.copy())
        mask, decisions = self.numbers(batch), batch[VALID]
        dist = self.policy.get_dist(batch)
        value = value_loss(batch[VALUE], batch[TARGET])
        out = {"loss_value": self.value_weight * masked_mean(value, decisions, totals["decisions"])}
        new = dist.log_prob(batch[schema.TOKENS])
        ratio = log_ratio(new.detach(), batch[schema.LOG_PROBS], mask)
        share = mask.sum() / totals["numbers"].clamp_min(1)
        out |= {
            "entropy": masked_mean(dist.entropy().detach(), mask, totals["numbers"]),
            "clip_fraction": share * clip_fraction(ratio, mask, *self.clip),
            "approx_kl": share * approx_kl(ratio, mask),
        }
        if self.rounds > self.value_only_rounds:
            surrogate = self.surrogate(batch)["loss_objective"]
            out["loss_policy"] = masked_mean(surrogate, mask, totals["numbers"])
            if self.entropy_weight:
                entropy = masked_mean(dist.entropy(), mask, totals["numbers"])
                out["loss_entropy"] = -self.entropy_weight * entropy
        return out
