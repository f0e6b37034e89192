"""A policy in a process of its own, and the module by which simulator processes call it.

What the room is for: a policy that is too large for a copy in every actor. It is TorchRL's
inference server (``ProcessInferenceServer``) over fixed slots in shared memory: a request costs two
copies and no pickling. What the room does not do: start simulators or decide when to publish.

    simulator process ──observations──▶ slot ─┐  a batch: as many requests as one group has,
    simulator process ──observations──▶ slot ─┤  or fewer when ``window`` is over
    simulator process ◀──actions────── slot ◀─┴─ policy, one forward pass per batch

Simulation and inference overlap when there are several groups of clients: while the policy works
for one, the others simulate. Give every core two processes with half of the simulators each; the
core is busy with one while the other waits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import nn
from torchrl.modules.inference_server import (
    PolicyClientModule,
    ProcessInferenceServer,
    ProcessSlotTransport,
)


class RemotePolicy(TensorDictModuleBase):
    """Stands for a policy that acts in another process; picklable, one per simulator process.

    Called like the policy itself: reads ``in_keys``, writes ``out_keys`` into its argument. The
    exploration type of the caller travels with the request.

    Args:
        client: TorchRL's client of one slot.
        in_keys: what is sent.
        out_keys: what comes back.
    """

    def __init__(self, client: Any, in_keys: list, out_keys: list) -> None:
        super().__init__()
        self.in_keys, self.out_keys = in_keys, out_keys
        self.client = PolicyClientModule(client, in_keys=in_keys, out_keys=out_keys)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Let the policy act on ``tensordict`` (its batch size is that of the example request).

        Raises:
            RuntimeError: the server is gone, or the policy raised (its own exception).
        """
        return tensordict.update(self.client(tensordict.select(*self.in_keys)))


class PolicyServer:
    """One policy, many clients; ``with`` starts and stops its process.

    Args:
        make_policy: picklable; builds the policy in the server's process. What it stamps on its
            answers (``policy_version``) belongs to the weights it has.
        request: example of what a client sends, ``[N]`` simulators; its keys, shapes and dtypes
            are those of every request (CPU).
        response: example of what a client gets back, ``[N]``.
        clients: number of simulator processes.
        groups: parts of the clients that take turns; the policy waits for ``clients / groups``
            requests before it acts. 1: simulators and policy alternate.
        window: seconds that a request waits at most for others to join its batch.
        device: of the policy.

    Raises:
        ValueError: ``groups`` does not divide ``clients``, or ``window`` is not positive.
    """

    def __init__(
        self,
        make_policy: Callable[[], nn.Module],
        request: TensorDictBase,
        response: TensorDictBase,
        *,
        clients: int,
        groups: int = 2,
        window: float = 0.02,
        device: str = "cpu",
    ) -> None:
        if clients < 1 or groups < 1 or clients % groups:
            divisors = [n for n in range(1, clients + 1) if clients % n == 0]
            raise ValueError(
                f"groups is {groups} with {clients} clients; it must divide them: use one of "
                f"{divisors}"
            )
        if window <= 0:
            raise ValueError(f"window is {window} s; it must be above 0 (0.02, say)")
        self._keys = [list(td.keys(True, True)) for td in (request, response)]
        transport = ProcessSlotTransport(request, response, num_slots=clients)
        self._policies = [RemotePolicy(transport.client(), *self._keys) for _ in range(clients)]
        self._server = ProcessInferenceServer(
            policy_factory=make_policy,
            transport=transport,
            # Exactly one group at a time: a batch of everybody would make all wait for one another.
            max_batch_size=clients // groups,
            min_batch_size=clients // groups,
            timeout=window,
            policy_device=device,
            policy_version_key=None,
        )

    def policy(self, client: int) -> RemotePolicy:
        """Return the policy for simulator process ``client``, which alone uses it."""
        return self._policies[client]

    def publish(self, weights: TensorDict) -> None:
        """Give the policy new weights, between two batches; returns when it has them.

        Args:
            weights: whole weights, nested like ``TensorDict.from_module`` of what ``make_policy``
                builds (version included, if that is one of its buffers).

        Raises:
            RuntimeError: the server is not alive, or the weights do not fit.
            TimeoutError: it did not take them.
        """
        self._server.update_model_weights(weights)

    def stats(self) -> dict[str, float]:
        """Return TorchRL's counters since the last call: requests, batches, sizes, times in ms."""
        return self._server.stats(reset=True)

    @property
    def pid(self) -> int | None:
        """Process id of the server."""
        return self._server.health()["pid"]

    def __enter__(self) -> PolicyServer:
        self._server.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.shutdown()


def examples(
    policy: nn.Module, observation: TensorDictBase
) -> tuple[TensorDictBase, TensorDictBase]:
    """Return an example request and response of ``policy``.

    Args:
        policy: any copy of the policy that will be served (the learner's whole copy, say).
        observation: what a simulator process sees after a reset, ``[N]``.
    """
    request = observation.select(*policy.in_keys).clone()
    with torch.no_grad():
        answer = policy(request.clone())
    return request, answer.select(*policy.out_keys).clone()
