"""What all tests share: one thread per process, and a learner rank that is alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from torchrl_vla.topology import Topology

# The tests start many processes, and torch would give each one every core.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture
def one() -> Iterator[Topology]:
    """Give a process group of this process alone, on gloo."""
    from torchrl_vla import topology

    ranks = topology.start("cpu")
    yield ranks
    ranks.stop()
