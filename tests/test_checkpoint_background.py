"""Saves in the background: what is saved is what was there, failures reach every rank.

Run by torchrun (``__main__`` below), this file is also the program of the ranks.
"""

import errno
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from disks import small_file_system
from programs import torchrun
from torch import nn

from torchrl_vla import topology as topo
from torchrl_vla.checkpoint import Checkpointer, check_space, space
from torchrl_vla.checkpoint import checkpointer as ckpt
from torchrl_vla.policies.shard import full_weights, shard


class Small:
    """A sharded linear layer with an optimizer that has taken a step."""

    def __init__(self, ranks: topo.Topology, seed: int = 0):
        torch.manual_seed(seed)
        self.model = shard(nn.Sequential(nn.Linear(6, 5)), ranks.mesh, blocks=[nn.Linear])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.draws = torch.Generator().manual_seed(seed)
        self.counters = {"updates": 0}

    def update(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(4, 6, generator=self.draws)).square().sum().backward()
        self.optimizer.step()
        self.counters["updates"] += 1

    def state(self) -> dict:
        return {
            "modules": {"model": self.model},
            "optimizers": {"adam": (self.optimizer, [self.model])},
            "json": {"counters": self.counters},
            "rank_tensors": {"draws": self.draws.get_state()},
        }


def saved_while_training(ranks: topo.Topology, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hold the writing thread until training has gone on, then compare with the start of it."""
    run, store, go = Small(ranks), Checkpointer(root), threading.Event()
    write_files = ckpt.write_files

    def held(*args):
        assert go.wait(timeout=100)
        return write_files(*args)

    monkeypatch.setattr(ckpt, "write_files", held)
    run.update()
    before = full_weights(run.model)
    path = store.save(1, run.state(), topology=ranks, background=True)
    draws = run.draws.get_state()
    assert not path.exists()
    for _ in range(3):
        run.update()
    go.set()
    store.wait()
    other = Small(ranks, seed=9)
    rest = store.load(store.latest(ranks), other.state(), ranks)
    assert (full_weights(other.model) == before).all()
    assert not (full_weights(run.model) == before).all()
    assert rest["json"]["counters"] == {"updates": 1}
    assert torch.equal(rest["rank_tensors"]["draws"], draws)
    # the next save waits for the one under way
    store.save(2, run.state(), topology=ranks, background=True)
    assert store.save(4, run.state(), topology=ranks) == store.latest(ranks)
    if ranks.is_main:
        assert len([p for p in root.iterdir() if p.name.startswith("step-")]) == 3


def test_what_is_saved_is_what_was_there(
    one: topo.Topology, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    saved_while_training(one, tmp_path, monkeypatch)


def test_a_failure_in_the_background_is_raised_by_the_next_look(
    one: topo.Topology, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run, store = Small(one), Checkpointer(tmp_path)
    store.save(1, run.state(), topology=one)
    with monkeypatch.context() as patch:
        patch.setattr(ckpt, "write_files", lambda *_: 1 / 0)
        store.save(2, run.state(), topology=one, background=True)
        with pytest.raises(ZeroDivisionError):
            store.wait()
    store.wait()  # it is told once
    assert store.latest(one) == tmp_path / "step-000000001"
    store.save(3, run.state(), topology=one, background=True)
    store.wait()
    assert store.latest(one) == tmp_path / "step-000000003"


def ranks_main(folder: Path) -> None:
    ranks = topo.start("cpu")
    with pytest.MonkeyPatch.context() as patch:
        saved_while_training(ranks, folder / "a", patch)
    run, store = Small(ranks), Checkpointer(folder / "b")
    if ranks.rank == 1:
        ckpt.write_files = lambda *_: 1 / 0
    store.save(2, run.state(), topology=ranks, background=True)
    with pytest.raises((ZeroDivisionError, RuntimeError), match="division"):
        store.wait()
    assert store.latest(ranks) is None
    if ranks.is_main:
        for manifest in (folder / "a").glob("step-*/manifest.json"):
            manifest.unlink()
    ranks.barrier()
    with pytest.raises(FileNotFoundError, match="no intact checkpoint"):  # on every rank
        Checkpointer(folder / "a").latest(ranks)
    needed = space.checkpoint_bytes(run.state())
    assert needed == 3 * 4 * (6 * 5 + 5)
    ranks.stop()


@pytest.mark.slow
def test_two_ranks(tmp_path: Path):
    torchrun(__file__, tmp_path)


@pytest.fixture
def small_disk(tmp_path: Path):
    """A real file system of 4 MB."""
    with small_file_system(tmp_path / "disk", 4 * 2**20) as folder:
        yield folder


def large(numbers: int) -> dict:
    return {"modules": {"m": nn.Linear(numbers, 1, bias=False)}}


def test_a_run_that_does_not_fit_is_refused_at_the_start(one: topo.Topology, small_disk: Path):
    # two checkpoints of 1 MB and 2 MB of replay: 4 MB, all there is; one byte more is too much
    check_space(small_disk, large(250_000), one, 2_000_000)
    said = (
        r"needs 0.005 GB .* 0.004 GB are free: 0.003 GB for the replays .* 2 checkpoints of 0.001"
    )
    with pytest.raises(OSError, match=said) as error:
        check_space(small_disk, large(250_000), one, 3_000_000)
    assert error.value.errno == errno.ENOSPC


def test_a_replay_on_another_disk_needs_its_room_there(
    one: topo.Topology, small_disk: Path, tmp_path: Path
):
    # 4 MB here hold three checkpoints of 1 MB, or 4 MB of replay
    check_space(small_disk, large(250_000), one, 3_000_000, tmp_path)
    check_space(tmp_path, large(250_000), one, 4_000_000, small_disk)
    said = (
        r"needs 0.005 GB on the disk of .*/disk and .* 0.005 GB for the replays of this machine's "
        r"ranks and 0 checkpoints of .* another replay\.folder"
    )
    with pytest.raises(OSError, match=said):
        check_space(tmp_path, large(250_000), one, 5_000_000, small_disk)
    with pytest.raises(OSError, match=r"0.000 GB for the replays .* 2 check.* another run_dir"):
        check_space(small_disk, large(750_000), one, 3_000_000, tmp_path)


def save_and_wait(store: Checkpointer, ranks: topo.Topology, background: bool) -> None:
    store.save(2, large(250_000), topology=ranks, background=background)
    store.wait()


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("checked", [True, False])
def test_a_disk_that_fills_up_leaves_the_last_checkpoint(
    one: topo.Topology,
    small_disk: Path,
    monkeypatch: pytest.MonkeyPatch,
    background: bool,
    checked: bool,
):
    store = Checkpointer(small_disk / "checkpoints")
    store.save(1, large(250_000), topology=one)
    (small_disk / "filler").write_bytes(b"x" * 2_800_000)
    if not checked:  # there was room when it was looked at
        monkeypatch.setattr(ckpt, "checkpoint_bytes", lambda _: 0)
    said = r"does not fit .*last checkpoint is .*step-000000001"
    with pytest.raises(OSError, match=said) as error:
        save_and_wait(store, one, background)
    assert error.value.errno == errno.ENOSPC
    assert store.latest(one) == small_disk / "checkpoints" / "step-000000001"
    state = large(250_000)
    store.load(store.latest(one), state, one)
    (small_disk / "filler").unlink()
    store.save(3, state, topology=one)  # what was left half written is swept away
    assert dcp.FileSystemReader(store.latest(one) / "dcp").read_metadata() is not None


if __name__ == "__main__":
    ranks_main(Path(sys.argv[1]))
