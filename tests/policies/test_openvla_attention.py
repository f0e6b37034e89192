"""Which attention mode a checkpoint was trained with: the comparison and its command."""

import json
from functools import cache
from pathlib import Path

import pytest
import torch
from programs import composed, program
from tensordict import TensorDict

from torchrl_vla import schema
from torchrl_vla.data import demonstrations
from torchrl_vla.envs.tabletop import TabletopSuite
from torchrl_vla.policies.openvla import compare_attention, make_policy
from torchrl_vla.policies.openvla.attention_check import AttentionComparison
from torchrl_vla.policies.openvla.policy import TailTokenPolicy
from torchrl_vla.policies.weights import save_weights

ROOT = Path(__file__).parent.parent.parent
SUITE = TabletopSuite()
SIZES = {
    "num_bins": 32,
    "patch_size": 32,
    "vision_width": 16,
    "width": 32,
    "layers": 2,
    "heads": 2,
}
SETTINGS = {"size": "tiny", "chunk_size": 4, **SIZES}


check_policy = program("check_policy")


@cache
def demonstrated() -> TensorDict:
    episodes = demonstrations.record(SUITE.simulators(1), SUITE.splits["demo"][:3])
    return demonstrations.cloning_samples(episodes, 4)


def opinionated(attention: str, head: str, scale: float):
    """Return a policy whose attention is not nearly uniform, as it is with fresh weights."""
    torch.manual_seed(0)
    policy = make_policy(SUITE.meta, **SETTINGS, attention=attention, head=head)
    with torch.no_grad():
        for name, p in policy.model.model.backbone.named_parameters():
            if "_proj.weight" in name or "lm_head" in name:
                p.mul_(scale)
    return policy


def fit(policy, batch: TensorDict, updates: int, lr: float) -> float:
    """Clone ``batch`` in the policy's mode; return the last loss."""
    model, real = policy.model.model, batch[schema.EXECUTED_MASK]
    tokens = policy.model.bins.encode(batch[schema.CHUNK])[real]
    optimizer = torch.optim.AdamW(model.parameters(), lr)
    for update in range(updates):
        optimizer.param_groups[0]["lr"] = lr * (1 - update / updates)
        if isinstance(policy, TailTokenPolicy):
            logits = policy.unscaled_logits(batch)[real]
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        else:
            loss = (policy.normalised_chunk(batch) - batch[schema.CHUNK])[real].abs().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


@cache
def trained(attention: str, head: str = "tokens"):
    """Return a policy fitted in one mode to demonstrations that depend on it, and those.

    The demonstrated states, with the policy's own first opinion as the teacher: a few updates then
    do what days of training do to a checkpoint.
    """
    policy, batch = opinionated(attention, head, 8.0), demonstrated()[::2].clone()
    with torch.no_grad():
        if head == "tokens":
            batch[schema.CHUNK] = policy.bin_centres[policy.unscaled_logits(batch).argmax(-1)]
        else:
            batch[schema.CHUNK] = policy.normalised_chunk(batch)
    return policy, batch, fit(policy, batch, updates=5, lr=1e-4)


@pytest.mark.parametrize("attention", ["bidirectional", "causal"])
def test_the_trained_mode_is_found(attention: str):
    policy, batch, loss = trained(attention)
    for configured in ("bidirectional", "causal"):
        policy.model.model.backbone.attention = configured
        compared = compare_attention(policy, batch, rows=40)
        assert compared.trained_with == attention
        assert policy.model.model.backbone.attention == configured
    # the error in its own mode is the loss that was trained, or a little less
    assert 0.3 * loss < getattr(compared, attention) < 1.1 * loss
    assert (compared.unit, compared.samples) == ("nats", len(batch))
    by_seven = compare_attention(policy, batch, rows=7)
    assert by_seven.causal == pytest.approx(compared.causal, rel=1e-5)


