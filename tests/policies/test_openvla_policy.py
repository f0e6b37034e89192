"""OpenVLA policies on the tabletop suite: tiny, random weights, every head and both decodings."""

from pathlib import Path

import pytest
import torch
from openvla_folder import META as ARM
from openvla_folder import write_folder
from tensordict import TensorDict
from torchrl.envs.utils import ExplorationType, set_exploration_type

from torchrl_vla import schema
from torchrl_vla.envs.tabletop import TabletopSuite
from torchrl_vla.policies.images import ImagePipeline
from torchrl_vla.policies.openvla import make_policy
from torchrl_vla.policies.policy import LOGITS, VALUE
from torchrl_vla.policies.weights import load_weights, save_weights

META = TabletopSuite().meta
SMALL = {
    "size": "tiny",
    "chunk_size": 3,
    "num_bins": 32,
    "patch_size": 16,
    "vision_width": 16,
    "width": 32,
    "heads": 2,
}
AUTOREGRESSIVE = {"decoding": "autoregressive"}


def build(meta=META, seed=0, **settings):
    torch.manual_seed(seed)
    policy = make_policy(meta, **(SMALL | settings))
    model = policy.model.model
    # Fresh weights are nearly blind; give them opinions so that tests see a difference.
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim > 1 and "value_head" not in name:
                p.mul_(4.0 if "lm_head" in name else 2.0)
        torch.nn.init.normal_(model.value_head[-1].weight)
    return policy


def observations(*batch, meta=META, seed=0):
    generator = torch.Generator().manual_seed(seed)
    size, tasks = meta.image_size, len(meta.instructions)
    td = TensorDict(batch_size=batch)
    image = (*batch, len(meta.cameras), 3, size, size)
    td[schema.IMAGE] = torch.randint(0, 256, image, generator=generator, dtype=torch.uint8)
    td[schema.STATE] = torch.randn(*batch, meta.state_dim, generator=generator)
    td[schema.TASK_ID] = torch.randint(0, tasks, (*batch, 1), generator=generator)
    return td


@pytest.mark.parametrize("settings", [{}, AUTOREGRESSIVE], ids=["parallel", "autoregressive"])
@pytest.mark.parametrize("batch", [(), (4,), (2, 3)])
def test_token_policies_speak_the_contract(batch: tuple, settings: dict):
    policy = build(**settings)
    with torch.no_grad():
        td = policy(observations(*batch))
        shape = (*batch, 3, META.action_dim)
        for key in (schema.CHUNK, schema.TOKENS, schema.LOG_PROBS):
            assert td[key].shape == shape
        assert td[schema.CHUNK].dtype == td[schema.LOG_PROBS].dtype == torch.float32
        assert td[schema.CHUNK].abs().max() <= 1
        assert td[schema.TOKENS].dtype == torch.int64
        assert td[VALUE].shape == (*batch, 1)
        assert set(policy.out_keys) <= set(td.keys(True, True))
        scored = policy.score(td.clone())
        assert scored[LOGITS].shape == (*shape, 32)
        assert policy.value(observations(*batch)).shape == (*batch, 1)


@pytest.mark.parametrize("temperature", [0.7, 1.6])
@pytest.mark.parametrize("settings", [{}, AUTOREGRESSIVE], ids=["parallel", "autoregressive"])
def test_the_learner_finds_the_actors_log_probs(settings: dict, temperature: float):
    policy = build(temperature=temperature, **settings)
    with torch.no_grad():
        acted = policy(observations(6))
        scored = policy.score(acted.clone())
        learner = policy.get_dist(scored).log_prob(acted[schema.TOKENS])
        by_hand = policy.unscaled_logits(acted.clone()) / temperature
    by_hand = by_hand.log_softmax(-1).gather(-1, acted[schema.TOKENS][..., None])[..., 0]
    assert (acted[schema.LOG_PROBS] - learner).abs().max() < 1e-5
    assert (acted[schema.LOG_PROBS] - by_hand).abs().max() < 1e-5
    torch.testing.assert_close(scored[VALUE], acted[VALUE], atol=1e-5, rtol=0)
    assert acted[VALUE].std() > 0
    assert acted[schema.LOG_PROBS].std() > 0.1
    torch.testing.assert_close(
        acted[schema.CHUNK], policy.action_tokenizer.decode(acted[schema.TOKENS])
    )


