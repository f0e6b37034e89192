"""Embedded tabletop suite: MuJoCo primitives, 12 instructions, a scripted expert."""

from torchrl_vla.envs.gl import import_mujoco

import_mujoco()  # Before torchrl, whose import pulls mujoco in with whatever MUJOCO_GL is set.

from torchrl_vla.envs.tabletop.suite import Tabletop, TabletopSuite  # noqa: E402
from torchrl_vla.envs.tabletop.tasks import SPLITS, init_state_ids  # noqa: E402

__all__ = ["SPLITS", "Tabletop", "TabletopSuite", "init_state_ids"]
