"""The network against numbers of the reference implementations (tests/golden/openvla/README.md)."""

import json

import pytest
import torch
from openvla_fixture import (
    ATOL,
    GOLDEN,
    NUMBER,
    TOWERS,
    WINDOW,
    arrays,
    case,
    config,
    inputs,
    language,
    model,
    part,
    pixels,
    state_dict,
)

from torchrl_vla.objectives.action_log_prob import window_log_probs
from torchrl_vla.policies.action_tokens import TailBins
from torchrl_vla.policies.images import ImagePipeline
from torchrl_vla.policies.openvla.backbone import OpenVLA
from torchrl_vla.policies.openvla.model import L1Head, StateProjector
from torchrl_vla.policies.openvla.towers import VisionBackbone, dinov2_sizes, siglip_sizes
from torchrl_vla.policies.statistics import ActionSpace, Normalizer

ENTRY = config()["norm_stats"]["tiny_libero_no_noops"]
DISCRETE = [
    ("fused", "bidirectional", "fused_discrete_bidirectional"),
    ("fused", "causal", "fused_discrete_causal"),
    ("single", "bidirectional", "single_discrete_bidirectional"),
    ("single", "causal", "single_discrete_causal"),
]


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def close(ours: torch.Tensor, golden: torch.Tensor) -> None:
    torch.testing.assert_close(ours, golden, atol=ATOL, rtol=0)


def run(network: OpenVLA, patches: torch.Tensor, words: torch.Tensor, state=None):
    """Return the sequence and the states at the action positions."""
    sequence = network.prompt(patches, words, state, network.placeholders(len(words), NUMBER))
    hidden = network.at_actions(network.hidden(sequence), sequence.first, NUMBER)
    assert torch.equal(hidden, network.parallel(patches, words, state, NUMBER))
    return sequence, hidden


def check_discrete(network: OpenVLA, golden: dict, patches, words, state=None) -> None:
    """Compare every array of a discrete case."""
    close(patches, golden["projected_patches"])
    sequence, hidden = run(network, patches, words, state)
    close(sequence.embeds, golden["lm_inputs_embeds"])
    assert torch.equal(sequence.real.long(), golden["lm_attention_mask"])
    positions = sequence.first[:, None] + torch.arange(NUMBER)
    assert torch.equal(positions, golden["action_positions"])
    close(hidden, golden["action_hidden"])
    logits = network.action_logits(hidden)
    close(logits, golden["logits_window"])
    tokens = logits.argmax(-1)
    assert torch.equal(WINDOW.ids(tokens), golden["greedy_tokens"])
    full = network.language_model.lm_head(hidden)
    assert torch.equal(logits, full[..., 31744:32000])
    close(full.logsumexp(-1), golden["logits_full_logsumexp"])
    close(full[..., 32000:], golden["logits_padcols"])
    assert torch.equal(full.argmax(-1), golden["logits_full_argmax"])
    for temperature, name in ((1.0, "T1p0"), (1.6, "T1p6")):
        given = WINDOW.bins(golden["sampled_tokens"])
        chunked = (logits.unflatten(1, (8, 7)), given.unflatten(1, (8, 7)))
        log_probs, entropy = window_log_probs(*chunked, temperature)
        close(log_probs.flatten(1), golden[f"logprob_sampled_{name}"])
        close(entropy.flatten(1), golden[f"entropy_{name}"])
    chunk = tokens.unflatten(1, (8, 7))
    normalised = TailBins().centres[chunk]
    assert (normalised - golden["greedy_actions_normalized"]).abs().max() < 1e-12
    space = ActionSpace(Normalizer("quantile", ENTRY["action"], range_epsilon=1e-8))
    actions = space.to_simulator(normalised)
    assert (actions - golden["greedy_actions_unnormalized"]).abs().max() < 1e-12
    for row in range(len(words)):
        if f"oft_predict_action_row{row}" in golden:
            nearest = WINDOW.nearest_bins(golden["logits_full_argmax"][row]).unflatten(0, (8, 7))
            original = space.to_simulator(TailBins().centres[nearest])
            assert (original - golden[f"oft_predict_action_row{row}"]).abs().max() < 1e-12


