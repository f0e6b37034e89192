"""Unsharded copies of the policy on the learner's side, for evaluation."""

from __future__ import annotations

import torch
from tensordict import TensorDict
from torch import nn


def load_full_weights(policy: nn.Module, weights: TensorDict, share: float = 1.0) -> None:
    """Move an unsharded policy towards whole ``weights`` (see ``policies.shard.full_weights``).

    Args:
        policy: changed in place.
        weights: nested like ``TensorDict.from_module(policy)``, or a part of it; the rest of the
            policy stays.
        share: 1 copies; below 1 keeps an exponential moving average (integers are copied).
    """
    weights = weights.select(*weights.keys(True, True))  # without empty modules
    own = TensorDict.from_module(policy).data.select(*weights.keys(True, True))
    with torch.no_grad():
        if share < 1.0:
            weights = own.apply(
                lambda a, b: torch.lerp(a, b, share) if a.is_floating_point() else b, weights
            )
        own.update_(weights)
