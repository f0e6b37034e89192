"""Rounds on their way from a worker to the learner, through memory that both map.

The learner numbers the slots: it says into which slot a worker puts a round, and gives the number
out again once it has taken the round. A slot that a dying worker left half written is never read:
only the worker's message says that it is full.
"""

from __future__ import annotations

from tensordict import TensorDict, TensorDictBase

from torchrl_vla.actors.memory import SharedMemory, Tensors


class RoundMemory:
    """One worker's slots.

    Args:
        memory: shared between the worker and the learner.
    """

    def __init__(self, memory: SharedMemory) -> None:
        self.memory = memory
        self._free: list[int] = []
        self._count = 0

    def lend(self) -> int:
        """Return the number of a free slot (learner)."""
        if not self._free:
            self._free.append(self._count)
            self._count += 1
        return self._free.pop()

    def give_back(self, slot: int) -> None:
        """Say that nothing needs the slot's content any more (learner)."""
        self._free.append(slot)

    def put(self, batch: TensorDictBase, slot: int) -> Tensors:
        """Copy ``batch`` into a slot (worker); returns what the learner needs to find it."""
        tensors = Tensors.of(batch)
        self.memory.reserve((slot + 1) * tensors.size)
        tensors.views(self.memory.bytes(), slot * tensors.size).update_(batch)
        return tensors

    def look(self, tensors: Tensors, slot: int) -> TensorDict:
        """Return a slot's batch without a copy (learner)."""
        return tensors.views(self.memory.bytes(), slot * tensors.size)
