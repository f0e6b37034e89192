"""Weights that are read after sharding: no rank reads, or holds, more than its share.

Run by torchrun (``__main__`` below), this file is also the program of the ranks.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors
import torch
from openvla_folder import META, write_folder
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor

from torchrl_vla import topology as topo
from torchrl_vla.policies.deferred import fill, without_weights
from torchrl_vla.policies.lora import LoraSettings
from torchrl_vla.policies.openvla import make_policy
from torchrl_vla.policies.shard import full_weights, shard

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
EMBEDDING = "language_model.model.embed_tokens.weight"


class CountingFile:
    """``safe_open`` that notes how many numbers are taken from a file."""

    read: list[int] = []  # noqa: RUF012
    real = safetensors.safe_open

    def __init__(self, *args, **kwargs):
        self.file = CountingFile.real(*args, **kwargs)

    def __enter__(self):
        self.file = self.file.__enter__()
        return self

    def __exit__(self, *exception):
        return self.file.__exit__(*exception)

    def get_slice(self, key):
        inner = self.file.get_slice(key)

        class View:
            get_shape, get_dtype = inner.get_shape, inner.get_dtype

            def __getitem__(self, slices):
                found = inner[slices]
                CountingFile.read.append(found.numel())
                return found

        return View()

    def __getattr__(self, name):
        return getattr(self.file, name)


def local_numbers(module: torch.nn.Module) -> int:
    return sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in module.parameters())


def ranks_main(folder: Path, out: Path) -> None:
    t = topo.start("cpu")
    with without_weights():
        policy = make_policy(META, checkpoint=str(folder), chunk_size=2)
    backbone = policy.model.model.backbone
    assert all(p.is_meta for p in backbone.parameters())
    shard(policy.model.model, t.mesh, blocks=policy.model.model.shard_plan())
    safetensors.safe_open = CountingFile
    fill(policy.model.model)
    safetensors.safe_open = CountingFile.real
    assert not any(x.is_meta for x in (*policy.parameters(), *policy.buffers()))
    facts = {
        "read": sum(CountingFile.read),
        "largest": max(CountingFile.read),
        "held": local_numbers(backbone),
        "kept_whole": sum(b.numel() for b in backbone.buffers()),
    }
    (out / f"{t.rank}.json").write_text(json.dumps(facts))
    whole = full_weights(policy.model.model).flatten_keys(".")
    if t.is_main:
        save_file({k: v.contiguous() for k, v in whole.items()}, out / "whole.safetensors")
    t.stop()


def test_two_ranks_read_half_each_and_hold_the_published_weights(tmp_path: Path):
    folder = write_folder(tmp_path / "published")
    done = subprocess.run(
        [*TORCHRUN, __file__, str(folder), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    plain = make_policy(META, checkpoint=str(folder), chunk_size=2).model.model
    total = sum(p.numel() for p in plain.backbone.parameters())
    largest = max(p.numel() for p in plain.backbone.parameters())
    facts = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert sum(one["held"] for one in facts) == total
    for one in facts:
        # blocks that are stored and never run are buffers, which FSDP2 does not split
        assert one["read"] <= 0.6 * total + one["kept_whole"]
        assert one["largest"] <= max(largest / 2 + 64, one["kept_whole"])
        assert one["held"] <= 0.6 * total
    found, wanted = load_file(tmp_path / "whole.safetensors"), plain.state_dict()
    for key in (key for key in wanted if key.startswith("backbone.")):
        assert torch.equal(found[key], wanted[key]), key


@pytest.fixture
def one():
    t = topo.start("cpu")
    yield t
    t.stop()


def test_one_rank_gets_the_same_policy(tmp_path: Path, one: topo.Topology):
    folder = write_folder(tmp_path)
    with without_weights():
        policy = make_policy(META, checkpoint=str(folder), chunk_size=2)
    names = {name for name, p in policy.named_parameters() if p.requires_grad}
    shard(policy.model.model, one.mesh, blocks=policy.model.model.shard_plan())
    fill(policy.model.model)
    plain = make_policy(META, checkpoint=str(folder), chunk_size=2)
    found, wanted = full_weights(policy).flatten_keys("."), plain.state_dict()
    assert all(torch.equal(found[k], wanted[k]) for k in wanted if ".backbone." in k)
    assert {name for name, p in policy.named_parameters() if p.requires_grad} == names
    fill(policy.model.model)  # nothing is missing any more


def test_adapters_are_there_before_the_weights_are(tmp_path: Path, one: topo.Topology):
    folder = write_folder(tmp_path)
    settings = {"lora": LoraSettings(("q_proj", "fc1"), rank=2), "chunk_size": 2}
    torch.manual_seed(0)
    with without_weights():
        policy = make_policy(META, checkpoint=str(folder), **settings)
    adapters = {name: p for name, p in policy.named_parameters() if p.requires_grad}
    assert adapters
    for name, parameter in adapters.items():
        assert not parameter.is_meta
        assert bool(parameter.abs().sum() > 0) == (".lora_A." in name)  # B starts at 0
    before = {name: p.detach().clone() for name, p in adapters.items()}
    shard(policy.model.model, one.mesh, blocks=policy.model.model.shard_plan())
    fill(policy.model.model)
    found = full_weights(policy).flatten_keys(".")
    wanted = make_policy(META, checkpoint=str(folder), **settings).state_dict()
    for key in (key for key in wanted if ".backbone." in key):
        assert torch.equal(found[key], before.get(key, wanted[key])), key


def test_a_shape_that_does_not_fit_is_found_before_any_weight_is_read(tmp_path: Path):
    stored = {EMBEDDING: torch.zeros(3, 5)}
    folder = write_folder(tmp_path, tensors=stored, extras=False)
    with without_weights(), pytest.raises(ValueError, match="does not fit OpenVLA"):
        make_policy(META, checkpoint=str(folder), chunk_size=2)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    ranks_main(Path(sys.argv[1]), Path(sys.argv[2]))
