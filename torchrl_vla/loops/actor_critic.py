"""The learner of an actor with Q heads: settings, critics, optimizer groups, sharding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from torchrl_vla.learner import Learner, ParameterGroup
from torchrl_vla.loops.run import Run
from torchrl_vla.objectives.critics import ActorCritic
from torchrl_vla.policies.deferred import place


@dataclass(frozen=True)
class UpdateSettings:
    """Optimizers of actor, critic and entropy coefficient."""

    lr: float
    critic_lr: float
    alpha_lr: float | None
    """Of the entropy coefficient, > 0; ``None`` for an algorithm that learns none."""
    max_grad_norm: float
    trunk_lr: float = 0.0
    """0: the trunk is frozen and its features are cached; above: the critic trains it."""
    q_heads: int = 2
    actor_warm_up: int = 0
    """Updates of linear warm-up of the actor's learning rate, once it begins to move."""
    micro_batch_size: int | None = None
    recompute: bool = False
    """Activation checkpointing of a trained trunk: less memory, one more forward pass."""
    offload: bool = False
    """Keep a trained trunk's shards and their optimizer in host memory."""

    def __post_init__(self) -> None:
        if self.max_grad_norm <= 0:
            raise ValueError(f"updates.max_grad_norm is {self.max_grad_norm}; it must be above 0")
        if (self.recompute or self.offload) and not self.trunk_lr:
            raise ValueError(
                f"updates.recompute={self.recompute} and offload={self.offload} need a trained "
                "trunk, but updates.trunk_lr is 0: remove them, or give the trunk a learning rate"
            )
        if self.alpha_lr is not None and self.alpha_lr <= 0:
            raise ValueError(
                f"updates.alpha_lr is {self.alpha_lr}; it must be above 0. For an alpha that stays "
                "set it, and objective.alpha_kind, target_entropy and entropy_unit, to null"
            )


def make_learner(
    run: Run,
    policy: nn.Module,
    objective: Callable[..., ActorCritic],
    settings: UpdateSettings,
    gamma: float,
) -> tuple[Learner, ActorCritic]:
    """Build critics, objective and learner; shard the trunk if it is trained.

    A frozen trunk stays whole on every rank: ranks encode their own transitions when these arrive,
    at moments of their own, which the collective calls of a sharded one would not survive.

    Raises:
        TypeError: the policy has no continuous actor.
    """
    if not hasattr(policy, "make_critics"):
        raise TypeError(
            f"{type(policy).__name__} has no continuous actor for critics to improve; use "
            "policy.head=gaussian or policy.head=flow"
        )
    model = policy.model.model
    place(
        policy,
        run.topology,
        sharded=bool(settings.trunk_lr),
        recompute=settings.recompute,
        offload=settings.offload,
    )
    if not settings.trunk_lr:
        model.requires_grad_(False)
    heads = [head.to(run.topology.device) for head in policy.make_critics(settings.q_heads)]
    goal = objective(policy.actor, heads, policy.features, gamma=gamma)
    limit = settings.max_grad_norm
    groups = [
        ParameterGroup(
            "actor",
            goal.actor_parameters,
            settings.lr,
            limit,
            warm_up=settings.actor_warm_up,
            start=goal.critic_only_updates,
        ),
        ParameterGroup("critic", goal.critic_parameters, settings.critic_lr, limit),
    ]
    if bool(goal.alpha_parameters) != (settings.alpha_lr is not None):
        raise ValueError(
            f"updates.alpha_lr is {settings.alpha_lr}, but {type(goal).__name__} has "
            f"{len(goal.alpha_parameters)} entropy coefficients; give a learning rate exactly if "
            "there is one, otherwise null"
        )
    if settings.alpha_lr is not None:
        groups.append(ParameterGroup("alpha", goal.alpha_parameters, settings.alpha_lr))
    if settings.trunk_lr:
        idle = (*policy.idle, "value_head")
        trunk = [
            p
            for name, p in model.named_parameters()
            if p.requires_grad and not name.startswith(idle)
        ]
        groups.append(ParameterGroup("trunk", trunk, settings.trunk_lr, limit))
    learner = Learner(
        goal,
        groups,
        run.topology,
        sharded=[model] if settings.trunk_lr else [],
        micro_batch_size=settings.micro_batch_size,
        after_step=goal.after_step,
    )
    return learner, goal
