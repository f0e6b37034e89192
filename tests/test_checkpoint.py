"""Checkpoints: what was saved comes back bit for bit on any number of ranks, and damage is refused.

Run by torchrun or python (``__main__`` below), this file is also the program of the ranks.
"""

import json
import math
import os
import pickle
import random
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from tensordict import TensorDict
from torch import nn
from torch.distributed.tensor import DTensor

from torchrl_vla import topology as topo
from torchrl_vla.checkpoint import Checkpointer, rng_state, set_rng_state
from torchrl_vla.checkpoint import checkpointer as ckpt
from torchrl_vla.policies.shard import all_reduce_replicated_grads, full_weights, shard

BATCH, WIDTH = 8, 6


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + torch.tanh(self.fc(x))


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        # 3 rows: uneven shards on 2 ranks, an empty shard on rank 3 of 4
        self.three = nn.Linear(WIDTH, 3)
        self.unused = nn.Linear(2, 2)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.three(x)


class Run:
    """A sharded backbone, a replicated head, one optimizer over both, a schedule."""

    def __init__(self, t: topo.Topology, seed: int):
        torch.manual_seed(seed)
        self.t = t
        self.backbone = shard(Backbone(), t.mesh, blocks=[Block])
        self.head = nn.Linear(3, 1)
        groups = [
            {"params": list(self.backbone.parameters()), "lr": 1e-3},
            {"params": list(self.head.parameters()), "lr": 3e-2, "betas": (0.8, 0.9)},
        ]
        self.optimizer = torch.optim.AdamW(groups, weight_decay=0.1)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda n: 0.9**n)

    def loss(self, step: int) -> torch.Tensor:
        g = torch.Generator().manual_seed(step)
        x = torch.randn(BATCH, WIDTH, generator=g).chunk(self.t.world_size)[self.t.rank]
        return (self.head(self.backbone(x)) - x.sum(1, True)).square().mean()

    def global_loss(self, step: int) -> float:
        return self.t.all_reduce_sum(self.loss(step)).item() / self.t.world_size

    def update(self, step: int) -> None:
        self.optimizer.zero_grad()
        self.loss(step).backward()
        all_reduce_replicated_grads(self.head.parameters(), self.t)
        self.optimizer.step()
        self.schedule.step()
        self.backbone.seen += 1

    def state(self) -> dict:
        modules = [self.backbone, self.head]
        plain, tensors = rng_state()
        return {
            "modules": {"backbone": self.backbone, "head": self.head},
            "optimizers": {"adam": (self.optimizer, modules)},
            "tensors": {"ids": torch.arange(3), "stats": TensorDict({"a": {"b": torch.ones(2)}})},
            "json": {"schedule": self.schedule.last_epoch, "tiny": 5e-324},
            "rank_tensors": tensors,
            "rank_json": {"rank": self.t.rank, **plain},
        }

    def snapshot(self) -> dict[str, torch.Tensor]:
        """Everything that must come back, whole, by name; the same keys for any world size."""
        found = {}
        for name, module in (("backbone", self.backbone), ("head", self.head)):
            for key, value in full_weights(module).items(True, True):
                found[f"{name}.{'.'.join(key) if isinstance(key, tuple) else key}"] = value
            for key, p in module.named_parameters():
                for field, value in self.optimizer.state.get(p, {}).items():
                    whole = value.full_tensor() if isinstance(value, DTensor) else value
                    found[f"{name}.{key}.{field}"] = whole.detach().clone()
        rates = [g["lr"] for g in self.optimizer.param_groups]
        return found | {"lr": torch.tensor(rates, dtype=torch.float64)}


def check_loaded(t: topo.Topology, root: Path) -> None:
    """Load into a run of another seed and compare with the snapshot of the ranks that saved."""
    run = Run(t, seed=t.world_size + 50)
    store = Checkpointer(root)
    path = store.latest(t)
    assert path == root / "step-000000005"
    rest = store.load(path, run.state(), t)
    wanted = load_file(root / "snapshot.safetensors")
    losses = wanted.pop("losses").tolist()
    got = run.snapshot()
    assert got.keys() == wanted.keys()
    assert "backbone.three.weight.exp_avg_sq" in got
    # never had a gradient: no moments when saved, none when loaded
    assert not any(key.startswith("backbone.unused.weight.") for key in got)
    for key, value in wanted.items():
        assert torch.equal(got[key], value), key
    betas = [g["betas"] for g in run.optimizer.param_groups]
    assert betas == [(0.9, 0.999), (0.8, 0.9)]
    assert rest["step"] == 5
    assert rest["json"] == {"schedule": 5, "tiny": 5e-324}
    assert torch.equal(rest["tensors"]["ids"], torch.arange(3))
    assert torch.equal(rest["tensors"]["stats"]["a", "b"], torch.ones(2))
    if rest["world_size"] == t.world_size:
        assert rest["rank_json"]["rank"] == t.rank
    else:
        assert rest["rank_json"] is rest["rank_tensors"] is None
    run.schedule.last_epoch = rest["json"]["schedule"]
    assert run.global_loss(5) == pytest.approx(losses[0], rel=1e-6)
    run.update(5)
    assert run.global_loss(6) == pytest.approx(losses[1], rel=1e-6)


