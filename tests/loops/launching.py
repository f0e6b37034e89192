"""What ``python launch/train.py OVERRIDES`` does, in this process."""

import importlib.util
import signal
from pathlib import Path
from types import ModuleType

import torch.distributed as dist
from hydra import compose, initialize_config_dir

ROOT = Path(__file__).parents[2]
ON_POLICY = ("ppo", "ppo_async", "grpo", "rloo", "reinforce_pp", "ppo_gaussian")


def program(name: str) -> ModuleType:
    """Import ``launch/NAME.py``, which is a program and in no package."""
    spec = importlib.util.spec_from_file_location(f"launch_{name}", ROOT / "launch" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def launch(*overrides: str) -> None:
    """Train (or check) with these overrides; nothing is left behind in this process."""
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        cfg = compose("train", ["logger.display=false", *overrides])
    before = signal.getsignal(signal.SIGTERM)
    try:
        program("train").main.__wrapped__(cfg)
    finally:
        signal.signal(signal.SIGTERM, before)
        if dist.is_initialized():
            dist.destroy_process_group()
