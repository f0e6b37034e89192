"""A supervised run that was stopped and resumed ends with the weights of one that was not."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from small import POLICY, make_run
from test_lock_step import tensors_of

from torchrl_vla import topology as topo
from torchrl_vla.envs.tabletop import TabletopSuite
from torchrl_vla.loops.imitation import train_cloning, train_grounding
from torchrl_vla.loops.plans import CheckpointPlan
from torchrl_vla.loops.stage import Draws
from torchrl_vla.metrics import read_metrics
from torchrl_vla.objectives.supervised import GaussianCloning, TokenCloning

CLONE = partial(
    train_cloning,
    demonstrations_per_task=1,
    noise=0.1,
    epochs=3,
    batch_size=16,
    lr=1e-3,
    warm_up=2,
)
TOKENS = partial(TokenCloning, labels="soft", label_sigma=0.1)
GAUSSIAN = partial(GaussianCloning, loss="squared", target_std=0.1)
STAGES = {
    "all": (partial(CLONE, objective=TOKENS, trainable="all"), POLICY),
    "head": (
        partial(CLONE, objective=GAUSSIAN, trainable="head"),
        partial(POLICY, head="gaussian"),
    ),
    "ground": (
        partial(
            train_grounding,
            scenes=40,
            held_out=10,
            updates=9,
            batch_size=8,
            lr=1e-3,
            warm_up=2,
            max_error_cm=100.0,
        ),
        POLICY,
    ),
}


def train(folder: Path, stage: str, *, stop_at: int | None = None, resume: bool = False) -> Any:
    """Train; with ``stop_at`` the run is asked to stop after that many updates."""
    loop, make_policy = STAGES[stage]
    ranks = topo.start("cpu")
    run = make_run(
        folder,
        ranks,
        updates=1000,
        suite=TabletopSuite(),
        run={"saves": CheckpointPlan(every_minutes=99, every_updates=4)},
    )
    if stop_at is not None:
        run.stop_asked = lambda: run.counters["updates"] >= stop_at
    try:
        return loop(run, make_policy=make_policy, seed=0, resume=resume), run
    finally:
        ranks.stop()


@pytest.mark.parametrize(
    "stage",
    [pytest.param(s, marks=() if s == "ground" else pytest.mark.slow) for s in STAGES],
)
def test_a_stopped_and_resumed_stage_ends_with_the_same_weights(tmp_path: Path, stage: str):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    train(whole, stage)
    metrics, stopped = train(cut, stage, stop_at=5)
    assert metrics == {}
    assert stopped.interrupted
    assert not (cut / "policy.safetensors").exists()
    assert stopped.checkpoints.latest().name == "step-000000005"
    train(cut, stage, resume=True)
    found, wanted = (load_file(f / "policy.safetensors") for f in (cut, whole))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[key], value) for key, value in wanted.items())
    saved = tensors_of(max((cut / "checkpoints").iterdir()))
    kept = [value for key, value in saved.items() if key.startswith("modules/evaluated/")]
    kept = [value for value in kept if value.is_floating_point()]
    assert len(kept) > 10  # as it was exported and evaluated: rounded to bfloat16
    assert all(torch.equal(value, value.bfloat16().float()) for value in kept)
    steps = [row["update"] for row in read_metrics(cut)]
    assert steps == sorted(set(steps))
    assert steps[-1] == read_metrics(whole)[-1]["update"]


def test_draws_are_whole_passes_that_go_on_where_they_were_saved():
    draws = Draws(3, seed=0)
    one_pass = torch.cat([draws.shuffled(7), draws.shuffled(7)])
    assert len(set(one_pass.tolist())) == 6  # one is left out, none comes twice
    saved = draws.state_dict()
    after = [draws.shuffled(7), draws.uniform(100), draws.shuffled(7)]
    other = Draws(3, seed=1)
    other.load_state_dict(saved)
    again = [other.shuffled(7), other.uniform(100), other.shuffled(7)]
    assert all(torch.equal(a, b) for a, b in zip(after, again, strict=True))
