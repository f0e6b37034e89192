"""From a judged round to updates: the on-policy learner, shuffled minibatches, epochs.

Legend: ``N`` envs, ``T`` decisions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from torchrl_vla.learner import Learner, ParameterGroup
from torchrl_vla.metrics import RATIO_GAP, TARGET_KL_STOPS, Means
from torchrl_vla.policies.deferred import place, without_weights
from torchrl_vla.policies.shard import reshard
from torchrl_vla.topology import Topology


@dataclass(frozen=True)
class UpdateSettings:
    """How a round becomes updates."""

    minibatch_size: int
    """Decisions per update, on this rank."""
    epochs: int
    """Passes over a round."""
    lr: float
    max_grad_norm: float
    value_lr: float | None = None
    """Learning rate of the value head, where the objective trains a value; refused elsewhere."""
    head_lr: float | None = None
    """Learning rate of an action head outside the sharded model (the Gaussian one); refused for
    policies without one."""
    micro_batch_size: int | None = None
    """Decisions per backward pass; the whole minibatch if ``None``."""
    betas: tuple[float, float] = (0.9, 0.95)
    warm_up: int = 0
    """Updates of linear warm-up."""
    target_kl: float | None = None
    """A minibatch with a larger approximate KL (nats per ratio) ends the updates of its round."""
    frozen: tuple[str, ...] = ()
    """Parameters of the model that stay as they are, by the start of their names."""
    recompute: bool = False
    """Activation checkpointing: less memory, one more forward pass."""
    offload: bool = False
    """Keep the shards and their optimizer in host memory."""

    def __post_init__(self) -> None:
        for name in ("minibatch_size", "epochs", "max_grad_norm"):
            if getattr(self, name) <= 0:
                raise ValueError(f"updates.{name} is {getattr(self, name)}; it must be above 0")
        if self.target_kl is not None and self.target_kl <= 0:
            raise ValueError(f"updates.target_kl is {self.target_kl}; it must be above 0, or null")


def make_learner(
    topology: Topology,
    policy: nn.Module,
    objective: Callable[..., Any],
    settings: UpdateSettings,
    **given: Any,
) -> tuple[Learner, Any]:
    """Build objective and learner on a policy, and shard its model.

    Args:
        topology: the learner ranks.
        policy: whole, with the weights that the run starts from; its model is sharded in place.
        objective: ``objective(policy, **given)`` builds the algorithm's objective.
        settings: optimizer and minibatches.
        **given: what the loop knows: ``gamma``, ``group_size``, ``max_lag``, ``make_reference``.

    Raises:
        ValueError: a learning rate is missing or has nothing to train.
    """
    model = policy.model.model
    goal = objective(policy, **given)
    _check_rate("value_lr", settings.value_lr, goal.uses_value, "the objective trains no value")
    idle = (*policy.idle, *settings.frozen, *(() if goal.uses_value else ("value_head",)))
    for name, parameter in model.named_parameters():
        # What is frozen already (the base under an adapter) stays frozen.
        parameter.requires_grad_(parameter.requires_grad and not name.startswith(idle))
    place(policy, topology, recompute=settings.recompute, offload=settings.offload)
    _ = goal.reference  # of these weights, not of a checkpoint that is loaded later
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    inside = {id(p) for p in model.parameters()}
    groups = {
        "policy": ([p for n, p in named if not n.startswith("value_head")], settings.lr),
        "head": (
            [p for p in policy.parameters() if p.requires_grad and id(p) not in inside],
            settings.head_lr,
        ),
        "value": ([p for n, p in named if n.startswith("value_head")], settings.value_lr),
    }
    no_head = f"{type(policy).__name__} has no action head outside its model"
    _check_rate("head_lr", settings.head_lr, bool(groups["head"][0]), no_head)
    make = partial(
        ParameterGroup,
        max_grad_norm=settings.max_grad_norm,
        betas=settings.betas,
        warm_up=settings.warm_up,
    )
    learner = Learner(
        goal,
        [make(name, params, lr) for name, (params, lr) in groups.items() if params],
        topology,
        sharded=[model],
        micro_batch_size=settings.micro_batch_size,
    )
    return learner, goal


def _check_rate(name: str, rate: float | None, used: bool, why: str) -> None:
    if used and rate is None:
        raise ValueError(f"updates.{name} is missing; set it (1e-3, say)")
    if rate is not None and not used:
        raise ValueError(f"updates.{name}={rate} has no use: {why}; remove it")


def frozen_copy(policy: nn.Module, build: Callable[[], nn.Module], topology: Topology) -> nn.Module:
    """Return a copy of ``policy`` that never changes: the reference of a KL penalty; collective.

    Args:
        policy: with the weights to keep, where :func:`~torchrl_vla.policies.deferred.place` brought
            it; no rank ever holds more of the copy than its shards.
        build: builds a policy of the same shape.
        topology: ranks over which the copy's model is sharded.
    """
    with without_weights():
        copy = build().requires_grad_(False)
    place(copy, topology)
    pairs = zip(_tensors(copy), _tensors(policy), strict=True)
    with torch.no_grad():
        for own, source in pairs:
            own.copy_(source)
    return copy


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    reshard(module)
    return chain(module.parameters(), module.buffers())


def minibatches(
    rows: TensorDictBase, size: int, epochs: int, generator: torch.Generator
) -> Iterator[TensorDictBase]:
    """Yield every decision of ``rows`` once per epoch, in shuffled minibatches of ``size``.

    Args:
        rows: ``[N, T]`` or any other batch dims, equally many decisions on every rank.
        size: decisions per minibatch; the last of an epoch may be smaller.
        epochs: passes.
        generator: of the shuffles.
    """
    rows = rows.reshape(-1)
    for _ in range(epochs):
        for index in torch.randperm(len(rows), generator=generator).split(size):
            yield rows[index]


def update_epochs(
    learner: Learner,
    rows: TensorDictBase,
    settings: UpdateSettings,
    generator: torch.Generator,
) -> dict[str, float]:
    """Take the updates of a round, up to all of them; collective.

    Returns:
        Means of the updates' metrics; ``ratio_gap``, the largest of all ranks before the first
        update; ``target_kl_stops``, 1 if ``target_kl`` ended the round early.
    """
    goal = learner.objective
    means, gap, stopped = Means(), None, False
    for minibatch in minibatches(rows, settings.minibatch_size, settings.epochs, generator):
        report = goal.finish(learner.update(minibatch))
        if gap is None:
            gap = _largest(goal.pop_gap(), learner.topology)
        means.add(report)
        if settings.target_kl is not None and report["approx_kl"] > settings.target_kl:
            stopped = True
            break
    return means.pop() | {RATIO_GAP: gap, TARGET_KL_STOPS: float(stopped)}


def _largest(value: float, topology: Topology) -> float:
    """Return the largest number of all ranks; NaN (nothing was measured) counts on no rank."""
    values = topology.gather_objects(value) if topology.world_size > 1 else [value]
    return max((v for v in values if not math.isnan(v)), default=math.nan)
