"""``launch/actor.py`` builds what a learner describes and nothing else; who may have actors."""

from functools import partial
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from programs import composed, program

from torchrl_vla.loops import off_policy, on_policy

pytestmark = pytest.mark.slow  # whole programs


def resolved(*overrides: str):
    cfg = composed(*overrides)
    OmegaConf.resolve(cfg)
    return cfg


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.touch(0o600)
    path.write_text("k" * 64 + "\n")
    return path


def test_a_run_describes_what_actors_can_build(secret: Path):
    cfg = resolved("topology=remote", f"topology.secret_file={secret}", "policy.weights=null")
    where = program("train").choose_listening(cfg, partial(off_policy.train))["remote"]
    assert (where.host, where.port) == ("127.0.0.1", 29700)
    suite, make_policy = program("actor").build(where.description)
    assert type(suite).__name__ == "TabletopSuite"
    policy = make_policy()
    assert policy.model.model.chunk_size == cfg.chunk_size
    assert b"kkk" not in repr(where).encode()


def test_local_runs_listen_to_nobody():
    assert program("train").choose_listening(resolved(), partial(off_policy.train)) == {}


def test_on_policy_runs_are_refused(secret: Path):
    cfg = resolved("algo=ppo", "topology=remote", f"topology.secret_file={secret}")
    with pytest.raises(ValueError, match="algo=ppo: its rounds need every actor"):
        program("train").choose_listening(cfg, partial(on_policy.train))


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ({"_target_": "os.system", "command": "true"}, "names 'os.system'"),
        ({"_target_": "torchrl_vla.envs.gl.os.system", "command": "true"}, r"envs\.gl\.os\.system"),
        ({"_target_": "torchrl_vla.report.write_page"}, "write_page"),
        ({"_target_": ["os.system"]}, "names"),
        ({"a": [{"b": {"_target_": "builtins.eval"}}]}, r"description\.a\.b|description\.a"),
        ({"a": "${oc.env:HOME}"}, "not interpolations"),
    ],
)
def test_a_description_may_not_name_anything_else(node: dict, message: str):
    with pytest.raises(ValueError, match=message):
        program("actor").check_description(node)
