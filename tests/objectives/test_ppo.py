"""Surrogate, value loss, KL estimators, V-trace and diagnostics, worked by hand."""

import math

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential
from tensordict.nn import TensorDictModule as Mod
from torch.distributions import Categorical
from torchrl.objectives import ClipPPOLoss

from torchrl_vla.objectives.ppo import (
    approx_kl,
    clip_fraction,
    clipped_surrogate,
    effective_sample_size,
    explained_variance,
    kl_estimate,
    log_ratio,
    truncated_importance_weight,
    value_loss,
    vtrace,
)

LN2 = math.log(2)


def column(*numbers):
    return torch.tensor(numbers).view(-1, 1)


def row(*numbers):
    return torch.tensor(numbers).view(1, -1, 1)


def close(actual, *expected):
    assert torch.allclose(actual.flatten(), torch.tensor(expected), atol=1e-5), actual.flatten()


def test_log_ratio_levels():
    # One chunk of 2 steps, 2 numbers; the last step was never executed.
    new = torch.tensor([[[-1.0, -2.0], [torch.nan, 5.0]]])
    old = torch.tensor([[[-2.0, -2.5], [-1.0, -1.0]]])
    mask = torch.tensor([[[True, True], [False, False]]])
    close(log_ratio(new, old, mask), 1.0, 0.5, 0.0, 0.0)
    chunk = log_ratio(new, old, mask, "chunk")
    assert chunk.shape == (1, 1)
    close(chunk, 1.5)
    with pytest.raises(ValueError, match="level is 'step'"):
        log_ratio(new, old, mask, "step")
    with pytest.raises(TypeError, match="bfloat16"):
        log_ratio(new, old.bfloat16(), mask)


@pytest.mark.parametrize("log_r", [-9.0, 0.0, 9.0])
def test_a_nan_advantage_is_never_clipped_into_a_zero_gradient(log_r: float):
    ratio = torch.tensor([[log_r]], requires_grad=True)
    clipped_surrogate(ratio, torch.tensor([[torch.nan]]), 0.2, 0.2, 3.0).sum().backward()
    assert ratio.grad.isnan().all()


def test_clipped_surrogate():
    # A=+1: r 1.5 -> -1.28, r .5 -> -.5. A=-1: r 1.5 -> 1.5, r .5 -> .8. A=0 -> 0.
    ratio, advantage = column(1.5, 0.5, 1.5, 0.5, 9.0), column(1.0, 1.0, -1.0, -1.0, 0.0)
    close(clipped_surrogate(ratio.log(), advantage, 0.2, 0.28), -1.28, -0.5, 1.5, 0.8, 0.0)


def test_dual_clip_bounds_the_loss_of_a_negative_advantage():
    # r=10: A=-2 -> min(10, 3)*2 = 6; A=+2 -> -2*1.28, untouched by the dual clip.
    loss = clipped_surrogate(column(10.0, 10.0).log(), column(-2.0, 2.0), 0.2, 0.28, dual_clip=3.0)
    close(loss, 6.0, -2.56)


def test_gradient_vanishes_only_where_clipped_and_never_becomes_nan():
    x = column(1000.0, math.log(1.1), -1000.0, LN2).requires_grad_()
    loss = clipped_surrogate(x, column(1.0, 1.0, -1.0, -1.0), 0.2, 0.2)
    loss.sum().backward()
    # Clipped, inside (-r), clipped, not clipped (A < 0, r = 2: gradient +2).
    close(loss, -1.2, -1.1, 0.8, 2.0)
    close(x.grad, 0.0, -1.1, 0.0, 2.0)


def test_surrogate_bounds_are_checked():
    zero = column(0.0)
    for low, high, dual in ((0.0, 0.2, None), (1.5, 0.2, None), (0.2, 0.0, None), (0.2, 0.2, 1.0)):
        with pytest.raises(ValueError, match="clip"):
            clipped_surrogate(zero, zero, low, high, dual)


def test_surrogate_equals_torchrls_on_a_token_policy():
    torch.manual_seed(0)
    batch, horizon, dims, bins = 5, 3, 2, 4
    net = torch.nn.Sequential(
        torch.nn.Linear(6, horizon * dims * bins), torch.nn.Unflatten(-1, (horizon, dims, bins))
    )
    policy = ProbabilisticTensorDictSequential(
        Mod(net, in_keys=["state"], out_keys=["logits"]),
        ProbabilisticTensorDictModule(
            in_keys=["logits"], out_keys=["tokens"], distribution_class=Categorical
        ),
    )
    td = TensorDict(
        {
            "state": torch.randn(batch, 6),
            "tokens": torch.randint(bins, (batch, horizon, dims)),
            "log_probs": -torch.rand(batch, horizon, dims) * 3,
            "advantage": torch.randn(batch, 1),
        },
        [batch],
    )
    loss = ClipPPOLoss(
        policy,
        None,
        clip_epsilon=(0.2, 0.28),
        entropy_bonus=False,
        functional=False,
        reduction="none",
    )
    loss.set_keys(action="tokens", sample_log_prob="log_probs")
    theirs = loss(td)["loss_objective"]
    new = policy.get_dist(td.clone()).log_prob(td["tokens"])
    ratio = log_ratio(new, td["log_probs"], torch.ones_like(new, dtype=torch.bool))
    ours = clipped_surrogate(ratio, td["advantage"], 0.2, 0.28)
    assert ours.shape == theirs.shape == (batch, horizon, dims)
    assert torch.allclose(ours, theirs, atol=1e-6)
    grads = [
        torch.autograd.grad(x.sum(), net[0].weight, retain_graph=True)[0] for x in (ours, theirs)
    ]
    assert torch.allclose(*grads, atol=1e-5)
    # The data reach both sides of the clip, or the test would show nothing.
    assert float(clip_fraction(ratio, torch.ones_like(ratio, dtype=torch.bool), 0.2, 0.28)) > 0.3


