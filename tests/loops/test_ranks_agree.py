"""Ranks of one run that were started apart: one folder, one set of settings, or an error on all.

Run as a program (``__main__`` below), this file is one rank.
"""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from programs import composed, program

from torchrl_vla import topology


def start(folder: Path, *ranks: tuple[str, ...]) -> list[str]:
    """Start one rank per tuple of overrides, 2 s apart; return what each of them said."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": str(len(ranks)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    path = {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    processes = []
    for rank, overrides in enumerate(ranks):
        if rank:
            time.sleep(2.0)
        processes.append(
            subprocess.Popen(
                [sys.executable, __file__, *overrides],
                env=os.environ | path | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                cwd=folder,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    return [process.communicate(timeout=300)[0] for process in processes]


@pytest.mark.slow
def test_ranks_that_start_apart_share_one_folder(tmp_path: Path):
    # Field case B38: the name has the time in it.
    said = start(tmp_path, ("algo=sac",), ("algo=sac",))
    (folder,) = (tmp_path / "runs").iterdir()
    assert (folder / "config.yaml").exists()
    assert [text.splitlines()[-1] for text in said] == [f"in {folder.name}"] * 2


@pytest.mark.slow
def test_ranks_with_other_settings_are_refused_before_there_is_a_folder(tmp_path: Path):
    said = start(tmp_path, ("algo=sac",), ("algo=sac", "seed=7", "algo.replay.capacity=99"))
    refused = (
        "rank 1 was started with other settings than rank 0: 'seed: 7' instead of 'seed: 0', "
        "'capacity: 99' instead of 'capacity: 30000'; give every node the same command line"
    )
    assert f"ValueError: {refused}" in said[1]
    assert "RuntimeError: other ranks failed: {1: " in said[0]
    assert refused in said[0]
    assert not (tmp_path / "runs").exists()


def main(overrides: list[str]) -> None:
    train, ranks = program("train"), topology.start("cpu")
    run, _ = train.build_run(composed(*overrides), ranks)
    ranks.stop()
    print(f"in {run.folder.name}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
