"""A save that goes on beside the training: one at a time, on a process group of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch.distributed as dist

from torchrl_vla.topology import Topology


@dataclass(frozen=True)
class Beside(Topology):
    """The same ranks on a gloo group of their own.

    Collectives match by their order within a group: those of a thread must not meet the others.
    """

    group: dist.ProcessGroup

    @classmethod
    def of(cls, topology: Topology) -> Beside:
        """Make the group. Collective."""
        values = {field.name: getattr(topology, field.name) for field in fields(Topology)}
        return cls(**values, group=dist.new_group(backend="gloo"))

    def gather_objects(self, obj: Any) -> list[Any]:
        """What every rank passed, in rank order, on every rank."""
        boxes: list[Any] = [None] * self.world_size
        dist.all_gather_object(boxes, obj, group=self.group)
        return boxes


class Background:
    """Runs one action at a time in a thread and hands its error to the next one who looks."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, action: Callable[[], object]) -> None:
        """Run ``action``; :meth:`wait` first."""

        def run() -> None:
            try:
                action()
            except BaseException as error:  # raised by wait()
                self._error = error

        self._thread = threading.Thread(target=run, name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait for the action under way, if there is one, and raise what it raised."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error