def test_an_autoregressive_token_changes_what_follows_and_nothing_before():
    policy = build(**AUTOREGRESSIVE)
    with torch.no_grad():
        td = policy(observations(2))
        base = policy.unscaled_logits(td.clone()).flatten(1, 2)
        td[schema.TOKENS][:, 1, 1] = (td[schema.TOKENS][:, 1, 1] + 7) % 32  # number 5 of 12
        other = policy.unscaled_logits(td.clone()).flatten(1, 2)
        value = policy.value(td)
    moved = (base - other).abs().amax(-1)
    assert moved[:, :6].max() < 1e-5
    assert moved[:, 6].min() > 1e-3
    torch.testing.assert_close(value, td[VALUE], atol=1e-5, rtol=0)


def test_demonstrations_condition_on_their_own_tokens():
    policy = build(**AUTOREGRESSIVE)
    td = policy(observations(3)).detach()
    td[schema.TOKENS].clamp_(min=1)  # bins 0 and 1 have one centre
    logits = policy.unscaled_logits(td.clone())
    del td[schema.TOKENS]
    torch.testing.assert_close(policy.unscaled_logits(td), logits)
    del td[schema.CHUNK]
    with pytest.raises(ValueError, match="depend on the action tokens"):
        policy.unscaled_logits(td)


@pytest.mark.parametrize("decode", ["mean", "argmax", "sample"])
def test_decodes_of_an_evaluation(decode: str):
    policy = build(eval_decode=decode)
    with set_exploration_type(ExplorationType.DETERMINISTIC), torch.no_grad():
        out = policy(observations(3))
        probs = policy.score(observations(3))[LOGITS].softmax(-1)
    centres = policy.action_tokenizer.centres.float()
    wanted = {
        "mean": (probs * centres).sum(-1),
        "argmax": centres[probs.argmax(-1)],
        "sample": centres[out[schema.TOKENS]],
    }[decode]
    torch.testing.assert_close(out[schema.CHUNK], wanted)


def test_greedy_autoregressive_decoding_is_repeatable():
    policy = build(**AUTOREGRESSIVE, eval_decode="argmax")
    with set_exploration_type(ExplorationType.DETERMINISTIC), torch.no_grad():
        first, second = policy(observations(3)), policy(observations(3))
        logits = policy.unscaled_logits(first.clone())
    assert torch.equal(first[schema.TOKENS], second[schema.TOKENS])
    assert torch.equal(logits.argmax(-1), first[schema.TOKENS])
    with pytest.raises(ValueError, match="eval_decode=mean needs all bins at once"):
        build(**AUTOREGRESSIVE, eval_decode="mean")


@pytest.mark.parametrize("attention", ["bidirectional", "causal"])
def test_every_input_matters_and_rows_do_not_mix(attention: str):
    policy = build(attention=attention)
    assert policy.model.describe()["attention"] == attention
    td = observations(4)
    with torch.no_grad():
        base = policy.unscaled_logits(td)
        changed = {
            "image": td.clone().set(schema.IMAGE, 255 - td[schema.IMAGE]),
            "state": td.clone().set(schema.STATE, td[schema.STATE] + 1.0),
            "words": td.clone().set(schema.TASK_ID, (td[schema.TASK_ID] + 1) % 12),
        }
        for name, other in changed.items():
            moved = (policy.unscaled_logits(other) - base).abs().amax((1, 2, 3))
            assert moved.min() > 1e-4, name
        # rows of other prompt lengths change nothing
        torch.testing.assert_close(policy.unscaled_logits(td[2:3]), base[2:3])