def test_value_loss():
    # Smooth L1: .5*.25 = .125 inside 1, 2 - .5 = 1.5 outside; l2: .25, 4.
    value, target = column(0.5, 2.0), column(0.0, 0.0)
    close(value_loss(value, target), 0.125, 1.5)
    close(value_loss(value, target, kind="l2"), 0.25, 4.0)
    # Clipped around old 0 by .2: near = .2, (.2 - 1)^2 = .64 > 0; and .2^2 = .04 < 4.
    old = column(0.0, 0.0)
    close(value_loss(column(1.0, 2.0), column(1.0, 0.0), old, 0.2, "l2"), 0.64, 4.0)
    with pytest.raises(ValueError, match="both clip and old_value"):
        value_loss(value, target, clip=0.2)
    with pytest.raises(ValueError, match="clip is -1"):
        value_loss(value, target, old, -1)
    with pytest.raises(ValueError, match="'huber'"):
        value_loss(value, target, kind="huber")


def test_kl_estimates():
    # d = ln 2: k1 .693147, k2 .240227, k3 = 1/2 - 1 + ln 2 = .193147.
    new, ref = column(LN2), column(0.0)
    close(kl_estimate(new, ref, "k1"), 0.693147)
    close(kl_estimate(new, ref, "k2"), 0.240227)
    close(kl_estimate(new, ref, "k3"), 0.193147)
    with pytest.raises(ValueError, match="'k4'"):
        kl_estimate(new, ref, "k4")


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_kl_estimates_are_unbiased(kind):
    # Exact expectation over the 3 outcomes of p against the KL in closed form.
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.2, 0.6])
    estimate = (p * kl_estimate(p.log(), q.log(), kind)).sum()
    assert float(estimate) == pytest.approx(float((p * (p / q).log()).sum()), abs=1e-6)


def test_truncated_importance_weight():
    x = column(0.0, 5.0, -LN2).requires_grad_()
    weight = truncated_importance_weight(x, 2.0)
    close(weight, 1.0, 2.0, 0.5)
    assert not weight.requires_grad
    with pytest.raises(ValueError, match="cap is 0"):
        truncated_importance_weight(x, 0)


def test_vtrace_does_not_leak_across_a_truncation():
    # B14: r=0, rho=1, gamma .9. Inside: .9*V' - V + .9*correction; 71.9 at index 1 is the leak.
    zero, value = row(0.0, 0, 0, 0), row(1.0, 1, 100, 100)
    done = row(False, True, False, True)
    no = row(False, False, False, False)
    advantage, _ = vtrace(zero, zero, zero, value, value, done, no, 0.9)
    close(advantage, -0.19, -0.1, -19.0, -10.0)


def test_vtrace_off_policy_with_discount_per_decision():
    # rho = [2 -> 1, .5]. delta1 = .5*(3 + .25*4 - 2) = 1, v1 = 3. delta0 = 1 + .5*2 - 1 = 1,
    # v0 = 1 + 1 + .5*1*1 = 2.5. A0 = 1 + .5*v1 - 1 = 1.5; A1 = .5*(3 + .25*4 - 2) = 1.
    log_prob, behaviour = row(LN2, -LN2), row(0.0, 0.0)
    no = row(False, False)
    args = row(1.0, 3.0), row(1.0, 2.0), row(2.0, 4.0), no, no, row(0.5, 0.25)
    advantage, target = vtrace(log_prob, behaviour, *args)
    close(advantage, 1.5, 1.0)
    close(target, 2.5, 3.0)


def test_vtrace_on_policy_with_terminal_and_invalid():
    # Decision 1 is void; decision 0 bootstraps from its own next value: 1 + .5*4 - 1 = 2.
    # Decision 2 terminated: 1 - 2 = -1.
    nan = torch.nan
    zero = row(0.0, nan, 0.0)
    advantage, target = vtrace(
        zero,
        zero,
        row(1.0, nan, 1.0),
        row(1.0, nan, 2.0),
        row(4.0, nan, 9.0),
        row(False, False, True),
        row(False, False, True),
        0.5,
        valid=row(True, False, True),
    )
    close(advantage, 2.0, 0.0, -1.0)
    close(target, 3.0, 0.0, 1.0)


def test_explained_variance():
    target, valid = column(1.0, 2.0, 3.0, 99.0), column(True, True, True, False)
    assert float(explained_variance(target, target, valid)) == 1
    assert float(explained_variance(column(2.0, 2, 2, 2), target, valid)) == pytest.approx(0)
    # error = target - 2*target = -target: 1 - Var/Var = 0; three times: 1 - 4 = -3.
    assert float(explained_variance(3 * target, target, valid)) == pytest.approx(-3)
    assert explained_variance(target, torch.ones_like(target), valid).isnan()


def test_diagnostics():
    ratio = column(1.0, 1.5, 0.5, 1.1, 77.0)
    mask = column(True, True, True, True, False)
    assert float(clip_fraction(ratio.log(), mask, 0.2, 0.28)) == 0.5
    # r = 2: 2 - 1 - ln 2 = .306853.
    assert float(approx_kl(column(LN2), column(True))) == pytest.approx(0.306853, abs=1e-6)
    # (1 + 3)^2 / (2 * (1 + 9)) = .8.
    weights = column(1.0, 3.0, 50.0).log()
    ess = effective_sample_size(weights, column(True, True, False))
    assert float(ess) == pytest.approx(0.8)
    assert effective_sample_size(weights, column(False, False, False)).isnan()
