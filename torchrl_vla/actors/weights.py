"""Publishing: the newest weights in memory that all workers of a rank map.

The learner writes once, however many workers there are, and waits for none of them. A worker looks
between two decisions whether something newer is there and copies it into its policy. A worker that
starts later finds the newest weights by itself.

There are two slots. Publish number p goes to slot p % 2, so the slot that workers read is never the
one being written, unless a worker takes longer for its copy than the learner for a whole update;
``STARTED`` tells it, and it copies again. So no decision is ever made with weights of two versions,
and no lock is needed that a killed process could keep. This relies on stores becoming visible in
program order, as on x86-64.

The first publish is of all weights, later ones may be of a part (those that are trained). The rest
stays in the slot of the first.
"""

from __future__ import annotations

import pickle
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from tensordict import TensorDictBase

from torchrl_vla.actors.memory import Key, SharedMemory, Tensors, sorted_leaves

_STARTED, _FINISHED, _DESCRIPTION, _VERSIONS = 0, 1, 2, 3  # two versions, one per slot
_HEADER = 64
_FIRST_SLOT = 1
"""Where publish number 1 went."""


class Publisher:
    """The learner's side.

    Args:
        memory: shared with the workers.
        background: write in a thread, while the learner goes on.
    """

    def __init__(self, memory: SharedMemory, *, background: bool = False) -> None:
        self.memory = memory
        memory.reserve(_HEADER)
        self.count = 0
        """Publishes so far."""
        self._slots: list[dict[Key, torch.Tensor]] = []
        self._moving: tuple[Key, ...] = ()
        self._thread = ThreadPoolExecutor(1, "publisher") if background else None
        self._writing: Future[None] | None = None

    def publish(self, weights: TensorDictBase, version: int) -> None:
        """Write ``weights``; with ``background``, return at once and keep them until written.

        Args:
            weights: CPU or GPU tensors, nested like ``TensorDict.from_module(policy)``: all of them
                the first time, later the same part each time.
            version: stamped on the decisions made with them.

        Raises:
            ValueError: the keys differ from those of the publishes before.
        """
        self.wait()
        keys = tuple(key for key, _ in sorted_leaves(weights))
        if not self.count:
            self._lay_out(weights)
        elif self.count == 1:
            self._choose_moving(keys)
        elif keys != self._moving:
            raise ValueError(
                f"version {version} has {len(keys)} tensors, the ones before had "
                f"{len(self._moving)}; publish the same part of the weights each time"
            )
        self.count += 1
        if self._thread is None:
            self._write(self.count, weights, version)
        else:
            self._writing = self._thread.submit(self._write, self.count, weights, version)

    def wait(self) -> None:
        """Wait until what was published is there for the workers; raises what went wrong."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()

    def close(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._thread.shutdown()

    def _lay_out(self, weights: TensorDictBase) -> None:
        tensors = Tensors.of(weights)
        description = pickle.dumps((tensors, len(tensors.leaves)))
        marks = _HEADER + -(-len(description) // 64) * 64
        start = marks + -(-len(tensors.leaves) // 64) * 64
        self.memory.reserve(start + 2 * tensors.size)
        memory = self.memory.bytes()
        memory[_HEADER : _HEADER + len(description)] = np.frombuffer(description, np.uint8)
        self._marks = memory[marks : marks + len(tensors.leaves)]
        self._numbers = memory[:_HEADER].view(np.int64)
        self._numbers[_DESCRIPTION] = len(description)
        self._slots = [
            dict(sorted_leaves(tensors.views(memory, start + slot * tensors.size)))
            for slot in range(2)
        ]

    def _choose_moving(self, keys: tuple[Key, ...]) -> None:
        known = list(self._slots[0])
        if not keys or not set(keys) <= set(known):
            unknown = sorted(".".join(key) for key in set(keys) - set(known))
            raise ValueError(f"weights {unknown} were not in the first publish, which had all")
        self._moving = keys
        for number, key in enumerate(known):
            self._marks[number] = key in keys

    def _write(self, count: int, weights: TensorDictBase, version: int) -> None:
        slot, numbers = count % 2, self._numbers
        numbers[_STARTED] = count
        for key, leaf in sorted_leaves(weights):
            self._slots[slot][key].copy_(leaf)
        numbers[_VERSIONS + slot] = version
        numbers[_FINISHED] = count


class Subscriber:
    """A worker's side.

    Args:
        memory: shared with the learner.
    """

    def __init__(self, memory: SharedMemory) -> None:
        self.memory = memory
        self._numbers = memory.bytes()[:_HEADER].view(np.int64)
        self._taken = 0
        self._slots: list[dict[Key, torch.Tensor]] = []

    def take(self, destination: TensorDictBase) -> int | None:
        """Copy the newest weights into ``destination``; ``None`` if it has them already.

        Args:
            destination: ``TensorDict.from_module(policy).data``.

        Returns:
            Their version.

        Raises:
            KeyError: the learner's policy has a tensor that this one lacks.
        """
        while True:
            count = int(self._numbers[_FINISHED])
            if count == self._taken:
                return None
            if not self._slots:
                self._attach()
            version = int(self._numbers[_VERSIONS + count % 2])
            self._copy(count, destination)
            if int(self._numbers[_STARTED]) < count + 2:
                self._taken = count
                return version

    def _attach(self) -> None:
        memory = self.memory.bytes()
        length = int(self._numbers[_DESCRIPTION])
        tensors, leaves = pickle.loads(memory[_HEADER : _HEADER + length].tobytes())
        marks = _HEADER + -(-length // 64) * 64
        start = marks + -(-leaves // 64) * 64
        self._marks = memory[marks : marks + leaves]
        self._slots = [
            dict(sorted_leaves(tensors.views(memory, start + slot * tensors.size)))
            for slot in range(2)
        ]

    def _copy(self, count: int, destination: TensorDictBase) -> None:
        part = count > 1
        for number, key in enumerate(self._slots[0]):
            moving = not part or self._marks[number]
            if moving or not self._taken:
                source = self._slots[count % 2 if moving else _FIRST_SLOT][key]
                destination.get(key).copy_(source)
