"""Tells whether a MuJoCo simulation still makes sense."""

from __future__ import annotations

from typing import Any

import numpy as np

from torchrl_vla.envs.gl import import_mujoco

mujoco = import_mujoco()

_BAD = [
    int(warning)
    for warning in (
        mujoco.mjtWarning.mjWARN_BADQPOS,
        mujoco.mjtWarning.mjWARN_BADQVEL,
        mujoco.mjtWarning.mjWARN_BADQACC,
        mujoco.mjtWarning.mjWARN_BADCTRL,
    )
]


def diverged(data: Any) -> bool:
    """Whether the ``MjData`` went wrong since it was last reset.

    Looking at the numbers is not enough: MuJoCo starts a diverged simulation anew by itself, with
    nothing but a warning's count to tell.
    """
    finite = np.isfinite(data.qpos).all() and np.isfinite(data.qvel).all()
    return not finite or bool(data.warning.number[_BAD].any())
