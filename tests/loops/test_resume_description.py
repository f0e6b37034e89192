"""A resume under other conventions than those of the saved policy is refused."""

import json
from pathlib import Path

import pytest
from small import POLICY, SUITE, make_run
from torch import nn

from torchrl_vla import topology as topo


def state_of(policy: nn.Module) -> dict:
    return {"modules": {"policy": policy}}


def test_another_precision_is_named_and_the_same_goes_on(one: topo.Topology, tmp_path: Path):
    policy = POLICY(SUITE.meta)
    make_run(tmp_path, one, updates=1).save(state_of(policy))
    assert make_run(tmp_path, one, updates=1).resume(state_of(POLICY(SUITE.meta))) is not None
    other = POLICY(SUITE.meta, precision="bfloat16")
    with pytest.raises(ValueError, match="precision=float32 there and bfloat16 here") as caught:
        make_run(tmp_path, one, updates=1).resume(state_of(other))
    assert "step-000000000" in str(caught.value)


def test_results_say_what_the_policy_was(one: topo.Topology, tmp_path: Path):
    policy = POLICY(SUITE.meta)
    make_run(tmp_path, one, updates=1).evaluate(policy)
    report = json.loads((tmp_path / "eval.json").read_text())
    told = report["policy"]
    assert told["policy"] == "TokenPolicy"
    assert told["precision"] == "float32"
    assert not report["environment"].keys() & told.keys()


def test_a_module_without_a_reader_says_nothing(one: topo.Topology, tmp_path: Path):
    make_run(tmp_path, one, updates=1).save(state_of(nn.Linear(1, 1)))
    assert make_run(tmp_path, one, updates=1).resume(state_of(nn.Linear(1, 1))) is not None
