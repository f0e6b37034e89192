"""SAC over whole action chunks as an objective of the learner.

TorchRL's ``SACLoss`` works on heads that read pooled features; the trunk (frozen with cached
features, or sharded and trained by the critic) is encoded outside it, once per batch. The discount
of a decision is exactly ``gamma ** num_executed``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
from tensordict import TensorDict, TensorDictBase, TensorDictParams
from tensordict.nn import TensorDictModule, TensorDictModuleBase
from torch import Tensor, nn
from torchrl.objectives import SACLoss, SoftUpdate

from torchrl_vla import schema
from torchrl_vla.objectives.critics import (
    ACTOR_ROWS,
    CHUNK,
    FEATURES,
    NEXT_FEATURES,
    STEPS,
    ClonedRows,
    Ensemble,
    Reduction,
    ReductionKind,
    check_common,
    cloned_steps,
    encoded,
    fill_unexecuted,
    loss_rows,
    q_statistics,
    row_counts,
)
from torchrl_vla.objectives.masks import action_mask, decision_discount
from torchrl_vla.objectives.off_policy import Alpha, target_entropy, td_target
from torchrl_vla.objectives.reduction import masked_sum

AlphaKind = Literal["exp", "softplus"]
EntropyUnit = Literal["chunk", "executed_number"]


class Critic(TensorDictModuleBase):
    """Gives ``SACLoss`` the parameters of a Q head and the keys that it reads.

    Args:
        module: ``(features [*, F], chunk [*, H, A]) -> [*, 1]``.
    """

    in_keys = (FEATURES, CHUNK)
    out_keys = ("state_action_value",)

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


class EnsembleSACLoss(SACLoss):
    """TorchRL's loss with three things it lacks: lean passes, reductions, a softplus alpha.

    Its critic, actor and alpha losses are TorchRL's. ``SACLoss`` takes the minimum over what its
    ensemble call returns; for the actor the call has reduced the members already, and the minimum
    is over one. The target is :func:`~torchrl_vla.objectives.off_policy.td_target`, which has the
    same value and costs a third (no copies of the batch, no estimator object).

    Args:
        actor: as for ``SACLoss``; the loss does not own its parameters.
        ensemble: the critics and their targets.
        gamma: discount per control step.
        alpha: initial entropy coefficient.
        alpha_kind: ``"exp"``: TorchRL's own; ``"softplus"``: see
            :class:`~torchrl_vla.objectives.off_policy.Alpha`; ``None``: alpha stays.
        of_target: how the targets' members make one value.
        of_actor: the same for the value that the actor climbs.
    """

    def __init__(
        self,
        actor: TensorDictModule,
        ensemble: Ensemble,
        *,
        gamma: float,
        alpha: float,
        alpha_kind: AlphaKind | None,
        of_target: Reduction,
        of_actor: Reduction,
    ) -> None:
        coefficient = None if alpha_kind is None else Alpha(alpha, alpha_kind)
        super().__init__(
            actor,
            [Critic(head) for head in ensemble.online],
            num_qvalue_nets=len(ensemble.online),
            alpha_init=alpha,
            fixed_alpha=alpha_kind != "exp",  # otherwise its own parameter would be unused
            target_entropy=0.0,  # the objective adds the target, which may differ by row
            loss_function="l2",
        )
        self.set_keys(action=CHUNK)
        self.coefficient = coefficient if alpha_kind == "softplus" else None
        if self.coefficient is not None:
            self.coefficient.to(self.log_alpha.device)  # the critics'
        self.gamma, self.of_target, self.of_actor = gamma, of_target, of_actor
        self.update = 0
        self.online: Tensor | None = None
        """Q of the stored chunks, ``[E, B, 1]``, of the last :meth:`qvalue_v2_loss`."""
        # The actor is called as it is. It has no delayed copy, so there is nothing to swap in.
        self.actor_network_params = TensorDictParams(TensorDict())
        self.__dict__["ensemble"] = ensemble
        self._share_storage()

    def _share_storage(self) -> None:
        """Let the heads' parameters and TorchRL's stacks of them be one memory."""
        stacks = self.qvalue_network_params, self._modules["target_qvalue_network_params"]
        for stack, kinds in zip(stacks, (("online", "frozen"), ("target",)), strict=True):
            named = stack.data.get("module").flatten_keys(".")
            for kind in kinds:
                for number, head in enumerate(getattr(self.ensemble, kind)):
                    for name, parameter in head.named_parameters():
                        parameter.data = named[name][number]

    def _make_vmap(self) -> None:
        # SACLoss evaluates its critics through this attribute alone.
        self._vmap_qnetworkN0 = self._evaluate

    def _evaluate(self, rows: TensorDictBase, params: TensorDictParams) -> TensorDict:
        heads, at = self.ensemble, (rows.get(FEATURES), rows.get(CHUNK))
        if params is self.qvalue_network_params:
            q = self.online = heads.values(heads.online, *at)
        else:
            q = self.of_actor(heads.values(heads.frozen, *at)).unsqueeze(0)
        return TensorDict({"state_action_value": q}, batch_size=q.shape[:2])

    @torch.no_grad()
    def _compute_target_v2(self, rows: TensorDictBase) -> Tensor:
        """Return the soft Bellman target ``[B]``: the value TorchRL computes, by reduction."""
        features = rows.get(NEXT_FEATURES)
        following = TensorDict({FEATURES: features}, batch_size=rows.batch_size)
        chunk, log_prob = self.actor_network.get_dist(following).rsample_and_log_prob()
        members = self.of_target.members(self.update)
        q = self.ensemble.values(self.ensemble.target, features, chunk, members)
        return td_target(
            rows.get("reward"),
            self.of_target(q),
            rows.get("terminated"),
            decision_discount(rows.get(STEPS), self.gamma),
            log_prob.unsqueeze(-1),
            self._alpha,
        ).squeeze(-1)

    @property
    def _alpha(self) -> Tensor:
        if self.coefficient is None:
            return self.log_alpha.detach().exp()
        return self.coefficient().detach()

    def _alpha_loss(self, log_prob: Tensor) -> Tensor:
        if self.coefficient is None:
            return super()._alpha_loss(log_prob)
        return self.coefficient.loss(log_prob, torch.zeros_like(log_prob))


class FlatSoftUpdate(SoftUpdate):
    """TorchRL's target step as one call over all tensors."""

    def __init__(self, loss: SACLoss, tau: float) -> None:
        super().__init__(loss, tau=tau)
        self.tau = tau
        self._flat = [
            [value.data for value in tree.values(True, True)]
            for tree in (self._targets, self._sources)
        ]

    def step(self) -> None:
        """Move every target by ``tau`` towards its source."""
        torch._foreach_lerp_(*self._flat, self.tau)