@pytest.mark.parametrize("attention", ["bidirectional", "causal"])
def test_an_l1_head_is_compared_by_its_error(attention: str):
    policy, batch, _ = trained(attention, "l1")
    compared = compare_attention(policy, batch, rows=64)
    assert compared.trained_with == attention
    assert compared.unit == "normalised units"


def test_errors_by_hand():
    policy, batch, _ = trained("causal")
    policy.model.model.backbone.attention = "causal"
    sample = batch[-1:]  # near the end of an episode: two real steps, two of padding
    assert sample[schema.EXECUTED_MASK].tolist() == [[True, True, False, False]]
    tokens = policy.action_tokenizer.encode(sample[schema.CHUNK])
    with torch.no_grad():
        log_probs = policy.unscaled_logits(sample).log_softmax(-1)
    steps = [-log_probs[0, step, range(4), tokens[0, step]].mean().item() for step in range(2)]
    wanted = sum(steps) / 2
    twice = torch.cat([sample, sample])
    compared = compare_attention(policy, twice)
    assert compared.causal == pytest.approx(wanted, rel=1e-5)
    assert compared.standard_error == pytest.approx(0.0, abs=1e-6)
    twice[schema.CHUNK][:, 2:] = 0.77  # padding does not count
    assert compare_attention(policy, twice).causal == pytest.approx(wanted, rel=1e-5)


def test_no_verdict_without_evidence():
    batch = demonstrated()
    noise = AttentionComparison(2.0, 2.1, 0.05, "nats", 100)
    assert noise.trained_with is None
    assert AttentionComparison(2.0, 2.1, 0.03, "nats", 100).trained_with == "bidirectional"
    assert AttentionComparison(2.1, 2.0, 0.03, "nats", 100).trained_with == "causal"
    fresh = make_policy(SUITE.meta, **SETTINGS)
    with pytest.raises(ValueError, match="1 samples cannot tell"):
        compare_attention(fresh, batch[:1])
    with pytest.raises(ValueError, match="causal by construction"):
        compare_attention(make_policy(SUITE.meta, **SETTINGS, decoding="autoregressive"), batch)
    gaussian = make_policy(SUITE.meta, **SETTINGS, head="gaussian", eval_decode="mean")
    with pytest.raises(TypeError, match="GaussianPolicy cannot be compared"):
        compare_attention(gaussian, batch)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture):
    policy = opinionated("bidirectional", "tokens", 6.0)
    fit(policy, demonstrated()[::3], updates=150, lr=3e-3)
    weights, out = tmp_path / "policy.safetensors", tmp_path / "check.json"
    save_weights(weights, modules=policy.parts(), vocabulary=policy.model.vocabulary, recipe={})
    overrides = [
        *("policy=openvla_oft_tiny", f"policy.weights={weights}", f"out={out}"),
        *(f"++policy.{name}={value}" for name, value in SIZES.items()),
        *("episodes=3", "samples=40"),
    ]
    for configured, code in (("causal", 1), ("bidirectional", 0)):
        cfg = composed(*overrides, f"policy.attention={configured}", name="check_policy")
        assert check_policy.check(cfg) == code
        report = json.loads(out.read_text())
        assert report["trained_with"] == "bidirectional"
        assert report["samples"] == 40
        assert report["bidirectional"] < report["causal"]
        assert report["policy"]["attention"] == configured
    assert "is wrong: set policy.attention=bidirectional" in capsys.readouterr().out


def test_the_verdict_in_words():
    command = check_policy
    clear = AttentionComparison(2.0, 3.0, 0.01, "nats", 100)
    text, code = command.verdict(clear, "bidirectional")
    assert text.endswith("policy.attention=bidirectional agrees")
    assert code == 0
    assert command.verdict(clear, "causal")[1] == 1
    text, code = command.verdict(AttentionComparison(2.0, 2.0, 0.01, "nats", 100), "causal")
    assert "undecided" in text
    assert code == 0
