"""Process group, mesh and collectives: one process, and two ranks under torchrun.

Run by torchrun (``__main__`` below), this file is also the program of the ranks.
"""

import json
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from programs import torchrun

from torchrl_vla.topology import Topology, start


def ranks_main(out: Path, replicate: int) -> None:
    try:
        t = start("cpu", replicate=replicate, timeout=timedelta(seconds=60))
    except ValueError as error:
        (out / f"refused-{os.environ['RANK']}").write_text(str(error))
        raise SystemExit(3) from None
    t.barrier()
    try:
        t.together(lambda: {0: "fine"}[t.rank])
    except (KeyError, RuntimeError) as error:
        failure = f"{type(error).__name__}: {error}"
    mine = torch.tensor([1.5 + t.rank, 10.0])
    facts = {
        "rank": [t.rank, t.world_size, t.local_rank, t.is_main],
        "sum": t.all_reduce_sum(mine).tolist(),
        "mine": mine.tolist(),
        "run_dir": t.broadcast_object(f"runs/of-rank-{t.rank}"),
        "gathered": t.gather_objects({"rank": t.rank}),
        "one_stops": t.any_true(t.rank == 1),
        "none_stops": t.any_true(False),
        "failure": failure,
        "together": t.together(lambda: t.rank),
        "timeouts": [
            group._get_backend(t.device).options._timeout.total_seconds()
            for group in (dist.group.WORLD, *t.mesh.get_all_groups())
        ],
        "mesh": [list(t.mesh.mesh_dim_names), list(t.mesh.mesh.shape)],
    }
    (out / f"{t.rank}.json").write_text(json.dumps(facts))
    t.stop()
    t.stop()


def run_ranks(out: Path, replicate: int) -> subprocess.CompletedProcess:
    return torchrun(__file__, out, replicate, check=False)


@pytest.mark.parametrize(
    ("replicate", "mesh"),
    [
        pytest.param(1, [["shard"], [2]], marks=pytest.mark.slow),
        (2, [["replicate", "shard"], [2, 1]]),
    ],
)
def test_two_ranks(tmp_path: Path, replicate: int, mesh: list):
    run = run_ranks(tmp_path, replicate)
    assert run.returncode == 0, run.stderr[-3000:]
    for rank in range(2):
        facts = json.loads((tmp_path / f"{rank}.json").read_text())
        assert facts["rank"] == [rank, 2, rank, rank == 0]
        # 1.5 + 2.5 = 4, 10 + 10 = 20; the argument keeps its own value
        assert facts["sum"] == [4.0, 20.0]
        assert facts["mine"] == [1.5 + rank, 10.0]
        assert facts["run_dir"] == "runs/of-rank-0"
        assert facts["gathered"] == [{"rank": 0}, {"rank": 1}]
        assert facts["one_stops"] is True
        assert facts["none_stops"] is False
        # rank 1 keeps its own exception, rank 0 is told of it
        told = "RuntimeError: other ranks failed: {1: 'KeyError: 1'}"
        assert facts["failure"] == (told if rank == 0 else "KeyError: 1")
        assert facts["together"] == rank
        assert facts["mesh"] == mesh
        # the default group and one per mesh dimension; torch's own defaults are 1800 and 600
        assert facts["timeouts"] == [60.0] * (1 + len(mesh[0]))


@pytest.mark.slow
def test_replicate_must_divide_ranks(tmp_path: Path):
    assert run_ranks(tmp_path, 3).returncode != 0
    message = (tmp_path / "refused-1").read_text()
    assert "replicate is 3 with 2 ranks" in message
    assert "[1, 2]" in message


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch):
    for name in (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    ):
        monkeypatch.delenv(name, raising=False)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_one_process_without_torchrun():
    for _ in range(2):  # stop() leaves nothing behind that a second start() trips over
        t = start("cpu", threads=1)
        assert isinstance(t, Topology)
        assert (t.rank, t.world_size, t.local_rank, t.device) == (0, 1, 0, torch.device("cpu"))
        assert tuple(t.mesh.mesh.shape) == (1,)
        assert torch.get_num_threads() == 1
        assert t.all_reduce_sum(torch.tensor(2.0)).item() == 2.0
        assert t.broadcast_object({"a": 1}) == {"a": 1}
        assert t.gather_objects(7) == [7]
        assert t.any_true(True)
        assert not t.any_true(False)
        t.barrier()
        t.stop()
        assert not dist.is_initialized()


@pytest.mark.usefixtures("alone")
def test_refusals(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ValueError, match="replicate is 2 with 1 ranks"):
        start("cpu", replicate=2)
    with pytest.raises(ValueError, match="threads is 0"):
        start("cpu", threads=0)
    with pytest.raises(ValueError, match="must be positive"):
        start("cpu", timeout=timedelta(0))
    with pytest.raises(ValueError, match="'meta'"):
        start("meta")
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="sees no GPU"):
            start("cuda")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(RuntimeError, match=r"lacks \['WORLD_SIZE'"):
        start("cpu")
    monkeypatch.delenv("RANK")
    start("cpu")
    with pytest.raises(RuntimeError, match="already"):
        start("cpu")


if __name__ == "__main__":
    ranks_main(Path(sys.argv[1]), int(sys.argv[2]))
