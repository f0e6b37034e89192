"""What a policy's results depend on besides its weights: described, kept, compared at a resume.

Two policies of equal weights and another attention mode, other statistics or another image pipeline
are two policies, and nothing in a state dict tells them apart. Every reader (``policy.model``)
describes itself in plain values; runs keep that beside results and in checkpoints.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

WHERE = ("checkpoint",)
"""Facts that say where something came from: they may change, as folders move."""


def describe(policy: nn.Module) -> dict[str, Any]:
    """Return the facts as JSON gives them back (tuples are lists), with the policy's class."""
    facts = {"policy": type(policy).__name__, **policy.model.describe()}
    return json.loads(json.dumps(facts))


def check_description(saved: Mapping[str, Any], own: Mapping[str, Any], source: Path) -> None:
    """Check that a checkpoint was written by a policy that reads and acts as this one does.

    Args:
        saved: :func:`describe` of the policy that was saved.
        own: of the one that is to take its weights.
        source: the checkpoint, for the message.

    Raises:
        ValueError: they differ; every differing fact is named with both values.
    """
    names = sorted({*saved, *own} - {*WHERE})
    differing = [
        f"{name}={saved.get(name)} there and {own.get(name)} here"
        for name in names
        if saved.get(name) != own.get(name)
    ]
    if differing:
        raise ValueError(
            f"{source} holds the weights of another policy: {'; '.join(differing)}. Weights mean "
            "nothing under other conventions: set policy.* as in that run's config.yaml"
        )


def described(modules: Mapping[str, nn.Module]) -> dict[str, Any]:
    """Return what a checkpoint of ``modules`` keeps: the policy's facts, if its reader has any."""
    policy = modules.get("policy", modules.get("evaluated"))
    if not hasattr(getattr(policy, "model", None), "describe"):
        return {}
    return {"policy": describe(policy)}
