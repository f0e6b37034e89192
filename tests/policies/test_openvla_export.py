"""OpenVLA with adapters, and exported: the published names, the same bits."""

from pathlib import Path

import pytest
import torch
from openvla_fixture import state_dict
from openvla_folder import META, write_folder
from safetensors import safe_open
from tensordict import TensorDict

from torchrl_vla import schema
from torchrl_vla.policies.lora import LoraSettings, merged_state_dict, trainable_names
from torchrl_vla.policies.openvla import export, make_policy

ATTENTION = LoraSettings(("q_proj", "v_proj"), rank=2, alpha=4.0, trained=("*value_head*",))
SETTINGS = {"head": "l1", "chunk_size": 2}


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("published"))


def adapted(folder: Path) -> torch.nn.Module:
    """A policy whose trainable parameters have moved, as updates would move them."""
    torch.manual_seed(0)
    policy = make_policy(META, checkpoint=str(folder), lora=ATTENTION, **SETTINGS)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if name in trainable_names(policy):
                parameter += 0.1 * torch.randn(parameter.shape)
    return policy


def observation() -> TensorDict:
    generator = torch.Generator().manual_seed(0)
    td = TensorDict(batch_size=[2])
    image = (2, 2, 3, META.image_size, META.image_size)
    td[schema.IMAGE] = torch.randint(0, 256, image, generator=generator, dtype=torch.uint8)
    td[schema.STATE] = torch.rand(2, META.state_dim, generator=generator)
    td[schema.TASK_ID] = torch.tensor([[0], [1]])
    return td


def test_adapters_alone_are_trained(published: Path):
    policy = make_policy(META, checkpoint=str(published), lora=ATTENTION, **SETTINGS)
    plain = make_policy(META, checkpoint=str(published), **SETTINGS)
    assert all(".lora_" in n or "value_head" in n for n in trainable_names(policy))
    with torch.no_grad():
        assert torch.equal(policy(observation())[schema.CHUNK], plain(observation())[schema.CHUNK])


def test_an_export_has_the_published_keys_and_loads_bit_equal(published: Path, tmp_path: Path):
    policy = adapted(published)
    export(policy, tmp_path / "out", source=published)
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert set(file.keys()) == set(state_dict())
    again = make_policy(META, checkpoint=str(tmp_path / "out"), **SETTINGS)
    wanted, found = merged_state_dict(policy), again.state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)
    fresh = make_policy(META, checkpoint=str(published), **SETTINGS)
    with torch.no_grad():
        moved = again(observation())[schema.CHUNK] - fresh(observation())[schema.CHUNK]
    assert moved.abs().max() > 1e-3
    with pytest.raises(FileExistsError, match="not empty"):
        export(policy, tmp_path / "out", source=published)


def test_an_adapter_that_would_be_ignored_is_refused(published: Path):
    with pytest.raises(ValueError, match="match the LM head"):
        make_policy(META, checkpoint=str(published), lora=LoraSettings(("lm_head",)), chunk_size=2)
