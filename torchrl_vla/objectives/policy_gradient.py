"""The on-policy family as ONE objective, composed of an advantage estimator and loss options.

PPO, GRPO, RLOO, REINFORCE++ and their asynchronous relatives differ in how a decision is judged
(:mod:`~torchrl_vla.objectives.credit`) and in a few terms of the loss; nothing else knows which of
them runs. ``credit`` judges a round once, the call gives the loss of a micro-batch. Policy and
value come from one pass of the trunk.

The surrogate is :func:`~torchrl_vla.objectives.ppo.clipped_surrogate`, not TorchRL's
``ClipPPOLoss``, which it equals where both apply (a test holds them together): that loss has no
dual clip, no ratio of a whole chunk with masked numbers and no ratio to a third policy, and it
computes the log-probs once more beside those that the diagnostics and the KL term need.

Legend: ``N`` envs, ``T`` decisions, ``M`` decisions of whole trajectories, ``B`` rows of a
micro-batch, ``H`` steps per chunk, ``A`` action dims.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from torchrl_vla import schema
from torchrl_vla.objectives.credit import COUNTED, NEXT_VALUE, PROXIMAL, VALID, VALUE
from torchrl_vla.objectives.groups import trajectory_weight
from torchrl_vla.objectives.masks import action_mask
from torchrl_vla.objectives.options import Options
from torchrl_vla.objectives.ppo import (
    approx_kl,
    clip_fraction,
    clipped_surrogate,
    explained_variance,
    kl_estimate,
    log_ratio,
    truncated_importance_weight,
    value_loss,
)
from torchrl_vla.objectives.reduction import (
    global_max,
    global_sum,
    masked_mean,
    masked_sum,
    per_number,
)
from torchrl_vla.objectives.trajectories import Trajectories, padded, void_episodes

ADVANTAGE, TARGET = "advantage", "value_target"
LAG, WEIGHT, REFERENCE = "lag", "loss_weight", "reference_log_probs"
SCORED_ROWS = 256
"""Decisions of one forward pass when a whole round is scored without gradient."""


def device_of(policy: nn.Module) -> torch.device:
    """Return where ``policy`` computes; a round is judged where it lies, on the host."""
    # Parameters may be sharded and kept in host memory; a buffer is where it is used.
    return next(chain(policy.buffers(), policy.parameters())).device


@torch.no_grad()
def score(policy: nn.Module, rows: TensorDictBase) -> tuple[Tensor, Tensor]:
    """Score stored actions of many rows ``[M]``, some at a time.

    Returns:
        Log-probs ``[M, H, A]`` and values ``[M, 1]``, where ``rows`` lie.
    """
    device, log_probs, values = device_of(policy), [], []
    for part in rows.split(SCORED_ROWS):
        given = part.select(*policy.in_keys, policy.action_key).to(device)
        scored = policy.score(given.select(*policy.in_keys))
        log_prob = policy.get_dist(scored).log_prob(given[policy.action_key])
        home = part[schema.LOG_PROBS].device
        log_probs.append(log_prob.to(home))
        values.append(scored[VALUE].to(home))
    return torch.cat(log_probs), torch.cat(values)


@dataclass(eq=False)
class PolicyGradient(Options):
    """Clipped policy gradient (Schulman et al. 2017, arXiv:1707.06347, eq. 7 and 9).

    See :class:`~torchrl_vla.objectives.options.Options` for the arguments.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.rounds = 0
        """Rounds that were trained on."""
        self.trajectories = None
        if self.advantage.whole_trajectories:
            self.trajectories = Trajectories(
                self.group_size, self.largest_lag, contrast_only=self.dynamic_sampling
            )
        self._gap: Tensor | None = None
        self._seen = dict.fromkeys(("void", "given_up", "groups", "without_contrast"), 0)

    @cached_property
    def reference(self) -> nn.Module | None:
        """The frozen start policy, if there is a KL penalty; made when it is first asked for."""
        return self.make_reference() if self.kl_weight > 0 else None

    @property
    def held(self) -> int:
        """Decisions of unfinished trajectories and groups that are held back on this rank."""
        return 0 if self.trajectories is None else self.trajectories.held

    # -- credit -----------------------------------------------------------------------------------

    def credit(
        self, rollout: TensorDictBase, version: int
    ) -> tuple[TensorDictBase, dict[str, float]]:
        """Judge a round; collective.

        Args:
            rollout: ``[N, T]`` as collected; keys are added to it.
            version: the learner's, which lag is counted from.

        Returns:
            Rows to train on, equally many on every rank, and the round's metrics (equal on every
            rank): ``[N, T]``, or ``[1, M]`` decisions of whole trajectories. ``[0]`` rows if
            nothing is complete yet: collect another round.
        """
        rows, facts = self._rows(rollout, version)
        if rows is None:
            return rollout.reshape(-1)[:0], {}
        self.rounds += 1
        self._gap = torch.tensor(-1.0)
        rows[LAG] = version - rows[schema.POLICY_VERSION]
        rows[VALID] = rows[COUNTED] & (rows[LAG] <= self.largest_lag)
        self._score_round(rows)
        if self.uses_value:
            self._value_next_states(rollout, rows)
        advantage, target = self.advantage(rows, self.gamma)
        rows[ADVANTAGE] = advantage
        if target is not None:
            rows[TARGET] = target
            facts["explained_variance"] = explained_variance(rows[VALUE], target, rows[VALID])
            size = torch.stack([masked_sum(rows[VALUE], rows[VALID]), rows[VALID].sum()])
            total, number = global_sum(size)
            facts["value_mean"] = total / number.clamp_min(1)
        if self.weighting == "trajectory":
            size = rows[schema.NUM_EXECUTED] * rows[schema.CHUNK].shape[-1]
            rows[WEIGHT] = trajectory_weight(
                rows[schema.EPISODE_ID], rows[VALID], size if self.ratio == "token" else None
            )
        return rows, {name: float(value) for name, value in facts.items()} | self._ages(rows)

    def _rows(
        self, rollout: TensorDictBase, version: int
    ) -> tuple[TensorDictBase | None, dict[str, float]]:
        """Return the rows to judge, with ``counted``, and how much of what was dropped."""
        if self.trajectories is None:
            void = void_episodes(rollout)
            rollout[COUNTED] = ~void
            return rollout, {"dropped_void": float(global_sum(void.sum()))}
        held = self.trajectories
        if self.uses_value:
            unseen = rollout[schema.TRUNCATED].squeeze(-1)
            rollout[NEXT_VALUE] = self._values_after(rollout, unseen)
        kept = rollout.select(*self._keys(rollout)).reshape(-1)
        held.add(kept, version)
        number, world = global_sum(torch.tensor([held.num_ready, 1])).tolist()
        if number < max(1, self.min_groups * world):
            return None, {}
        rows = held.take()
        if rows is not None:
            rows[COUNTED] = rows[VALID] = torch.ones(len(rows), 1, dtype=torch.bool)
        most = int(global_max(torch.tensor(0 if rows is None else len(rows))))
        rows = padded(rows, kept[:1], most)
        return rows.unsqueeze(0), self._since_last_time()

    def _since_last_time(self) -> dict[str, float]:
        """Return what was dropped and compared since the last round, over all ranks."""
        now = {name: getattr(self.trajectories, name) for name in self._seen}
        change = torch.tensor([now[name] - self._seen[name] for name in now] + [self.held])
        self._seen = now
        void, given_up, groups, alike, held = global_sum(change).tolist()
        facts = {"dropped_void": void, "dropped_unfinished": given_up, "held_decisions": held}
        if self.advantage.compares_groups:
            facts["zero_contrast_fraction"] = alike / groups if groups else 0.0
        return facts

    def _keys(self, rollout: TensorDictBase) -> list[str | tuple[str, ...]]:
        """Keys that are worth keeping while a trajectory waits: all but the next observation."""
        own = [field.key for field in schema.SCHEMA if rollout.get(field.key, None) is not None]
        if self.policy.action_key not in own:  # a flow policy is scored by its denoising path
            own.append(self.policy.action_key)
        return [*own, *(key for key in (VALUE, NEXT_VALUE) if rollout.get(key, None) is not None)]

    def _score_round(self, rows: TensorDictBase) -> None:
        """Score a round under the start policy and under the version it starts from, if needed."""
        flat = rows.reshape(-1)
        if self.reference is not None:
            log_probs, _ = score(self.reference, flat)
            rows[REFERENCE] = log_probs.view_as(rows[schema.LOG_PROBS])
        if self.behaviour_cap is not None or self.advantage.corrects_behaviour:
            log_probs, value = score(self.policy, flat)
            rows[PROXIMAL] = log_probs.view_as(rows[schema.LOG_PROBS])
            if self.uses_value:
                rows[VALUE] = value.view(rows[VALID].shape)

    def _value_next_states(self, rollout: TensorDictBase, rows: TensorDictBase) -> None:
        """Write the value of every next state ``[N, T, 1]``.

        A decision's own value is known; only states that no later decision shows (cut off, or last
        in the row of a round) are evaluated, those of whole trajectories when they came.
        """
        following = torch.zeros_like(rows[VALUE])
        following[:, :-1] = rows[VALUE][:, 1:]
        if self.trajectories is not None:
            rows[NEXT_VALUE] = torch.where(rows[schema.DONE], rows[NEXT_VALUE], following)
            return
        unseen = rollout[schema.TRUNCATED].squeeze(-1).clone()
        unseen[:, -1] = True
        after = self._values_after(rollout, unseen)
        rows[NEXT_VALUE] = torch.where(unseen.unsqueeze(-1), after, following)

    def _values_after(self, rollout: TensorDictBase, where: Tensor) -> Tensor:
        """Return the value of the next state where ``[N, T]`` is set, else 0; ``[N, T, 1]``."""
        value = torch.zeros_like(rollout[VALUE])
        with torch.no_grad():
            states = rollout["next"][where].select(*self.policy.in_keys)
            value[where] = self.policy.value(states.to(device_of(self.policy))).to(value.device)
        return value

    def _ages(self, rows: TensorDictBase) -> dict[str, float]:
        """Return the lag of the decisions trained on, and the share that is trained on."""
        largest = self.largest_lag
        lags = rows[LAG][rows[VALID]]
        counts = torch.bincount(lags, minlength=largest + 1)
        counted, valid = rows[COUNTED].sum(), rows[VALID].sum()
        seen = global_sum(torch.cat([counts, torch.stack([counted, valid])])).double()
        counts, (counted, valid) = seen[:-2], seen[-2:]
        total = valid.clamp_min(1)
        shares = (counts / total).tolist()
        ages = torch.arange(largest + 1)
        return {
            "valid_fraction": float(valid / global_sum(torch.tensor(rows[VALID].numel()))),
            "dropped_stale": float(counted - valid),
            "policy_lag": float((ages * counts).sum() / total),
            "policy_lag_max": float(ages[counts > 0].max()) if valid else 0.0,
        } | {f"policy_lag_share/{age}": share for age, share in enumerate(shares)}

    def pop_gap(self) -> float:
        """Return ``ratio_gap``: the largest |log ratio| that this rank has seen since ``credit``.

        Over the executed numbers of decisions of the newest version, per number. Before the first
        update of a round it says how far learner and actors disagree about equal weights; NaN if
        no such decision was in the minibatch.
        """
        gap, self._gap = self._gap, None
        return math.nan if gap is None or gap < 0 else float(gap)

    # -- loss -------------------------------------------------------------------------------------

    def numbers(self, batch: TensorDictBase) -> Tensor:
        """Return ``[B, H, A]`` bool: numbers of the chunk that were executed and are data."""
        mask = action_mask(batch[schema.EXECUTED_MASK], batch[schema.CHUNK].shape[-1])
        return mask & batch[VALID].unsqueeze(-1)

    def _entries(self, numbers: Tensor) -> Tensor:
        """Return the mask of the ratios: ``[B, H, A]``, or ``[B, 1]`` per chunk."""
        return numbers if self.ratio == "token" else numbers.any(-1).any(-1, keepdim=True)

    def counts(self, batch: TensorDictBase) -> dict[str, Tensor]:
        """Return the number of executed numbers, valid decisions, ratios, and their weight."""
        numbers = self.numbers(batch)
        entries = self._entries(numbers)
        weight = entries.sum()
        if self.weighting == "trajectory":
            weight = masked_sum(per_number(batch[WEIGHT], entries), entries)
        return {
            "numbers": numbers.sum(),
            "decisions": batch[VALID].sum(),
            "entries": entries.sum(),
            "weight": weight,
        }

    def __call__(self, batch: TensorDictBase, totals: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the loss terms ``loss_*`` and the diagnostics of a micro-batch ``[B]``."""
        old_value = batch.get(VALUE, None)
        batch = self.policy.score(batch.copy())
        numbers = self.numbers(batch)
        dist = self.policy.get_dist(batch)
        new = dist.log_prob(batch[self.policy.action_key])
        out = self._diagnostics(batch, new.detach(), numbers, totals)
        entropy = dist.entropy()
        out["entropy"] = masked_mean(entropy.detach(), numbers, totals["numbers"])
        if self.uses_value:
            old = None if self.value_clip is None else old_value
            value = value_loss(batch[VALUE], batch[TARGET], old, self.value_clip)
            mean = masked_mean(value, batch[VALID], totals["decisions"])
            out["loss_value"] = self.value_weight * mean
        if self.rounds <= self.value_only_rounds:
            return out
        out["loss_policy"] = self._policy_loss(batch, new, numbers, totals)
        if self.entropy_weight:
            mean = masked_mean(entropy, numbers, totals["numbers"])
            out["loss_entropy"] = -self.entropy_weight * mean
        if self.reference is not None:
            far = kl_estimate(new, batch[REFERENCE], self.kl_kind)
            out["loss_kl"] = self.kl_weight * masked_mean(far, numbers, totals["numbers"])
        return out

    def _policy_loss(
        self, batch: TensorDictBase, new: Tensor, numbers: Tensor, totals: Mapping[str, Tensor]
    ) -> Tensor:
        proximal = batch.get(PROXIMAL, batch[schema.LOG_PROBS])
        ratio = log_ratio(new, proximal, numbers, self.ratio)
        entries = self._entries(numbers)
        loss = clipped_surrogate(
            ratio, batch[ADVANTAGE], self.clip_low, self.clip_high, self.dual_clip
        )
        if self.behaviour_cap is not None:
            off = log_ratio(proximal, batch[schema.LOG_PROBS], numbers, self.ratio)
            loss = loss * truncated_importance_weight(off, self.behaviour_cap)
        if self.weighting == "trajectory":
            loss = loss * per_number(batch[WEIGHT], entries)
        return masked_mean(loss, entries, totals["weight"])

    def _diagnostics(
        self, batch: TensorDictBase, new: Tensor, numbers: Tensor, totals: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Return what says how far policy, start of the round and behaviour policy are apart."""
        if self._gap is not None:
            fresh = numbers & (batch[LAG] <= 0).unsqueeze(-1)
            apart = torch.where(fresh, (new - batch[schema.LOG_PROBS]).abs(), -1.0)
            self._gap = torch.maximum(self._gap.to(apart.device), apart.amax())
        entries, total = self._entries(numbers), totals["entries"]
        behaviour = log_ratio(new, batch[schema.LOG_PROBS], numbers, self.ratio)
        proximal = batch.get(PROXIMAL, None)
        ratio = behaviour if proximal is None else log_ratio(new, proximal, numbers, self.ratio)
        weight = behaviour.double().exp()
        low, high = self.clip_low, self.clip_high
        return {
            "approx_kl": approx_kl(ratio, entries, total),
            "clip_fraction": clip_fraction(ratio, entries, low, high, total),
            "clip_fraction_low": clip_fraction(ratio, entries, low, math.inf, total),
            "clip_fraction_high": clip_fraction(ratio, entries, 1.0, high, total),
            "importance_mean": masked_mean(weight, entries, total),
            "importance_square": masked_mean(weight.square(), entries, total),
        }

    def finish(self, report: Mapping[str, float]) -> dict[str, float]:
        """Turn the sums of an update's report into ``effective_sample_size``, a share in (0, 1]."""
        done = dict(report)
        mean, square = done.pop("importance_mean"), done.pop("importance_square")
        done["effective_sample_size"] = mean**2 / square if square > 0 else math.nan
        return done
