"""torchrun with one to two nodes: one is lost, the run goes on, it comes back, the run grows."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from slurm_cluster import alive, wait_until

PROGRAM = Path(__file__).with_name("elastic_trainer.py")


def node(folder: Path, port: int) -> subprocess.Popen:
    """Start the torchrun of one node (both are this machine)."""
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1",
         "--max-restarts=3", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}",
         "--rdzv-id=elastic", "--rdzv-conf=last_call_timeout=5", str(PROGRAM), str(folder)],
        # without it the new ranks meet the addresses of the dead ones in torchrun's store
        env=os.environ | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        stderr=(folder / "torchrun.log").open("a"),
        start_new_session=True,
    )  # fmt: skip


@pytest.mark.slow
def test_a_node_leaves_and_comes_back(tmp_path: Path):
    def starts(world: int) -> list[dict]:
        file = tmp_path / "starts.jsonl"
        rows = map(json.loads, file.read_text().splitlines()) if file.exists() else ()
        return [row for row in rows if row["world"] == world]

    def saved() -> int:
        file = tmp_path / "checkpoint.json"
        return json.loads(file.read_text()) if file.exists() else 0

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    stays = node(tmp_path, port)
    leaves = node(tmp_path, port)
    running = [stays, leaves]
    try:
        wait_until(lambda: len(starts(2)) == 2, "two nodes run together", 600)
        wait_until(lambda: saved() >= 5, "they have saved", 600)
        children = Path(f"/proc/{leaves.pid}/task/{leaves.pid}/children").read_text().split()
        for pid in [leaves.pid, *map(int, children)]:  # its power is gone
            os.kill(pid, signal.SIGKILL)
        before = saved()
        wait_until(lambda: any(row["step"] >= before for row in starts(1)), "one goes on", 600)
        alone = starts(1)[-1]["step"]
        wait_until(lambda: saved() > alone, "it makes progress alone", 600)
        running.append(node(tmp_path, port))
        wait_until(lambda: len(starts(2)) == 4, "both run together again", 600)
        again = [row["step"] for row in starts(2)[2:]]
        # both go on from one checkpoint, with what was done alone, one replica per node
        assert again[0] == again[1] > alone
        assert {row["replicas"] for row in starts(2)} == {2}
        wait_until(lambda: saved() > again[0], "they make progress", 600)
        (tmp_path / "finish").touch()
        assert [process.wait(timeout=600) for process in (stays, running[-1])] == [0, 0]
    finally:
        for process in running:
            process.kill()
        left = [json.loads(line)["pid"] for line in (tmp_path / "starts.jsonl").open()]
        for pid in filter(alive, left):
            os.kill(pid, signal.SIGKILL)
