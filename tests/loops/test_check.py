"""``check=ratio``: passes for every on-policy configuration, and finds the faults it is for."""

import multiprocessing
from functools import partial
from pathlib import Path

import pytest
from launching import launch
from programs import ON_POLICY
from small import GRPO, POLICY, PPO, arguments, make_run
from torch import nn

from torchrl_vla import topology as topo
from torchrl_vla.loops.check import BOUNDS, check_ratio

SMALL = ("algo.actors.num_workers=1", "algo.actors.envs_per_worker=8", "topology.device=cpu")
FEWER = {
    "ppo": ("algo.actors.decisions_per_env=2",),
    "ppo_async": ("algo.actors.decisions_per_env=2",),
    "grpo": ("algo.objective.min_groups=1", "algo.actors.group_size=4"),
    "rloo": ("algo.objective.min_groups=1", "algo.actors.group_size=4"),
    "reinforce_pp": ("algo.actors.decisions_per_env=8",),
    "ppo_gaussian": ("algo.actors.decisions_per_env=2",),
}


def check(folder: Path, algorithm: str, *overrides: str) -> int:
    """Return the exit code of ``launch/train.py algo=ALGORITHM check=ratio``."""
    given = (f"algo={algorithm}", "check=ratio", f"run_dir={folder / 'run'}")
    with pytest.raises(SystemExit) as ended:
        launch(*given, *SMALL, *FEWER[algorithm], *overrides)
    return ended.value.code


def test_every_on_policy_configuration_is_here():
    assert set(FEWER) == set(ON_POLICY)


@pytest.mark.parametrize("algorithm", ON_POLICY)
def test_every_ratio_is_one(algorithm: str, tmp_path: Path, capsys):
    assert check(tmp_path, algorithm) == 0
    said = capsys.readouterr().out
    assert f"check=ratio {algorithm}: passed in float32" in said
    assert "clip fraction 0;" in said


def test_in_bfloat16_the_gap_is_reported_and_bounded(tmp_path: Path, capsys):
    assert check(tmp_path, "ppo", "policy.precision=bfloat16") == 0
    said = capsys.readouterr().out
    assert "passed in bfloat16" in said
    assert f"bound {BOUNDS['bfloat16']:g}" in said


def crooked(meta, **settings) -> nn.Module:
    """Build a policy that is hotter in the actors' processes than in the learner's."""
    policy = POLICY(meta, **settings)
    nn.init.normal_(policy.model.model.token_head.linear.weight, std=0.5)
    if multiprocessing.parent_process() is not None:
        policy.temperature *= 1.02
    return policy


def test_another_temperature_in_the_actor_is_found(one: topo.Topology, tmp_path: Path, capsys):
    given = arguments(PPO, make_policy=crooked)
    assert not check_ratio(make_run(tmp_path, one, updates=1), **given)
    said = capsys.readouterr().out
    assert "FAILED in float32" in said
    assert "action dim" in said
    assert "stored -" in said


def test_old_weights_are_no_fault_when_none_moved(one: topo.Topology, tmp_path: Path):
    # The penalty's reference and the start of the round are scored as well: all is equal.
    objective = partial(GRPO, kl_weight=0.5, kl_kind="k2", behaviour_cap=2.0)
    given = arguments(objective, group_size=2, max_lag=1)
    assert check_ratio(make_run(tmp_path, one, updates=1), **given)


def test_nothing_to_continue(one: topo.Topology, tmp_path: Path):
    with pytest.raises(ValueError, match="check=ratio starts afresh"):
        check_ratio(make_run(tmp_path, one, updates=1), **arguments(PPO, resume=True))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("algo=sac", "check=ratio"), "algo=sac stores none"),
        (("algo=bc", "check=ratio"), "algo=bc stores none"),
        (("algo=ppo", "check=everything"), "check='everything' is unknown"),
    ],
)
def test_refusals(overrides: tuple[str, ...], message: str, tmp_path: Path):
    with pytest.raises(ValueError, match=message):
        launch(*overrides, f"run_dir={tmp_path / 'run'}", "topology.device=cpu")