@pytest.mark.parametrize(("name", "attention", "golden"), DISCRETE)
def test_parallel_decoding(name: str, attention: str, golden: str):
    network, wanted = model(name, attention), case(golden)
    features = network.vision_backbone(pixels(name))
    close(features, wanted["vision_features"])
    # the rows are padded on the left: 3 and 9 pads
    words = inputs()["input_ids"]
    patches = network.encode(pixels(name))
    check_discrete(network, wanted, patches, words)


@pytest.mark.parametrize("attention", ["bidirectional", "causal"])
def test_a_padded_row_equals_the_row_alone(attention: str):
    network = model("fused", attention)
    patches = network.encode(pixels())
    words, alone = inputs()["input_ids"], inputs()["input_ids_row1"]
    assert words.shape[1] == 38
    assert alone.shape[1] == 29
    _, padded = run(network, patches, words)
    _, single = run(network, patches[1:], alone)
    close(padded[1:], single)
    # wherever the pads are
    right = torch.cat([alone, torch.full((1, 9), 32000)], dim=1)
    _, other = run(network, patches[1:], right)
    close(other, single)


def test_the_two_attention_modes_are_two_policies():
    logits = {}
    for attention in ("bidirectional", "causal"):
        network = model("fused", attention)
        _, hidden = run(network, network.encode(pixels()), inputs()["input_ids"])
        logits[attention] = network.action_logits(hidden)
    gap = (logits["bidirectional"] - logits["causal"]).abs().max()
    assert gap == pytest.approx(7.996747, abs=1e-4)
    same = (logits["bidirectional"].argmax(-1) == logits["causal"].argmax(-1)).float().mean()
    assert same == pytest.approx(0.4732143, abs=1e-6)


def test_two_images_and_proprioception():
    network, wanted = model(), case("fused_discrete_bidirectional_2img_proprio")
    projector = StateProjector(8, 24)
    projector.load_state_dict(
        {k: v.float() for k, v in part("weights", "proprio_projector").items()}
    )
    raw = inputs()["proprio_raw"]
    normaliser = Normalizer("quantile", ENTRY["proprio"], range_epsilon=1e-8, clip=True)
    state = normaliser.normalise(raw).float()
    close(state, inputs()["proprio_normalized"])
    two = inputs()["pixel_values_2img"].unflatten(1, (2, 6))
    close(network.vision_backbone(two), wanted["vision_features"])
    patches = network.encode(two)
    words = inputs()["input_ids_row1"]
    check_discrete(network, wanted, patches, words, projector(state))
    # L1: the same trunk, another head
    golden = case("fused_l1_bidirectional_2img_proprio")
    sequence, hidden = run(network, patches, words, projector(state))
    close(sequence.embeds, golden["lm_inputs_embeds"])
    close(hidden, golden["action_hidden"])
    head = L1Head(24, 7)
    head.load_state_dict({k: v.float() for k, v in part("weights", "action_head").items()})
    chunk = head(hidden)
    close(chunk, golden["normalized_actions"])
    space = ActionSpace(Normalizer("quantile", ENTRY["action"], range_epsilon=1e-8))
    actions = space.to_simulator(chunk.double())[0]
    assert (actions - golden["unnormalized_actions"]).abs().max() < ATOL


def test_norm_epsilons():
    """Everything that feeds a norm scaled by 1/128: a wrong epsilon moves the logits by 1.5."""
    wanted = case("fused_eps_probe_bidirectional")
    scaled = state_dict()
    for key in scaled:
        names = ("patch_embed.proj", "pos_embed", "cls_token", "reg_token", "embed_tokens", "fc3")
        if any(name in key for name in names):
            scaled[key] = scaled[key] / 128
    network = model()
    network.load_state_dict(scaled)
    close(network.vision_backbone(pixels()), wanted["vision_features"])
    patches = network.encode(pixels())
    close(patches, wanted["projected_patches"])
    _, hidden = run(network, patches, inputs()["input_ids"])
    logits = network.action_logits(hidden)
    close(logits, wanted["logits_window"])
    assert torch.equal(WINDOW.ids(logits.argmax(-1)), wanted["greedy_tokens"])


