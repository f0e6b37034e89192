"""What every Q-learning objective on pooled features shares: rows, ensemble, statistics.

A minibatch comes from ``replay.ReplayFeed``: with cached features, or with observations that
``encode`` maps to features. One decision is one step: its discount is ``gamma ** steps`` and its
action the whole chunk.

Legend: ``*`` batch dims, ``B`` rows, ``F`` features, ``H`` steps per chunk, ``A`` action dims,
``E`` ensemble members, ``S`` sampled actions.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Protocol

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from torchrl_vla import schema
from torchrl_vla.objectives.off_policy import reduce_ensemble

FEATURES = "features"
STEPS = "steps_to_next_obs"
OUTCOME = "outcome"
"""int8 ``[*, 1]``: how the row's episode ended, 1 success, 0 failure, -1 not known yet."""
ACTOR_ROWS = "actor_rows"
"""A second minibatch of the same length, for the actor's terms alone (optional)."""
CHUNK, NEXT_FEATURES = "chunk", "next_features"
"""The filled chunk, and features of the next observation, inside an objective (nested keys cost a
lookup per access)."""
DEMONSTRATION = -1
"""``policy_version`` of transitions that no policy chose."""

ReductionKind = Literal["min", "mean", "subset"]
ClonedRows = Literal["all", "demonstrations", "successes"]


class ActorCritic(Protocol):
    """What the off-policy loop asks of an objective besides being one of the learner's.

    A new algorithm is a class like this and a YAML file; the loop stays as it is.
    """

    critic_only_updates: int
    """Updates before the actor moves (its warm-up begins there)."""
    updates: int
    """Optimizer steps so far; a resume sets it."""
    state: nn.Module
    """Everything of the algorithm that is not the policy, by name, for checkpoints."""

    @property
    def actor_parameters(self) -> list[nn.Parameter]:
        """What the actor's terms train."""

    @property
    def critic_parameters(self) -> list[nn.Parameter]:
        """What the critic's terms train besides the trunk."""

    @property
    def alpha_parameters(self) -> list[nn.Parameter]:
        """The entropy coefficient's parameter; empty without one."""

    def after_step(self) -> None:
        """Move targets; called after every optimizer step."""


class Ensemble:
    """E Q heads, the same without gradient to their parameters, and their targets.

    The members run one after the other as plain modules: on a CPU core one batched matrix product
    over them is slower (its backward transposes), and swapping parameters into a functional module
    costs more than a layer of a head.

    Args:
        heads: ``(features [*, F], chunk [S*, *, H, A]) -> [S*, *, 1]``, at least 2, each with its
            own initialisation. They are trained in place.

    Raises:
        ValueError: fewer than 2 heads.
    """

    def __init__(self, heads: Sequence[nn.Module]) -> None:
        if len(heads) < 2:
            raise ValueError(f"{len(heads)} critic given; use an ensemble of at least 2 (q_heads)")
        self.online = nn.ModuleList(heads)
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.frozen = copy.deepcopy(self.online).requires_grad_(False)
        for twin, source in zip(self.frozen.parameters(), self.online.parameters(), strict=True):
            twin.data = source.data

    @staticmethod
    def values(
        heads: nn.ModuleList, features: Tensor, chunk: Tensor, members: Sequence[int] | None = None
    ) -> Tensor:
        """Return ``[E, *, 1]``.

        Args:
            heads: :attr:`online`, :attr:`frozen` or :attr:`target`.
            features: ``[*, F]``.
            chunk: ``[*, H, A]``; more leading dims for several candidates per state.
            members: which members to evaluate; ``None``: all.
        """
        chosen = heads if members is None else [heads[member] for member in members]
        return torch.stack([head(features, chunk) for head in chosen])


class Reduction:
    """How one value is made of an ensemble's; the drawn subset belongs to an update.

    Args:
        kind: see :func:`~torchrl_vla.objectives.off_policy.reduce_ensemble`.
        subset: members of a random subset; only with ``kind="subset"``.
        members: size of the ensemble.

    Raises:
        ValueError: unknown kind, or a subset that is missing, unused or larger than the ensemble.
    """

    def __init__(self, kind: ReductionKind, subset: int | None, members: int) -> None:
        if kind not in ("min", "mean", "subset"):
            raise ValueError(f"reduction is {kind!r}; expected 'min', 'mean' or 'subset'")
        if (subset is not None) != (kind == "subset"):
            raise ValueError(
                f"subset is {subset} with reduction {kind!r}; give a number of members exactly "
                "with 'subset', otherwise null"
            )
        if subset is not None and not 1 <= subset <= members:
            raise ValueError(f"subset is {subset}; the ensemble has 1..{members} members")
        self.kind, self.subset, self.size = kind, subset, members
        self._generator = torch.Generator()

    def members(self, update: int) -> list[int] | None:
        """Return the members that count at ``update``; ``None``: all.

        The draw depends on nothing else, so that it is the same in every micro-batch and on every
        rank of an update, and after a resume.
        """
        if self.subset is None:
            return None
        self._generator.manual_seed(update)
        return torch.randperm(self.size, generator=self._generator)[: self.subset].tolist()

    def __call__(self, q: Tensor) -> Tensor:
        """Reduce ``[E, *, 1]`` of the counting members to ``[*, 1]``."""
        return reduce_ensemble(q, "mean" if self.kind == "mean" else "min")


