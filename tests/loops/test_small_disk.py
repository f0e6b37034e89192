"""A run whose replay does not fit on its disk: an error with both numbers, before any worker."""

import errno
import re
from dataclasses import replace
from pathlib import Path

import pytest
from disks import small_file_system
from small import SUITE, make_run
from test_off_policy_loop import small_settings

from torchrl_vla import topology as topo
from torchrl_vla.loops.off_policy import train
from torchrl_vla.loops.replay_folder import layout_of

DISK = 64 * 2**20
WANTED = 128 * 2**20


@pytest.fixture
def small_disk(tmp_path: Path):
    """A real file system of 64 MB (field case B28)."""
    with small_file_system(tmp_path / "disk", DISK) as folder:
        yield folder


def test_a_replay_too_large_for_the_disk_ends_the_run_before_any_worker(
    small_disk: Path, one: topo.Topology
):
    run, settings = make_run(small_disk / "run", one, updates=4), small_settings()
    policy = settings["make_policy"](SUITE.meta)
    rows = WANTED // layout_of(policy, run).slot_bytes
    settings["replay"] = replace(settings["replay"], capacity=rows)
    with pytest.raises(OSError, match=r"lower replay\.capacity") as said:
        train(run, **settings)
    assert said.value.errno == errno.ENOSPC
    assert str(run.folder) in str(said.value)
    numbers = [float(number) for number in re.findall(r"([\d.]+) GB", str(said.value))]
    needed, free, replays, checkpoint = numbers
    assert replays == pytest.approx(WANTED / 1e9, rel=0.05)
    assert needed == pytest.approx(replays + 2 * checkpoint, abs=0.003)
    assert free == pytest.approx(DISK / 1e9, rel=0.05)
    assert not (run.folder / "actors").exists()
    assert not (run.folder / "replay").exists()
