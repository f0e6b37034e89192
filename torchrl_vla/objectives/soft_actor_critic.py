"""SAC over whole action chunks as an objective of the learner.

TorchRL's ``SACLoss`` works on heads that read pooled features; the trunk (frozen with cached
features, or sharded and trained by the critic) is encoded outside it, once per batch. Its
``steps_to_next_obs`` makes the discount of a decision exactly ``gamma ** num_executed``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictModuleBase
from torch import Tensor, nn
from torchrl.objectives import SACLoss, SoftUpdate

from torchrl_vla import schema
from torchrl_vla.objectives.masks import action_mask
from torchrl_vla.objectives.reduction import masked_mean

FEATURES = "features"
STEPS = "steps_to_next_obs"
DEMONSTRATION = -1
"""``policy_version`` of transitions that no policy chose."""


class Critic(TensorDictModuleBase):
    """A Q head as ``SACLoss`` calls it; what it returns holds the value and nothing else.

    ``TensorDictModule`` would do, but it hands back its inputs too, which ``SACLoss`` then stacks
    over the heads, and per output it pays about as much as a layer of the head.

    Args:
        module: ``(features [*, F], chunk [*, H, A]) -> [*, 1]``.
    """

    in_keys = (FEATURES, schema.CHUNK)
    out_keys = ("state_action_value",)

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, tensordict: TensorDictBase) -> TensorDict:
        """Return ``state_action_value`` ``[*, 1]``."""
        value = self.module(tensordict.get(FEATURES), tensordict.get(schema.CHUNK))
        return TensorDict({"state_action_value": value}, batch_size=tensordict.batch_size)


class SoftActorCritic:
    """SAC (Haarnoja et al. 2018, arXiv:1812.05905) with a cloning term on demonstrations.

    Differs: the actor also pays ``cloning_weight`` × squared error on the *replay's* demonstration
    chunks (as in RLPD-style fine-tuning), so that a good start is not forgotten while Q is young.

    Args:
        actor: TorchRL actor reading ``"features"``, writing the chunk.
        q_heads: N critics ``(features, chunk) -> [*, 1]``, each with its own initialisation.
        encode: maps a batch to features ``[B, F]``, used when the batch holds none.
        gamma: discount per control step.
        alpha: initial entropy coefficient, > 0.
        target_entropy: of the whole chunk, in nats.
        tau: target network step, in (0, 1].
        cloning_weight: weight of the cloning term.
        critic_only_updates: updates before the actor and alpha move.
        actor_interval: updates per actor update.
    """

    def __init__(
        self,
        actor: TensorDictModule,
        q_heads: Sequence[nn.Module],
        encode: Callable[[TensorDictBase], Tensor],
        *,
        gamma: float,
        alpha: float = 1e-3,
        target_entropy: float = -20.0,
        tau: float = 0.01,
        cloning_weight: float = 0.5,
        critic_only_updates: int = 400,
        actor_interval: int = 1,
    ) -> None:
        if not 0 < gamma <= 1:
            raise ValueError(f"gamma is {gamma}; it must be in (0, 1]")
        if alpha <= 0:
            raise ValueError(f"alpha is {alpha}; it must be above 0")
        if not 0 < tau <= 1:
            raise ValueError(f"tau is {tau}; it must be in (0, 1]")
        if len(q_heads) < 2:
            raise ValueError(f"{len(q_heads)} critic given; SAC takes the minimum of at least 2")
        self.encode, self.actor = encode, actor
        self.cloning_weight = cloning_weight
        self.critic_only_updates, self.actor_interval = critic_only_updates, actor_interval
        self.updates = 0
        self.loss = SACLoss(
            actor,
            [Critic(head) for head in q_heads],
            num_qvalue_nets=len(q_heads),
            alpha_init=alpha,
            target_entropy=target_entropy,
            loss_function="l2",
            deactivate_vmap=True,  # two heads one after the other are faster than one batched pass
        )
        self.loss.set_keys(action=schema.CHUNK)
        self.loss.make_value_estimator(gamma=gamma)
        self.targets = SoftUpdate(self.loss, tau=tau)
        self.critic = self._named_state()

    def _named_state(self) -> nn.Module:
        """Return a plain module over the same tensors, which a checkpoint can name.

        It holds everything of SAC that is not the policy: Q ensemble, targets, alpha.
        """
        state = nn.Module()
        state.register_parameter("log_alpha", self.loss.log_alpha)
        for key, value in self.loss.qvalue_network_params.items(True, True):
            state.register_parameter("q_" + "_".join(key), value)
        for key, value in self.loss.target_qvalue_network_params.items(True, True):
            state.register_buffer("target_" + "_".join(key), value.data)
        return state

    @property
    def critic_parameters(self) -> list[nn.Parameter]:
        """Trainable parameters of the Q ensemble."""
        return list(self.loss.qvalue_network_params.parameters())

    @property
    def alpha_parameters(self) -> list[nn.Parameter]:
        """The entropy coefficient's parameter."""
        return [self.loss.log_alpha]

    def after_step(self) -> None:
        """Move the target networks; call after every optimizer step."""
        self.targets.step()
        self.updates += 1

    def counts(self, batch: TensorDictBase) -> dict[str, Tensor]:
        """Return the number of rows, and of demonstrated numbers."""
        return {"rows": torch.tensor(len(batch)), "demonstrated": self._demonstrated(batch).sum()}

    def _demonstrated(self, batch: TensorDictBase) -> Tensor:
        executed = action_mask(batch[schema.EXECUTED_MASK], batch[schema.CHUNK].shape[-1])
        return executed & (batch[schema.POLICY_VERSION] == DEMONSTRATION).unsqueeze(-1)

    def __call__(self, batch: TensorDictBase, totals: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return ``loss_critic``, and ``loss_actor``, ``loss_alpha``, ``loss_cloning`` when due."""
        share = len(batch) / totals["rows"]
        batch = self._prepare(batch)
        loss_critic, info = self.loss.qvalue_v2_loss(batch)
        out = {
            "loss_critic": share * loss_critic,
            "td_error": share * info["td_error"].mean(),
            "alpha": share * self.loss.log_alpha.detach().exp(),
        }
        if self.updates < self.critic_only_updates or self.updates % self.actor_interval:
            return out
        features = batch.copy()
        features[FEATURES] = features[FEATURES].detach()
        loss_actor, info = self.loss.actor_loss(features)
        log_prob = info["log_prob"]
        out |= {
            "loss_actor": share * loss_actor,
            "loss_alpha": share * self.loss.alpha_loss(log_prob).mean(),
            "entropy": -share * log_prob.mean(),
        }
        if self.cloning_weight:
            # The actor loss has just written "loc": the head need not run again.
            error = (features["loc"].tanh() - batch[schema.CHUNK]) ** 2
            demonstrated = self._demonstrated(batch)
            cloning = masked_mean(error, demonstrated, totals["demonstrated"])
            out["loss_cloning"] = self.cloning_weight * cloning
        return out

    def _prepare(self, batch: TensorDictBase) -> TensorDictBase:
        batch = batch.copy()
        if batch.get(STEPS, None) is None:
            batch[STEPS] = batch[schema.NUM_EXECUTED]
        if batch.get(FEATURES, None) is None:
            batch[FEATURES] = self.encode(batch)
            with torch.no_grad():
                following = batch["next"].copy()
                following[schema.TASK_ID] = batch[schema.TASK_ID]
                batch["next", FEATURES] = self.encode(following)
        batch[schema.CHUNK] = self._fill_unexecuted(batch)
        return batch

    def _fill_unexecuted(self, batch: TensorDictBase) -> Tensor:
        """Return the chunks with never-executed numbers replaced by fresh samples of the policy.

        What was not executed cannot have caused the reward, so Q must learn to ignore it. Chunks
        end early only where episodes end; zeros or noise there would mark those states, and Q
        would prefer actions that look like the end of an episode.
        """
        chunk = batch[schema.CHUNK]
        rows = ~batch[schema.EXECUTED_MASK].all(-1)
        if not bool(rows.any()):
            return chunk
        features = TensorDict(
            {FEATURES: batch[FEATURES][rows].detach()}, batch_size=[int(rows.sum())]
        )
        with torch.no_grad():
            fresh = self.actor.get_dist(features).sample()
        filled = chunk.clone()
        executed = batch[schema.EXECUTED_MASK][rows].unsqueeze(-1)
        filled[rows] = torch.where(executed, chunk[rows], fresh)
        return filled