def check_common(gamma: float, tau: float, critic_only_updates: int, actor_interval: int) -> None:
    """Refuse what no actor-critic of this family can use.

    Raises:
        ValueError: a setting is out of its range.
    """
    if not 0 < gamma <= 1:
        raise ValueError(f"gamma is {gamma}; it must be in (0, 1]")
    if not 0 < tau <= 1:
        raise ValueError(f"tau is {tau}; it must be in (0, 1]")
    if critic_only_updates < 0:
        raise ValueError(f"critic_only_updates is {critic_only_updates}; it is at least 0")
    if actor_interval < 1:
        raise ValueError(f"actor_interval is {actor_interval}; it is at least 1")


def cloned_steps(batch: TensorDictBase, rows: ClonedRows) -> Tensor:
    """Return which steps a cloning term copies: executed ones of the rows that are worth it.

    Args:
        batch: the minibatch.
        rows: ``"all"``, ``"demonstrations"``, or ``"successes"``: demonstrations and the policy's
            own decisions in episodes known to have succeeded.

    Returns:
        ``[B, H]`` bool.
    """
    executed = batch[schema.EXECUTED_MASK]
    if rows == "all":
        return executed
    worth = batch[schema.POLICY_VERSION] == DEMONSTRATION
    return executed & (worth | (batch[OUTCOME] == 1) if rows == "successes" else worth)


def row_counts(batch: TensorDictBase, cloned: ClonedRows | None) -> dict[str, Tensor]:
    """Return how many rows there are, of which kind, and how many numbers are cloned.

    Args:
        batch: the minibatch.
        cloned: see :func:`cloned_steps`; ``None``: there is no cloning term.
    """
    where = batch[schema.REWARD].device
    counts = {"rows": torch.full((), len(batch), device=where)}
    if cloned is not None:
        source = batch.get(ACTOR_ROWS, batch)
        counts["cloned"] = cloned_steps(source, cloned).sum() * source[schema.CHUNK].shape[-1]
    outcome = batch.get(OUTCOME, None)
    if outcome is not None:
        counts |= {"succeeded": (outcome == 1).sum(), "failed": (outcome == 0).sum()}
    return counts


def encoded(
    batch: TensorDictBase, encode: Callable[[TensorDictBase], Tensor], *, following: bool = True
) -> tuple[Tensor, Tensor | None]:
    """Return features ``[B, F]`` of the observations and, without gradient, of the next ones.

    Args:
        batch: holds features, or observations to encode.
        encode: batch of observations → ``[B, F]``.
        following: ``False`` leaves the next ones out.
    """
    features = batch.get(FEATURES, None)
    if features is not None:
        return features, batch["next", FEATURES] if following else None
    features = encode(batch)
    if not following:
        return features, None
    with torch.no_grad():
        after = batch["next"].copy()
        after[schema.TASK_ID] = batch[schema.TASK_ID]
        return features, encode(after)


def fill_unexecuted(chunk: Tensor, executed_mask: Tensor, fresh: Tensor) -> Tensor:
    """Return the chunks with never-executed numbers replaced by fresh samples of the policy.

    What was not executed cannot have caused the reward, so Q must learn to ignore it. Chunks end
    early only where episodes end; zeros or noise there would mark those states, and Q would prefer
    actions that look like the end of an episode.

    Args:
        chunk: ``[B, H, A]``.
        executed_mask: ``[B, H]`` bool.
        fresh: ``[B, H, A]``, the policy's choice in those states, without gradient.
    """
    return torch.where(executed_mask.unsqueeze(-1), chunk, fresh)


def loss_rows(
    batch: TensorDictBase, features: Tensor, next_features: Tensor, chunk: Tensor
) -> TensorDict:
    """Return what a Bellman loss reads of a minibatch, flat, and nothing else."""
    steps = batch.get(STEPS, None)
    return TensorDict(
        {
            FEATURES: features,
            NEXT_FEATURES: next_features,
            CHUNK: chunk,
            STEPS: batch.get(schema.NUM_EXECUTED) if steps is None else steps,
            "reward": batch.get(schema.REWARD),
            "terminated": batch.get(schema.TERMINATED),
        },
        batch_size=batch.batch_size,
    )


def q_statistics(
    q: Tensor, batch: TensorDictBase, totals: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return statistics of Q values that the loss has computed anyway.

    Args:
        q: ``[E, B, 1]`` of the stored chunks.
        batch: the minibatch.
        totals: :func:`row_counts` over all micro-batches and ranks.

    Returns:
        ``q_mean``; ``q_std``: spread over the members, mean over rows; ``q_success`` and
        ``q_failure``: means over rows of episodes that ended so, NaN if the minibatch has none;
        ``demonstration_share`` of the rows.
    """
    rows, q = totals["rows"], q.detach()
    value = q.mean(0)
    shown = (batch[schema.POLICY_VERSION] == DEMONSTRATION).sum()
    out = {
        "q_mean": value.sum() / rows,
        "q_std": q.std(0, correction=0).sum() / rows,
        "demonstration_share": shown / rows,
    }
    outcome = batch.get(OUTCOME, None)
    if outcome is not None:
        out["q_success"] = (value * (outcome == 1)).sum() / totals["succeeded"]
        out["q_failure"] = (value * (outcome == 0)).sum() / totals["failed"]
    return out
