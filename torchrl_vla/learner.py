"""One update: micro-batches → loss → backward → average over ranks → clip → step.

The room is for gradients and optimizers. It knows no algorithm: an objective says what the loss
terms are and how many entries each is a mean over; the learner makes the result independent of the
micro-batch split and of the number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from tensordict import TensorDictBase
from torch import nn
from torch.distributed.fsdp import FSDPModule

from torchrl_vla.policies.shard import all_reduce_replicated_grads, clip_grad_norm
from torchrl_vla.topology import Topology


class Objective(Protocol):
    """What an algorithm gives the learner."""

    def counts(self, batch: TensorDictBase) -> dict[str, torch.Tensor]:
        """Return, per kind of mean, the number of valid entries of ``batch`` (this rank's)."""

    def __call__(
        self, batch: TensorDictBase, totals: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Return scalars of one micro-batch.

        Names starting with ``loss_`` are added up and differentiated; all others are metrics. Each
        is a *sum over the micro-batch divided by the global total*, so that sums over micro-batches
        and ranks are the global means.
        """


@dataclass
class ParameterGroup:
    """Parameters that share a learning rate and a gradient-norm limit."""

    name: str
    params: list[nn.Parameter]
    lr: float
    max_grad_norm: float = math.inf
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    warm_up: int = 0
    """Updates of linear warm-up. Adam's first steps move every parameter by the whole learning
    rate, however small its gradient; a good start does not survive that."""
    start: int = 0
    """Update at which the warm-up begins (where the group's first gradient is expected)."""

    def factor(self, update: int) -> float:
        """Return the warm-up factor at ``update``, in (0, 1]."""
        if not self.warm_up:
            return 1.0
        return min(1.0, max(1, update - self.start + 1) / self.warm_up)

    def __post_init__(self) -> None:
        if not self.params:
            raise ValueError(f"parameter group {self.name!r} is empty")
        if self.lr < 0:
            raise ValueError(f"lr of {self.name!r} is {self.lr}; it must be at least 0")


@dataclass
class Learner:
    """Owns the optimizer and turns batches into updates.

    Args:
        objective: the algorithm's loss.
        groups: every trainable parameter, once.
        topology: the ranks that average their gradients.
        sharded: FSDP2 roots (gradient sync is delayed to the last micro-batch).
        micro_batch_size: rows of one backward pass; ``None`` for the whole minibatch.
        schedule: factor on every learning rate by update index; constant if ``None``.
        after_step: called after each optimizer step (target networks).
    """

    objective: Objective
    groups: Sequence[ParameterGroup]
    topology: Topology
    sharded: Sequence[FSDPModule] = ()
    micro_batch_size: int | None = None
    schedule: Callable[[int], float] | None = None
    after_step: Callable[[], None] | None = None
    updates: int = field(default=0, init=False)
    """Optimizer steps so far."""

    def __post_init__(self) -> None:
        if self.micro_batch_size is not None and self.micro_batch_size < 1:
            raise ValueError(f"micro_batch_size is {self.micro_batch_size}; the least is 1")
        self.optimizer = torch.optim.AdamW(
            [
                {
                    "params": group.params,
                    "lr": group.lr,
                    "betas": group.betas,
                    "weight_decay": group.weight_decay,
                }
                for group in self.groups
            ],
            # One kernel per group: a loop over sharded parameters pays DTensor's dispatch for every
            # arithmetic operation on every one of them.
            fused=True,
        )

    def update(self, batch: TensorDictBase) -> dict[str, float]:
        """Take one optimizer step on ``batch`` (this rank's rows of the minibatch, on any device).

        Returns:
            Global means of the objective's scalars, ``grad_norm/<group>`` before clipping and
            ``lr/<group>``.

        Raises:
            FloatingPointError: a gradient is not finite; parameters are left as they were.
        """
        if self.topology.device.type != "cpu":  # data wait on the host
            batch = batch.to(self.topology.device)
        totals = self._totals(batch)
        size = self.micro_batch_size or len(batch)
        micro_batches = [batch] if size >= len(batch) else batch.split(size)
        summed: dict[str, torch.Tensor] = {}
        for number, micro_batch in enumerate(micro_batches):
            for root in self.sharded:
                root.set_requires_gradient_sync(number == len(micro_batches) - 1)
            scalars = self.objective(micro_batch, totals)
            loss = sum(value for name, value in scalars.items() if name.startswith("loss_"))
            if self.topology.world_size > 1:
                # Ranks' gradients are averaged, the terms are fractions of a global sum.
                loss = loss * self.topology.world_size
            loss.backward()
            with torch.no_grad():
                for name, value in scalars.items():
                    summed[name] = summed[name] + value if name in summed else value
        norms = self._clip()
        factor = 1.0 if self.schedule is None else self.schedule(self.updates)
        for group, settings in zip(self.groups, self.optimizer.param_groups, strict=True):
            settings["lr"] = group.lr * factor * group.factor(self.updates)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.after_step is not None:
            self.after_step()
        self.updates += 1
        return self._report(summed, norms)

    def _totals(self, batch: TensorDictBase) -> dict[str, torch.Tensor]:
        counts = self.objective.counts(batch)
        if self.topology.world_size == 1:
            return {name: value.float() for name, value in counts.items()}
        values = torch.stack([value.float() for value in counts.values()])
        return dict(zip(counts, self.topology.all_reduce_sum(values).unbind(), strict=True))

    def _clip(self) -> dict[str, float]:
        if self.topology.world_size > 1:
            params = [p for group in self.groups for p in group.params]
            all_reduce_replicated_grads(params, self.topology)
        norms = {}
        for group in self.groups:
            if all(p.grad is None for p in group.params):
                continue  # this update has no loss term for the group
            norm = float(clip_grad_norm(group.params, group.max_grad_norm))
            if not math.isfinite(norm):
                self.optimizer.zero_grad(set_to_none=True)
                raise FloatingPointError(
                    f"gradient norm of {group.name!r} is {norm} at update {self.updates}: the loss "
                    "diverged; lower its learning rate or look at the last metrics"
                )
            norms[f"grad_norm/{group.name}"] = norm
        return norms

    def _report(self, summed: dict[str, torch.Tensor], norms: dict[str, float]) -> dict[str, float]:
        names = sorted(summed)
        with torch.no_grad():
            values = torch.stack([summed[name].float().reshape(()) for name in names])
        if self.topology.world_size > 1:
            values = self.topology.all_reduce_sum(values)
        report = dict(zip(names, values.tolist(), strict=True))
        report |= norms
        for group, settings in zip(self.groups, self.optimizer.param_groups, strict=True):
            report[f"lr/{group.name}"] = settings["lr"]
        return report
