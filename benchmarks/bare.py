"""PPO and SAC updates written by hand in plain PyTorch: the yardstick of ``benchmarks/learner.py``.

No TensorDict, no TorchRL, no FSDP2, no metrics beyond the loss and the gradient norms; the same
mathematics on the same modules. Each class owns its copy of the model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_

Report = dict[str, float]


@dataclass
class PPOSettings:
    """Numbers of the clipped loss and its optimizer."""

    lr: float
    value_lr: float
    betas: tuple[float, float]
    max_grad_norm: float
    clip: tuple[float, float]
    """Below and above 1."""
    value_weight: float
    temperature: float


class BarePPO:
    """Clipped PPO with a value head; policy and value from one pass of the trunk.

    Args:
        model: ``TinyModel``, not sharded.
        instruction_table: int64 ``[tasks, L]``.
        settings: see :class:`PPOSettings`.
        second_pass: run the trunk again for the value, as an actor and a critic that do not know of
            each other do.
    """

    def __init__(
        self,
        model: nn.Module,
        instruction_table: Tensor,
        settings: PPOSettings,
        *,
        second_pass: bool = False,
    ) -> None:
        self.model, self.table, self.settings = model, instruction_table, settings
        self.second_pass = second_pass
        named = [(n, p) for n, p in model.named_parameters() if not n.startswith("ground_head")]
        self.value = [p for n, p in named if n.startswith("value_head")]
        self.policy = [p for n, p in named if not n.startswith("value_head")]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": self.policy, "lr": settings.lr},
                {"params": self.value, "lr": settings.value_lr},
            ],
            betas=settings.betas,
            weight_decay=0.0,
            fused=True,
        )

    def forward(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return logits ``[B, H, A * V]`` and values ``[B, 1]``."""
        inputs = batch["image"], batch["state"], self.table[batch["task_id"].squeeze(-1)]
        if not self.second_pass:
            out = self.model(*inputs, ("logits", "value"))
            return out["logits"], out["value"]
        logits = self.model(*inputs, ("logits",))["logits"]
        return logits, self.model(*inputs, ("value",))["value"]

    def update(self, batch: Mapping[str, Tensor]) -> Report:
        """Take one optimizer step."""
        settings, tokens = self.settings, batch["tokens"]
        logits, value = self.forward(batch)
        logits = logits.unflatten(-1, (tokens.shape[-1], -1)) / settings.temperature
        log_prob = logits.log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)
        ratio = (log_prob - batch["log_probs"]).exp()
        advantage = batch["advantage"][..., None]
        clipped = ratio.clamp(1 - settings.clip[0], 1 + settings.clip[1])
        surrogate = -torch.minimum(ratio * advantage, clipped * advantage)
        mask = batch["executed_mask"][..., None].expand_as(surrogate)
        loss_policy = (surrogate * mask).sum() / mask.sum()
        loss_value = settings.value_weight * functional.smooth_l1_loss(value, batch["target"])
        (loss_policy + loss_value).backward()
        norm_policy = clip_grad_norm_(self.policy, settings.max_grad_norm)
        norm_value = clip_grad_norm_(self.value, settings.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return {
            "loss_policy": loss_policy.item(),
            "loss_value": loss_value.item(),
            "grad_norm/policy": norm_policy.item(),
            "grad_norm/value": norm_value.item(),
        }


@dataclass
class SACSettings:
    """Numbers of the SAC losses and their optimizer."""

    lr: float
    critic_lr: float
    alpha_lr: float
    max_grad_norm: float
    gamma: float
    alpha: float
    target_entropy: float
    tau: float
    cloning_weight: float


class BareSAC:
    """SAC on cached features: two critics with targets, learned alpha, cloning of demonstrations.

    Args:
        actor: head ``features [B, F] -> loc, scale [B, H, A]``.
        critics: heads ``(features, chunk) -> [B, 1]``.
        targets: copies of the critics.
        settings: see :class:`SACSettings`.
    """

    def __init__(
        self,
        actor: nn.Module,
        critics: list[nn.Module],
        targets: list[nn.Module],
        settings: SACSettings,
    ) -> None:
        self.actor, self.critics, self.targets, self.settings = actor, critics, targets, settings
        self.log_alpha = nn.Parameter(torch.tensor(math.log(settings.alpha)))
        self.actor_params = list(actor.parameters())
        self.critic_params = [p for critic in critics for p in critic.parameters()]
        self.target_params = [p for target in targets for p in target.parameters()]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": self.actor_params, "lr": settings.lr},
                {"params": self.critic_params, "lr": settings.critic_lr},
                {"params": [self.log_alpha], "lr": settings.alpha_lr},
            ],
            weight_decay=0.0,
            fused=True,
        )

    def sample(self, loc: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Return a chunk ``[B, H, A]`` and its log-prob ``[B, 1]``."""
        noise = torch.randn_like(loc)
        raw = loc + scale * noise
        normal = -noise.square() / 2 - scale.log() - math.log(2 * math.pi) / 2
        slope = 2 * (math.log(2) - raw - functional.softplus(-2 * raw))
        return raw.tanh(), (normal - slope).flatten(1).sum(-1, keepdim=True)

    def update(self, batch: Mapping[str, Tensor]) -> Report:
        """Take one optimizer step on critics, actor and alpha, and move the targets."""
        settings, features = self.settings, batch["features"]
        mask = batch["executed_mask"][..., None]
        loc, scale = self.actor(features)
        with torch.no_grad():
            fresh, _ = self.sample(loc, scale)
        chunk = torch.where(mask, batch["chunk"], fresh)
        alpha = self.log_alpha.detach().exp()
        with torch.no_grad():
            following, log_prob = self.sample(*self.actor(batch["next_features"]))
            q = torch.stack([target(batch["next_features"], following) for target in self.targets])
            soft = q.amin(0) - alpha * log_prob
            discount = settings.gamma ** batch["steps"] * ~batch["terminated"]
            wanted = batch["reward"] + discount * soft
        losses = [functional.mse_loss(critic(features, chunk), wanted) for critic in self.critics]
        loss_critic = losses[0] + losses[1]
        _require_grad(self.critic_params, False)
        chosen, log_prob = self.sample(loc, scale)
        q = torch.stack([critic(features, chosen) for critic in self.critics]).amin(0)
        _require_grad(self.critic_params, True)
        loss_actor = (alpha * log_prob - q).mean()
        loss_alpha = -(self.log_alpha * (log_prob.detach() + settings.target_entropy)).mean()
        shown = (mask & batch["demonstrated"][..., None]).expand_as(loc)
        error = (loc.tanh() - chunk).square()
        loss_cloning = settings.cloning_weight * (error * shown).sum() / shown.sum()
        (loss_critic + loss_actor + loss_alpha + loss_cloning).backward()
        norm_actor = clip_grad_norm_(self.actor_params, settings.max_grad_norm)
        norm_critic = clip_grad_norm_(self.critic_params, settings.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            torch._foreach_lerp_(self.target_params, self.critic_params, settings.tau)
        return {
            "loss_critic": loss_critic.item(),
            "loss_actor": loss_actor.item(),
            "loss_alpha": loss_alpha.item(),
            "loss_cloning": loss_cloning.item(),
            "grad_norm/actor": norm_actor.item(),
            "grad_norm/critic": norm_critic.item(),
        }


def _require_grad(params: list[nn.Parameter], flag: bool) -> None:
    for param in params:
        param.requires_grad_(flag)