def test_autoregressive_decoding():
    network, wanted = model("fused", "causal"), case("fused_autoregressive")
    words = inputs()["input_ids"]
    patches = network.encode(pixels())
    close(patches[0], wanted["projected_patches_row0"])
    head = network.language_model.lm_head
    # the original chooses over all 32064 columns; both rows in one batch, pads and all
    ids, hidden = network.generate(patches, words, None, 7, lambda h: head(h).argmax(-1))
    for row in range(2):
        assert torch.equal(ids[row], wanted[f"row{row}_greedy_tokens"])
        window = wanted[f"row{row}_greedy_step_logits_window"]
        close(network.action_logits(hidden[row]), window)
        # OpenVLA's own rule has no 1e-8 in the range
        nearest = WINDOW.nearest_bins(ids[row])
        space = ActionSpace(Normalizer("quantile", ENTRY["action"]))
        actions = space.to_simulator(TailBins().centres[nearest])
        assert (actions - wanted[f"row{row}_predict_action"]).abs().max() < 1e-12


def test_given_tokens():
    network, wanted = model("fused", "causal"), case("fused_autoregressive")
    patches, words = network.encode(pixels()), inputs()["input_ids"]
    given = torch.stack([wanted[f"row{row}_given_tokens"] for row in range(2)])
    hidden = network.teacher_forced(patches, words, None, WINDOW.bins(given))
    full = network.language_model.lm_head(hidden)
    for row in range(2):
        close(hidden[row], wanted[f"row{row}_given_hidden"])
        logits = network.action_logits(hidden[row])
        close(logits, wanted[f"row{row}_given_logits_window"])
        close(full[row].logsumexp(-1), wanted[f"row{row}_given_logits_full_logsumexp"])
        for temperature, name in ((1.0, "T1p0"), (1.6, "T1p6")):
            supports = (
                ("window", logits, WINDOW.bins(given[row])),
                ("full", full[row], given[row]),
            )
            for support, columns, index in supports:
                log_probs, entropy = window_log_probs(columns, index, temperature)
                close(log_probs, wanted[f"row{row}_given_logprob_{support}_{name}"])
                close(entropy, wanted[f"row{row}_given_entropy_{support}_{name}"])


def test_cached_decoding_equals_one_pass_over_its_tokens():
    network = model("fused", "causal")
    patches, words = network.encode(pixels()), inputs()["input_ids"]
    ids, cached = network.generate(
        patches, words, None, 7, lambda h: network.action_logits(h).argmax(-1) + WINDOW.first
    )
    close(network.teacher_forced(patches, words, None, WINDOW.bins(ids)), cached)


def test_pixels_of_the_reference_processor():
    backbone = VisionBackbone(TOWERS)
    for name in ("a", "b"):  # 56 x 56 (no resize) and 90 x 120
        image = arrays("image_processor")[f"image_{name}"].movedim(-1, 0)
        ours = backbone.normalise(ImagePipeline()(image, 56)[None, None])
        close(ours[0, 0], arrays("image_processor")[f"pixel_values_{name}"])


def test_decode_table():
    table = arrays("decode_table")
    values = TailBins().centres[WINDOW.nearest_bins(table["token_ids"])]
    assert torch.equal(values, table["normalized"])
    encoded = WINDOW.ids(TailBins().encode(table["encode_input"]))
    assert torch.equal(encoded, table["encode_tokens"])


def test_the_real_model_has_the_published_keys():
    listed = json.loads((GOLDEN / "openvla_7b_keys.json").read_text())
    wanted = {}
    for entry in listed["patterns"]:
        for i in range(entry.get("i", 1)):
            wanted[entry["pattern"].replace("{i}", str(i))] = tuple(entry["shape"])
    with torch.device("meta"):
        language_model = {"vocab_size": 32064, "pad_token_id": 32000}
        network = OpenVLA((dinov2_sizes(), siglip_sizes()), language_model, WINDOW, "causal")
    own = {key: tuple(value.shape) for key, value in network.state_dict().items()}
    assert own == wanted
    assert len(own) == 982
    assert sum(value.numel() for value in network.state_dict().values()) == 7_541_237_184
    llama = network.language_model.config
    assert llama.rms_norm_eps == 1e-6
    assert language()["rms_norm_eps"] == 1e-6