def save_main(t: topo.Topology, root: Path) -> None:
    run = Run(t, seed=0)
    store = Checkpointer(root)
    for step in range(5):
        run.update(step)
    if t.world_size > 1:
        refuse_together(t, run, store)
    store.save(5, run.state(), topology=t)
    snapshot = run.snapshot()
    losses = [run.global_loss(5)]
    run.update(5)
    losses.append(run.global_loss(6))
    if t.is_main:
        snapshot["losses"] = torch.tensor(losses, dtype=torch.float64)
        save_file(snapshot, root / "snapshot.safetensors")


def refuse_together(t: topo.Topology, run: Run, store: Checkpointer) -> None:
    """What goes wrong on one rank is an error on all, and leaves no checkpoint."""
    broken = run.state()
    if t.rank == 1:
        broken["rank_json"] = {"pair": (1, 2)}
    with pytest.raises((TypeError, RuntimeError), match="pair is a tuple"):
        store.save(4, broken, topology=t)
    with pytest.raises(ValueError, match=r"ranks save steps \(7, 8\)"):
        store.save(7 + t.rank, run.state(), topology=t)
    with pytest.raises(ValueError, match=r"scores \(0.5, nan\)"):
        store.save(7, run.state(), score=(0.5, math.nan)[t.rank], topology=t)
    assert store.latest(t) is None


