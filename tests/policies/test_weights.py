"""The start weights in the package: what they are, and that their commands make their like."""

import hashlib
import json
import os
import shlex
import sys
from pathlib import Path
from subprocess import run

import pytest

from torchrl_vla.policies.tiny import SHIPPED_WEIGHTS

ROOT = Path(__file__).parents[2]
RECORD = json.loads(SHIPPED_WEIGHTS.with_suffix(".json").read_text())


def test_record_names_the_file_that_is_shipped():
    content = SHIPPED_WEIGHTS.read_bytes()
    assert RECORD["file"] == SHIPPED_WEIGHTS.name
    assert RECORD["sha256"] == hashlib.sha256(content).hexdigest()
    assert len(content) <= 2 * 2**20


def test_readme_tells_the_same_commands():
    readme = (ROOT / "README.md").read_text()
    for command in RECORD["commands"]:
        assert command.replace(" seed=0", "") in readme


@pytest.mark.slow
def test_commands_make_weights_that_meet_the_same_bars(tmp_path):
    """About four minutes: grounding within 1 cm, and both heads start where RL can begin."""
    for number, command in enumerate(RECORD["commands"]):
        words = shlex.split(command.replace("runs/", f"{tmp_path}/"))
        assert words[0] == "torchrun"
        done = run(  # the default ports of concurrent torchruns would clash
            [sys.executable, "-m", "torch.distributed.run", "--standalone", *words[1:]],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"stage {number}: {done.stdout[-2000:]} {done.stderr[-3000:]}"
        if "algo=ground" in words:
            error = float(done.stdout.split("held-out error ")[1].split(" cm")[0])
            assert error <= 1.0
    success = {
        name: json.loads((tmp_path / name / "eval.json").read_text())["success_rate"]
        for name in ("bc", "bc_gaussian")
    }
    # The shipped file: 52 % (temperature 0.6) and 66 % on the same 200 states; 95 % interval +-7.
    assert 0.25 <= success["bc"] <= 0.75
    assert 0.45 <= success["bc_gaussian"] <= 0.85
    made = (tmp_path / "bc_gaussian" / "policy.safetensors").stat().st_size
    assert abs(made - SHIPPED_WEIGHTS.stat().st_size) < 1024