def test_cameras_are_chosen_by_name():
    meta = TabletopSuite(second_camera=True).meta
    td = observations(2, meta=meta)
    both = build(meta)
    one = build(meta, cameras=[meta.cameras[1]])
    assert both.model.cameras == [0, 1]
    other = td.clone()
    other[schema.IMAGE][:, 0] = 255 - other[schema.IMAGE][:, 0]
    with torch.no_grad():
        assert torch.equal(one.unscaled_logits(td), one.unscaled_logits(other))
        assert not torch.equal(both.unscaled_logits(td), both.unscaled_logits(other))
    with pytest.raises(ValueError, match=r"cameras are \['side'\]; choose 1\.\.3 of the suite's"):
        build(meta, cameras=["side"])


def test_the_model_sees_the_turned_image_once():
    seen = []
    policy = build(images=ImagePipeline(rotate=180))
    policy.model.model.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    td = observations(2)
    with torch.no_grad():
        acted = policy(td.clone())  # the actor
        policy.score(acted.clone())  # the learner
        with set_exploration_type(ExplorationType.DETERMINISTIC):
            policy(td.clone())  # the evaluation
    assert len(seen) == 3
    assert all(torch.equal(image, td[schema.IMAGE].flip(-1, -2)) for image in seen)
    assert policy.model.describe()["images"]["rotate"] == 180


def test_only_what_is_used_is_a_parameter():
    policy = build()
    model = policy.model.model
    td = policy.score(observations(3))
    (td[LOGITS].logsumexp(-1).sum() + td[VALUE].sum()).backward()
    without = [name for name, p in model.named_parameters() if p.grad is None]
    assert without == []
    window = model.backbone.window
    head = model.backbone.language_model.lm_head.weight.grad
    assert head[: window.first].abs().max() == 0
    assert head[window.vocabulary :].abs().max() == 0
    assert head[window.columns].abs().min(1).values.max() > 0
    # stored for a strict load, never run
    stored = {name for name, _ in model.named_buffers() if "vision_backbone" in name}
    assert any("featurizer.blocks.2" in name for name in stored)
    assert any("attn_pool" in name for name in stored)


def test_the_head_only_multiplies_the_window():
    policy = build()
    backbone = policy.model.model.backbone
    shapes = []
    linear = torch.nn.functional.linear

    def spy(x, weight, bias=None):
        shapes.append(tuple(weight.shape))
        return linear(x, weight, bias)

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(torch.nn.functional, "linear", spy)
        policy.unscaled_logits(observations(2))
    assert (32, backbone.width) in shapes
    assert backbone.language_model.config.vocab_size not in {rows for rows, _ in shapes}


def test_l1_head():
    policy = build(head="l1")
    td = policy(observations(2, 2))
    assert td[schema.CHUNK].shape == (2, 2, 3, META.action_dim)
    assert td[schema.CHUNK].abs().max() <= 1
    policy.normalised_chunk(observations(2)).abs().sum().backward()
    idle = [n for n, p in policy.model.model.named_parameters() if p.grad is None]
    assert idle
    assert all(name.startswith(policy.idle) for name in idle)


def test_gaussian_head():
    policy = build(head="gaussian", eval_decode="mean", store_log_probs=True)
    td = policy(observations(5))
    assert td[schema.CHUNK].shape == (5, 3, META.action_dim)
    assert policy.features(observations(5)).shape == (5, 32 + META.state_dim)
    (td[schema.LOG_PROBS].sum() + td[VALUE].sum()).backward()
    idle = [n for n, p in policy.model.model.named_parameters() if p.grad is None]
    assert [name for name in idle if not name.startswith(policy.idle)] == []


def test_bfloat16_passes_keep_float32_log_probs():
    single, half = build(), build(precision="bfloat16")
    with torch.no_grad():
        acted = half(observations(8))
        again = half.get_dist(half.score(acted.clone())).log_prob(acted[schema.TOKENS])
        exact = single.get_dist(single.score(acted.clone())).log_prob(acted[schema.TOKENS])
    assert acted[schema.LOG_PROBS].dtype == again.dtype == torch.float32
    assert (acted[schema.LOG_PROBS] - again).abs().max() < 1e-5
    gap = (acted[schema.LOG_PROBS] - exact).abs().max()
    assert 0 < gap < 0.5
    with pytest.raises(ValueError, match="precision is 'float16'"):
        build(precision="float16")


