"""Which attention mode a checkpoint was trained with, from how well it explains demonstrations.

Shape legend: ``M`` samples, ``H`` chunk steps, ``A`` action dims.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_vla import schema
from torchrl_vla.policies.openvla.backbone import ATTENTION, Attention
from torchrl_vla.policies.openvla.policy import RegressionPolicy, TailTokenPolicy

SIGNIFICANT = 3.0
"""Standard errors that the two modes must be apart."""


@dataclass(frozen=True)
class AttentionComparison:
    """Mean error of demonstrated actions in both modes; lower explains them better."""

    bidirectional: float
    causal: float
    standard_error: float
    """Of the difference, over samples."""
    unit: str
    samples: int

    @property
    def trained_with(self) -> Attention | None:
        """The mode of the lower error; None if the samples do not decide."""
        difference = self.causal - self.bidirectional
        if not abs(difference) > SIGNIFICANT * self.standard_error:
            return None
        return "bidirectional" if difference > 0 else "causal"


@torch.no_grad()
def compare_attention(
    policy: TailTokenPolicy | RegressionPolicy, batch: TensorDictBase, *, rows: int = 16
) -> AttentionComparison:
    """Score demonstrations in both modes; the policy is left in the mode it had.

    Args:
        policy: with parallel decoding.
        batch: ``[M]`` with image, state, task_id, chunk ``[M, H, A]`` and
            ``("next", "executed_mask")`` ``[M, H]``.
        rows: samples per forward pass.

    Returns:
        Negative log-likelihood per number (token head, at temperature 1) or absolute error per
        normalised number (L1 head).

    Raises:
        TypeError: the policy has no head whose error could be compared.
        ValueError: an autoregressive policy, or fewer than two samples.
    """
    if not isinstance(policy, TailTokenPolicy | RegressionPolicy):
        raise TypeError(f"{type(policy).__name__} cannot be compared; use head=tokens or head=l1")
    if policy.model.model.decoding != "parallel":
        raise ValueError("an autoregressive policy is causal by construction: nothing to compare")
    if len(batch) < 2:
        raise ValueError(f"{len(batch)} samples cannot tell two modes apart; give some hundreds")
    backbone = policy.model.model.backbone
    before = backbone.attention
    errors = {}
    try:
        for mode in ATTENTION:
            backbone.attention = mode
            errors[mode] = torch.cat([_errors(policy, part) for part in batch.split(rows)])
    finally:
        backbone.attention = before
    difference = errors["causal"] - errors["bidirectional"]
    return AttentionComparison(
        bidirectional=float(errors["bidirectional"].mean()),
        causal=float(errors["causal"].mean()),
        standard_error=float(difference.std() / math.sqrt(len(batch))),
        unit="nats" if isinstance(policy, TailTokenPolicy) else "normalised units",
        samples=len(batch),
    )


def _errors(policy: TailTokenPolicy | RegressionPolicy, batch: TensorDictBase) -> Tensor:
    """Return the mean error of each sample's real numbers, float64 ``[M]``."""
    if isinstance(policy, TailTokenPolicy):
        tokens = policy.action_tokenizer.encode(batch[schema.CHUNK])
        log_probs = policy.unscaled_logits(batch).log_softmax(-1)
        error = -log_probs.gather(-1, tokens[..., None])[..., 0]
    else:
        error = (policy.normalised_chunk(batch) - policy.normalise(batch[schema.CHUNK])).abs()
    real = batch[schema.EXECUTED_MASK].unsqueeze(-1)
    return (error * real).double().sum((1, 2)) / (real.sum((1, 2)) * error.shape[-1])
