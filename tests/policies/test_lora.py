"""LoRA: what is trained, what is published, what is merged, on any family."""

import sys
from pathlib import Path

import pytest
import torch
from small_checkpoints import META, PROMPTS, observations, save_pi0, save_vlm, spread
from tensordict import TensorDict
from torch import nn
from torch.distributed.tensor import DTensor
from torchrl.envs.utils import ExplorationType, set_exploration_type
from transformers import AutoModelForImageTextToText

from torchrl_vla import schema
from torchrl_vla import topology as topo
from torchrl_vla.policies import pi0, pi0_checkpoint, tiny, vlm
from torchrl_vla.policies.flow import PATH
from torchrl_vla.policies.lora import (
    LoraSettings,
    add_lora,
    apply_trainable,
    freeze,
    merged_state_dict,
    train_only,
    trainable_weights,
)
from torchrl_vla.policies.policy import LOGITS, VALUE
from torchrl_vla.policies.shard import full_weights, shard

ATTENTION = LoraSettings(("q_proj", "v_proj"), rank=2, alpha=4.0, trained=("*value_head*",))


def small_vlm(**settings):
    torch.manual_seed(0)
    return spread(vlm.make_policy(META, size="tiny", **({"num_bins": 8} | settings)))


def small_pi0(**settings):
    torch.manual_seed(0)
    return spread(pi0.make_policy(META, size="tiny", **({"steps": 3} | settings)))


