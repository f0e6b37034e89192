"""Objectives of the supervised stages: grounding on privileged labels, cloning of demonstrations.

Each is an ``Objective`` of the learner: scalars that are sums over a micro-batch divided by global
counts. The losses themselves are the pure functions of ``imitation.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.nn import functional

from torchrl_vla import schema
from torchrl_vla.objectives.imitation import chunk_mean, soft_token_cross_entropy


def real_numbers(batch: TensorDictBase) -> Tensor:
    """Return how many action numbers of ``batch`` are not padding."""
    return batch[schema.EXECUTED_MASK].sum() * batch[schema.CHUNK].shape[-1]


class GroundingObjective:
    """Smooth-L1 regression of the named block's position (see ``data/grounding.py``).

    Args:
        predict: maps a batch to labels ``[B, Q, 6]``, one estimate per output token.
        label_key: key of the label ``[B, 6]``.
        unit: metres per unit of the label, for the metric.
    """

    def __init__(
        self, predict: Callable[[TensorDictBase], Tensor], label_key: str, unit: float
    ) -> None:
        self.predict, self.label_key, self.unit = predict, label_key, unit

    def counts(self, batch: TensorDictBase) -> dict[str, Tensor]:
        """Return the number of scenes."""
        return {"scenes": torch.tensor(len(batch))}

    def __call__(self, batch: TensorDictBase, totals: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return ``loss_position`` and ``position_error_m`` (mean distance in the plane)."""
        predicted = self.predict(batch)
        target = batch[self.label_key].unsqueeze(-2).expand_as(predicted)
        loss = functional.smooth_l1_loss(predicted, target, reduction="none", beta=0.1)
        error = (predicted.mean(-2)[:, :2] - batch[self.label_key][:, :2]).norm(dim=-1) * self.unit
        return {
            "loss_position": loss.mean((-2, -1)).sum() / totals["scenes"],
            "position_error_m": error.detach().sum() / totals["scenes"],
        }


class TokenCloning:
    """Cross-entropy of action tokens on expert chunks, with soft bin labels.

    The policy's own distribution is cloned, temperature included.

    Args:
        policy: a token policy (``action_logits``, ``bin_centres``).
        label_sigma: width of the soft labels in action units, > 0.
    """

    def __init__(self, policy: nn.Module, label_sigma: float = 0.06) -> None:
        self.policy, self.label_sigma = policy, label_sigma

    def counts(self, batch: TensorDictBase) -> dict[str, Tensor]:
        """Return the number of real action numbers (padding past the episode's end excluded)."""
        return {"numbers": real_numbers(batch)}

    def __call__(self, batch: TensorDictBase, totals: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return ``loss_cloning`` (nats per number) and ``entropy``."""
        logits = self.policy.unscaled_logits(batch)
        mask = batch[schema.EXECUTED_MASK]
        loss = soft_token_cross_entropy(
            logits, batch[schema.CHUNK], self.policy.bin_centres, self.label_sigma
        )
        log_probs = logits.detach().log_softmax(-1)
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        return {
            "loss_cloning": chunk_mean(loss, mask, totals["numbers"]),
            "entropy": chunk_mean(entropy, mask, totals["numbers"]),
        }


class GaussianCloning:
    """Regression of the tanh-Gaussian chunk head on expert chunks.

    Squared error of the squashed location, and a pull of the scale towards ``target_std``, so that
    the cloned policy explores by a known amount instead of collapsing onto the demonstrations.

    Args:
        policy: a Gaussian policy (``features``, ``location_and_scale``).
        target_std: standard deviation before tanh, > 0.
    """

    def __init__(self, policy: nn.Module, target_std: float = 0.15) -> None:
        if target_std <= 0:
            raise ValueError(f"target_std is {target_std}; it must be above 0")
        self.policy, self.target_std = policy, target_std

    def counts(self, batch: TensorDictBase) -> dict[str, Tensor]:
        """Return the number of real action numbers."""
        return {"numbers": real_numbers(batch)}

    def __call__(self, batch: TensorDictBase, totals: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return ``loss_cloning`` (squared error per number) and ``loss_scale``."""
        loc, scale = self.policy.location_and_scale(batch)
        mask = batch[schema.EXECUTED_MASK]
        error = (loc.tanh() - batch[schema.CHUNK]) ** 2
        spread = 0.01 * (scale / self.target_std).log() ** 2
        return {
            "loss_cloning": chunk_mean(error, mask, totals["numbers"]),
            "loss_scale": chunk_mean(spread, mask, totals["numbers"]),
        }
