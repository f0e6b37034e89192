"""Any VLM with our heads: the published hidden states, prompts, padding, what feeds the heads.

Run by torchrun (``__main__`` below), this file is also the program of the ranks.
"""

import sys
from pathlib import Path

import pytest
import torch
from programs import torchrun
from small_checkpoints import IMAGE_TOKEN, META, PROMPTS, observations, save_vlm, spread
from transformers import PreTrainedTokenizerFast
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from two_ranks import assert_equal_to_one_process, gradients, save_gradients

from torchrl_vla import schema
from torchrl_vla import topology as topo
from torchrl_vla.policies import vlm, vlm_inputs
from torchrl_vla.policies.families import PAD
from torchrl_vla.policies.flow import PATH
from torchrl_vla.policies.images import to_pixels
from torchrl_vla.policies.policy import LOGITS, VALUE
from torchrl_vla.policies.shard import full_weights, shard

FAMILIES = ("smolvlm", "paligemma", "qwen2_vl")
CELLS = {"smolvlm": 2, "paligemma": 4, "qwen2_vl": 4}
"""Tokens along one side of an image."""


@pytest.fixture(scope="module", params=FAMILIES)
def published(request, tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, folder, save_vlm(folder, request.param)


def build(family: str, folder: Path, **settings):
    torch.manual_seed(0)
    settings = {"prompt": PROMPTS[family], "num_bins": 8} | settings
    if family == "qwen2_vl":
        settings |= {"image_size": 64}
    policy = vlm.make_policy(META, checkpoint=str(folder), **settings)
    # Fresh heads are near uniform and blind; give them opinions.
    for name, parameter in policy.named_parameters():
        if "backbone" not in name and parameter.ndim > 1 and "queries" not in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return policy


def tiny(**settings):
    torch.manual_seed(0)
    return spread(vlm.make_policy(META, size="tiny", **({"num_bins": 8} | settings)))


def test_prompt_states_are_transformers_own(published):
    family, folder, network = published
    policy = build(family, folder)
    trunk, td = policy.model.model, observations(5)
    td[schema.TASK_ID] = torch.tensor([[0], [3], [6], [9], [10]])  # of four lengths
    words = policy.model.instruction_table[td[schema.TASK_ID].squeeze(-1)]
    mask = words != PAD
    pixels = to_pixels(td[schema.IMAGE], [trunk.pixel_scale], torch.float32)
    # what a user of transformers would pass, input ids and pixels
    given = {"input_ids": words.clamp_min(0), "attention_mask": mask.long()}
    if family == "smolvlm":
        given |= {"pixel_values": pixels}
    elif family == "paligemma":
        given |= {"pixel_values": pixels.flatten(0, 1), "token_type_ids": torch.zeros_like(words)}
    else:
        given |= {
            "pixel_values": vlm_inputs.to_patches(
                pixels.flatten(0, 1), network.config.vision_config
            ),
            "image_grid_thw": torch.tensor([[1, 8, 8]] * 5),
            "mm_token_type_ids": (words == IMAGE_TOKEN).int(),
        }
    with torch.no_grad():
        wanted = network.model(**given).last_hidden_state
        ours, _ = trunk._run(td[schema.IMAGE], td[schema.STATE], words)
    ours = ours[:, : words.shape[1]]
    assert wanted[mask].std() > 0.1
    torch.testing.assert_close(ours[mask], wanted[mask], atol=2e-5, rtol=2e-5)


def test_prompts_by_hand(published):
    family, folder, _ = published
    table = build(family, folder).model.instruction_table
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    shown = [tokenizer.convert_ids_to_tokens([i for i in row.tolist() if i >= 0]) for row in table]
    image = [tokenizer.convert_ids_to_tokens(IMAGE_TOKEN)] * CELLS[family] ** 2
    fake = "<fake_token_around_image>"
    wanted = {
        "smolvlm": ["<bos>", "User", ":", fake, "<global-img>", *image, fake],
        "paligemma": [*image, "<bos>"],
        "qwen2_vl": ["<bos>", "<|vision_start|>", *image, "<|vision_end|>"],
    }[family]
    for text, tokens in zip(META.instructions, shown, strict=True):
        assert tokens == [*wanted, *text.split(), "\n"]
    # padding is on the right
    lengths = (table >= 0).sum(-1)
    assert all((row[: int(n)] >= 0).all() for row, n in zip(table, lengths, strict=True))
    assert lengths.max() == table.shape[1]


def test_a_chat_template_is_used(tmp_path: Path):
    save_vlm(tmp_path, "smolvlm")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    tokenizer.chat_template = (
        "{% for m in messages %}User : {% for c in m.content %}{% if c.type == 'image' %}<image> "
        "{% else %}{{ c.text }} {% endif %}{% endfor %}{{ '\n' }}{% endfor %}"
    )
    tokenizer.save_pretrained(tmp_path)
    by_chat = build("smolvlm", tmp_path, prompt=None).model.instruction_table
    by_hand = build("smolvlm", tmp_path, prompt="User : {images} {instruction} \n")
    assert torch.equal(by_chat, by_hand.model.instruction_table)


def test_mixed_prompts_equal_each_row_alone(published):
    family, folder, _ = published
    for reads in ("queries", "last", "mean"):
        policy = build(family, folder, reads=reads)
        table = policy.model.instruction_table
        lengths = (table >= 0).sum(-1)
        short, long = int(lengths.argmin()), int(lengths.argmax())
        assert lengths[short] < lengths[long]
        td = observations(2)
        td[schema.TASK_ID] = torch.tensor([[short], [long]])
        with torch.no_grad():
            both = policy.score(td.clone())
            policy.model.instruction_table = table[:, : int(lengths[short])]
            alone = policy.score(td[:1].clone())
        for key in (LOGITS, VALUE):
            torch.testing.assert_close(alone[key], both[:1][key], atol=3e-5, rtol=1e-4)


def test_every_input_matters_for_every_read(published):
    family, folder, _ = published
    td = observations(3)
    changed = {
        "image": td.clone().set(schema.IMAGE, 255 - td[schema.IMAGE]),
        "state": td.clone().set(schema.STATE, td[schema.STATE] + 0.5),
        "words": td.clone().set(schema.TASK_ID, (td[schema.TASK_ID] + 1) % 12),
    }
    seen = []
    for reads in ("queries", "last", "mean"):
        policy = build(family, folder, reads=reads)
        with torch.no_grad():
            base = policy.score(td.clone())
            for name, other in changed.items():
                score = policy.score(other)
                gap = (score[LOGITS] - base[LOGITS]).abs().amax((1, 2, 3)).min()
                assert gap > 1e-5, (reads, name)
                assert (score[VALUE] - base[VALUE]).abs().min() > 1e-6, (reads, name)
        # the chunk's steps are told apart
        assert (base[LOGITS][:, 0] - base[LOGITS][:, 1]).abs().max() > 1e-3
        seen.append(base[LOGITS])
    assert not torch.allclose(seen[0], seen[1])
    assert not torch.allclose(seen[1], seen[2])


@pytest.mark.parametrize("head", ["tokens", "gaussian", "flow"])
@pytest.mark.parametrize("reads", ["queries", "last", "mean"])
@pytest.mark.parametrize("batch", [(), (2, 3)])
def test_heads_for_any_batch_dims(head: str, reads: str, batch: tuple[int, ...]):
    policy = tiny(head=head, reads=reads, steps=3)
    td = policy(observations(*batch))
    assert set(policy.out_keys) <= set(td.keys(True, True))
    assert td[schema.CHUNK].shape == td[schema.LOG_PROBS].shape == (*batch, 4, 4)
    assert td[VALUE].shape == (*batch, 1)
    assert td[schema.CHUNK].abs().max() <= 1
    with torch.no_grad():
        scored = policy.score(td.select(*policy.in_keys))
        again = policy.get_dist(scored).log_prob(td[policy.action_key])
    assert again.shape == (*batch, 4, 4)
    assert (again - td[schema.LOG_PROBS]).abs().max() < 1e-5
    assert policy.value(td).shape == (*batch, 1)
    if head == "flow":
        assert td[PATH].shape == (*batch, 4, 4, 4)
    if head != "tokens":
        width = {"queries": 5, "last": 1, "mean": 1}[reads] * 64 + META.state_dim
        assert policy.features(td).shape == (*batch, width)
        assert policy.model.model.feature_dim == width


def test_bfloat16_arithmetic_keeps_float32_densities():
    policy = tiny(precision="bfloat16")
    with torch.no_grad():
        td = policy(observations(4))
        again = policy.get_dist(policy.score(td.clone())).log_prob(td[schema.TOKENS])
        full = tiny().get_dist(tiny().score(td.clone())).log_prob(td[schema.TOKENS])
    assert td[schema.LOG_PROBS].dtype == td[VALUE].dtype == torch.float32
    assert (again - td[schema.LOG_PROBS]).abs().max() < 1e-5
    assert (full - again).abs().max() > 0


def test_the_layer_that_feeds_the_heads():
    td = observations(2)
    seen = []
    for layer in (-1, 1):
        policy = tiny(layer=layer)
        with torch.no_grad():
            seen.append(policy.score(td.clone())[LOGITS])
            if layer == 1:
                # layers behind the one that is read cannot matter
                last = policy.model.model.backbone.model.text_model.layers[-1]
                last.mlp.down_proj.weight.add_(1.0)
                assert torch.equal(policy.score(td.clone())[LOGITS], seen[-1])
    assert len({logits.sum().item() for logits in seen}) == 2
    for layer in (0, 2, -2):
        with pytest.raises(ValueError, match=rf"layer is {layer}; use -1 .* or 1 to 1"):
            tiny(layer=layer)


def test_qwen_inputs_are_its_processors():
    settings = {"patch_size": 8, "merge_size": 2, "temporal_patch_size": 2, "do_resize": False}
    processor = Qwen2VLImageProcessorPil(**settings)
    image = torch.randint(0, 256, (2, 3, 64, 64), dtype=torch.uint8)
    wanted = processor(images=[x.permute(1, 2, 0).numpy() for x in image], return_tensors="pt")
    mean, std = (
        torch.tensor(part).reshape(3, 1, 1) for part in (processor.image_mean, processor.image_std)
    )

    class Vision:
        patch_size, spatial_merge_size, temporal_patch_size = 8, 2, 2

    patches = vlm_inputs.to_patches((image.float() / 255 - mean) / std, Vision)
    torch.testing.assert_close(patches, wanted["pixel_values"], atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="image_size is 60; it must be a multiple of 16"):
        vlm_inputs.to_patches(torch.zeros(1, 3, 60, 60), Vision)


def test_positions_by_hand():
    class Settings:
        model_type, image_token_id = "qwen2_vl", 9

        class vision_config:
            patch_size, spatial_merge_size = 8, 2

    # 32 px: 2 x 2 merged cells. Text, image, text, pad: 0, then the image starts at 1 and takes
    # two positions, so the next word is at 3
    words = torch.tensor([[5, 9, 9, 9, 9, 6, 7, PAD]])
    found = vlm_inputs.positions(Settings, words, words != PAD, torch.zeros(1, 1, 3, 32, 32))
    assert found[0, 0, :7].tolist() == [0, 1, 1, 1, 1, 3, 4]
    assert found[1, 0, :7].tolist() == [0, 1, 1, 2, 2, 3, 4]
    assert found[2, 0, :7].tolist() == [0, 1, 2, 1, 2, 3, 4]
    Settings.model_type = "smolvlm"
    found = vlm_inputs.positions(Settings, words, words != PAD, torch.zeros(1, 1, 3, 32, 32))
    assert found[0, :7].tolist() == [0, 1, 2, 3, 4, 5, 6]


def test_what_is_refused(tmp_path: Path):
    save_vlm(tmp_path, "smolvlm")
    where = {"checkpoint": str(tmp_path)}
    for settings, message in [
        ({}, "exactly one of a checkpoint and size=tiny"),
        ({"size": "tiny", "head": "l1"}, "head is 'l1'"),
        ({"size": "tiny", "reads": "first"}, "reads is 'first'"),
        (where, "has no chat template: set policy.prompt"),
        (where | {"prompt": "User {instruction}"}, "places 0 images, the suite has 1 cameras"),
        (where | {"prompt": "{images} {images} {instruction}"}, "places 2 images"),
    ]:
        with pytest.raises(ValueError, match=message):
            vlm.make_policy(META, **settings)
    other = tmp_path / "qwen"
    save_vlm(other, "qwen2_vl")
    with pytest.raises(ValueError, match=r"takes images of any size: set policy\.image_size"):
        vlm.make_policy(META, checkpoint=str(other), prompt=PROMPTS["qwen2_vl"])
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError, match="holds no tokenizer"):
        vlm.make_policy(META, **where)


