"""A policy copy that chooses actions and says with which version of the weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase

from torchrl_vla import schema
from torchrl_vla.actors.memory import SharedMemory
from torchrl_vla.actors.weights import Subscriber


class WeightSource(Protocol):
    """Where newer weights come from (:class:`~torchrl_vla.actors.weights.Subscriber`)."""

    def take(self, destination: TensorDictBase) -> int | None:
        """Copy the newest weights into ``destination``; ``None`` if it has them already."""


class Behaviour(TensorDictModuleBase):
    """Stamps ``policy_version`` on every decision; never mixes two versions in one.

    New weights are taken before a forward pass, by the thread that runs it.

    Args:
        policy: acts.
        subscriber: where newer weights come from; ``None`` keeps the policy as it is.
    """

    def __init__(
        self, policy: TensorDictModuleBase, subscriber: WeightSource | None = None
    ) -> None:
        super().__init__()
        self.policy, self.subscriber = policy, subscriber
        self.version = 0
        self.in_keys = policy.in_keys
        self.out_keys = [*policy.out_keys, schema.POLICY_VERSION]
        self._weights = TensorDict.from_module(policy).data

    @torch.no_grad()
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Take newer weights if there are any, let the policy act and stamp the decision."""
        if self.subscriber is not None:
            version = self.subscriber.take(self._weights)
            self.version = self.version if version is None else version
        tensordict = self.policy(tensordict)
        version = torch.full((*tensordict.batch_size, 1), self.version, dtype=torch.int64)
        return tensordict.set(schema.POLICY_VERSION, version)


def make_behaviour(
    make_policy: Callable[[], TensorDictModuleBase], weights: SharedMemory, device: str = "cpu"
) -> Behaviour:
    """Build a copy of the policy that takes what the learner publishes into ``weights``."""
    # moved first: a module that moves later would have other buffers than those it writes to
    return Behaviour(make_policy().to(device), Subscriber(weights))
