"""The fast renderer for other people's scenes, and which GPU EGL draws on.

``gl.OffscreenRenderer`` draws everything that a scene shows by default and is sized for our own
suite. Benchmark scenes have many more geometries and keep collision shapes beside the visible ones.
"""

from __future__ import annotations

import importlib
import logging
import multiprocessing
import os
from collections.abc import Sequence
from typing import Any, Literal

from torchrl_vla.envs.gl import OffscreenRenderer, choose_backend, egl_device_index

EGL_CUDA_DEVICE_NV = 0x323A
"""Attribute of an EGL device: the CUDA number of the GPU behind it (EGL_NV_device_cuda)."""

_log = logging.getLogger(__name__)


class SceneRenderer(OffscreenRenderer):
    """As its base, for large scenes.

    Args:
        model: the ``mujoco.MjModel``.
        size: image height and width [px].
        hidden_groups: geometry groups that are not drawn (collision shapes).
        max_geoms: most geometries one picture may hold.
        high_quality: see the base.
    """

    def __init__(
        self,
        model: Any,
        size: int,
        *,
        hidden_groups: Sequence[int] = (),
        max_geoms: int = 2000,
        high_quality: bool = False,
    ) -> None:
        super().__init__(model, size, high_quality=high_quality)
        flags = self._scene.flags.copy()
        self._scene = self._mj.MjvScene(model, maxgeom=max_geoms)
        self._scene.flags[:] = flags
        for group in hidden_groups:
            self._option.geomgroup[group] = 0


def egl_number(position: int, cuda_numbers: Sequence[int | None], visible: str | None) -> int:
    """Return EGL's own number of the GPU that is ``position``-th among those this process may use.

    Drivers tell the CUDA number of each EGL device either as the physical GPU's or as its position
    in ``CUDA_VISIBLE_DEVICES``; both are understood. Where no device has a CUDA number (a CPU),
    EGL's own order counts.

    Args:
        position: 0, 1, ... among the visible GPUs.
        cuda_numbers: by EGL device, what the driver says; ``None`` for a device without CUDA.
        visible: ``CUDA_VISIBLE_DEVICES``; numbers or UUIDs.

    Raises:
        ValueError: there is no such device.
    """
    entries = [entry.strip() for entry in (visible or "").split(",") if entry.strip()]
    gpus = [number for number in cuda_numbers if number is not None]
    available = len(gpus) or len(cuda_numbers)
    if gpus and entries:
        available = min(available, len(entries))
    if not 0 <= position < available:
        raise ValueError(
            f"render_gpu is {position}, but EGL offers {available} device(s) to this process "
            f"(CUDA_VISIBLE_DEVICES={visible!r}); use 0..{available - 1}, or null"
        )
    if not gpus:
        return position
    physical = [int(entry) for entry in entries if entry.isdigit()]
    if len(physical) == len(entries) > 0 and set(physical) <= set(gpus):
        return list(cuda_numbers).index(physical[position])
    return list(cuda_numbers).index(sorted(gpus)[position])


def cuda_numbers() -> list[int | None]:
    """Ask EGL for its devices and the CUDA number of each."""
    egl = importlib.import_module("mujoco.egl.egl_ext")
    error = importlib.import_module("OpenGL.error")
    query = importlib.import_module("OpenGL.EGL").eglGetProcAddress(b"eglQueryDeviceAttribEXT")
    numbers: list[int | None] = []
    for device in egl.eglQueryDevicesEXT():
        try:
            numbers.append(_cuda_number(query, device))
        except error.GLError:
            numbers.append(None)
    return numbers


def _cuda_number(query: int | None, device: Any) -> int | None:
    """Call ``eglQueryDeviceAttribEXT``, for which not every MuJoCo brings a binding."""
    import ctypes

    if not query:
        return None
    value = ctypes.c_ssize_t()
    call = ctypes.CFUNCTYPE(
        ctypes.c_uint, ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(ctypes.c_ssize_t)
    )(query)
    found = call(ctypes.cast(device, ctypes.c_void_p), EGL_CUDA_DEVICE_NV, ctypes.byref(value))
    return int(value.value) if found else None


def render_on(render_gpu: int | Literal["spread"] | None) -> None:
    """Choose the GPU that this process draws on; call it before the first picture.

    Args:
        render_gpu: a position among the visible GPUs; ``"spread"`` lets child processes take turns
            (0, 1, 0, 1, ...) in the order in which they were started; ``None`` leaves the choice
            to MuJoCo and the user's ``MUJOCO_EGL_DEVICE_ID``.

    Raises:
        ValueError: no such device, or another word.
    """
    if render_gpu is None:
        return
    if render_gpu != "spread" and not isinstance(render_gpu, int):
        raise ValueError(f"render_gpu is {render_gpu!r}, must be a number, 'spread' or null")
    backend = choose_backend()
    if backend != "egl":
        _log.warning("render_gpu=%s has no effect: the OpenGL backend is %s", render_gpu, backend)
        return
    numbers = cuda_numbers()
    identity = multiprocessing.current_process()._identity
    worker = identity[-1] - 1 if identity else 0
    if render_gpu == "spread":
        gpus = sum(number is not None for number in numbers)
        render_gpu = egl_device_index(worker, gpus or len(numbers))
    number = egl_number(render_gpu, numbers, os.environ.get("CUDA_VISIBLE_DEVICES"))
    mujoco = importlib.import_module("mujoco")
    # MuJoCo 4 does the mapping itself and wants the position; older ones want EGL's number.
    mapped = int(mujoco.__version__.split(".")[0]) >= 4
    os.environ["MUJOCO_EGL_DEVICE_ID"] = str(render_gpu if mapped else number)
    _log.info("worker %d (pid %d) draws with EGL device %d", worker, os.getpid(), number)