def teach(policy: nn.Module, seed: int = 1) -> nn.Module:
    """Move every trainable parameter, as updates would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return policy


def act(policy: nn.Module, td: TensorDict) -> TensorDict:
    torch.manual_seed(3)
    with torch.no_grad():
        return policy(td.clone())


def trainable(policy: nn.Module) -> set[str]:
    return {name for name, p in policy.named_parameters() if p.requires_grad}


def test_a_fresh_adapter_changes_nothing_and_trains_alone():
    for make in (small_vlm, small_pi0):
        plain, policy = make(), add_lora(make(), ATTENTION)
        td = observations(3)
        before, after = act(plain, td), act(policy, td)
        assert all(torch.equal(before[key], after[key]) for key in plain.out_keys)
        names = trainable(policy)
        assert all(".lora_" in name or "value_head" in name for name in names)
        assert any("value_head" in name for name in names)
        # both towers, or prefix and expert
        parts = {"vision" in name for name in names if ".lora_" in name}
        assert parts == {True, False}
        scored = policy.score(td)
        given = act(policy, td)
        score = policy.get_dist(scored).log_prob(given[policy.action_key]).sum()
        (score + scored[VALUE].sum()).backward()
        moved = {n for n, p in policy.named_parameters() if p.grad is not None}
        assert moved == names
        # B starts at 0, so that the first gradient reaches B and not A
        for name, parameter in policy.named_parameters():
            if ".lora_B." in name and "vision" not in name:
                assert parameter.grad.abs().sum() > 0, name


def test_the_tiny_policy_takes_adapters_too():
    policy = tiny.make_policy(META)
    add_lora(policy, LoraSettings(r".*blocks\.\d+\.(query|key_value|out)", rank=4))
    names = trainable(policy)
    # two blocks, three layers, A and B
    assert len(names) == 12
    assert act(policy, observations(2))[schema.CHUNK].abs().max() <= 1


def test_merging_by_hand():
    # W = [[1, 2]], A = [[3, 4]], B = [[0.5]], alpha / rank = 2: W + 2 * 0.5 * [3, 4] = [4, 6]
    model = nn.Sequential(nn.Linear(2, 1))
    add_lora(model, LoraSettings("0", rank=1, alpha=2.0))
    layer = model[0]
    with torch.no_grad():
        layer.base_layer.weight.copy_(torch.tensor([[1.0, 2.0]]))
        layer.base_layer.bias.fill_(7.0)
        layer.lora_A["default"].weight.copy_(torch.tensor([[3.0, 4.0]]))
        layer.lora_B["default"].weight.fill_(0.5)
    merged = merged_state_dict(model)
    assert set(merged) == {"0.weight", "0.bias"}
    assert merged["0.weight"].tolist() == [[4.0, 6.0]]
    assert merged["0.bias"].tolist() == [7.0]
    # the module itself is as it was
    assert layer.base_layer.weight.tolist() == [[1.0, 2.0]]
    # x = [1, 1]: 4 + 6 + 7
    assert model(torch.ones(1, 2)).item() == 17.0


def test_publishing_carries_the_trainable_part_only():
    learner, actor = add_lora(small_vlm(), ATTENTION), add_lora(small_vlm(), ATTENTION)
    td = observations(3)
    teach(learner)
    weights = trainable_weights(learner)
    leaves = list(weights.values(include_nested=True, leaves_only=True))
    assert len(leaves) == len(trainable(learner))
    whole = sum(p.numel() for p in learner.parameters())
    assert sum(leaf.numel() for leaf in leaves) < 0.05 * whole
    # nested as the whole weights are, so that the same channel carries them
    everything = full_weights(learner)
    assert set(weights.keys(True, True)) <= set(everything.keys(True, True))
    assert not torch.equal(act(actor, td)[VALUE], act(learner, td)[VALUE])
    apply_trainable(actor, weights)
    first, second = act(actor, td), act(learner, td)
    assert all(torch.equal(first[key], second[key]) for key in actor.out_keys)
    # copies: what the learner does next does not reach the actor
    teach(learner, seed=2)
    assert torch.equal(act(actor, td)[VALUE], first[VALUE])


def test_publishing_into_another_policy_is_refused():
    weights = trainable_weights(add_lora(small_vlm(), ATTENTION))
    other = add_lora(small_vlm(), LoraSettings(("q_proj",), rank=2))
    with pytest.raises(ValueError, match="do not fit the trainable parameters"):
        apply_trainable(other, weights)
    wider = LoraSettings(("q_proj", "v_proj"), rank=3, trained=("*value_head*",))
    with pytest.raises(ValueError, match=r"\(2, 48\) given, \(3, 48\) here"):
        apply_trainable(add_lora(small_vlm(), wider), weights)
    with pytest.raises(ValueError, match="nothing would be published"):
        trainable_weights(small_vlm().requires_grad_(False))


def test_sharded_adapters(one: topo.Topology):
    plain, policy = add_lora(small_vlm(), ATTENTION), add_lora(small_vlm(), ATTENTION)
    trunk = policy.model.model
    shard(trunk, one.mesh, blocks=trunk.shard_plan())
    assert any(isinstance(p, DTensor) for p in policy.parameters())
    td = observations(2)
    score = policy.score(td)
    (score[LOGITS].square().sum() + score[VALUE].sum()).backward()
    moved = {name for name, p in policy.named_parameters() if p.grad is not None}
    assert moved == trainable(policy)
    weights = trainable_weights(policy)
    own = trainable_weights(plain)
    for key in own.keys(True, True):
        assert torch.equal(weights[key], own[key]), key
    with pytest.raises(TypeError, match="is sharded; load the result"):
        merged_state_dict(policy)


@pytest.mark.parametrize("family", ["pi0", "smolvlm", "paligemma"])
def test_merged_exports_load_back_bit_equal(family: str, tmp_path: Path):
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    if family == "pi0":
        save_pi0(source)
        make, write, settings = pi0.make_policy, pi0_checkpoint.export, {"steps": 3}
    else:
        save_vlm(source, family)
        make, write = vlm.make_policy, vlm.export
        settings = {"prompt": PROMPTS[family], "num_bins": 8}
    torch.manual_seed(0)
    policy = teach(make(META, checkpoint=str(source), lora=ATTENTION, **settings))
    wanted = merged_state_dict(policy)
    write(policy, out, source=source)
    torch.manual_seed(9)  # nothing of the loaded policy may be random
    again = make(META, checkpoint=str(out), **settings)
    state = again.state_dict()
    assert state.keys() == wanted.keys()
    assert all(torch.equal(state[key], value) for key, value in wanted.items())
    # and it acts like the adapted one, up to rounding
    td = observations(3)
    with set_exploration_type(ExplorationType.RANDOM):
        first, second = act(policy, td), act(again, td)
    key = PATH if family == "pi0" else VALUE
    torch.testing.assert_close(first[key], second[key], atol=1e-4, rtol=1e-4)
    assert not torch.equal(
        act(make(META, checkpoint=str(source), **settings), td)[VALUE], first[VALUE]
    )
    if family != "pi0":
        network = AutoModelForImageTextToText.from_pretrained(out)
        plain = network.state_dict()
        ours = again.model.model.backbone.state_dict()
        assert all(torch.equal(plain[key], ours[key]) for key in ours)


def test_freezing_by_pattern():
    policy = small_pi0()
    freeze(policy, ("*vision_tower*", "*embed_tokens*"))
    frozen = {name for name, p in policy.named_parameters() if not p.requires_grad}
    assert frozen == {
        name
        for name, _ in policy.named_parameters()
        if "vision_tower" in name or "embed_tokens" in name
    }
    train_only(policy, ("actor.*",))
    assert trainable(policy) == {n for n, _ in policy.named_parameters() if n.startswith("actor.")}
    with pytest.raises(ValueError, match="pattern 'vision_tower' matches none"):
        freeze(policy, ("vision_tower",))


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ValueError, match="rank is 0"):
        LoraSettings(("q_proj",), rank=0)
    with pytest.raises(ValueError, match="alpha is -1"):
        LoraSettings(("q_proj",), alpha=-1.0)
    with pytest.raises(ValueError, match=r"lora\.targets=\('nothing',\) fit no layer"):
        add_lora(small_vlm(), LoraSettings(("nothing",)))
    with pytest.raises(ValueError, match=r"pattern '\*critic\*' matches none"):
        add_lora(small_vlm(), LoraSettings(("q_proj",), trained=("*critic*",)))
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'torchrl_vla\[lora\]'"):
        add_lora(small_vlm(), ATTENTION)
