"""Published checkpoint folders: strict, no foreign code, errors that name what is wrong."""

import dataclasses
import json
import pickle
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from openvla_fixture import config, inputs, part, state_dict
from openvla_folder import META, SPATIAL, TEN, tokenizer, write_folder
from safetensors.torch import save_file

from torchrl_vla.policies.families import resolve_checkpoint
from torchrl_vla.policies.openvla import make_policy
from torchrl_vla.policies.openvla.checkpoint import read_settings
from torchrl_vla.policies.openvla.prompts import prompt_table, render_prompt, word_encoder

ENTRY = config()["norm_stats"]["tiny_libero_no_noops"]
EMBEDDING = "language_model.model.embed_tokens.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("published"))


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A folder whose tensors are missing, for errors that come before the load."""
    return write_folder(tmp_path, tensors={"x": torch.zeros(1)}, extras=False)


def test_a_published_folder_loads(folder: Path):
    policy = make_policy(META, checkpoint=str(folder), head="l1", gripper="libero")
    model = policy.model.model
    loaded, wanted = model.backbone.state_dict(), state_dict()
    assert loaded.keys() == wanted.keys()
    assert all(torch.equal(loaded[key], wanted[key]) for key in wanted)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert not any(t.is_meta for t in (*model.parameters(), *model.buffers()))
    for name in ("action_head", "proprio_projector"):
        own = getattr(model, name).state_dict()
        stored = part("weights", name)
        assert own.keys() == stored.keys()
        assert all(torch.equal(own[key], stored[key].float()) for key in stored)
    # rotary frequencies are in no file: 10000^(-2i/8)
    frequencies = model.backbone.language_model.model.rotary_emb.inv_freq
    torch.testing.assert_close(frequencies, torch.tensor([1.0, 0.1, 0.01, 0.001]))
    described = policy.model.describe()
    assert described["attention"] == "bidirectional"
    assert described["unnorm_key"] == "tiny_libero_no_noops"
    assert described["gripper"] == "LiberoGripper"
    assert described["state_token"] is True
    assert len(described["statistics_sha256"]) == 16
    json.dumps(described)


def test_defaults_of_the_two_families(folder: Path):
    oft = make_policy(META, checkpoint=str(folder))
    assert (oft.model.model.decoding, oft.model.model.backbone.attention) == (
        "parallel",
        "bidirectional",
    )
    first = make_policy(META, checkpoint=str(folder), decoding="autoregressive", chunk_size=1)
    assert first.model.model.backbone.attention == "causal"


def test_prompts_have_the_recorded_ids():
    def encode(text: str) -> list[int]:
        return tokenizer().encode(text).ids

    table = prompt_table((SPATIAL.upper(), TEN), encode, pad_id=32000, end_id=29871)
    # recorded from Llama-2's tokenizer, padded on the left there
    for row, recorded in zip(table, inputs()["input_ids"], strict=True):
        assert row[row != 32000].tolist() == recorded[recorded != 32000].tolist()
    assert table.shape == (2, 35)
    assert table[1, 29:].tolist() == [32000] * 6
    # a prompt that ends with the piece already does not get it twice
    again = prompt_table((TEN,), lambda text: [*encode(text), 29871], 32000, 29871)
    assert torch.equal(again[0], table[1, :29])
    with pytest.raises(ValueError, match="contains the padding id 13"):
        prompt_table((TEN,), encode, pad_id=13)


def test_word_level_prompts():
    encode, words = word_encoder(("push the Red block", "reach it"))
    assert words[:4] == ("\n", ":", "?", "In")
    ids = encode(render_prompt("reach it"))
    assert ids[0] == 1
    assert min(ids[1:]) >= 3
    assert max(ids) == 2 + len(words)
    with pytest.raises(ValueError, match=r"uses \['cube'\]"):
        encode(render_prompt("push the cube"))


def test_a_foreign_tokenizer_is_refused(small: Path):
    for built, found in (
        (tokenizer(start=False), r"\[512, 29901"),
        (None, "tokenizer.json is mis"),
    ):
        (small / "tokenizer.json").unlink()
        if built is not None:
            built.save(str(small / "tokenizer.json"))
        (small / "model.safetensors.index.json").unlink(missing_ok=True)
        save_file(state_dict(), small / "model.safetensors")
        with pytest.raises((ValueError, FileNotFoundError), match=found):
            make_policy(META, checkpoint=str(small))


def test_keys_and_shapes_are_named(tmp_path: Path):
    missing = state_dict()
    del missing["projector.fc3.bias"]
    missing["projector.fc9.bias"] = torch.zeros(1)
    path = write_folder(tmp_path / "keys", tensors=missing)
    with pytest.raises(
        ValueError,
        match=r"1 missing \['projector.fc3.bias'\], 1 unexpected \['projector.fc9.bias'\]",
    ):
        make_policy(META, checkpoint=str(path))
    other = state_dict() | {"projector.fc3.bias": torch.zeros(25)}
    path = write_folder(tmp_path / "shapes", tensors=other)
    with pytest.raises(ValueError, match=r"projector.fc3.bias: file \(25,\), model \(24,\)"):
        make_policy(META, checkpoint=str(path))
    (path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"lacks \['model-00002-of-00002.safetensors'\]"):
        make_policy(META, checkpoint=str(path))


def test_statistics_are_chosen_by_name(small: Path):
    with pytest.raises(
        ValueError, match=r"for \['tiny_libero_no_noops'\], and 'tiny_libero' was asked for"
    ):
        make_policy(META, checkpoint=str(small), unnorm_key="tiny_libero")
    # the file beside the checkpoint replaces what config.json carried along
    (small / "dataset_statistics.json").write_text(json.dumps({"mine": ENTRY, "other": ENTRY}))
    assert sorted(read_settings(small).norm_stats) == ["mine", "other"]
    with pytest.raises(
        ValueError, match=r"dataset_statistics.json has .*\['mine', 'other'\].*none"
    ):
        make_policy(META, checkpoint=str(small))


def test_pixel_statistics_come_from_the_processor(small: Path):
    assert read_settings(small).towers[0].mean == (0.484375, 0.455078125, 0.40625)
    params = [{"mean": [0.1, 0.2, 0.3], "std": [1, 1, 1]}, {"mean": [0, 0, 0], "std": [2, 2, 2]}]
    content = {"means": [[9, 9, 9]], "tvf_normalize_params": params}
    (small / "preprocessor_config.json").write_text(json.dumps(content))
    first, second = read_settings(small).towers
    assert first.mean == (0.1, 0.2, 0.3)
    assert second.std == (2, 2, 2)


def test_extras_are_checked(folder: Path, tmp_path: Path):
    bare = write_folder(tmp_path / "bare", extras=False)
    for settings, name in (
        ({"head": "l1"}, "action_head"),
        ({"state_token": True}, "proprio_projector"),
    ):
        with pytest.raises(ValueError, match=rf"has no {name}--\*.pt"):
            make_policy(META, checkpoint=str(bare), **settings)
    assert make_policy(META, checkpoint=str(bare)).model.model.proprio_projector is None
    torch.save({}, bare / "action_head--1_checkpoint.pt")
    torch.save({}, bare / "action_head--2_checkpoint.pt")
    with pytest.raises(ValueError, match=r"keep the one that belongs"):
        make_policy(META, checkpoint=str(bare), head="l1")
    # a suite whose state has another length
    other = dataclasses.replace(META, state_names=META.state_names[:6])
    with pytest.raises(ValueError, match=r"fc1.weight: file \(24, 8\), model \(24, 6\)"):
        make_policy(other, checkpoint=str(folder))
    other = dataclasses.replace(META, action_names=META.action_names[:4])
    with pytest.raises(ValueError, match=r"of 7 action numbers, the suite 'arm' has 4"):
        make_policy(other, checkpoint=str(folder))


def test_a_projector_inside_the_checkpoint(tmp_path: Path):
    stored = part("weights", "proprio_projector")
    inside = state_dict() | {f"proprio_projector.{k}": v.float() for k, v in stored.items()}
    path = write_folder(tmp_path, tensors=inside, extras=False)
    model = make_policy(META, checkpoint=str(path)).model.model
    assert torch.equal(model.proprio_projector.fc1.weight, stored["fc1.weight"].float())


class Trap:
    def __reduce__(self):
        return exec, ("raise SystemExit('pickle ran')",)


def test_no_code_from_files(folder: Path, tmp_path: Path):
    # the folder's own modeling.py would end this process
    assert "foreign code ran" in (folder / "modeling.py").read_text()
    path = write_folder(tmp_path)
    torch.save({"fc1": Trap()}, path / "action_head--150000_checkpoint.pt")
    with pytest.raises(pickle.UnpicklingError):
        make_policy(META, checkpoint=str(path), head="l1")


def test_parts_that_are_not_supported(small: Path):
    (small / "vision_backbone--1_checkpoint.pt").touch()
    with pytest.raises(ValueError, match="FiLM-conditioned vision is not supported"):
        read_settings(small)


def test_unknown_towers_are_named(tmp_path: Path):
    content = config() | {"timm_model_ids": ["vit_base_patch16_clip_224"]}
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"\['vit_base_patch16_clip_224'\]; known are"):
        read_settings(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        read_settings(tmp_path)


def test_the_published_names_mean_the_published_sizes(tmp_path: Path):
    content = config() | {"image_sizes": [224, 224]}
    (tmp_path / "config.json").write_text(json.dumps(content))
    dino, siglip = read_settings(tmp_path).towers
    assert (dino.width, dino.depth, dino.num_heads, dino.hidden) == (1024, 24, 16, 4096)
    assert (siglip.width, siglip.depth, siglip.num_heads, siglip.hidden) == (1152, 27, 16, 4304)
    assert dino.num_patches == siglip.num_patches == 256


def test_a_hub_id_without_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    for name in ("openvla/openvla-7b", "no such folder!"):
        with pytest.raises(FileNotFoundError) as caught:
            resolve_checkpoint(name)
        message = str(caught.value)
        assert "\n" not in message
        assert f"policy.checkpoint={name} is no local folder" in message
        assert "pass policy.checkpoint=FOLDER" in message
