"""Say which attention mode an OFT checkpoint was trained with, before anything is trained on it.

    python launch/check_policy.py policy=openvla_oft policy.checkpoint=DIR chunk_size=8 \
        env=libero dataset=libero dataset.folder=DATA

Demonstrations are scored in both modes. The exit code is 1 if they contradict ``policy.attention``.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torchrl_vla.envs.gl import choose_backend

try:
    choose_backend()  # before anything imports mujoco
except RuntimeError as error:
    sys.exit(str(error))

import hydra
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig
from tensordict import TensorDict

from torchrl_vla.data import demonstrations
from torchrl_vla.policies.openvla.attention_check import AttentionComparison, compare_attention


def samples(cfg: DictConfig, suite: Any) -> TensorDict:
    """Return ``cfg.samples`` control steps of demonstrations, evenly spread."""
    if cfg.get("dataset") is None:
        ids = suite.splits["demo"][: cfg.episodes]
        episodes = demonstrations.record(suite.simulators(1), ids)
    else:
        episodes = instantiate(cfg.dataset)(suite.meta)
    every = demonstrations.cloning_samples(episodes, cfg.chunk_size)
    index = torch.linspace(0, len(every) - 1, min(cfg.samples, len(every))).long()
    return every[index]


def verdict(compared: AttentionComparison, configured: str) -> tuple[str, int]:
    """Return what to tell the user, and the exit code."""
    found = compared.trained_with
    figures = (
        f"error of demonstrated actions: bidirectional {compared.bidirectional:.4f}, causal "
        f"{compared.causal:.4f} {compared.unit} per number (standard error of the difference "
        f"{compared.standard_error:.4f}, {compared.samples} samples)"
    )
    if found is None:
        return f"{figures}\nundecided: give more samples, or demonstrations of its own tasks", 0
    text = f"{figures}\ntrained with attention={found}; policy.attention={configured}"
    if found == configured:
        return f"{text} agrees", 0
    return f"{text} is wrong: set policy.attention={found}", 1


def check(cfg: DictConfig) -> int:
    """Load, compare, print, write; return the exit code."""
    torch.set_num_threads(cfg.threads)
    torch.manual_seed(0)
    suite = instantiate(cfg.env)
    policy = instantiate(cfg.policy)(suite.meta)
    compared = compare_attention(policy, samples(cfg, suite), rows=cfg.rows)
    described = policy.model.describe()
    text, code = verdict(compared, described["attention"])
    print(json.dumps(described, indent=1))
    print(text, flush=True)
    if cfg.out is not None:
        report = asdict(compared) | {"trained_with": compared.trained_with, "policy": described}
        Path(cfg.out).write_text(json.dumps(report, indent=1))
    return code


@hydra.main(version_base="1.3", config_path="../conf", config_name="check_policy")
def main(cfg: DictConfig) -> None:
    """Check, and leave with the exit code."""
    sys.exit(check(cfg))


if __name__ == "__main__":
    main()