# --- shards ----------------------------------------------------------------------------------


def update_like(policy, td):
    scored = policy.score(td.copy())
    log_prob = policy.get_dist(scored).log_prob(td[schema.TOKENS])
    loss = -(log_prob.mean((1, 2)) * td["advantage"]).mean() + scored[VALUE].square().mean()
    loss.backward()


def round_of_data():
    policy = tiny()
    torch.manual_seed(1)
    with torch.no_grad():
        td = policy(observations(4))
    td["advantage"] = torch.tensor([1.0, -1.0, 0.5, 2.0])
    return policy, td


@pytest.mark.slow
def test_two_ranks_have_the_gradient_of_one(tmp_path: Path):
    torchrun(__file__, tmp_path)
    assert_equal_to_one_process(tmp_path, *round_of_data(), update_like)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_shard_plan_fits(family: str, tmp_path: Path, one: topo.Topology):
    save_vlm(tmp_path, family)
    policy, plain = build(family, tmp_path), build(family, tmp_path)
    trunk = policy.model.model
    plan = trunk.shard_plan()
    # decoder layers and vision blocks
    assert len(plan) == 2
    sharded = shard(trunk, one.mesh, blocks=plan, param_dtype=torch.bfloat16)
    td = plain(observations(3))
    td["advantage"] = torch.ones(3)
    update_like(policy, td)
    assert {p.dtype for p in sharded.parameters()} == {torch.float32}
    assert all(grad.isfinite().all() for grad in gradients(policy).values())
    weights = full_weights(policy)
    assert torch.equal(
        weights["model", "model", "value_head", "weight"], plain.model.model.value_head.weight
    )


if __name__ == "__main__":
    save_gradients(*round_of_data(), update_like, Path(sys.argv[1]))
