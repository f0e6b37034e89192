"""TD3+BC: targets by hand, the global weight of Q, masks, delayed steps."""

import math

import pytest
import torch
from objectives.test_soft_actor_critic import (
    ALL,
    SOME,
    A,
    B,
    Constant,
    F,
    H,
    make_batch,
    no_images,
)

from torchrl_vla import schema
from torchrl_vla.objectives.critics import OUTCOME
from torchrl_vla.objectives.td3_bc import TD3BC
from torchrl_vla.policies.heads import GaussianHead, QHead, chunk_actor


def build(num_q: int = 2, **settings) -> TD3BC:
    torch.manual_seed(0)
    heads = [QHead(F, H, A, hidden=16, bottleneck=8) for _ in range(num_q)]
    settings = {"gamma": 0.9, "critic_only_updates": 0, "actor_interval": 1, **settings}
    return TD3BC(chunk_actor(GaussianHead(F, H, A, 16)), heads, no_images, **settings)


def losses(goal: TD3BC, batch) -> dict[str, float]:
    torch.manual_seed(2)
    return {k: float(v.detach()) for k, v in goal(batch, goal.counts(batch)).items()}


def test_the_target_by_hand():
    # Members worth 3 and 4 at the next state, gamma 0.5: one executed step, not terminated:
    # 1 + 0.5 x 3 = 2.5; terminated: 1.
    goal = TD3BC(
        chunk_actor(GaussianHead(1, H, A, 4)),
        [Constant(3.0), Constant(4.0)],
        no_images,
        gamma=0.5,
    )
    batch = make_batch([1, 1])
    batch["features"], batch["next", "features"] = torch.zeros(2, 1), torch.ones(2, 1)
    batch[schema.REWARD] = torch.ones(2, 1)
    batch[schema.TERMINATED] = torch.tensor([[False], [True]])
    out = losses(goal, batch)
    # online values are 0: two members, (2.5^2 + 1) / 2 each
    assert out["loss_critic"] == pytest.approx(2 * (2.5**2 + 1) / 2)
    assert out["td_error"] == pytest.approx((2.5 + 1) / 2)


def test_target_noise_is_clipped_and_so_is_the_chunk():
    class Largest(torch.nn.Module):
        """Values a chunk at its largest number."""

        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(()))

        def forward(self, features, chunk):
            return self.scale * chunk.flatten(-2).amax(-1, keepdim=True)

    head = GaussianHead(F, H, A, 16)
    torch.nn.init.zeros_(head.net[-1].weight)
    torch.nn.init.zeros_(head.net[-1].bias)  # the policy is 0 everywhere
    goal = TD3BC(
        chunk_actor(head), [Largest(), Largest()], no_images, gamma=1.0, target_noise=100.0,
        noise_clip=0.2,
    )  # fmt: skip
    batch = make_batch(ALL)
    batch[schema.REWARD][:] = 0
    batch[schema.CHUNK][:] = 0
    # noise of scale 100 clipped to 0.2: the largest of 8 numbers is 0.2 (but for 1 in 2^8 rows)
    assert losses(goal, batch)["td_error"] == pytest.approx(0.2, abs=1e-6)
    goal.noise_clip = 50.0
    assert losses(goal, batch)["td_error"] == pytest.approx(1.0, abs=1e-6)


def test_the_weight_of_q_is_one_over_its_mean_size():
    goal, batch = build(q_weight=2.5), make_batch(ALL)
    with torch.no_grad():
        chunk = goal.actor[0].module(batch["features"])[0].tanh()
        q = goal.ensemble.online[0](batch["features"], chunk)
    out = losses(goal, batch)
    weight = 2.5 / float(q.abs().mean())
    assert out["q_weight"] == pytest.approx(weight, rel=1e-5)
    assert out["loss_actor"] == pytest.approx(-weight * float(q.mean()), rel=1e-4)


@pytest.mark.parametrize(
    ("rows", "numbers"), [("all", 4 + 2 + 4 + 4 + 4 + 4), ("demonstrations", 6)]
)
def test_only_executed_numbers_are_cloned(rows, numbers):
    goal, batch = build(cloned_rows=rows), make_batch([4, 2, 4, 4, 4, 4])
    assert int(goal.counts(batch)["cloned"]) == numbers * A
    loc = goal.actor[0].module(batch["features"])[0].tanh()
    error = ((loc - batch[schema.CHUNK]) ** 2).detach()
    error[1, 2:] = 0
    wanted = error.sum() if rows == "all" else error[:2].sum()
    assert losses(goal, batch)["loss_cloning"] == pytest.approx(float(wanted) / (numbers * A))


@pytest.mark.parametrize("junk", [0.0, -0.3])
def test_never_executed_numbers_have_no_influence(junk):
    goal, batch = build(), make_batch(SOME)
    other = batch.clone()
    other[schema.CHUNK][~batch[schema.EXECUTED_MASK]] = junk
    assert losses(goal, other) == losses(goal, batch)


def test_gradients_stay_where_they_belong():
    goal, batch = build(), make_batch(ALL)
    out = goal(batch, goal.counts(batch))
    (out["loss_actor"] + out["loss_cloning"]).backward()
    assert all(p.grad is None for p in goal.critic_parameters)
    assert all(p.grad is not None for p in goal.actor_parameters)
    assert all(not p.requires_grad for p in goal.target_actor.parameters())


def test_actor_and_targets_move_every_few_updates():
    goal, batch = build(actor_interval=2, tau=0.5, critic_only_updates=2), make_batch(ALL)
    with torch.no_grad():
        for p in [*goal.actor_parameters, *goal.critic_parameters]:
            p.add_(1.0)
    due, target = [], []
    before = goal.target_actor[0].module.net[0].weight.clone()
    for _ in range(4):
        due.append("loss_actor" in losses(goal, batch))
        goal.after_step()
        target.append(float((goal.target_actor[0].module.net[0].weight - before).mean()))
    assert due == [False, False, True, False]
    # half of the way at updates 0 and 2: 0.5, 0.75
    assert target == pytest.approx([0.5, 0.5, 0.75, 0.75], abs=1e-5)


def test_statistics_have_the_names_of_sac():
    out = losses(build(), make_batch(ALL))
    names = {"loss_critic", "loss_actor", "loss_cloning", "td_error", "q_mean", "q_std"}
    assert names | {"q_success", "q_failure", "demonstration_share"} <= set(out)
    assert all(map(math.isfinite, out.values()))


def test_a_batch_without_outcomes_has_no_split():
    batch = make_batch(ALL).exclude(OUTCOME)
    assert "q_success" not in losses(build(), batch)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"q_weight": 0.0}, "q_weight is 0.0"),
        ({"cloned_rows": "online"}, "cloned_rows is 'online'"),
        ({"target_noise": -0.1}, "target_noise is -0.1"),
        ({"noise_clip": -0.1}, "noise_clip -0.1"),
        ({"num_q": 1}, "1 critic given"),
        ({"target_subset": 1}, "subset is 1 with reduction 'min'"),
    ],
)
def test_settings_out_of_range(settings, message):
    with pytest.raises(ValueError, match=message):
        build(**settings)


def test_there_is_no_entropy_coefficient():
    assert build().alpha_parameters == []
    with pytest.raises(TypeError, match="alpha"):
        build(alpha=0.1)
    assert B == 6
