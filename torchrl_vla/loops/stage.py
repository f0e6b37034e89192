"""A supervised stage of a run: minibatches in an order that can be saved, updates, saves, export.

What is drawn from is made again when a run is resumed, from the same seed; where the draws were is
in the checkpoint, so that a run that was stopped ends with the weights of one that was not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from torchrl_vla.actors import load_full_weights
from torchrl_vla.learner import Learner
from torchrl_vla.loops.run import Run
from torchrl_vla.metrics import EVAL_SUCCESS
from torchrl_vla.policies.shard import full_weights
from torchrl_vla.policies.weights import load_weights, save_weights


class Draws:
    """Indices of samples, minibatch after minibatch, from one generator that can be saved.

    Args:
        batch_size: of a minibatch.
        seed: of the generator.
    """

    def __init__(self, batch_size: int, seed: int) -> None:
        self.batch_size = batch_size
        self.generator = torch.Generator().manual_seed(seed)
        self.order = torch.zeros(0, dtype=torch.int64)

    def uniform(self, count: int) -> Tensor:
        """Return int64 ``[batch_size]`` in ``[0, count)``, each independent of the others."""
        return torch.randint(count, (self.batch_size,), generator=self.generator)

    def shuffled(self, count: int) -> Tensor:
        """Return the next int64 ``[batch_size]`` of a pass over ``count`` in random order.

        What is left of a pass and is smaller than a minibatch is left out.
        """
        if len(self.order) < self.batch_size:
            self.order = torch.randperm(count, generator=self.generator)
        index, self.order = self.order[: self.batch_size], self.order[self.batch_size :]
        return index

    def state_dict(self) -> dict[str, Tensor]:
        """Return where the draws are."""
        return {"order": self.order.clone(), "generator": self.generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on where ``state`` was."""
        self.order = state["order"]
        self.generator.set_state(state["generator"])


@dataclass
class Stage:
    """One supervised stage of a run: its learner, its draws, what a checkpoint holds.

    Args:
        run: the run.
        policy: what is trained, perhaps sharded.
        evaluated: a whole copy of it.
        learner: of ``policy``.
        draws: which samples are next.
        updates: to take in all.
    """

    run: Run
    policy: nn.Module
    evaluated: nn.Module
    learner: Learner
    draws: Draws
    updates: int

    def begin(self, resume: bool) -> None:
        """Check the disk, and go on from the last checkpoint if that is wanted; collective."""
        loaded = self.run.begin(self._state(), resume)
        if loaded is None:
            return
        self.learner.updates = min(self.run.counters["updates"], self.updates)
        if loaded["rank_tensors"] is not None:  # as many ranks as there were
            names = self.draws.state_dict()
            self.draws.load_state_dict({name: loaded["rank_tensors"][name] for name in names})

    def _state(self) -> dict[str, Any]:
        return {
            "modules": {"policy": self.policy, "evaluated": self.evaluated},
            "optimizers": {"learner": (self.learner.optimizer, [self.policy])},
        }

    def copy(self) -> None:
        """Bring the whole copy up to date; collective."""
        load_full_weights(self.evaluated, full_weights(self.policy))

    def save(self, *, last: bool = False) -> None:
        """Save a checkpoint, with the whole copy as it is; collective."""
        self.run.save(self._state() | {"rank_tensors": self.draws.state_dict()}, last=last)

    def fit(
        self,
        batch: Callable[[Draws], TensorDict],
        look: Callable[[], dict[str, float]] | None = None,
    ) -> None:
        """Take the updates that are left, until the run is over; collective.

        Args:
            batch: returns the next minibatch.
            look: evaluates, when the run says that it is time to.
        """
        run = self.run
        over = run.finished() or self.learner.updates >= self.updates
        while not over:
            metrics = self.learner.update(batch(self.draws))
            run.counters["updates"] = self.learner.updates
            over = run.finished() or self.learner.updates >= self.updates
            if look is not None and not over and run.evaluation_due():
                metrics |= look()
            if self.learner.updates % 20 == 0 or over or EVAL_SUCCESS in metrics:
                run.record(metrics)
            if not over and run.save_due():
                self.copy()
                self.save()
        if run.interrupted:
            self.copy()
            self.save(last=True)

    def export(self, recipe: dict[str, Any]) -> None:
        """Write the policy as ``policy.safetensors`` into the run's folder; collective.

        Weights are rounded to bfloat16 in the file, which halves it; the whole copy has them as
        they will load from there.
        """
        self.copy()
        path, whole = self.run.folder / "policy.safetensors", self.evaluated
        vocabulary = whole.model.vocabulary
        if self.run.topology.is_main:
            save_weights(
                path,
                modules=whole.parts(),
                vocabulary=vocabulary,
                recipe=recipe,
                dtype=torch.bfloat16,
            )
        self.run.topology.barrier()
        load_weights(path, vocabulary=vocabulary, **whole.parts())
