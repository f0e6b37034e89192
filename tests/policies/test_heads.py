"""Heads: shapes, bounds, and several candidate chunks per state."""

import pytest
import torch
from tensordict import TensorDict

from torchrl_vla import schema
from torchrl_vla.policies.heads import GaussianHead, QHead, chunk_actor

F, H, A = 10, 4, 2


def test_candidates_of_a_state_are_valued_as_if_alone():
    torch.manual_seed(0)
    head, features = QHead(F, H, A, hidden=16, bottleneck=8), torch.randn(5, F)
    chunks = torch.rand(3, 5, H, A) * 2 - 1
    together = head(features, chunks)
    assert together.shape == (3, 5, 1)
    for candidate, values in zip(chunks, together, strict=True):
        torch.testing.assert_close(head(features, candidate), values)


def test_the_distribution_is_that_of_the_head():
    torch.manual_seed(0)
    actor = chunk_actor(GaussianHead(F, H, A, 16))
    rows = TensorDict({"features": torch.randn(5, F)}, batch_size=[5])
    dist = actor.get_dist(rows)
    loc, scale = actor[0].module(rows["features"])
    assert torch.equal(dist.loc, loc)
    assert torch.equal(dist.scale, scale)
    assert torch.equal(rows["loc"], loc)
    assert dist.sample().shape == (5, H, A)


def test_the_head_does_not_run_twice():
    actor = chunk_actor(GaussianHead(F, H, A, 16))
    rows = TensorDict(
        {"loc": torch.full((5, H, A), 0.25), "scale": torch.full((5, H, A), 0.5)}, batch_size=[5]
    )
    dist = actor.get_dist(rows)  # there are no features: it could not
    assert (dist.loc == 0.25).all()
    assert (dist.scale == 0.5).all()


def test_the_actor_still_acts_as_torchrls():
    torch.manual_seed(0)
    actor = chunk_actor(GaussianHead(F, H, A, 16))
    out = actor(TensorDict({"features": torch.randn(5, F)}, batch_size=[5]))
    assert out[schema.CHUNK].shape == (5, H, A)
    assert out[schema.CHUNK].abs().max() < 1


@pytest.mark.parametrize("bounds", [(-4.0, -1.5), (-1.0, 0.5)])
def test_the_scale_stays_in_its_range(bounds):
    head = GaussianHead(F, H, A, 16, log_std_range=bounds)
    _, scale = head(100 * torch.randn(50, F))
    assert scale.log().min() >= bounds[0] - 1e-5
    assert scale.log().max() <= bounds[1] + 1e-5