def die(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_main(t: topo.Topology, root: Path, moment: str) -> None:
    """Save step 100, then die by SIGKILL in the middle of saving step 200."""
    run = Run(t, seed=0)
    store = Checkpointer(root)
    store.save(100, run.state(), topology=t)
    run.update(0)
    if moment == "one rank, before its shard":
        if t.rank == 1:
            dcp.FileSystemWriter.write_data = die
    elif moment == "shards, no metadata":
        dcp.FileSystemWriter.finish = die
    elif moment == "half a manifest":
        write = ckpt.write_json

        def half(path: Path, content: object) -> None:
            if path.name == "manifest.json":
                path.write_text(json.dumps(content)[:100])
                die()
            write(path, content)

        ckpt.write_json = half
    elif moment == "before the rename":
        Path.rename = die
    store.save(200, run.state(), topology=t)


def run_ranks(ranks: int, *args: object) -> subprocess.CompletedProcess:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return subprocess.run(
        [sys.executable, *(launcher if ranks > 1 else []), __file__, *map(str, args)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=250,
    )


def must(run: subprocess.CompletedProcess) -> None:
    assert run.returncode == 0, run.stderr[-4000:]


@pytest.fixture
def one(monkeypatch: pytest.MonkeyPatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    t = topo.start("cpu")
    yield t
    t.stop()


@pytest.mark.slow
def test_two_ranks_save_then_one_two_and_four_load(tmp_path: Path, one: topo.Topology):
    # Field case B43.
    must(run_ranks(2, "save", tmp_path))
    check_loaded(one, tmp_path)
    must(run_ranks(2, "load", tmp_path))
    must(run_ranks(4, "load", tmp_path))


def test_one_saves_then_one_and_two_load(tmp_path: Path, one: topo.Topology):
    save_main(one, tmp_path)
    check_loaded(one, tmp_path)
    must(run_ranks(2, "load", tmp_path))


@pytest.mark.parametrize(
    ("ranks", "moment"),
    [
        (1, "shards, no metadata"),
        (1, "half a manifest"),
        (1, "before the rename"),
        pytest.param(2, "one rank, before its shard", marks=pytest.mark.slow),
    ],
)
def test_kill_in_the_middle_of_a_save(
    tmp_path: Path, one: topo.Topology, capsys: pytest.CaptureFixture, ranks: int, moment: str
):
    # Field case B44, as are the damaged ones below.
    run = run_ranks(ranks, "kill", tmp_path, moment)
    assert run.returncode != 0
    # torchrun names the signal of the rank that died first
    assert run.returncode == -signal.SIGKILL or "exitcode  : -9" in run.stderr, run.stderr
    assert (tmp_path / ".tmp-step-000000200").is_dir()
    store = Checkpointer(tmp_path)
    path = store.latest(one)
    assert path == tmp_path / "step-000000100"
    assert (
        ".tmp-step-000000200 is refused: its save or removal was cut short"
        in capsys.readouterr().out
    )
    run = Run(one, seed=9)
    assert store.load(path, run.state(), one)["step"] == 100
    # The run goes on, and the next save sweeps the rest of the dead one away.
    assert store.save(200, run.state(), topology=one) == store.latest(one)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000000100", "step-000000200"]


def tiny_state(value: float = 0.0) -> dict:
    module = nn.Linear(2, 2)
    nn.init.constant_(module.weight, value)
    return {"modules": {"m": module}, "tensors": {"x": torch.ones(4)}, "json": {"n": 1}}


def save_steps(store: Checkpointer, t: topo.Topology, *steps: int) -> None:
    for step in steps:
        store.save(step, tiny_state(float(step)), topology=t)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


DAMAGES = [
    (truncate, "dcp/__0_0.distcp", "bytes"),
    (flip, "dcp/__0_0.distcp", "differs"),
    (flip, "dcp/.metadata", "differs"),
    (Path.unlink, "dcp/.metadata", "missing"),
    (Path.unlink, "manifest.json", "no manifest.json"),
    (flip, "manifest.json", "damaged"),
    (truncate, "manifest.json", "damaged"),
    (flip, "shared.safetensors", "differs"),
    (flip, "rank-00000.json", "differs"),
]


@pytest.mark.parametrize(("damage", "name", "reason"), DAMAGES)
def test_damage_is_refused(
    tmp_path: Path,
    one: topo.Topology,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    damage,
    name: str,
    reason: str,
):
    store = Checkpointer(tmp_path)
    save_steps(store, one, 100, 200)
    broken = tmp_path / "step-000000200"
    damage(broken / name)
    monkeypatch.setattr(pickle, "load", lambda *_: pytest.fail("unpickled before verifying"))
    assert store.latest() == store.latest(one) == tmp_path / "step-000000100"
    out = capsys.readouterr().out
    assert str(broken) in out
    assert reason in out
    state = tiny_state(-1.0)
    with pytest.raises(ValueError, match=reason):
        store.load(broken, state, one)
    assert (state["modules"]["m"].weight == -1.0).all()


def test_nothing_intact_is_an_error_that_lists_all(tmp_path: Path, one: topo.Topology):
    store = Checkpointer(tmp_path / "new")
    assert store.latest() is None
    assert store.best() is None
    save_steps(store, one, 1, 2)
    flip(store.root / "step-000000001/dcp/.metadata")
    (store.root / "step-000000002/manifest.json").unlink()
    with pytest.raises(FileNotFoundError) as error:
        store.latest(one)
    assert "step-000000001: dcp/.metadata differs" in str(error.value)
    assert "step-000000002: it has no manifest.json" in str(error.value)


def steps_in(root: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in root.iterdir())


def test_retention_keeps_the_newest_and_the_best(tmp_path: Path, one: topo.Topology):
    store = Checkpointer(tmp_path, keep_last=2, keep_best=1)
    scores = {1: 0.2, 2: 0.9, 3: None, 4: 0.9, 5: 0.1, 6: None, 7: 0.0}
    for step, score in scores.items():
        store.save(step, tiny_state(float(step)), score=score, topology=one)
    # 6 and 7 are the newest; 2 and 4 have the highest score, of equals the newest is kept
    assert steps_in(tmp_path) == [4, 6, 7]
    assert store.latest() == tmp_path / "step-000000007"
    assert store.best() == store.best(one) == tmp_path / "step-000000004"


def test_retention_of_one_never_leaves_none(tmp_path: Path, one: topo.Topology):
    store = Checkpointer(tmp_path, keep_last=1, keep_best=0)
    save_steps(store, one, 3)
    with pytest.raises(TypeError, match="complex"):
        store.save(4, tiny_state() | {"json": {"z": 1j}}, topology=one)
    assert store.latest() == tmp_path / "step-000000003"
    # a lower step than what is there (a run that went back): the new one stays
    save_steps(store, one, 2)
    assert 2 in steps_in(tmp_path)


def test_a_step_saved_twice_is_replaced(
    tmp_path: Path, one: topo.Topology, monkeypatch: pytest.MonkeyPatch
):
    store = Checkpointer(tmp_path)
    store.save(1, tiny_state(1.0), topology=one)
    store.save(1, tiny_state(2.0), topology=one)
    assert steps_in(tmp_path) == [1]
    state = tiny_state()
    store.load(store.latest(), state, one)
    assert (state["modules"]["m"].weight == 2.0).all()
    # Stopped just before the new one gets its name, the old one is still found.
    rename = Path.rename

    def stop_at_the_new_one(path: Path, target: Path) -> Path:
        if path.name.startswith(".tmp"):
            raise OSError("no space left")
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", stop_at_the_new_one)
        with pytest.raises(OSError, match="no space"):
            store.save(1, tiny_state(3.0), topology=one)
    assert store.latest() == tmp_path / "step-000000001.replaced"
    store.save(1, tiny_state(3.0), topology=one)
    assert steps_in(tmp_path) == [1]


def test_saving_does_not_disturb_a_fresh_optimizer(tmp_path: Path, one: topo.Topology):
    module = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    before = [p.detach().clone() for p in module.parameters()]
    state = {"modules": {"m": module}, "optimizers": {"o": (optimizer, [module])}}
    store = Checkpointer(tmp_path)
    store.load(store.save(0, state, topology=one), state, one)
    assert len(optimizer.state) == 0
    assert all(torch.equal(p, b) for p, b in zip(module.parameters(), before, strict=True))


def test_what_cannot_be_saved_is_named(tmp_path: Path, one: topo.Topology):
    store = Checkpointer(tmp_path)
    module, other = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)

    def save(state: dict, **kwargs) -> None:
        store.save(1, state, topology=one, **kwargs)

    with pytest.raises(KeyError, match=r"\['model'\]"):
        save({"model": module})
    with pytest.raises(ValueError, match="in none of its modules"):
        save({"optimizers": {"o": (optimizer, [module])}})
    sharded = shard(nn.Sequential(module), one.mesh, blocks=[nn.Linear])
    with pytest.raises(TypeError, match="DTensor"):
        save({"tensors": {"w": sharded[0].weight}})
    with pytest.raises(TypeError, match="not a str"):
        save({"json": {1: 2}})
    with pytest.raises(ValueError, match=r"step 1 has scores \(nan,\)"):
        save({}, score=math.nan)
    with pytest.raises(ValueError, match="contain '/'"):
        save({"modules": {"a/b": module}})
    with pytest.raises(ValueError, match="keep_last is 0"):
        Checkpointer(tmp_path, keep_last=0)
    assert store.latest() is None


def test_what_does_not_fit_is_named(tmp_path: Path, one: topo.Topology):
    store = Checkpointer(tmp_path)
    module = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    state = {"modules": {"m": module}, "optimizers": {"o": (optimizer, [module])}}
    path = store.save(1, state, topology=one)
    with pytest.raises(ValueError, match=r"lacks \['modules/m/bias'\]"):
        store.load(path, {"modules": {"m": nn.Linear(2, 2, bias=False)}}, one)
    with pytest.raises(ValueError, match=r"\(2, 2\) torch.bfloat16, but \(2, 2\) torch.float32"):
        store.load(path, {"modules": {"m": nn.Linear(2, 2).bfloat16()}}, one)
    with pytest.raises(ValueError, match="lacks"):
        store.load(path, {"modules": {"actor": module}}, one)
    with pytest.raises(ValueError, match="no optimizer 'adam'"):
        store.load(path, {"optimizers": {"adam": (optimizer, [module])}}, one)
    fewer = torch.optim.SGD([module.weight], lr=0.1)
    with pytest.raises(ValueError, match="same modules in the same order"):
        store.load(path, {"optimizers": {"o": (fewer, [module])}}, one)


def test_random_states_come_back(tmp_path: Path, one: topo.Topology):
    def draw() -> list[float]:
        return [random.random(), np.random.rand(), torch.rand(1).item(), random.gauss(0, 1)]

    random.gauss(0, 1)  # leaves a second number cached in the state
    plain, tensors = rng_state()
    store = Checkpointer(tmp_path)
    path = store.save(1, {"rank_json": plain, "rank_tensors": tensors}, topology=one)
    first = draw()
    assert draw() != first
    rest = store.load(path, {}, one)
    set_rng_state(rest["rank_json"], rest["rank_tensors"])
    assert draw() == first


if __name__ == "__main__":
    t = topo.start("cpu")
    folder = Path(sys.argv[2])
    if sys.argv[1] == "save":
        save_main(t, folder)
    elif sys.argv[1] == "load":
        check_loaded(t, folder)
    else:
        kill_main(t, folder, sys.argv[3])
    t.stop()
