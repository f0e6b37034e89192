"""One support and one precision for actor and learner (B03, B20)."""

import math

import pytest
import torch

from torchrl_vla.objectives.action_log_prob import window_log_probs
from torchrl_vla.objectives.ppo import approx_kl, clip_fraction, log_ratio


def test_support_is_the_action_window():
    # B03: uniform over 256 bins: -ln 256 = -5.545177 per token, -38.816242 for 7, entropy ln 256.
    # Over the whole padded vocabulary of 32064 it would be -10.375489.
    full = torch.zeros(1, 1, 7, 32064)
    tokens = torch.tensor([[[0, 255, 1, 128, 254, 7, 64]]])
    log_prob, entropy = window_log_probs(full[..., 31744:32000], tokens)
    assert log_prob.shape == entropy.shape == (1, 1, 7)
    assert log_prob.flatten().tolist() == [pytest.approx(-5.545177, abs=1e-6)] * 7
    assert float(log_prob.sum()) == pytest.approx(-38.816242, abs=1e-5)
    assert float(entropy[0, 0, 0]) == pytest.approx(5.545177, abs=1e-6)


def test_temperature_and_entropy():
    # logits [0, 2 ln 3] at T=2 -> probabilities [1/4, 3/4]; entropy ln 4 - .75 ln 3 = .562335.
    logits = torch.tensor([0.0, 2 * math.log(3)]).view(1, 1, 1, 2).expand(2, 1, 1, 2)
    log_prob, entropy = window_log_probs(logits, torch.tensor([0, 1]).view(2, 1, 1), 2.0)
    assert log_prob.flatten().tolist() == pytest.approx([math.log(0.25), math.log(0.75)])
    assert entropy.flatten().tolist() == pytest.approx([0.562335] * 2, abs=1e-6)


def test_masked_bin_has_finite_entropy_and_gradient():
    logits = torch.tensor([0.0, 0.0, -torch.inf]).view(1, 1, 1, 3).requires_grad_()
    log_prob, entropy = window_log_probs(logits, torch.zeros(1, 1, 1, dtype=torch.long))
    (log_prob + entropy).sum().backward()
    assert entropy.item() == pytest.approx(math.log(2))
    assert bool(logits.grad.isfinite().all())


def test_learner_without_a_step_finds_ratio_one():
    # B20: 56 tokens, equal weights. Stored in float32 every ratio is 1 and nothing is clipped.
    logits = torch.zeros(1, 8, 7, 256, dtype=torch.bfloat16)
    tokens = torch.arange(56).view(1, 8, 7)
    stored, _ = window_log_probs(logits, tokens)
    again, _ = window_log_probs(logits, tokens)
    assert stored.dtype == torch.float32
    mask = torch.ones_like(tokens, dtype=torch.bool)
    for level in ("token", "chunk"):
        ratio = log_ratio(again, stored, mask, level)
        counted = torch.ones_like(ratio, dtype=torch.bool)
        assert torch.allclose(ratio.exp(), torch.ones_like(ratio), atol=1e-5)
        assert float(clip_fraction(ratio, counted, 0.2, 0.2)) == 0
        assert float(approx_kl(ratio, counted)) == 0
    # In bfloat16: -5.545177 -> -5.53125, ratio .98617 per token; the sum -310.52994 -> -310,
    # ratio exp(-.52994) = .58864, outside a .2 band before any learning.
    one, chunk = stored[0, 0, 0], stored.sum()
    assert float((one - one.bfloat16().float()).exp()) == pytest.approx(0.98617, abs=1e-5)
    assert float(chunk) == pytest.approx(-310.52994, abs=1e-3)
    assert float((chunk - chunk.bfloat16().float()).exp()) == pytest.approx(0.58864, abs=1e-3)


def test_half_precision_logits_are_scored_in_float32():
    torch.manual_seed(0)
    logits = torch.randn(4, 2, 3, 256).bfloat16()
    tokens = torch.randint(256, (4, 2, 3))
    log_prob, _ = window_log_probs(logits, tokens, 0.6)
    exact = torch.log_softmax(logits.double() / 0.6, -1).gather(-1, tokens.unsqueeze(-1))
    assert float((log_prob - exact.squeeze(-1)).abs().max()) < 1e-5


def test_ids_and_shapes_are_checked():
    logits = torch.zeros(1, 1, 1, 256)
    with pytest.raises(ValueError, match=r"31744\.\.31744.*0\.\.255"):
        window_log_probs(logits, torch.full((1, 1, 1), 31744))
    with pytest.raises(ValueError, match="do not belong"):
        window_log_probs(logits, torch.zeros(1, 1, dtype=torch.long))
    with pytest.raises(ValueError, match="temperature is 0"):
        window_log_probs(logits, torch.zeros(1, 1, 1, dtype=torch.long), 0.0)
    with pytest.raises(TypeError, match="float32"):
        window_log_probs(logits, torch.zeros(1, 1, 1))
