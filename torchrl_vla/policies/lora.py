"""LoRA through peft, freezing by pattern, and weights without what never changes.

Adapters are injected into a policy in place: its modules keep their names, so FSDP2 plans, losses
and checkpoints do not notice. There is no dropout option: actor and learner would then disagree
about the log-prob of one action.

Source: Hu et al. 2022, "LoRA", arXiv:2106.09685; peft.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TypeVar

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchrl_vla.policies.shard import reshard

ADAPTER = ".lora_"
"""In the name of every adapter parameter."""
Policy = TypeVar("Policy", bound=nn.Module)


@dataclass(frozen=True)
class LoraSettings:
    """Which layers get adapters, and what is trained beside them."""

    targets: str | tuple[str, ...]
    """Ends of layer names (``("q_proj", "v_proj")``), or one regular expression for the whole
    name."""
    rank: int = 16
    alpha: float = 32.0
    """The adapter's output is scaled by ``alpha / rank``."""
    trained: tuple[str, ...] = ()
    """Patterns (``*`` matches anything) of other parameters that are trained too, such as
    ``"*value_head*"``. Everything else is frozen."""

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"lora.rank is {self.rank}; it must be at least 1")
        if self.alpha <= 0:
            raise ValueError(f"lora.alpha is {self.alpha}; it must be above 0")


def add_lora(policy: Policy, settings: LoraSettings) -> Policy:
    """Inject adapters into ``policy`` in place, and freeze the rest; call before sharding.

    A fresh adapter adds exactly 0. Layers without storage (``policies/deferred.py``) stay so, their
    adapters do not.

    Raises:
        ModuleNotFoundError: peft is not installed.
        ValueError: no layer matches the targets, or a pattern matches no parameter.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
        from peft.tuners.lora import LoraLayer
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "policy.lora needs peft: pip install 'torchrl_vla[lora]', or set policy.lora=null"
        ) from error
    targets = settings.targets if isinstance(settings.targets, str) else list(settings.targets)
    recipe = LoraConfig(r=settings.rank, lora_alpha=settings.alpha, target_modules=targets)
    try:
        inject_adapter_in_model(recipe, policy)
    except ValueError as error:
        raise ValueError(f"lora.targets={settings.targets} fit no layer: {error}") from error
    for layer in policy.modules():
        if isinstance(layer, LoraLayer) and any(p.is_meta for p in layer.lora_A.parameters()):
            # peft puts an adapter where its layer is; no file holds this one.
            for adapter in (layer.lora_A, layer.lora_B):
                adapter.to_empty(device="cpu")
            layer.reset_lora_parameters("default", init_lora_weights=True)
    return train_only(policy, (f"*{ADAPTER}*", *settings.trained))


def train_only(policy: Policy, patterns: Sequence[str]) -> Policy:
    """Train the parameters whose names match a pattern, freeze all others.

    Raises:
        ValueError: a pattern matches nothing.
    """
    chosen = _matching(policy, patterns)
    for name, parameter in policy.named_parameters():
        parameter.requires_grad_(name in chosen)
    return policy


def freeze(policy: Policy, patterns: Sequence[str]) -> Policy:
    """Freeze the parameters whose names match a pattern, leave the others as they are.

    Raises:
        ValueError: a pattern matches nothing.
    """
    chosen = _matching(policy, patterns)
    for name, parameter in policy.named_parameters():
        if name in chosen:
            parameter.requires_grad_(False)
    return policy


def _matching(policy: nn.Module, patterns: Sequence[str]) -> set[str]:
    names = [name for name, _ in policy.named_parameters()]
    found: set[str] = set()
    for pattern in patterns:
        matches = {name for name in names if fnmatchcase(name, pattern)}
        if not matches:
            raise ValueError(
                f"pattern {pattern!r} matches none of {len(names)} parameters, such as "
                f"{names[:3]}; '*' matches anything, also dots"
            )
        found |= matches
    return found


def trainable_names(policy: nn.Module) -> tuple[str, ...]:
    """Return the names of the trainable parameters: all that changes from publish to publish.

    Sharding and adapters keep them, so a learner's names are those of its actors.

    Raises:
        ValueError: nothing is trainable.
    """
    names = tuple(name for name, p in policy.named_parameters() if p.requires_grad)
    if not names:
        raise ValueError("no parameter of the policy is trainable: nothing would be published")
    return names


def trainable_weights(policy: nn.Module) -> TensorDict:
    """Return the whole trainable parameters of ``policy``: what a publish has to carry. Collective.

    Returns:
        TensorDict nested like ``TensorDict.from_module(policy)``, with trainable leaves only:
        detached CPU copies.

    Raises:
        ValueError: nothing is trainable.
    """
    reshard(policy)
    found, parameters = TensorDict(), dict(policy.named_parameters())
    for name in trainable_names(policy):
        value = parameters[name].detach()
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        found.set(tuple(name.split(".")), whole.to("cpu", copy=True))
    return found


def apply_trainable(policy: nn.Module, weights: TensorDict) -> None:
    """Set the trainable parameters of an unsharded ``policy`` to published ``weights``.

    Raises:
        ValueError: names or shapes differ: learner and actor train different parts.
    """
    own = {name: p for name, p in policy.named_parameters() if p.requires_grad}
    given = {
        ".".join(key) if isinstance(key, tuple) else key: value
        for key, value in weights.items(include_nested=True, leaves_only=True)
    }
    wrong = sorted(own.keys() ^ given.keys()) or [
        f"{name}: {tuple(given[name].shape)} given, {tuple(own[name].shape)} here"
        for name in own
        if own[name].shape != given[name].shape
    ]
    if wrong:
        raise ValueError(
            f"published weights do not fit the trainable parameters of this policy: {wrong[:4]}; "
            "build both with the same policy settings"
        )
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(given[name])


def merged_state_dict(module: nn.Module) -> dict[str, Tensor]:
    """Return the state dict that ``module`` would have without adapters, their product added in.

    ``module`` stays as it is. Outputs of merged and unmerged weights differ by rounding only.

    Raises:
        TypeError: ``module`` is sharded.
    """
    layers = dict(module.named_modules())
    merged: dict[str, Tensor] = {}
    for key, value in module.state_dict().items():
        if isinstance(value, DTensor):
            raise TypeError(
                f"{key} is sharded; load the result of policies.shard.full_weights into an "
                "unsharded policy and merge that"
            )
        if ADAPTER in key:
            continue
        owner, base, name = key.rpartition(".base_layer.")
        if base and name == "weight":
            layer = layers[owner]
            for adapter in layer.active_adapters:
                value = value + layer.get_delta_weight(adapter)
        merged[f"{owner}.{name}" if base else key] = value.detach()
    return merged
