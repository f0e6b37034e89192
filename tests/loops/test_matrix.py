"""Every on-policy algorithm on its head: a short real training with the shipped settings."""

import math
from pathlib import Path

import pytest
from launching import launch
from programs import ON_POLICY

from torchrl_vla.metrics import read_metrics

SMALL = (
    "topology.device=cpu",
    "algo.actors.num_workers=1",
    "algo.actors.envs_per_worker=12",
    "algo.actors.decisions_per_env=4",
    "algo.updates.minibatch_size=32",
    "algo.updates.warm_up=0",
    "budget.minutes=4",
    "budget.updates=6",
    "evaluation.episodes=1",
    "evaluation.final_episodes=1",
    "evaluation.num_envs=1",
    "evaluation.videos=0",
)
GROUPS = ("algo.actors.group_size=3", "algo.objective.min_groups=1")
EXTRA = {"grpo": GROUPS, "rloo": GROUPS, "reinforce_pp": ("algo.objective.min_groups=2",)}
EVERY = {
    "approx_kl",
    "clip_fraction",
    "effective_sample_size",
    "entropy",
    "grad_norm/policy",
    "loss_policy",
    "lr/policy",
    "policy_lag",
    "policy_lag_max",
    "ratio_gap",
    "valid_fraction",
}
OWN = {
    "ppo": {"loss_value", "explained_variance", "grad_norm/value"},
    "ppo_async": {"loss_value", "explained_variance", "grad_norm/value"},
    "grpo": {"zero_contrast_fraction", "held_decisions"},
    "rloo": {"zero_contrast_fraction", "held_decisions"},
    "reinforce_pp": {"held_decisions"},
    "ppo_gaussian": {"loss_value", "explained_variance", "grad_norm/value", "grad_norm/head"},
}


@pytest.mark.parametrize("algorithm", ON_POLICY)
def test_a_short_training(algorithm: str, tmp_path: Path):
    folder = tmp_path / "run"
    launch(f"algo={algorithm}", f"run_dir={folder}", *SMALL, *EXTRA.get(algorithm, ()))
    rows = [row for row in read_metrics(folder) if row["update"]]
    assert rows[-1]["update"] >= 6
    for row in rows:
        needed = EVERY | OWN[algorithm]
        assert needed <= set(row)
        assert all(math.isfinite(row[name]) for name in needed - {"ratio_gap"})
        assert row["grad_norm/policy"] > 0
        assert 0 < row["effective_sample_size"] <= 1 + 1e-5
        assert row["approx_kl"] < 0.2
        assert row["ratio_gap"] is None or row["ratio_gap"] < 1e-5
    assert rows[0]["clip_fraction"] < 1
    if algorithm.startswith("ppo"):  # those that judge whole trajectories wait for their ends
        assert rows[-1]["policy_lag"] == (1 if algorithm == "ppo_async" else 0)
    assert list((folder / "checkpoints").iterdir())
