"""Log-probability and entropy of action tokens, over the action window only.

Actor and learner both call this function, on the same window and in float32, so that with equal
weights the importance ratio is 1. Where the window lies in the vocabulary is the policy's business.

Legend: ``*`` batch dims, ``H`` steps per chunk, ``A`` action dims, ``V`` bins.
"""

from __future__ import annotations

import torch
from torch import Tensor


def window_log_probs(
    logits: Tensor, tokens: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Score bins under ``softmax(logits / temperature)`` over the ``V`` bins.

    Args:
        logits: ``[*, H, A, V]``, any float dtype: the columns of the action bins and no others.
        tokens: ``[*, H, A]`` int64 in 0..V-1: bins, not vocabulary ids.
        temperature: above 0; part of the policy's definition, the same when acting and learning.

    Returns:
        ``(log_prob, entropy)``, both ``[*, H, A]`` float32, nats.

    Raises:
        ValueError: shapes do not belong together, a token is outside the window, or the temperature
            is not positive.
        TypeError: ``tokens`` is not int64.
    """
    if logits.shape[:-1] != tokens.shape:
        raise ValueError(
            f"logits {tuple(logits.shape)} and tokens {tuple(tokens.shape)} do not belong "
            "together; expected [*, H, A, V] and [*, H, A]"
        )
    if tokens.dtype != torch.int64:
        raise TypeError(f"tokens have dtype {tokens.dtype}, not torch.int64")
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}; it must be positive (greedy is argmax)")
    bins = logits.shape[-1]
    if tokens.numel():
        low, high = (int(bound) for bound in tokens.aminmax())
        if low < 0 or high >= bins:
            raise ValueError(
                f"tokens span {low}..{high}, but the window has bins 0..{bins - 1}; pass bins, "
                "not vocabulary ids"
            )
    log_p = torch.log_softmax(logits.float() / temperature, dim=-1)
    log_prob = log_p.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    # A bin that is masked out (logit -inf) has p log p = 0, not 0 * -inf.
    entropy = -(log_p.exp() * log_p.masked_fill(log_p == -torch.inf, 0)).sum(-1)
    return log_prob, entropy
