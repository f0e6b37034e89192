"""Imitation losses; padding is in neither numerator nor denominator (B09)."""

import math

import pytest
import torch

from torchrl_vla.objectives.imitation import (
    chunk_mean,
    gaussian_nll,
    l1,
    soft_labels,
    soft_token_cross_entropy,
    token_cross_entropy,
)

REAL = (torch.arange(8) < 3).unsqueeze(0)


def padded_loss(dims=1):
    """Per-step loss 1.0 on the 3 real steps, 9.0 on the 5 padded ones."""
    return torch.where(REAL, 1.0, 9.0).unsqueeze(-1).repeat(1, 1, dims).requires_grad_()


@pytest.mark.parametrize("dims", [1, 7])
def test_padding_counts_nowhere(dims):
    # 3/3 = 1. 6.0 is the mask ignored, 0.375 the division by 8.
    loss = padded_loss(dims)
    mean = chunk_mean(loss, REAL)
    mean.backward()
    assert mean.item() == pytest.approx(1.0)
    assert bool((loss.grad[~REAL] == 0).all())
    assert loss.grad[REAL].flatten().tolist() == [pytest.approx(1 / (3 * dims))] * (3 * dims)


def test_missing_mask_is_refused():
    with pytest.raises(ValueError, match="chunks of 8 steps but no mask"):
        chunk_mean(padded_loss(), None)
    assert chunk_mean(padded_loss()[:, :1], None).item() == 1


def test_shares_of_micro_batches_add_up():
    loss, real = torch.tensor([[1.0, 9.0], [2.0, 3.0]]), torch.tensor([[1, 0], [1, 1]]).bool()
    loss = loss.unsqueeze(-1)
    # (1 + 2 + 3) / 3 = 2, in one piece or two.
    parts = [chunk_mean(loss[i : i + 1], real[i : i + 1], real.sum()) for i in range(2)]
    assert float(sum(parts)) == pytest.approx(2.0)
    assert float(chunk_mean(loss, real)) == pytest.approx(2.0)


def test_token_cross_entropy():
    # Probabilities [1/4, 3/4]: ln 4 and ln 4/3.
    logits = torch.tensor([0.0, math.log(3)]).expand(1, 1, 2, 2)
    loss = token_cross_entropy(logits, torch.tensor([[[0, 1]]]))
    assert loss.flatten().tolist() == pytest.approx([1.386294, 0.287682], abs=1e-6)


CENTRES = torch.tensor([-1.0, 0.0, 1.0])


def test_soft_labels_are_gaussian_over_the_centres():
    # Action 0, sigma 1: e^-.5, 1, e^-.5 = .606531, 1, .606531 over 2.213061.
    labels = soft_labels(torch.zeros(1, 1, 1), CENTRES, 1.0)
    assert labels.flatten().tolist() == pytest.approx([0.274069, 0.451863, 0.274069], abs=1e-6)
    # Sigma in action units: the scale of the centres matters.
    wide = soft_labels(torch.zeros(1, 1, 1), 2 * CENTRES, 2.0)
    assert torch.allclose(labels, wide)
    # A narrow sigma is the nearest bin.
    hard = soft_labels(torch.tensor([[[0.6]]]), CENTRES, 0.01)
    assert hard.flatten().tolist() == pytest.approx([0, 0, 1])


def test_soft_cross_entropy():
    # Uniform logits cost ln 3 whatever the labels; matching logits cost the labels' entropy.
    action = torch.zeros(1, 1, 1)
    loss = soft_token_cross_entropy(torch.zeros(1, 1, 1, 3), action, CENTRES, 1.0)
    assert float(loss) == pytest.approx(math.log(3))
    # -(2*.274069 ln .274069 + .451863 ln .451863) = 1.068445.
    match = soft_labels(action, CENTRES, 1.0).log()
    matched = float(soft_token_cross_entropy(match, action, CENTRES, 1.0))
    assert matched == pytest.approx(1.068445, abs=1e-5)
    # With a narrow sigma it is the hard cross-entropy of the nearest bin.
    logits = torch.tensor([0.3, -1.0, 2.0]).view(1, 1, 1, 3)
    narrow = soft_token_cross_entropy(logits, torch.ones(1, 1, 1), CENTRES, 0.01)
    assert torch.allclose(narrow, token_cross_entropy(logits, torch.full((1, 1, 1), 2)))
    # Shifting the logits towards a neighbour of the label costs less than away from it.
    near, far = (
        soft_token_cross_entropy(
            torch.tensor(x).view(1, 1, 1, 3), torch.ones(1, 1, 1), CENTRES, 0.5
        )
        for x in ([0.0, 2.0, 0.0], [2.0, 0.0, 0.0])
    )
    assert float(near) < float(far)
    with pytest.raises(ValueError, match="sigma is 0"):
        soft_labels(action, CENTRES, 0)


def test_gaussian_nll():
    # Mean: ln(2 pi)/2 = .918939. One off with std 2: .125 + ln 2 + .918939 = 1.737086.
    action, mean = torch.tensor([[[0.0, 1.0]]]), torch.zeros(1, 1, 2)
    loss = gaussian_nll(action, mean, torch.tensor([[[1.0, 2.0]]]))
    assert loss.flatten().tolist() == pytest.approx([0.918939, 1.737086], abs=1e-6)


def test_l1():
    assert l1(torch.tensor([[[0.5]]]), torch.tensor([[[-0.25]]])).tolist() == [[[0.75]]]
    with pytest.raises(ValueError, match="shapes differ"):
        l1(torch.zeros(2, 1, 1), torch.zeros(1, 1))
