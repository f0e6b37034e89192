"""CQL: the penalty by hand, densities of the proposals, and that it holds unseen chunks down."""

import math

import pytest
import torch
from objectives.test_soft_actor_critic import ALL, SOME, A, B, F, H, losses, make_batch, no_images
from tensordict import TensorDict

from torchrl_vla import schema
from torchrl_vla.objectives.cql import ConservativeSoftActorCritic
from torchrl_vla.objectives.critics import CHUNK, FEATURES, NEXT_FEATURES
from torchrl_vla.policies.heads import GaussianHead, QHead, chunk_actor


def build(num_q: int = 2, **settings) -> ConservativeSoftActorCritic:
    torch.manual_seed(0)
    heads = [QHead(F, H, A, hidden=16, bottleneck=8) for _ in range(num_q)]
    settings = {"gamma": 0.9, "critic_only_updates": 0, "conservative_weight": 1.0, **settings}
    actor = chunk_actor(GaussianHead(F, H, A, 16))
    return ConservativeSoftActorCritic(actor, heads, no_images, **settings)


def loss_rows(batch: TensorDict) -> TensorDict:
    features = {FEATURES: batch["features"], NEXT_FEATURES: batch["next", "features"]}
    return TensorDict({**features, CHUNK: batch[schema.CHUNK]}, batch_size=batch.batch_size)


def test_proposals_and_their_densities():
    goal, rows = build(conservative_samples=3), loss_rows(make_batch(ALL))
    chunks, density = goal.proposals(rows)
    assert chunks.shape == (9, B, H, A)
    assert chunks.abs().max() <= 1
    # uniform on [-1, 1]^8: 8 x log(1/2) = -5.545177
    assert density[:3].unique().tolist() == pytest.approx([-5.545177], abs=1e-5)
    for block, key in ((slice(3, 6), FEATURES), (slice(6, 9), NEXT_FEATURES)):
        at = TensorDict({FEATURES: rows[key]}, batch_size=[B])
        wanted = goal.actor.get_dist(at).log_prob(chunks[block])
        torch.testing.assert_close(density[block], wanted, rtol=1e-3, atol=1e-3)
    assert not density.requires_grad


class Flat(torch.nn.Module):
    """The same value for every chunk and state."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = torch.nn.Parameter(torch.tensor(value))

    def forward(self, features, chunk):
        return self.value + 0 * chunk.sum((-2, -1)).unsqueeze(-1)


@pytest.mark.parametrize("samples", [1, 4])
def test_the_penalty_of_a_flat_q(samples):
    # Without densities the soft maximum over equal values is that value: penalty 0 for any S.
    actor = chunk_actor(GaussianHead(F, H, A, 16))
    settings = {"gamma": 0.9, "conservative_weight": 2.0, "conservative_samples": samples}
    goal = ConservativeSoftActorCritic(
        actor, [Flat(1.0), Flat(3.0)], no_images, density_weights=False, **settings
    )
    assert losses(goal, make_batch(ALL))["loss_conservative"] == pytest.approx(0, abs=1e-5)


def test_with_densities_the_soft_maximum_is_over_all_chunks():
    # A flat Q of v over a cube of volume 2^8: log of the integral of exp(v) = v + 8 log 2. The
    # estimate is exact for uniform samples; two members, weight 1.
    actor = chunk_actor(GaussianHead(F, H, A, 16))
    goal = ConservativeSoftActorCritic(
        actor,
        [Flat(1.0), Flat(3.0)],
        no_images,
        gamma=0.9,
        conservative_weight=1.0,
        conservative_samples=4000,
    )
    batch = make_batch(ALL)
    torch.manual_seed(0)
    chunks, density = goal.proposals(loss_rows(batch))
    estimate = (-density).logsumexp(0) - math.log(len(density))
    # the policy's importance weights have the same mean and a large spread: its bulk is narrow
    assert estimate[0].item() == pytest.approx(8 * math.log(2), abs=1.5)
    out = losses(goal, batch)["loss_conservative"]
    assert out == pytest.approx(2 * 8 * math.log(2), abs=3.0)
    assert chunks.shape[0] == 12000


def test_unseen_chunks_are_held_down():
    batch = make_batch(SOME)
    gaps = {}
    for weight in (1e-6, 5.0):
        goal = build(conservative_weight=weight, conservative_samples=2, density_weights=False)
        optimizer = torch.optim.Adam(goal.critic_parameters, 1e-2)
        torch.manual_seed(3)
        for _ in range(150):
            out = goal(batch, goal.counts(batch))
            (out["loss_critic"] + out["loss_conservative"]).backward()
            optimizer.step()
            optimizer.zero_grad()
        rows = loss_rows(batch)
        unseen = 2 * torch.rand(64, B, H, A) - 1
        with torch.no_grad():
            q = goal.ensemble.values(goal.ensemble.online, rows[FEATURES], unseen).mean()
            seen = goal.ensemble.values(goal.ensemble.online, rows[FEATURES], rows[CHUNK]).mean()
        gaps[weight] = float(seen - q)
    assert gaps[5.0] > gaps[1e-6] + 0.2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"conservative_weight": 0.0}, "conservative_weight is 0.0"),
        ({"conservative_samples": 0}, "conservative_samples is 0"),
        ({"conservative_temperature": 0.0}, "conservative_temperature is 0.0"),
        ({"alpha": 0.0}, "alpha is 0.0"),
    ],
)
def test_settings_out_of_range(settings, message):
    with pytest.raises(ValueError, match=message):
        build(**settings)
