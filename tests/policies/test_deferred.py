"""Weights that are read after sharding: no rank reads, or holds, more than its share.

Run by torchrun (``__main__`` below), this file is also the program of the ranks.
"""

import json
import sys
from functools import partial
from pathlib import Path

import pytest
import safetensors
import small_checkpoints as small
import torch
from openvla_folder import META, write_folder
from programs import torchrun
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import DTensor

from torchrl_vla import topology as topo
from torchrl_vla.loops.updates import UpdateSettings, frozen_copy, make_learner
from torchrl_vla.objectives.credit import Gae
from torchrl_vla.objectives.policy_gradient import PolicyGradient
from torchrl_vla.policies import pi0, vlm
from torchrl_vla.policies.deferred import fill, place, without_weights
from torchrl_vla.policies.lora import LoraSettings
from torchrl_vla.policies.openvla import make_policy
from torchrl_vla.policies.shard import full_weights, shard

EMBEDDING = "language_model.model.embed_tokens.weight"
VLMS = ("smolvlm", "paligemma", "qwen2_vl")
FAMILIES = ("openvla", "pi0", *VLMS)


def write(family: str, folder: Path) -> Path:
    """A published folder of a family."""
    if family == "openvla":
        return write_folder(folder)
    (small.save_pi0(folder) if family == "pi0" else small.save_vlm(folder, family))
    return folder


def build(family: str, folder: Path, **settings) -> nn.Module:
    torch.manual_seed(0)
    settings = {"checkpoint": str(folder), "chunk_size": 2} | settings
    if family == "openvla":
        return make_policy(META, **settings)
    if family == "pi0":
        return pi0.make_policy(small.META, **settings, steps=2)
    settings |= {"num_bins": 8, "prompt": small.PROMPTS[family]}
    if family == "qwen2_vl":
        settings |= {"image_size": 64}
    return vlm.make_policy(small.META, **settings)


def published(policy: nn.Module) -> nn.Module:
    """The part of the model that a folder holds."""
    model = policy.model.model
    return model.prefix if hasattr(model, "prefix") else model.backbone


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


def ranks_main(out: Path) -> None:
    t = topo.start("cpu")
    for family in FAMILIES:
        with without_weights():
            policy = build(family, out / family)
        network = published(policy)
        assert all(p.is_meta for p in network.parameters())
        CountingFile.read, safetensors.safe_open = [], CountingFile
        place(policy, t)
        safetensors.safe_open = CountingFile.real
        assert not any(x.is_meta for x in (*policy.parameters(), *policy.buffers()))
        facts = {
            "read": sum(CountingFile.read),
            "largest": max(CountingFile.read),
            "held": local_numbers(network),
            "kept_whole": sum(b.numel() for b in network.buffers()),
        }
        (out / f"{family}-{t.rank}.json").write_text(json.dumps(facts))
        whole = full_weights(policy).flatten_keys(".")
        if t.is_main:
            # safetensors refuses two names of one memory
            whole = {k: v.clone(memory_format=torch.contiguous_format) for k, v in whole.items()}
            save_file(whole, out / f"{family}.safetensors")
    t.stop()


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("ranks")
    for family in FAMILIES:
        write(family, out / family)
    torchrun(__file__, out)
    return out


@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_read_half_each_and_hold_the_published_weights(two_ranks: Path, family: str):
    policy = build(family, two_ranks / family)
    network = published(policy)
    total = sum(p.numel() for p in network.parameters())
    largest = max(p.numel() for p in network.parameters())
    facts = [json.loads((two_ranks / f"{family}-{rank}.json").read_text()) for rank in range(2)]
    assert sum(one["held"] for one in facts) == total
    for one in facts:
        # blocks that are stored and never run are buffers, which FSDP2 does not split
        assert one["read"] <= 0.6 * total + one["kept_whole"]
        assert one["largest"] <= max(largest / 2 + 64, one["kept_whole"])
        assert one["held"] <= 0.6 * total
    found, wanted = load_file(two_ranks / f"{family}.safetensors"), policy.state_dict()
    inside = {id(value) for value in (*network.parameters(), *network.buffers())}
    if family == "pi0":  # the expert, which every rank has whole
        inside |= {id(value) for value in policy.actor.parameters()}
    kept = policy.state_dict(keep_vars=True)
    keys = [key for key in wanted if id(kept[key]) in inside]
    assert len(keys) >= len(network.state_dict())
    for key in keys:
        assert torch.equal(found[key], wanted[key]), key


