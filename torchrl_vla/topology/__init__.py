"""Which rank is what: the checked split, the process group and its collectives."""

from torchrl_vla.topology.environment import under_torchrun
from torchrl_vla.topology.group import TEN_MINUTES, Topology, backends, start
from torchrl_vla.topology.layout import Layout, Place, plan

__all__ = [
    "TEN_MINUTES",
    "Layout",
    "Place",
    "Topology",
    "backends",
    "plan",
    "start",
    "under_torchrun",
]
