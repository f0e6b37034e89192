"""Cloning objectives: every loss counts real numbers only, and no option is ignored."""

import math
from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict
from torchrl.data.vla import UniformActionTokenizer

from torchrl_vla import schema
from torchrl_vla.objectives.supervised import (
    FlowCloning,
    GaussianCloning,
    RegressionCloning,
    TokenCloning,
)

H, A, V = 4, 1, 4


def batch_of(executed: list[int]) -> TensorDict:
    out = TensorDict(batch_size=[len(executed)])
    out[schema.EXECUTED_MASK] = torch.arange(H) < torch.tensor(executed)[:, None]
    out[schema.CHUNK] = torch.zeros(len(executed), H, A)
    return out


def gaussian(loc: torch.Tensor, scale: float):
    return SimpleNamespace(
        location_and_scale=lambda batch: (loc, torch.full_like(loc, scale)),
    )


def tokens(logits: torch.Tensor):
    tokenizer = UniformActionTokenizer(V, low=-1.0, high=1.0)
    return SimpleNamespace(
        unscaled_logits=lambda batch: logits,
        normalise=lambda chunk: chunk,
        action_tokenizer=tokenizer,
        bin_centres=tokenizer.decode(torch.arange(V)),
    )


def cloning(goal, batch) -> dict[str, float]:
    return {k: float(v) for k, v in goal(batch, goal.counts(batch)).items()}


@pytest.mark.parametrize("loss", ["squared", "l1"])
def test_padding_is_in_no_numerator_and_no_denominator(loss):
    # Field case B09: three real steps with error 1, padding with error 9: 1.0 (sum 3 / 3).
    # 6.0 would be the mask ignored, 0.375 divided by all 8.
    batch = batch_of([3])
    batch[schema.CHUNK] = torch.tensor([1.0, 1.0, 1.0, 9.0]).view(1, H, A)
    goal = GaussianCloning(gaussian(torch.zeros(1, H, A), 0.2), loss, target_std=0.2)
    assert cloning(goal, batch) == pytest.approx({"loss_cloning": 1.0, "loss_scale": 0.0})


def test_gaussian_nll_learns_the_scale():
    # (0.5 / 0.5)^2 / 2 + ln 0.5 + ln(2 pi) / 2 = 0.5 - 0.693147 + 0.918939 = 0.725791
    batch = batch_of([4])
    batch[schema.CHUNK][:] = 0.5
    loc = torch.zeros(1, H, A)
    out = cloning(GaussianCloning(gaussian(loc, 0.5), "nll"), batch)
    assert out == pytest.approx({"loss_cloning": 0.725791}, abs=1e-5)


def test_l1_and_squared_of_the_squashed_location():
    batch = batch_of([4])
    loc = torch.full((1, H, A), 0.5)
    for loss, wanted in (("l1", math.tanh(0.5)), ("squared", math.tanh(0.5) ** 2)):
        out = cloning(GaussianCloning(gaussian(loc, 0.1), loss, target_std=0.2), batch)
        assert out["loss_cloning"] == pytest.approx(wanted, rel=1e-5)
        # 0.01 (log(0.1 / 0.2))^2
        assert out["loss_scale"] == pytest.approx(0.01 * math.log(2) ** 2, rel=1e-5)


def test_hard_labels_are_the_bin_of_the_number():
    # Bins of [-1, 1] in four: 0.3 lies in the third. Logits 0, 0, ln 2, 0: -ln(2/5) there.
    logits = torch.tensor([0.0, 0.0, math.log(2), 0.0]).expand(1, H, A, V)
    batch = batch_of([2])
    batch[schema.CHUNK][:] = 0.3
    batch[schema.CHUNK][:, 2:] = -0.9  # padding
    out = cloning(TokenCloning(tokens(logits), "hard"), batch)
    assert out["loss_cloning"] == pytest.approx(math.log(5 / 2), rel=1e-5)
    narrow = cloning(TokenCloning(tokens(logits), "soft", 0.01), batch)
    assert narrow["loss_cloning"] == pytest.approx(math.log(5 / 2), rel=1e-5)
    wide = cloning(TokenCloning(tokens(logits), "soft", 100.0), batch)
    # all bins alike: mean of ln 5 three times and ln(5/2) once
    assert wide["loss_cloning"] == pytest.approx(math.log(5) - math.log(2) / 4, rel=1e-3)


def test_labels_are_made_in_the_units_of_the_bins():
    # The data reach to 0.5, so a demonstrated number is half of the policy's normalised one.
    logits = torch.tensor([0.0, 0.0, 0.0, math.log(2)]).expand(1, H, A, V)
    policy = tokens(logits)
    policy.normalise = lambda chunk: 2 * chunk
    batch = batch_of([4])
    batch[schema.CHUNK][:] = 0.4  # 0.8: the fourth bin, logit ln 2; unconverted it is the third
    out = cloning(TokenCloning(policy, "soft", 0.01), batch)
    assert out["loss_cloning"] == pytest.approx(math.log(5 / 2), rel=1e-5)


def test_l1_in_normalised_units_without_padding():
    policy = SimpleNamespace(
        normalised_chunk=lambda batch: torch.full((1, H, A), 0.25),
        normalise=lambda chunk: 2 * chunk,
    )
    batch = batch_of([3])
    batch[schema.CHUNK] = torch.tensor([0.5, 0.0, 0.25, 9.0]).view(1, H, A)
    # |1 - 0.25|, |0 - 0.25|, |0.5 - 0.25|: mean 1.25 / 3
    assert cloning(RegressionCloning(policy), batch) == pytest.approx({"loss_cloning": 1.25 / 3})


def test_flow_matching_without_padding():
    error = torch.tensor([1.0, 2.0, 6.0, 9.0]).view(1, H, A)
    policy = SimpleNamespace(cloning_error=lambda batch: error)
    assert cloning(FlowCloning(policy), batch_of([3])) == pytest.approx({"loss_cloning": 3.0})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TokenCloning(None, "hard", 0.1), "label_sigma is 0.1 with labels 'hard'"),
        (lambda: TokenCloning(None, "soft"), "label_sigma is None with labels 'soft'"),
        (lambda: TokenCloning(None, "firm"), "labels is 'firm'"),
        (lambda: GaussianCloning(None, "nll", 0.1), "target_std is 0.1 with loss 'nll'"),
        (lambda: GaussianCloning(None, "l1"), "target_std is None with loss 'l1'"),
        (lambda: GaussianCloning(None, "l2", 0.1), "loss is 'l2'"),
        (lambda: GaussianCloning(None, "l1", 0.0), "target_std is 0.0"),
    ],
)
def test_options_that_are_not_used_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
