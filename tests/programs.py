"""The programs of ``launch/`` as modules, and the settings that a command line composes."""

import importlib.util
from pathlib import Path
from types import ModuleType

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

ROOT = Path(__file__).parents[1]
ON_POLICY = ("ppo", "ppo_async", "grpo", "rloo", "reinforce_pp", "ppo_gaussian")


def program(name: str) -> ModuleType:
    """Import ``launch/NAME.py``, which is a program and in no package."""
    spec = importlib.util.spec_from_file_location(f"launch_{name}", ROOT / "launch" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def composed(*overrides: str, name: str = "train") -> DictConfig:
    """Return ``conf/NAME.yaml`` with these overrides, as a command line gives it."""
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return compose(name, list(overrides))
