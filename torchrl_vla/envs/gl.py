"""Off-screen OpenGL for MuJoCo suites: backend choice, device choice and one small renderer.

``mujoco`` reads ``MUJOCO_GL`` when it is first imported, so :func:`choose_backend` comes first;
:func:`import_mujoco` does both. Importing this module imports no ``mujoco``.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import importlib
import json
import os
import weakref
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

APT_LINE = "apt-get update && apt-get install -y --no-install-recommends libegl1 libgl1-mesa-dri"
NO_GL_MESSAGE = (
    "no off-screen OpenGL library found (neither libEGL.so.1 with a Mesa or NVIDIA driver "
    f"nor libOSMesa.so.8); install one with: {APT_LINE}"
)
_VENDOR_DIRS = ("/etc/glvnd/egl_vendor.d", "/usr/share/glvnd/egl_vendor.d")
_HEADLESS = ("egl", "osmesa")


def _loads(library: str) -> bool:
    """Whether the dynamic loader finds ``library``."""
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _egl_vendor_libraries() -> list[str]:
    """Driver libraries that libglvnd would try, from its JSON manifests."""
    names = os.environ.get("__EGL_VENDOR_LIBRARY_FILENAMES", "")
    if names:
        manifests = [Path(name) for name in names.split(":") if name]
    else:
        dirs = os.environ.get("__EGL_VENDOR_LIBRARY_DIRS", ":".join(_VENDOR_DIRS))
        manifests = [p for d in dirs.split(":") if d for p in sorted(Path(d).glob("*.json"))]
    libraries = []
    for manifest in manifests:
        try:
            libraries.append(str(json.loads(manifest.read_text())["ICD"]["library_path"]))
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return libraries


def choose_backend() -> str:
    """Choose MuJoCo's off-screen OpenGL backend; call it before ``mujoco`` is imported.

    A ``MUJOCO_GL`` that is already set is kept. Otherwise EGL is taken if ``libEGL.so.1`` and one
    of its drivers load, else OSMesa. Sets ``MUJOCO_GL``, ``PYOPENGL_PLATFORM`` (for the headless
    backends) and, unless set, ``LP_NUM_THREADS=0`` so that software rendering starts no threads.

    Returns:
        The backend in lower case, usually ``"egl"`` or ``"osmesa"``.

    Raises:
        RuntimeError: neither library is found; the one-line message holds the ``apt-get`` line.
    """
    backend = os.environ.get("MUJOCO_GL", "").strip().lower()
    if not backend:
        if _loads("libEGL.so.1") and any(map(_loads, _egl_vendor_libraries())):
            backend = "egl"
        elif _loads("libOSMesa.so.8") or _loads("libOSMesa.so"):
            backend = "osmesa"
        else:
            raise RuntimeError(NO_GL_MESSAGE)
        os.environ["MUJOCO_GL"] = backend
    if backend in _HEADLESS:
        os.environ["PYOPENGL_PLATFORM"] = backend
    os.environ.setdefault("LP_NUM_THREADS", "0")
    return backend


def egl_device_index(worker: int, visible_devices: int) -> int:
    """EGL device for a worker, for ``MUJOCO_EGL_DEVICE_ID``; workers take turns (0, 1, 0, 1, ...).

    The result is a *position* among the devices this process may use, never a physical GPU id, so
    ``CUDA_VISIBLE_DEVICES="3"`` with one visible device gives 0. Entries of that variable, ids or
    UUIDs, are only counted. MuJoCo 4 turns the position into the GPU that CUDA has there; older
    versions take it as EGL's own number.

    Args:
        worker: Worker number, >= 0.
        visible_devices: How many devices EGL lists in this process, >= 1.

    Returns:
        An index in ``[0, visible_devices)``.

    Raises:
        ValueError: a negative worker, or no EGL device.
    """
    if worker < 0:
        raise ValueError(f"worker is {worker}, must be >= 0: pass the worker's number")
    if visible_devices < 1:
        raise ValueError(
            f"visible_devices is {visible_devices}, must be >= 1: without an EGL device use "
            "MUJOCO_GL=osmesa or do not render"
        )
    entries = [e.strip() for e in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    allowed = sum(e not in ("", "-1") for e in entries)
    return worker % (min(allowed, visible_devices) or visible_devices)


def import_mujoco() -> ModuleType:
    """Import ``mujoco`` with the chosen backend, or for physics only where there is no OpenGL.

    Without OpenGL the import itself would fail; then ``mujoco`` is imported with rendering off and
    the first :class:`OffscreenRenderer` reports what is missing.
    """
    before = os.environ.get("MUJOCO_GL")
    try:
        choose_backend()
        return importlib.import_module("mujoco")
    except (RuntimeError, ImportError, AttributeError, OSError):
        os.environ["MUJOCO_GL"] = "disable"
        try:
            return importlib.import_module("mujoco")
        finally:
            del os.environ["MUJOCO_GL"]
            if before is not None:
                os.environ["MUJOCO_GL"] = before


def _new_context(backend: str, size: int) -> Any:
    """Create a MuJoCo ``GLContext``, with a helpful one-line error if that fails."""
    modules = {"egl": "mujoco.egl", "osmesa": "mujoco.osmesa"}
    try:
        module = importlib.import_module(modules.get(backend, "mujoco.gl_context"))
        return module.GLContext(size, size)
    except (ImportError, AttributeError, OSError, RuntimeError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise RuntimeError(
            f"OpenGL backend {backend!r} cannot start; unset MUJOCO_GL to choose automatically, "
            f"or install a driver with: {APT_LINE} ({reason})"
        ) from error


@functools.cache
def renderer_name() -> str:
    """Return what draws in this process, as OpenGL names it: renderer and version.

    Raises:
        RuntimeError: no usable OpenGL backend.
    """
    context = _new_context(choose_backend(), 16)
    try:
        context.make_current()
        from OpenGL import GL

        names = (GL.glGetString(name) for name in (GL.GL_RENDERER, GL.GL_VERSION))
        return "; ".join(name.decode() for name in names)
    finally:
        context.free()


def _close_at_exit(reference: weakref.ref[OffscreenRenderer]) -> None:
    """Free a context before MuJoCo terminates its EGL display."""
    renderer = reference()
    if renderer is not None:
        renderer.close()


class OffscreenRenderer:
    """One off-screen OpenGL context for one ``MjModel``, for any number of its ``MjData``.

    Belongs to the process and thread that built it.

    Args:
        model: The ``mujoco.MjModel``; its ``vis`` sizes and quality are overwritten.
        size: Image height and width in pixels.
        high_quality: Shadows, reflections and 4x anti-aliasing (about 80 times slower on a CPU).

    Raises:
        RuntimeError: no usable OpenGL backend.
    """

    _gl: Any = None

    def __init__(self, model: Any, size: int, *, high_quality: bool = False) -> None:
        backend = choose_backend()
        mujoco = importlib.import_module("mujoco")
        self._mj, self._model, self._pid = mujoco, model, os.getpid()
        self._gl = _new_context(backend, size)
        self._gl.make_current()
        model.vis.global_.offwidth = model.vis.global_.offheight = size
        model.vis.quality.offsamples = 4 if high_quality else 0
        model.vis.quality.shadowsize = 2048 if high_quality else 0
        self._context = mujoco.MjrContext(model, int(mujoco.mjtFontScale.mjFONTSCALE_100))
        mujoco.mjr_setBuffer(int(mujoco.mjtFramebuffer.mjFB_OFFSCREEN), self._context)
        self._scene = mujoco.MjvScene(model, maxgeom=200)
        for flag in (mujoco.mjtRndFlag.mjRND_SHADOW, mujoco.mjtRndFlag.mjRND_REFLECTION):
            self._scene.flags[int(flag)] = int(high_quality)
        self._option, self._camera = mujoco.MjvOption(), mujoco.MjvCamera()
        self._camera.type = int(mujoco.mjtCamera.mjCAMERA_FIXED)
        self._catmask = int(mujoco.mjtCatBit.mjCAT_ALL)
        self._viewport = mujoco.MjrRect(0, 0, size, size)
        self._pixels = np.zeros((size, size, 3), np.uint8)
        self._at_exit = functools.partial(_close_at_exit, weakref.ref(self))
        atexit.register(self._at_exit)

    def render(self, data: Any, camera: int) -> np.ndarray:
        """Draw ``data`` from fixed camera number ``camera``.

        Returns:
            uint8 RGB ``[size, size, 3]``, first row on top: a view of a buffer that the next call
            overwrites.

        Raises:
            RuntimeError: called in a forked child, or after :meth:`close`.
        """
        if self._gl is None:
            raise RuntimeError("this renderer is closed: build a new one")
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"renderer of process {self._pid} used in process {os.getpid()}: OpenGL contexts "
                "do not survive fork; start workers with 'spawn' or render first in the worker"
            )
        mj = self._mj
        self._gl.make_current()
        self._camera.fixedcamid = camera
        mj.mjv_updateScene(
            self._model, data, self._option, None, self._camera, self._catmask, self._scene
        )
        mj.mjr_render(self._viewport, self._scene, self._context)
        mj.mjr_readPixels(self._pixels, None, self._viewport, self._context)
        return self._pixels[::-1]

    def close(self) -> None:
        """Free the context. Idempotent; a forked child frees nothing of its parent's."""
        gl, self._gl = self._gl, None
        if gl is None or os.getpid() != self._pid:
            return
        atexit.unregister(self._at_exit)
        gl.make_current()
        self._context.free()
        gl.free()

    def __del__(self) -> None:
        self.close()
