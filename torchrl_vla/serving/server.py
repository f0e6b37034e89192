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

import multiprocessing
import weakref
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import nn
from torchrl.modules.inference_server import (
    PolicyClientModule,
    ProcessInferenceServer,
    ProcessSlotTransport,
)

from torchrl_vla.serving.events import KillSafeContext

_END_SECONDS = 5.0
"""How long a killed server may take to be gone."""
_ANSWER_SECONDS = 30.0
"""How long a server may take to say that it is well, on a machine that is busy."""


class PolicyServerError(RuntimeError):
    """The policy server cannot start, is gone or does not answer; the message says which."""


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

    A client may be killed at any moment: the others are served on. What it had asked for is still
    answered, so its slot must rest; a successor takes one of the ``spare`` slots.

    Args:
        make_policy: picklable; builds the policy in the server's process. What it stamps on its
            answers (``policy_version``) belongs to the weights it has; it takes newer ones itself.
        request: example of what a client sends, ``[N]`` simulators; its keys, shapes and dtypes
            are those of every request (CPU).
        response: example of what a client gets back, ``[N]``.
        clients: number of simulator processes at a time.
        groups: parts of the clients that take turns; the policy waits for ``clients / groups``
            requests before it acts. 1: simulators and policy alternate.
        spare: slots beside those of the clients, for successors of clients that were killed.
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
        spare: int = 0,
        window: float = 0.02,
        device: str = "cpu",
    ) -> None:
        if clients < 1 or groups < 1 or clients % groups:
            divisors = [n for n in range(1, clients + 1) if clients % n == 0]
            raise ValueError(
                f"groups is {groups} with {clients} clients; it must divide them: use one of "
                f"{divisors} (topology.server_groups; a rank's clients are algo.actors.num_workers)"
            )
        if window <= 0:
            raise ValueError(f"window is {window} s; it must be above 0 (0.02, say)")
        keys = [list(td.keys(True, True)) for td in (request, response)]
        slots = clients + spare
        transport = ProcessSlotTransport(request, response, num_slots=slots, ctx=KillSafeContext())
        self._policies = [RemotePolicy(transport.client(), *keys) for _ in range(slots)]
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
        # The process ignores what multiprocessing would end it with at an exit without close().
        self._started: list[int] = []
        self._kill = weakref.finalize(self, _kill, self._started)

    def policy(self, slot: int) -> RemotePolicy:
        """Return the policy for the simulator process that alone uses ``slot``."""
        return self._policies[slot]

    def stats(self) -> dict[str, float]:
        """Return TorchRL's counters since the last call: requests, batches, sizes, times in ms."""
        return self._server.stats(reset=True)

    @property
    def pid(self) -> int | None:
        """Process id of the server; ``None`` before its start."""
        return self._started[0] if self._started else None

    def start(self) -> None:
        """Start the process and wait until it has its policy.

        Raises:
            PolicyServerError: it cannot be built.
        """
        others = multiprocessing.active_children()
        try:
            self._server.start()
        except (RuntimeError, TimeoutError) as error:
            raise PolicyServerError(f"the policy server cannot start: {error}") from error
        finally:
            children = multiprocessing.active_children()
            self._started += [child.pid for child in children if child not in others]

    def check(self, *, ask: bool = False) -> None:
        """Check that the process runs.

        Args:
            ask: and that it answers, within 30 s.

        Raises:
            PolicyServerError: it does not.
        """
        if not ask and self._server.is_alive:
            return
        health = self._server.health(timeout=_ANSWER_SECONDS)
        name = f"policy server (pid {health['pid']})"
        if not health["process_alive"]:
            raise PolicyServerError(
                f"{name} ended with exit code {health['exitcode']}; no actor of this rank can act"
            )
        if "control_error" in health:
            raise PolicyServerError(f"{name} does not answer: {health['control_error']}")

    def close(self) -> None:
        """End the process; it holds nothing that must be kept. Idempotent."""
        self._kill()
        self._server.shutdown()

    def __enter__(self) -> PolicyServer:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _kill(pids: list[int]) -> None:
    for child in multiprocessing.active_children():
        if child.pid in pids:
            child.kill()
            child.join(_END_SECONDS)


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