@pytest.mark.parametrize("head", ["tokens", "l1", "gaussian"])
def test_weights_survive_a_file(tmp_path: Path, head: str):
    decode = {"eval_decode": "mean"} if head == "gaussian" else {}
    first, second = build(head=head, **decode), build(head=head, seed=1, **decode)
    vocabulary = first.model.vocabulary
    assert "block" in vocabulary
    path = tmp_path / "policy.safetensors"
    save_weights(path, modules=first.parts(), vocabulary=vocabulary, recipe={})
    load_weights(path, vocabulary=vocabulary, **second.parts())
    a, b = first.state_dict(), second.state_dict()
    assert a.keys() == b.keys()
    assert all(torch.equal(a[key], b[key]) for key in a)
    third = make_policy(META, **(SMALL | {"head": head, "weights": str(path)} | decode))
    c = third.state_dict()
    assert all(torch.equal(a[key], c[key]) for key in a)


def test_a_checkpoint_acts_in_the_simulators_units(tmp_path: Path):
    folder = write_folder(tmp_path)
    settings = {"checkpoint": str(folder), "chunk_size": 8, "gripper": "libero"}
    low = torch.tensor([-0.7454732, -0.6616071, -0.9375, -0.1071429, -0.2067857, -0.1842857])
    high = torch.tensor([0.9375, 0.8758929, 0.9321429, 0.1039286, 0.1767857, 0.145714283])
    with torch.no_grad():
        policy = make_policy(ARM, **settings)
        td = policy(observations(3, meta=ARM))
        # q01 and q99 of the file; the gripper opens or closes and nothing between
        assert td[schema.CHUNK].shape == (3, 8, 7)
        assert (td[schema.CHUNK][..., :6] >= low).all()
        assert (td[schema.CHUNK][..., :6] <= high).all()
        assert (td[schema.CHUNK][..., :6] < low / 2).any()
        assert set(td[schema.CHUNK][..., 6].unique().tolist()) == {-1.0, 1.0}
        # encoding what was decoded gives the same bins but for 0 and the gripper
        again = policy.action_tokenizer.encode(td[schema.CHUNK])[..., :6]
        assert torch.equal(again, td[schema.TOKENS][..., :6].clamp(min=1))
        for decode in ("mean", "argmax"):
            greedy = make_policy(ARM, **settings, eval_decode=decode)
            with set_exploration_type(ExplorationType.DETERMINISTIC):
                chunk = greedy(observations(3, meta=ARM))[schema.CHUNK]
            assert (chunk[..., :6] <= high).all()
            assert (chunk[..., :6] >= low).all()
            assert set(chunk[..., 6].unique().tolist()) <= {-1.0, 1.0}
        regression = make_policy(ARM, **settings, head="l1")
        chunk = regression(observations(3, meta=ARM))[schema.CHUNK]
        assert chunk.abs().max() <= 1
        assert set(chunk[..., 6].unique().tolist()) <= {-1.0, 1.0}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"size": None}, r"checkpoint=None and policy.size=None: give exactly one of a"),
        ({"checkpoint": "x"}, "checkpoint=x and policy.size=tiny"),
        ({"size": "huge"}, "size is 'huge'"),
        ({"size": None, "checkpoint": "x"}, "are no settings of a checkpoint"),
        ({"head": "flow"}, "head is 'flow'"),
        ({"attention": "prefix"}, "attention is 'prefix'"),
        ({"decoding": "beam"}, "decoding is 'beam'"),
        ({**AUTOREGRESSIVE, "attention": "bidirectional"}, "needs attention=causal"),
        ({**AUTOREGRESSIVE, "head": "l1"}, "use decoding=parallel"),
        ({**AUTOREGRESSIVE, "head": "gaussian", "eval_decode": "mean"}, "decoding=parallel"),
        ({"gripper": "panda"}, "gripper is 'panda'"),
        ({"patch_size": 15}, "64 is no multiple of patch_size 15"),
        ({"temperature": 0.0}, "temperature is 0.0"),
    ],
)
def test_settings_that_contradict(settings: dict, message: str):
    with pytest.raises(ValueError, match=message):
        make_policy(META, **(SMALL | settings))
