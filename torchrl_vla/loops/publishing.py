"""New weights for whoever has a copy of the policy: the actors and the evaluated policy."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from torchrl_vla.actors import Actors, load_full_weights
from torchrl_vla.policies.shard import full_weights
from torchrl_vla.remote import RemoteActors


@dataclass
class Publishing:
    """Gathers the policy's weights and hands them on; after the first time only what is trained.

    Args:
        policy: of the learner, perhaps sharded.
        evaluated: the whole copy that evaluations use.
        workers: this rank's actors.
    """

    policy: nn.Module
    evaluated: nn.Module
    workers: Actors | RemoteActors
    _first: bool = field(default=True, init=False)

    def __call__(self, version: int, share: float = 1.0) -> None:
        """Publish; collective.

        Args:
            version: stamped on the decisions made with these weights.
            share: of the new weights in the evaluated copy, an exponential moving average below 1.
        """
        weights = full_weights(self.policy, trained_only=not self._first)
        self._first = False
        load_full_weights(self.evaluated, weights, share)
        self.workers.publish(weights, version)