class SoftActorCritic:
    """SAC (Haarnoja et al. 2018, arXiv:1812.05905) with a cloning term on demonstrations.

    With ``target_reduction="subset"``, ``actor_reduction="mean"``, more heads and half of every
    minibatch from demonstrations it is RLPD (Ball et al. 2023, arXiv:2302.02948).

    Differs: the actor also pays ``cloning_weight`` × its cloning error on chunks of the *replay*
    (not on its own), so that a good start is not forgotten while Q is young (0: no such term).

    Args:
        actor: TorchRL actor reading ``"features"``, writing the chunk, with a ``cloning_error``
            (squared error of a Gaussian's location, flow matching of a flow actor).
        q_heads: E critics ``(features, chunk) -> [*, 1]``, each with its own initialisation.
        encode: maps a batch to features ``[B, F]``, used when the batch holds none.
        gamma: discount per control step.
        alpha: initial entropy coefficient, > 0.
        alpha_kind: ``"exp"`` or ``"softplus"`` of the learned number; ``None``, as the next two,
            for an alpha that stays (a flow actor's entropy is a constant: nothing to learn).
        target_entropy: in nats, of the ``entropy_unit``.
        entropy_unit: ``"chunk"``: all ``H × A`` numbers; ``"executed_number"``: of each number that
            was executed, so that the tail of a chunk that ended early counts neither in the entropy
            nor in its target.
        target_reduction: how the targets of the ensemble make one value.
        target_subset: members drawn per update with ``"subset"`` (REDQ, arXiv:2101.05982).
        actor_reduction: the same for the actor's Q, ``"min"`` or ``"mean"``.
        tau: target network step, in (0, 1].
        cloning_weight: weight of the cloning term, 0 or more.
        cloned_rows: whose chunks it copies, see
            :func:`~torchrl_vla.objectives.critics.cloned_steps`; ``None`` with weight 0.
        critic_only_updates: updates before the actor and alpha move.
        actor_interval: updates per actor update.

    Raises:
        ValueError: a setting is out of its range or is not used by the others.
    """

    def __init__(
        self,
        actor: TensorDictModule,
        q_heads: Sequence[nn.Module],
        encode: Callable[[TensorDictBase], Tensor],
        *,
        gamma: float,
        alpha: float = 1e-3,
        alpha_kind: AlphaKind | None = "exp",
        target_entropy: float | None = -20.0,
        entropy_unit: EntropyUnit | None = "chunk",
        target_reduction: ReductionKind = "min",
        target_subset: int | None = None,
        actor_reduction: Literal["min", "mean"] = "min",
        tau: float = 0.01,
        cloning_weight: float = 0.5,
        cloned_rows: ClonedRows | None = "demonstrations",
        critic_only_updates: int = 400,
        actor_interval: int = 1,
    ) -> None:
        check_common(gamma, tau, critic_only_updates, actor_interval)
        if cloning_weight < 0:
            raise ValueError(f"cloning_weight is {cloning_weight}; 0 switches the term off")
        if cloned_rows not in ("all", "demonstrations", "successes", None):
            raise ValueError(
                f"cloned_rows is {cloned_rows!r}; use 'all', 'demonstrations', 'successes' or null"
            )
        if (cloned_rows is None) != (cloning_weight == 0):
            raise ValueError(
                f"cloned_rows is {cloned_rows!r} with cloning_weight {cloning_weight}; give rows "
                "exactly if the term has a weight, otherwise null"
            )
        _check_alpha(alpha, alpha_kind, target_entropy, entropy_unit)
        if actor_reduction == "subset":
            raise ValueError("actor_reduction is 'subset'; the actor climbs 'min' or 'mean'")
        self.encode, self.actor = encode, actor
        self.target_entropy, self.entropy_unit = target_entropy, entropy_unit
        self.learns_alpha = alpha_kind is not None
        self.cloning_weight, self.cloned_rows = cloning_weight, cloned_rows
        self.critic_only_updates, self.actor_interval = critic_only_updates, actor_interval
        self.updates = 0
        self.ensemble = Ensemble(q_heads)
        self.loss = EnsembleSACLoss(
            actor,
            self.ensemble,
            gamma=gamma,
            alpha=alpha,
            alpha_kind=alpha_kind,
            of_target=Reduction(target_reduction, target_subset, len(q_heads)),
            of_actor=Reduction(actor_reduction, None, len(q_heads)),
        )
        self.targets = FlatSoftUpdate(self.loss, tau)
        self.state = self._named_state()

    def _named_state(self) -> nn.Module:
        """Return a plain module over the same tensors, which a checkpoint can name.

        It holds everything of SAC that is not the policy: Q ensemble, targets, a learned alpha.
        """
        name = "log_alpha" if self.loss.coefficient is None else "raw_alpha"
        state = nn.Module()
        for parameter in self.alpha_parameters:
            state.register_parameter(name, parameter)
        state.q, state.target = self.ensemble.online, self.ensemble.target
        return state

    @property
    def actor_parameters(self) -> list[nn.Parameter]:
        """Trainable parameters of the actor's head."""
        return [p for p in self.actor.parameters() if p.requires_grad]

    @property
    def critic_parameters(self) -> list[nn.Parameter]:
        """Trainable parameters of the Q ensemble."""
        return list(self.ensemble.online.parameters())

    @property
    def alpha_parameters(self) -> list[nn.Parameter]:
        """The entropy coefficient's parameter; empty if alpha stays."""
        if not self.learns_alpha:
            return []
        coefficient = self.loss.coefficient
        return [self.loss.log_alpha if coefficient is None else coefficient.raw]

    def after_step(self) -> None:
        """Move the target networks; call after every optimizer step."""
        self.targets.step()
        self.updates += 1

    def counts(self, batch: TensorDictBase) -> dict[str, Tensor]:
        """Return the numbers of rows by kind, and of cloned numbers."""
        return row_counts(batch, self.cloned_rows)

    def __call__(self, batch: TensorDictBase, totals: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the loss terms that are due, and statistics.

        ``loss_critic`` always; ``loss_actor``, ``loss_alpha`` (if it is learned) and
        ``loss_cloning`` when the actor moves.
        """
        self.loss.update = self.updates
        due = self.updates >= self.critic_only_updates and not self.updates % self.actor_interval
        source = batch.get(ACTOR_ROWS, None)
        features, following = encoded(batch, self.encode)
        # One pass of the head serves the fill and the actor's terms.
        choices = self._choices(features.detach(), gradient=due and source is None)
        with torch.no_grad():
            fresh = self.actor.get_dist(choices).sample()
        chunk = fill_unexecuted(batch[schema.CHUNK], batch[schema.EXECUTED_MASK], fresh)
        rows = loss_rows(batch, features, following, chunk)
        out = self._critic_terms(rows, batch, totals)
        if not due:
            return out
        if source is None:
            return out | self._actor_terms(choices, batch, totals)
        with torch.no_grad():
            features, _ = encoded(source, self.encode, following=False)
        return out | self._actor_terms(self._choices(features, gradient=True), source, totals)

    def _choices(self, features: Tensor, *, gradient: bool) -> TensorDict:
        """Return ``features`` with what the actor's distribution there keeps for another call."""
        rows = TensorDict({FEATURES: features}, batch_size=features.shape[:-1])
        with torch.set_grad_enabled(gradient):
            self.actor.get_dist(rows)
        return rows

    def _critic_terms(
        self, rows: TensorDict, batch: TensorDictBase, totals: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        share = len(batch) / totals["rows"]
        loss_critic, info = self.loss.qvalue_v2_loss(rows)
        return {
            "loss_critic": share * loss_critic,
            "td_error": share * info["td_error"].mean(),
            **({"alpha": share * self.loss._alpha} if self.learns_alpha else {}),
            **q_statistics(self.loss.online, batch, totals),
        }

    def _actor_terms(
        self, rows: TensorDict, batch: TensorDictBase, totals: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        share = len(batch) / totals["rows"]
        loss_actor, info = self.loss.actor_loss(rows)
        out = {
            "loss_actor": share * loss_actor,
            "entropy": -share * info["log_prob"].mean(),
        }
        if self.learns_alpha:
            excess = self._entropy_excess(rows, batch, info["log_prob"])
            out["loss_alpha"] = share * self.loss.alpha_loss(excess).mean()
        if self.cloned_rows is not None:
            error = self.actor.cloning_error(rows, batch[schema.CHUNK])
            cloned = action_mask(cloned_steps(batch, self.cloned_rows), error.shape[-1])
            cloning = masked_sum(error, cloned) / totals["cloned"].clamp_min(1)
            out["loss_cloning"] = self.cloning_weight * cloning
        return out

    def _entropy_excess(self, rows: TensorDict, batch: TensorDictBase, log_prob: Tensor) -> Tensor:
        """Return log-prob plus target entropy ``[B]``: above 0 where entropy is below target."""
        if self.entropy_unit == "chunk":
            return log_prob + self.target_entropy
        numbers = self.actor.get_dist(rows).drawn_log_probs()
        executed = batch[schema.EXECUTED_MASK].unsqueeze(-1)
        wanted = target_entropy(batch[schema.NUM_EXECUTED], numbers.shape[-1], self.target_entropy)
        return torch.where(executed, numbers, 0).flatten(1).sum(-1) + wanted.squeeze(-1)


def _check_alpha(
    alpha: float,
    kind: AlphaKind | None,
    target: float | None,
    unit: EntropyUnit | None,
) -> None:
    if alpha <= 0:
        raise ValueError(f"alpha is {alpha}; it must be above 0")
    given = {"alpha_kind": kind, "target_entropy": target, "entropy_unit": unit}
    if 0 < sum(value is None for value in given.values()) < len(given):
        raise ValueError(f"{given}: give all three for a learned alpha, or null for one that stays")
    if unit not in ("chunk", "executed_number", None):
        raise ValueError(f"entropy_unit is {unit!r}; expected 'chunk' or 'executed_number'")
