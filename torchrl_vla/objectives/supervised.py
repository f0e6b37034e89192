"""Objectives of the supervised stages: grounding on privileged labels, cloning of demonstrations.

Each is an ``Objective`` of the learner: scalars that are sums over a micro-batch divided by global
counts. The losses themselves are the pure functions of ``imitation.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.nn import functional

from torchrl_vla import schema
from torchrl_vla.objectives.imitation import (
    chunk_mean,
    gaussian_nll,
    l1,
    soft_token_cross_entropy,
    token_cross_entropy,
)


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
        return {"scenes": torch.full((), len(batch), device=batch[self.label_key].device)}

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
    """Cross-entropy of action tokens on expert chunks.

    The unscaled distribution is cloned; the temperature is the policy's at play.

    Labels are made in the units of the policy's bins: of a checkpoint with statistics those are
    normalised numbers, which the policy's ``normalise`` gives.

    Args:
        policy: a token policy (``unscaled_logits``, ``normalise``, ``bin_centres``,
            ``action_tokenizer``).
        labels: ``"hard"``: the bin of the demonstrated number; ``"soft"``: spread over its
            neighbours.
        label_sigma: width of the soft labels in the bins' units, > 0; only with ``"soft"``.

    Raises:
        ValueError: unknown labels, or a width that is missing or not used.
    """

    def __init__(
        self,
        policy: nn.Module,
        labels: Literal["hard", "soft"],
        label_sigma: float | None = None,
    ) -> None:
        if labels not in ("hard", "soft"):
            raise ValueError(f"labels is {labels!r}; use 'hard' or 'soft'")
        if (label_sigma is not None) != (labels == "soft"):
            raise ValueError(
                f"label_sigma is {label_sigma} with labels {labels!r}; give a width exactly with "
                "'soft', otherwise null"
            )
        self.policy, self.labels, self.label_sigma = policy, labels, label_sigma

    def counts(self, batch: TensorDictBase) -> dict[str, Tensor]:
        """Return the number of real action numbers (padding past the episode's end excluded)."""
        return {"numbers": real_numbers(batch)}

    def __call__(self, batch: TensorDictBase, totals: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return ``loss_cloning`` (nats per number) and ``entropy``."""
        logits = self.policy.unscaled_logits(batch)
        mask, chunk = batch[schema.EXECUTED_MASK], batch[schema.CHUNK]
        if self.label_sigma is None:
            loss = token_cross_entropy(logits, self.policy.action_tokenizer.encode(chunk))
        else:
            loss = soft_token_cross_entropy(
                logits, self.policy.normalise(chunk), self.policy.bin_centres, self.label_sigma
            )
        log_probs = logits.detach().log_softmax(-1)
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        return {
            "loss_cloning": chunk_mean(loss, mask, totals["numbers"]),
            "entropy": chunk_mean(entropy, mask, totals["numbers"]),
        }


class GaussianCloning:
    """Regression of the tanh-Gaussian chunk head on expert chunks.

    ``"squared"`` and ``"l1"`` compare the squashed location with the demonstrated number, and pull
    the scale towards ``target_std``, so that the cloned policy explores by a known amount instead
    of collapsing onto the demonstrations. ``"nll"`` is the negative log-density of a Gaussian
    around the squashed location, in action units, and learns the scale from the data. (The density
    after tanh has no use here: experts close and open grippers with exactly ±1.)

    Args:
        policy: a Gaussian policy (``features``, ``location_and_scale``).
        loss: ``"squared"``, ``"l1"`` or ``"nll"``.
        target_std: standard deviation before tanh, > 0; not with ``"nll"``.

    Raises:
        ValueError: unknown loss, or a ``target_std`` that is missing, not used or not positive.
    """

    def __init__(
        self,
        policy: nn.Module,
        loss: Literal["squared", "l1", "nll"] = "squared",
        target_std: float | None = None,
    ) -> None:
        if loss not in ("squared", "l1", "nll"):
            raise ValueError(f"loss is {loss!r}; use 'squared', 'l1' or 'nll'")
        if (target_std is None) != (loss == "nll"):
            raise ValueError(
                f"target_std is {target_std} with loss {loss!r}; 'nll' learns the scale (null), "
                "the others need a value"
            )
        if target_std is not None and target_std <= 0:
            raise ValueError(f"target_std is {target_std}; it must be above 0")
        self.policy, self.loss, self.target_std = policy, loss, target_std

    def counts(self, batch: TensorDictBase) -> dict[str, Tensor]:
        """Return the number of real action numbers."""
        return {"numbers": real_numbers(batch)}

    def __call__(self, batch: TensorDictBase, totals: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return ``loss_cloning`` per number, and ``loss_scale`` where the scale is given."""
        loc, scale = self.policy.location_and_scale(batch)
        mask, chunk, mean = batch[schema.EXECUTED_MASK], batch[schema.CHUNK], loc.tanh()
        if self.loss == "nll":
            nll = gaussian_nll(chunk, mean, scale)
            return {"loss_cloning": chunk_mean(nll, mask, totals["numbers"])}
        error = l1(chunk, mean) if self.loss == "l1" else (mean - chunk) ** 2
        spread = 0.01 * (scale / self.target_std).log() ** 2
        return {
            "loss_cloning": chunk_mean(error, mask, totals["numbers"]),
            "loss_scale": chunk_mean(spread, mask, totals["numbers"]),
        }


class RegressionCloning:
    """L1 regression of OpenVLA-OFT's continuous head, in the checkpoint's normalised units.

    Args:
        policy: a regression policy (``normalised_chunk``, ``normalise``).

    Source: Kim et al. 2025, arXiv:2502.19645, section 4.
    """

    def __init__(self, policy: nn.Module) -> None:
        self.policy = policy

    def counts(self, batch: TensorDictBase) -> dict[str, Tensor]:
        """Return the number of real action numbers."""
        return {"numbers": real_numbers(batch)}

    def __call__(self, batch: TensorDictBase, totals: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return ``loss_cloning``, the mean absolute error per number."""
        error = l1(self.policy.normalise(batch[schema.CHUNK]), self.policy.normalised_chunk(batch))
        return {"loss_cloning": chunk_mean(error, batch[schema.EXECUTED_MASK], totals["numbers"])}


class FlowCloning:
    """Flow matching on expert chunks: squared error of the velocity at a random time and noise.

    Args:
        policy: a flow policy (``cloning_error``).

    Source: Lipman et al. 2023, arXiv:2210.02747.
    """

    def __init__(self, policy: nn.Module) -> None:
        self.policy = policy

    def counts(self, batch: TensorDictBase) -> dict[str, Tensor]:
        """Return the number of real action numbers."""
        return {"numbers": real_numbers(batch)}

    def __call__(self, batch: TensorDictBase, totals: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return ``loss_cloning``, the mean squared error per number of the executed steps."""
        error = self.policy.cloning_error(batch)
        return {"loss_cloning": chunk_mean(error, batch[schema.EXECUTED_MASK], totals["numbers"])}
