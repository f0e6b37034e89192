"""A rank's policy server: acts for all of its workers, with the weights that the learner publishes.

The server is a client of the same shared memory as a worker with its own copy would be: it takes
newer weights between two batches and stamps their version on every decision of the next one.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase

from torchrl_vla import schema
from torchrl_vla.actors.behaviour import Behaviour
from torchrl_vla.actors.memory import SharedMemory
from torchrl_vla.actors.worker import belong_to
from torchrl_vla.serving import PolicyServer, PolicyServerError, RemotePolicy, examples
from torchrl_vla.storage.layout import transition_layout
from torchrl_vla.topology import Topology

FIRST_BATCH = 300.0
"""Seconds that the server's first batch may take (compilation, kernels that are loaded)."""


@dataclass(frozen=True)
class ServerSettings:
    """Where the server's policy is and how its clients take turns."""

    device: str
    """``"cpu"`` or ``"cuda:N"``."""
    groups: int
    """Parts of the workers: one waits for the policy while the others simulate."""
    copy: TensorDictModuleBase
    """Any whole copy of the policy, on the CPU: shows what an answer looks like."""

    @classmethod
    def of(cls, topology: Topology, copy: TensorDictModuleBase) -> ServerSettings | None:
        """Return what the layout says for this rank; ``None`` if actors have their own copies."""
        layout = topology.layout
        if layout.actors != "server":
            return None
        return cls(topology.place.actor_device, layout.server_groups, copy)


class RankServer:
    """The policy server of a rank and the slots that its workers have there.

    Args:
        request: what a worker sends, ``[N]``.
        response: what it gets back, ``[N]``.
        settings: device and groups.
        timeout: seconds that one batch may take.
        make_behaviour: picklable; ``make_behaviour(device=...)`` builds the policy that takes
            published weights.
        clients: workers.
        spare: workers that may be replaced within the window of the restart limit. A dead worker's
            slot rests until as many others have died, hence longer than that window: its last
            request cannot be answered to a successor.
        seed: of the noise of the policy's actions.

    Raises:
        ValueError: the groups do not divide the clients.
    """

    def __init__(
        self,
        request: TensorDictBase,
        response: TensorDictBase,
        settings: ServerSettings,
        timeout: float,
        make_behaviour: Callable[..., Behaviour],
        *,
        clients: int,
        spare: int,
        seed: int,
    ) -> None:
        self._timeout = timeout
        memory = SharedMemory("policy-server", 16)
        self._busy = memory.bytes().view(np.float64)
        make = partial(
            _serve,
            partial(make_behaviour, device=settings.device),
            memory,
            seed=seed,
            threads=torch.get_num_threads(),
            learner=os.getpid(),
        )
        self._server = PolicyServer(
            make,
            request,
            response,
            clients=clients,
            groups=settings.groups,
            spare=spare,
            device=settings.device,
        )
        self._resting = deque(range(clients + spare))
        self._slots: dict[int, int] = {}

    @property
    def pid(self) -> int | None:
        """Process id of the server; ``None`` before its start."""
        return self._server.pid

    def behaviour(self, worker: int) -> Callable[[], RemotePolicy]:
        """Return a fresh slot for a process of ``worker``; its predecessor's goes to rest."""
        if worker in self._slots:
            self._resting.append(self._slots[worker])
        self._slots[worker] = self._resting.popleft()
        return partial(_itself, self._server.policy(self._slots[worker]))

    def start(self) -> None:
        """Start the server; raises :class:`PolicyServerError` if it cannot."""
        self._server.start()

    def check(self, *, ask: bool = False) -> None:
        """Check that the server runs and is not stuck in a batch.

        Args:
            ask: and that it answers, within 30 s.

        Raises:
            PolicyServerError: it does not.
        """
        self._server.check(ask=ask)
        since, batches = self._busy
        limit = self._timeout if batches else max(self._timeout, FIRST_BATCH)
        busy = time.monotonic() - since
        if since and busy > limit:
            raise PolicyServerError(
                f"policy server (pid {self.pid}) hangs: one batch for {busy:.0f} s, limit "
                f"{limit:.0f} s (algo.actors.timeout)"
            )

    def close(self) -> None:
        """End the server. Idempotent."""
        self._server.close()


class Watched(TensorDictModuleBase):
    """A policy that says since when it has been busy with a batch.

    Args:
        policy: acts.
        memory: two float64: monotonic seconds at which the batch began, 0 between batches; batches
            that were finished.
    """

    def __init__(self, policy: TensorDictModuleBase, memory: SharedMemory) -> None:
        super().__init__()
        self.policy, self.in_keys, self.out_keys = policy, policy.in_keys, policy.out_keys
        self._busy = memory.bytes().view(np.float64)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Let the policy act."""
        self._busy[0] = time.monotonic()
        try:
            return self.policy(tensordict)
        finally:
            self._busy[:] = 0.0, self._busy[1] + 1


def request_and_response(
    copy: TensorDictModuleBase, meta: schema.SuiteMeta, chunk_size: int, num_envs: int
) -> tuple[TensorDictBase, TensorDictBase]:
    """Return what a worker with ``num_envs`` simulators sends and gets back, ``[N]``, as examples.

    Args:
        copy: of the policy, on the CPU; it acts once, without a trace in the random state.
        meta: of the suite.
        chunk_size: ``H``.
        num_envs: ``N``.
    """
    layout = transition_layout(meta, chunk_size)
    seen = TensorDict({}, batch_size=[1])
    for column in (*layout.observations, *layout.columns):
        seen[column.key] = torch.zeros(1, *column.shape, dtype=column.dtype)
    with torch.random.fork_rng(devices=[]):
        request, response = examples(copy, seen)
    response[schema.POLICY_VERSION] = torch.zeros(1, 1, dtype=torch.int64)
    return request.expand(num_envs).clone(), response.expand(num_envs).clone()


def _itself(policy: RemotePolicy) -> RemotePolicy:
    return policy


def _serve(
    make_behaviour: Callable[[], Behaviour],
    memory: SharedMemory,
    *,
    seed: int,
    threads: int,
    learner: int,
) -> Watched:
    """Build what acts; runs in the server's process."""
    belong_to(learner)
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    return Watched(make_behaviour(), memory)
