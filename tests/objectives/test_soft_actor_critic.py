"""SAC as an objective: what was never executed has no influence, demonstrations are cloned."""

import pytest
import torch
from tensordict import TensorDict

from torchrl_vla import schema
from torchrl_vla.objectives.soft_actor_critic import SoftActorCritic
from torchrl_vla.policies.heads import GaussianHead, QHead, chunk_actor

B, F, H, A = 6, 10, 4, 2


def no_images(batch):
    raise AssertionError("features are given, nothing may be encoded")


def build(num_q: int = 2, **settings) -> SoftActorCritic:
    torch.manual_seed(0)
    heads = [QHead(F, H, A, hidden=16, bottleneck=8) for _ in range(num_q)]
    settings = {"gamma": 0.9, "critic_only_updates": 0, **settings}
    return SoftActorCritic(chunk_actor(GaussianHead(F, H, A, 16)), heads, no_images, **settings)


def make_batch(executed: list[int]) -> TensorDict:
    torch.manual_seed(1)
    out = TensorDict(batch_size=[B])
    out["features"], out["next", "features"] = torch.randn(B, F), torch.randn(B, F)
    out[schema.CHUNK] = torch.rand(B, H, A) * 2 - 1
    number = torch.tensor(executed)[:, None]
    out[schema.EXECUTED_MASK] = torch.arange(H) < number
    out[schema.NUM_EXECUTED] = number
    out[schema.REWARD] = torch.rand(B, 1)
    out[schema.DONE] = out[schema.TERMINATED] = number < H
    out[schema.POLICY_VERSION] = torch.tensor([-1, -1, 0, 0, 0, 0])[:, None]
    return out


def losses(goal: SoftActorCritic, batch: TensorDict) -> dict[str, float]:
    torch.manual_seed(2)
    return {k: float(v) for k, v in goal(batch, goal.counts(batch)).items()}


@pytest.mark.parametrize("junk", [0.0, 1.0, -0.3])
def test_never_executed_numbers_have_no_influence(junk):
    goal = build()
    batch = make_batch([4, 2, 1, 4, 3, 4])
    other = batch.clone()
    other[schema.CHUNK][~batch[schema.EXECUTED_MASK]] = junk
    assert not torch.equal(other[schema.CHUNK], batch[schema.CHUNK])
    assert losses(goal, other) == losses(goal, batch)


def test_executed_numbers_do_have_influence():
    goal = build()
    batch = make_batch([4, 2, 1, 4, 3, 4])
    other = batch.clone()
    other[schema.CHUNK][2, 0] *= -1  # the one step of row 2 that ran
    assert losses(goal, other)["loss_critic"] != losses(goal, batch)["loss_critic"]


def test_the_batch_is_left_as_it_was():
    goal, batch = build(), make_batch([4, 2, 1, 4, 3, 4])
    before = batch.clone()
    losses(goal, batch)
    assert (batch == before).all()


def test_only_executed_demonstrated_numbers_are_cloned():
    goal = build(cloning_weight=1.0)
    batch = make_batch([4, 2, 4, 4, 4, 4])
    # rows 0 and 1 are demonstrations: 4 and 2 executed steps of 2 numbers
    assert int(goal.counts(batch)["demonstrated"]) == (4 + 2) * A
    loc = goal.actor[0].module(batch["features"])[0].tanh()
    error = (loc - batch[schema.CHUNK]) ** 2
    expected = (error[0].sum() + error[1, :2].sum()) / ((4 + 2) * A)
    assert losses(goal, batch)["loss_cloning"] == pytest.approx(float(expected), rel=1e-5)


def test_the_actor_waits_for_the_critic():
    goal, batch = build(critic_only_updates=2), make_batch([4] * B)
    assert "loss_actor" not in losses(goal, batch)
    goal.after_step()
    goal.after_step()
    assert "loss_actor" in losses(goal, batch)


def test_the_initial_alpha_is_the_initial_alpha():
    assert losses(build(alpha=0.02), make_batch([4] * B))["alpha"] == pytest.approx(0.02, rel=1e-6)


@pytest.mark.parametrize("num_q", [2, 3, 5])
def test_any_ensemble_size(num_q):
    values = losses(build(num_q), make_batch([4, 2, 1, 4, 3, 4]))
    assert all(map(torch.isfinite, map(torch.tensor, values.values())))


def test_one_critic_is_refused():
    with pytest.raises(ValueError, match="1 critic"):
        build(1)
