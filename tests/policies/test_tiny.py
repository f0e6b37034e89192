"""The tiny VLA: shapes, one policy in rollout and loss, instructions, weights files."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tensordict import TensorDict
from torchrl.envs.utils import ExplorationType, set_exploration_type

from torchrl_vla import schema
from torchrl_vla.envs.tabletop import TabletopSuite
from torchrl_vla.policies.instructions import build_vocabulary, tokenize
from torchrl_vla.policies.policy import LOGITS, VALUE, draw_bins
from torchrl_vla.policies.tiny import SHIPPED_WEIGHTS, Block, TinyModel, make_policy
from torchrl_vla.policies.weights import load_weights, read_header, save_weights

SMALL = {"weights": None, "width": 32, "heads": 2, "keypoints": 4, "chunk_size": 3, "num_bins": 8}
META = TabletopSuite().meta


def build(meta=META, seed=0, **settings):
    torch.manual_seed(seed)
    policy = make_policy(meta, **(SMALL | settings))
    if settings.get("head") != "gaussian":
        # Fresh heads are near uniform and blind; give them opinions so that tests see a difference.
        torch.nn.init.normal_(policy.model.model.token_head.linear.weight, std=0.5)
        torch.nn.init.normal_(policy.model.model.value_head.weight)
    return policy


def observations(*batch, meta=META, seed=0):
    generator = torch.Generator().manual_seed(seed)
    size, tasks = meta.image_size, len(meta.instructions)
    td = TensorDict(batch_size=batch)
    image = (*batch, len(meta.cameras), 3, size, size)
    td[schema.IMAGE] = torch.randint(0, 256, image, generator=generator, dtype=torch.uint8)
    td[schema.STATE] = 0.1 * torch.randn(*batch, meta.state_dim, generator=generator)
    td[schema.TASK_ID] = torch.randint(0, tasks, (*batch, 1), generator=generator)
    return td


@pytest.mark.parametrize("batch", [(), (4,), (2, 3), (0,)])
def test_shapes_for_any_batch_dims(batch):
    policy = build()
    td = policy(observations(*batch))
    shape = (*batch, 3, META.action_dim)
    assert td[schema.CHUNK].shape == td[schema.TOKENS].shape == td[schema.LOG_PROBS].shape == shape
    assert td[schema.CHUNK].dtype == td[schema.LOG_PROBS].dtype == torch.float32
    assert td[schema.TOKENS].dtype == torch.int64
    assert td[VALUE].shape == (*batch, 1)
    assert set(policy.out_keys) <= set(td.keys(True, True))
    scored = policy.score(observations(*batch))
    assert scored[LOGITS].shape == (*shape, 8)
    assert policy.value(observations(*batch)).shape == (*batch, 1)
    assert build(head="gaussian")(observations(*batch))[schema.CHUNK].shape == shape


def test_batch_dims_do_not_change_the_decision():
    policy = build(eval_decode="argmax")
    td = observations(2, 3)
    with set_exploration_type(ExplorationType.DETERMINISTIC), torch.no_grad():
        grid = policy(td.clone())
        rows = policy(td.reshape(6).clone())
        one = policy(td[1, 2].clone())
    torch.testing.assert_close(grid[VALUE].reshape(6, 1), rows[VALUE])
    assert torch.equal(grid[schema.TOKENS].reshape(6, 3, 4), rows[schema.TOKENS])
    torch.testing.assert_close(one[schema.LOG_PROBS], rows[schema.LOG_PROBS][5])


@pytest.mark.parametrize("temperature", [0.6, 1.0, 2.5])
def test_one_temperature_in_rollout_and_loss(temperature: float):
    policy = build(temperature=temperature)
    td = observations(5)
    with torch.no_grad():
        acted = policy(td.clone())
        scored = policy.score(td.clone())
        unscaled = policy.unscaled_logits(td.clone())
    tokens = acted[schema.TOKENS]
    learner = policy.get_dist(scored).log_prob(tokens)
    by_hand = (unscaled / temperature).log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    assert (acted[schema.LOG_PROBS] - learner).abs().max() < 1e-6
    assert (acted[schema.LOG_PROBS] - by_hand).abs().max() < 1e-6
    # the value comes from the same pass in both
    assert torch.equal(acted[VALUE], scored[VALUE])
    torch.testing.assert_close(policy.value(td), acted[VALUE])
    assert acted[VALUE].std() > 0


def test_temperature_scales_what_is_sampled():
    # softmax(z / T) of two-valued logits: the frequency of the favourite bin follows T.
    for temperature in (0.5, 2.0):
        policy = build(temperature=temperature, num_bins=4)
        linear = policy.model.model.token_head.linear
        with torch.no_grad():
            linear.weight.zero_()
            linear.bias.copy_(torch.tensor([1.0, 0.0, 0.0, 0.0]).repeat(META.action_dim))
        torch.manual_seed(0)
        td = policy(observations(200))
        # e^(1/T) / (e^(1/T) + 3): T = 0.5: 7.389 / 10.389 = 0.711; T = 2: 1.6487 / 4.6487 = 0.355
        wanted = {0.5: 0.711, 2.0: 0.355}[temperature]
        share = (td[schema.TOKENS] == 0).float().mean().item()  # 2400 draws, sd below 0.01
        assert share == pytest.approx(wanted, abs=0.03)
        favourite = td[schema.LOG_PROBS][td[schema.TOKENS] == 0].exp()
        assert favourite.mean().item() == pytest.approx(wanted, abs=1e-3)


def test_bins_are_drawn_as_often_as_they_should():
    torch.manual_seed(0)
    probs = torch.tensor([0.0, 0.5, 0.0, 0.2, 0.3, 0.0]).expand(3, 4000, 6)
    counts = torch.stack([row.bincount(minlength=6) for row in draw_bins(probs)])
    # 4000 draws: standard deviation of a count at most sqrt(4000 / 4) = 31.6
    wanted = torch.tensor([0, 2000, 0, 800, 1200, 0])
    assert (counts - wanted).abs().max() < 5 * 31.6
    assert not counts[:, [0, 2, 5]].any()
    certain = torch.eye(6).repeat(500, 1, 1)
    assert torch.equal(draw_bins(certain), torch.arange(6).expand(500, 6))
    with pytest.raises(FloatingPointError, match="1 of 2 action distributions are not finite"):
        draw_bins(torch.tensor([[0.5, 0.5], [float("nan"), 0.5]]))


def test_sampling_is_on_unless_exploration_is_off():
    policy = build()
    td = observations(6)
    torch.manual_seed(1)
    first, second = policy(td.clone()), policy(td.clone())
    assert not torch.equal(first[schema.TOKENS], second[schema.TOKENS])
    torch.manual_seed(1)
    assert torch.equal(policy(td.clone())[schema.TOKENS], first[schema.TOKENS])
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        assert torch.equal(policy(td.clone())[schema.CHUNK], policy(td.clone())[schema.CHUNK])


def test_decodes_of_an_evaluation():
    td = observations(3)
    chunks = {}
    for decode in ("mean", "argmax", "sample"):
        policy = build(eval_decode=decode)
        with set_exploration_type(ExplorationType.DETERMINISTIC), torch.no_grad():
            out = policy(td.clone())
            probs = policy.score(td.clone())[LOGITS].softmax(-1)
        # 8 bins of [-1, 1]: centres -7/8, -5/8, ... 7/8
        centres = torch.arange(-7, 8, 2) / 8
        wanted = {
            "mean": (probs * centres).sum(-1),
            "argmax": centres[probs.argmax(-1)],
            "sample": centres[out[schema.TOKENS]],
        }[decode]
        torch.testing.assert_close(out[schema.CHUNK], wanted)
        assert out[schema.CHUNK].abs().max() <= 1
        chunks[decode] = out[schema.CHUNK]
    assert not torch.equal(chunks["mean"], chunks["argmax"])
    gaussian = build(head="gaussian")
    with set_exploration_type(ExplorationType.DETERMINISTIC), torch.no_grad():
        loc, _ = gaussian.location_and_scale(td)
        torch.testing.assert_close(gaussian(td.clone())[schema.CHUNK], loc.tanh())


def test_exploration_and_the_stored_chunk_agree():
    policy = build()
    td = policy(observations(4))
    decoded = policy.action_tokenizer.decode(td[schema.TOKENS])
    assert torch.equal(td[schema.CHUNK], decoded)


def test_256_bins():
    policy = build(num_bins=256)
    td = policy(observations(16))
    assert td[schema.TOKENS].max() > 127
    # centres -1 + (2 i + 1) / 256
    torch.testing.assert_close(td[schema.CHUNK], -1 + (2 * td[schema.TOKENS] + 1) / 256)
    assert policy.score(observations(2))[LOGITS].shape == (2, 3, 4, 256)


def test_a_second_camera_is_seen():
    meta = TabletopSuite(second_camera=True).meta
    policy = build(meta)
    td = observations(3, meta=meta)
    other = td.clone()
    other[schema.IMAGE][:, 1] = 255 - other[schema.IMAGE][:, 1]
    swapped = td.clone()
    swapped[schema.IMAGE] = td[schema.IMAGE].flip(1)
    base, second, order = (policy.unscaled_logits(x) for x in (td, other, swapped))
    assert (base - second).abs().amax((1, 2, 3)).min() > 1e-4
    assert (base - order).abs().amax((1, 2, 3)).min() > 1e-4


def test_every_input_matters():
    policy = build()
    td = observations(4)
    base = policy.unscaled_logits(td)
    changed = {
        "image": td.clone().set(schema.IMAGE, 255 - td[schema.IMAGE]),
        "state": td.clone().set(schema.STATE, td[schema.STATE] + 0.3),
        "words": td.clone().set(schema.TASK_ID, (td[schema.TASK_ID] + 1) % 12),
    }
    for name, other in changed.items():
        difference = (policy.unscaled_logits(other) - base).abs().amax((1, 2, 3)).min()
        assert difference > 1e-4, name


def test_padding_of_an_instruction_cannot_influence_anything():
    # the same words with more padding, and a padding embedding that is not zero
    model = build().model.model
    wide = TinyModel(
        vocabulary_size=12,
        state_dim=META.state_dim,
        action_dim=4,
        chunk_size=3,
        num_bins=8,
        max_words=10,
        width=32,
        heads=2,
        keypoints=4,
    )
    own = model.state_dict()
    own["positions"] = torch.cat([own["positions"], torch.randn(3, 32)])
    wide.load_state_dict(own)
    td = observations(4)
    words = torch.tensor([[1, 2, 3, 0, 0, 0], [4, 5, 6, 7, 8, 9], [1, 0, 0, 0, 0, 0], [9] * 6])
    outputs = ("logits", "value", "features", "position")
    short = model(td[schema.IMAGE], td[schema.STATE], words, outputs)
    padded = torch.cat([words, torch.zeros(4, 4, dtype=torch.int64)], 1)
    with torch.no_grad():
        wide.words.weight[0] = 7.0
    long = wide(td[schema.IMAGE], td[schema.STATE], padded, outputs)
    for name in outputs:
        torch.testing.assert_close(short[name], long[name], atol=1e-5, rtol=1e-5)
    # and the words that are no padding do
    words[2, 0] = 2
    other = model(td[schema.IMAGE], td[schema.STATE], words, outputs)
    assert (other["logits"][2] - short["logits"][2]).abs().max() > 1e-4


def test_a_blocks_last_tokens_equal_the_full_computation():
    torch.manual_seed(0)
    block = Block(32, 4)
    x = torch.randn(3, 9, 32)
    mask = torch.rand(3, 9) > 0.3
    mask[:, 0] = True
    mask = mask[:, None, None]
    whole = block(x, mask)
    for num_out in (1, 4, 9):
        part = block(x, mask, num_out=num_out)
        torch.testing.assert_close(part, whole[:, -num_out:], atol=1e-6, rtol=1e-5)


def test_features_hold_what_the_heads_read():
    policy = build(head="gaussian")
    td = observations(4)
    features = policy.features(td)
    # (1 + H) hidden states of 32 and the normalised state
    size = META.state_dim
    assert features.shape == (4, 4 * 32 + size)
    torch.testing.assert_close(features[:, -size:], td[schema.STATE])
    policy.model.model.state_mean += 1.0
    policy.model.model.state_std *= 4.0
    torch.testing.assert_close(policy.features(td)[:, -size:], (td[schema.STATE] - 1) / 4)
    cached = TensorDict({"features": features}, batch_size=[4])
    own = policy.actor[0].module(features)
    assert all(
        torch.equal(a, b) for a, b in zip(policy.location_and_scale(cached), own, strict=True)
    )


def test_instructions_become_ids_once():
    texts = ("push left", "left", "reach")
    vocabulary = build_vocabulary(texts)
    assert vocabulary == ("left", "push", "reach")
    assert tokenize(texts, vocabulary, 3).tolist() == [[2, 1, 0], [1, 0, 0], [3, 0, 0]]
    with pytest.raises(ValueError, match=r"'reach'.*\['reach'\].*vocabulary of 2 words"):
        tokenize(texts, ("left", "push"), 3)
    with pytest.raises(ValueError, match="has 2 words; the policy reads 1"):
        tokenize(texts, vocabulary, 1)


@pytest.mark.parametrize("head", ["tokens", "gaussian"])
def test_weights_survive_a_file(tmp_path: Path, head: str):
    first, second = build(head=head, seed=0), build(head=head, seed=1)
    with torch.no_grad():
        first.model.model.state_mean.fill_(0.25)
    vocabulary = first.model.vocabulary
    path = tmp_path / "new" / "policy.safetensors"
    save_weights(path, modules=first.parts(), vocabulary=vocabulary, recipe={"stage": "test"})
    load_weights(path, vocabulary=vocabulary, **second.parts())
    a, b = first.state_dict(), second.state_dict()
    assert a.keys() == b.keys()
    assert all(torch.equal(a[key], b[key]) for key in a)
    assert read_header(path) == {"vocabulary": list(vocabulary), "recipe": {"stage": "test"}}
    # and a policy built with that path starts from them
    third = make_policy(META, **(SMALL | {"weights": str(path), "head": head}))
    assert torch.equal(third.model.model.queries, first.model.model.queries)


def test_a_file_in_bfloat16_loads_into_float32(tmp_path: Path):
    first, second = build(seed=0), build(seed=1)
    path = tmp_path / "half.safetensors"
    save_weights(
        path,
        modules=first.parts(),
        vocabulary=first.model.vocabulary,
        recipe={},
        dtype=torch.bfloat16,
    )
    load_weights(path, vocabulary=first.model.vocabulary, **second.parts())
    weight = second.model.model.queries
    assert weight.dtype == torch.float32
    assert torch.equal(weight, first.model.model.queries.bfloat16().float())


def test_files_that_do_not_fit_name_both_sides(tmp_path: Path):
    policy = build()
    path = tmp_path / "policy.safetensors"
    save_weights(path, modules=policy.parts(), vocabulary=policy.model.vocabulary, recipe={})
    # 4 numbers x 8 bins of width 32 against 4 x 16
    with pytest.raises(ValueError, match=r"weight: file \(32, 32\), policy \(64, 32\)"):
        make_policy(META, **(SMALL | {"weights": str(path), "num_bins": 16}))
    with pytest.raises(ValueError, match=r"queries: file \(4, 32\), policy \(6, 32\).*chunk_size"):
        make_policy(META, **(SMALL | {"weights": str(path), "chunk_size": 5}))
    with pytest.raises(ValueError, match=r"does not fit.*blocks\.2"):
        make_policy(META, **(SMALL | {"weights": str(path), "layers": 3}))
    texts = tuple(text.replace("block", "cube") for text in META.instructions)
    other = dataclasses.replace(META, instructions=texts)
    with pytest.raises(ValueError, match=r"knows the words \[.*'block'.*uses \[.*'cube'"):
        make_policy(other, **(SMALL | {"weights": str(path)}))
    with pytest.raises(FileNotFoundError, match=r"no policy weights at .*nowhere"):
        make_policy(META, **(SMALL | {"weights": str(tmp_path / "nowhere.safetensors")}))


def test_a_file_without_a_gaussian_head_leaves_it_fresh(tmp_path: Path):
    policy = build(seed=0)
    path = tmp_path / "policy.safetensors"
    save_weights(path, modules=policy.parts(), vocabulary=policy.model.vocabulary, recipe={})
    loaded = make_policy(META, **(SMALL | {"weights": str(path), "head": "gaussian"}))
    assert torch.equal(loaded.model.model.queries, policy.model.model.queries)


@pytest.mark.parametrize("head", ["tokens", "gaussian"])
def test_the_shipped_weights_load(head: str):
    assert SHIPPED_WEIGHTS.stat().st_size < 2_000_000
    header = read_header(SHIPPED_WEIGHTS)
    assert header["vocabulary"] == list(build_vocabulary(META.instructions))
    assert header["recipe"]
    with safe_open(SHIPPED_WEIGHTS, "pt") as file:
        assert json.loads(file.metadata()["recipe"]) == header["recipe"]
    policy = make_policy(META, head=head)
    td = policy(observations(2))
    assert td[schema.CHUNK].shape == (2, 4, 4)
    assert torch.isfinite(td[schema.CHUNK]).all()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"eval_decode": "mode"}, "eval_decode is 'mode'"),
        ({"head": "gaussian", "eval_decode": "argmax"}, "eval_decode is 'argmax'"),
        ({"head": "flow"}, "head is 'flow'"),
    ],
)
def test_settings_out_of_range(settings: dict, message: str):
    with pytest.raises(ValueError, match=message):
        make_policy(META, **(SMALL | settings))