@pytest.mark.parametrize("family", ["pi0", *VLMS])
def test_what_no_file_holds_is_there_too(tmp_path: Path, family: str):
    """Rotary frequencies, position ids, tied words: the filled network computes the same."""
    folder = write(family, tmp_path)
    plain = build(family, folder)
    with without_weights():
        policy = build(family, folder)
    fill(policy.model.model)
    assert published(policy).training == published(plain).training
    own, theirs = dict(policy.named_parameters()), dict(plain.named_parameters())
    assert own.keys() == theirs.keys()  # tied parameters are one, and were read once
    inside = {id(parameter) for parameter in published(policy).parameters()}
    drawn = {n: float(p.detach().std()) for n, p in own.items() if n.endswith("queries")}
    for name, parameter in own.items():
        assert parameter.requires_grad == theirs[name].requires_grad, name
        if id(parameter) not in inside:  # heads of ours, drawn anew
            parameter.data.copy_(theirs[name])
    for name, std in drawn.items():  # as large as the words that were not there yet
        assert std == pytest.approx(float(theirs[name].detach().std()), rel=0.5)
    td = small.observations(3)
    with torch.no_grad():
        torch.manual_seed(1)
        found = policy(td.clone())
        torch.manual_seed(1)
        wanted = plain(td.clone())
    for key in policy.out_keys:
        assert torch.equal(found[key], wanted[key]), key


def test_a_folder_that_is_not_whole_is_found_before_any_weight_is_read(tmp_path: Path):
    folder = write("smolvlm", tmp_path)
    stored = load_file(folder / "model.safetensors")
    name = next(name for name in stored if name.endswith("q_proj.weight"))
    save_file({k: v for k, v in stored.items() if k != name}, folder / "model.safetensors")
    with without_weights(), pytest.raises(ValueError, match=r"is not a whole .* checkpoint") as at:
        build("smolvlm", folder)
    assert "q_proj.weight" in str(at.value)
    save_file(stored | {name: torch.zeros(3, 5)}, folder / "model.safetensors")
    with without_weights(), pytest.raises(ValueError, match=r"\(3, 5\), here \("):
        build("smolvlm", folder)
    save_file(stored | {"else": torch.zeros(1)}, folder / "model.safetensors")
    with without_weights(), pytest.raises(ValueError, match=r"'unexpected': .'else'"):
        build("smolvlm", folder)


def test_the_reference_of_a_penalty_has_the_weights_that_came_later(
    tmp_path: Path, one: topo.Topology
):
    folder = write_folder(tmp_path)
    with without_weights():
        policy = build("openvla", folder)
    settings = UpdateSettings(4, 1, 1e-3, 1.0, value_lr=1e-3)
    _, goal = make_learner(
        one,
        policy,
        partial(PolicyGradient, advantage=Gae(), value_weight=0.5, kl_weight=0.1, kl_kind="k3"),
        settings,
        gamma=0.9,
        make_reference=partial(frozen_copy, policy, partial(build, "openvla", folder), one),
    )
    own, kept = full_weights(policy).flatten_keys("."), full_weights(goal.reference)
    kept = kept.flatten_keys(".")
    assert own.keys() == kept.keys()
    assert all(torch.equal(own[key], kept[key]) for key in own.keys())  # noqa: SIM118


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
    ranks_main(Path(sys.argv[1]))
