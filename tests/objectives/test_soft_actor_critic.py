"""SAC as an objective: Bellman targets by hand, options, what was never executed, cloning."""

import math

import pytest
import torch
from tensordict import TensorDict
from torchrl.objectives import SACLoss, SoftUpdate

from torchrl_vla import schema
from torchrl_vla.objectives.critics import ACTOR_ROWS, CHUNK, FEATURES, OUTCOME, STEPS
from torchrl_vla.objectives.soft_actor_critic import Critic, SoftActorCritic
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
    rows = len(executed)
    out = TensorDict(batch_size=[rows])
    out["features"], out["next", "features"] = torch.randn(rows, F), torch.randn(rows, F)
    out[schema.CHUNK] = torch.rand(rows, H, A) * 2 - 1
    number = torch.tensor(executed)[:, None]
    out[schema.EXECUTED_MASK] = torch.arange(H) < number
    out[schema.NUM_EXECUTED] = number
    out[schema.REWARD] = torch.rand(rows, 1)
    out[schema.DONE] = out[schema.TERMINATED] = number < H
    out[schema.POLICY_VERSION] = torch.tensor([-1, -1, 0, 0, 0, 0])[:rows, None]
    out[OUTCOME] = torch.tensor([1, 0, 1, -1, 0, 0], dtype=torch.int8)[:rows, None]
    return out


ALL = [4] * B
SOME = [4, 2, 1, 4, 3, 4]


def losses(goal: SoftActorCritic, batch: TensorDict) -> dict[str, float]:
    torch.manual_seed(2)
    return {k: float(v.detach()) for k, v in goal(batch, goal.counts(batch)).items()}


class Constant(torch.nn.Module):
    """A Q head that values every chunk in a state at the first feature."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(scale))

    def forward(self, features, chunk):
        return self.scale * features[..., :1] + 0 * chunk.sum((-2, -1)).unsqueeze(-1)


@pytest.mark.parametrize(
    ("terminated", "truncated", "target"),
    [(False, True, 10.9), (True, False, 1.0), (True, True, 1.0), (False, False, 10.9)],
)
def test_time_limits_are_bootstrapped_and_terminations_are_not(terminated, truncated, target):
    # Field case B12: r = 1, gamma = 0.99, Q(s) = 5, Q(final observation) = 10, alpha near 0.
    # Truncated 1 + 0.99 x 10 = 10.9, terminated 1.0, both flags: terminated. (5.95 would be the
    # wrong state.)
    heads = [Constant(1.0), Constant(1.0)]
    actor = chunk_actor(GaussianHead(1, 1, 1, 4))
    goal = SoftActorCritic(actor, heads, no_images, gamma=0.99, alpha=1e-30)
    batch = TensorDict(batch_size=[1])
    batch["features"], batch["next", "features"] = torch.tensor([[5.0]]), torch.tensor([[10.0]])
    batch[schema.CHUNK] = torch.zeros(1, 1, 1)
    batch[schema.EXECUTED_MASK] = torch.ones(1, 1, dtype=torch.bool)
    batch[schema.NUM_EXECUTED] = torch.ones(1, 1, dtype=torch.int64)
    batch[schema.REWARD] = torch.ones(1, 1)
    batch[schema.TERMINATED] = torch.tensor([[terminated]])
    batch[schema.TRUNCATED] = torch.tensor([[truncated]])
    batch[schema.DONE] = batch[schema.TERMINATED] | batch[schema.TRUNCATED]
    batch[schema.POLICY_VERSION] = torch.zeros(1, 1, dtype=torch.int64)
    out = losses(goal, batch)
    # two members, each (5 - target)^2
    assert out["loss_critic"] == pytest.approx(2 * (5 - target) ** 2, rel=1e-5)
    assert out["td_error"] == pytest.approx(abs(5 - target), rel=1e-5)


def test_the_discount_is_gamma_to_the_executed_steps():
    # r = 0.5, gamma = 0.5, 3 control steps to the next observation: 0.5 + 0.125 x 8 = 1.5
    heads = [Constant(1.0), Constant(1.0)]
    goal = SoftActorCritic(
        chunk_actor(GaussianHead(1, 4, 1, 4)), heads, no_images, gamma=0.5, alpha=1e-30
    )
    batch = make_batch([3])
    batch["features"], batch["next", "features"] = torch.zeros(1, 1), torch.tensor([[8.0]])
    batch[schema.CHUNK] = torch.zeros(1, H, 1)
    batch[schema.REWARD] = torch.tensor([[0.5]])
    batch[schema.DONE] = batch[schema.TERMINATED] = torch.tensor([[False]])
    assert losses(goal, batch)["td_error"] == pytest.approx(1.5, rel=1e-5)
    batch[STEPS] = torch.tensor([[1]])  # as n-step rows carry it: 0.5 + 0.5 x 8
    assert losses(goal, batch)["td_error"] == pytest.approx(4.5, rel=1e-5)


def test_it_is_torchrls_loss():
    # The same losses as a plain SACLoss on the same heads: evaluation differs, mathematics do not.
    goal, batch = (
        build(3, target_entropy=-5.0, alpha=0.05, cloning_weight=0.0, cloned_rows=None),
        make_batch(ALL),
    )
    torch.manual_seed(0)
    heads = [QHead(F, H, A, hidden=16, bottleneck=8) for _ in range(3)]
    actor = chunk_actor(GaussianHead(F, H, A, 16))

    class Whole(Critic):
        def forward(self, tensordict):
            value = self.module(tensordict.get(FEATURES), tensordict.get(CHUNK))
            return TensorDict({"state_action_value": value}, batch_size=tensordict.batch_size)

    plain = SACLoss(
        actor,
        [Whole(head) for head in heads],
        num_qvalue_nets=3,
        alpha_init=0.05,
        target_entropy=-5.0,
        loss_function="l2",
        deactivate_vmap=True,
    )
    plain.set_keys(action=CHUNK)
    plain.make_value_estimator(gamma=0.9)
    SoftUpdate(plain, tau=0.01)
    rows = batch.clone()
    rows[CHUNK], rows[STEPS] = rows[schema.CHUNK], rows[schema.NUM_EXECUTED]
    torch.manual_seed(2)
    torch.randn(B, H, A)  # ours draws for never-executed numbers first (there are none)
    wanted, _ = plain.qvalue_v2_loss(rows)
    loss_actor, info = plain.actor_loss(rows)
    out = losses(goal, batch)
    assert out["loss_critic"] == pytest.approx(float(wanted.detach()), rel=1e-5)
    assert out["loss_actor"] == pytest.approx(float(loss_actor.detach()), rel=1e-4)
    loss_alpha = plain.alpha_loss(info["log_prob"]).mean().detach()
    assert out["loss_alpha"] == pytest.approx(float(loss_alpha), rel=1e-4)


def test_heads_and_torchrls_stacks_are_one_memory():
    goal = build()
    stack = goal.loss.qvalue_network_params["module", "net", "0", "weight"]
    target = goal.loss.target_qvalue_network_params["module", "net", "0", "weight"]
    with torch.no_grad():
        goal.ensemble.online[1].net[0].weight.fill_(3.0)
    assert (stack[1] == 3).all()
    assert (goal.ensemble.frozen[1].net[0].weight == 3).all()
    assert not (target[1] == 3).any()
    before = target[0].clone()
    goal.after_step()
    # tau = 0.01 of the way
    wanted = before + 0.01 * (stack[0] - before)
    torch.testing.assert_close(goal.ensemble.target[0].net[0].weight, wanted)
    torch.testing.assert_close(target[0], wanted)


@pytest.mark.parametrize("kind", ["exp", "softplus"])
def test_the_named_state_is_everything_but_the_policy(kind):
    torch.manual_seed(7)
    one, other = build(3, alpha_kind=kind), build(3, alpha_kind=kind)
    with torch.no_grad():
        for p in [*one.critic_parameters, *one.alpha_parameters]:
            p.add_(torch.randn_like(p))
    one.after_step()
    other.state.load_state_dict(one.state.state_dict())
    batch = make_batch(SOME)
    assert losses(other, batch) == losses(one, batch)
    stacks = [goal.loss.target_qvalue_network_params for goal in (one, other)]
    assert (stacks[0] == stacks[1]).all()


def test_the_actors_loss_leaves_the_critics_alone():
    goal, batch = build(cloning_weight=0.0, cloned_rows=None), make_batch(ALL)
    goal(batch, goal.counts(batch))["loss_actor"].backward()
    assert all(p.grad is None for p in goal.critic_parameters)
    assert all(p.grad is not None for p in goal.actor_parameters)


@pytest.mark.parametrize("junk", [0.0, 1.0, -0.3])
def test_never_executed_numbers_have_no_influence(junk):
    goal = build()
    batch = make_batch(SOME)
    other = batch.clone()
    other[schema.CHUNK][~batch[schema.EXECUTED_MASK]] = junk
    assert not torch.equal(other[schema.CHUNK], batch[schema.CHUNK])
    assert losses(goal, other) == losses(goal, batch)


def test_executed_numbers_do_have_influence():
    goal = build()
    batch = make_batch(SOME)
    other = batch.clone()
    other[schema.CHUNK][2, 0] *= -1  # the one step of row 2 that ran
    assert losses(goal, other)["loss_critic"] != losses(goal, batch)["loss_critic"]


def test_the_batch_is_left_as_it_was():
    goal, batch = build(), make_batch(SOME)
    before = batch.clone()
    losses(goal, batch)
    assert (batch == before).all()
    assert set(batch.keys(True, True)) == set(before.keys(True, True))


def test_only_executed_demonstrated_numbers_are_cloned():
    goal = build(cloning_weight=1.0)
    batch = make_batch([4, 2, 4, 4, 4, 4])
    # rows 0 and 1 are demonstrations: 4 and 2 executed steps of 2 numbers
    assert int(goal.counts(batch)["cloned"]) == (4 + 2) * A
    loc = goal.actor[0].module(batch["features"])[0].tanh()
    error = (loc - batch[schema.CHUNK]) ** 2
    expected = (error[0].sum() + error[1, :2].sum()) / ((4 + 2) * A)
    assert losses(goal, batch)["loss_cloning"] == pytest.approx(float(expected), rel=1e-5)


def test_own_successes_may_be_cloned_too():
    goal = build(cloning_weight=1.0, cloned_rows="successes")
    batch = make_batch([4, 2, 3, 4, 4, 4])
    # demonstrations are rows 0 and 1; of the others only row 2 is known to have succeeded
    assert int(goal.counts(batch)["cloned"]) == (4 + 2 + 3) * A
    loc = goal.actor[0].module(batch["features"])[0].tanh()
    error = ((loc - batch[schema.CHUNK]) ** 2).detach()
    expected = (error[0].sum() + error[1, :2].sum() + error[2, :3].sum()) / ((4 + 2 + 3) * A)
    assert losses(goal, batch)["loss_cloning"] == pytest.approx(float(expected), rel=1e-5)


def test_the_actor_waits_for_the_critic():
    goal, batch = build(critic_only_updates=2), make_batch(ALL)
    assert "loss_actor" not in losses(goal, batch)
    goal.after_step()
    goal.after_step()
    assert "loss_actor" in losses(goal, batch)


def test_the_actor_moves_every_few_updates():
    goal, batch = build(actor_interval=3), make_batch(ALL)
    due = []
    for _ in range(7):
        due.append("loss_actor" in losses(goal, batch))
        goal.after_step()
    assert due == [True, False, False, True, False, False, True]


@pytest.mark.parametrize("kind", ["exp", "softplus"])
@pytest.mark.parametrize("alpha", [1e-4, 0.02, 3.0])
def test_the_initial_alpha_is_the_initial_alpha(kind, alpha):
    goal = build(alpha=alpha, alpha_kind=kind)
    assert losses(goal, make_batch(ALL))["alpha"] == pytest.approx(alpha, rel=1e-5)


@pytest.mark.parametrize("kind", ["exp", "softplus"])
@pytest.mark.parametrize(("target", "grows"), [(1000.0, True), (-1000.0, False)])
def test_alpha_grows_while_the_entropy_is_below_its_target(kind, target, grows):
    goal, batch = build(alpha=0.1, alpha_kind=kind, target_entropy=target), make_batch(ALL)
    (raw,) = goal.alpha_parameters
    goal(batch, goal.counts(batch))["loss_alpha"].backward()
    assert (raw.grad < 0) == grows


def test_softplus_alpha_loss_by_hand():
    # -alpha (log-prob + target), Haarnoja et al. eq. 18; exp is TorchRL's: -log alpha (...)
    batch = make_batch(ALL)
    plain, soft = (
        losses(build(alpha=0.1, alpha_kind=kind, target_entropy=-5.0), batch)
        for kind in ("exp", "softplus")
    )
    excess = -plain["entropy"] - 5.0
    assert plain["loss_alpha"] == pytest.approx(-math.log(0.1) * excess, rel=1e-4)
    assert soft["loss_alpha"] == pytest.approx(-0.1 * excess, rel=1e-4)


def test_entropy_per_executed_number_is_equal_to_the_chunks_where_all_ran():
    # H x A = 8 numbers of -2 nats each
    chunk = build(alpha=0.1, target_entropy=-16.0)
    number = build(alpha=0.1, target_entropy=-2.0, entropy_unit="executed_number")
    batch = make_batch(ALL)
    torch.manual_seed(0)
    pairs = [
        (losses_with(chunk, batch, seed), losses_with(number, batch, seed)) for seed in range(60)
    ]
    a, b = (torch.tensor(side) for side in zip(*pairs, strict=True))
    # two independent estimates of the same expectation
    assert abs(a.mean() - b.mean()) < 4 * (a.std() ** 2 / 60 + b.std() ** 2 / 60) ** 0.5


def losses_with(goal: SoftActorCritic, batch: TensorDict, seed: int) -> float:
    torch.manual_seed(seed)
    return float(goal(batch, goal.counts(batch))["loss_alpha"].detach())


def test_only_executed_numbers_count_in_the_entropy():
    goal = build(alpha=0.1, target_entropy=-2.0, entropy_unit="executed_number")
    batch = make_batch([1, 1, 1, 1, 1, 1])
    rows = TensorDict({FEATURES: batch[FEATURES]}, batch_size=[B])
    torch.manual_seed(5)
    excess = goal._entropy_excess(rows.copy(), batch, torch.zeros(B))
    torch.manual_seed(5)
    drawn = goal.actor.get_dist(rows)
    numbers = drawn.number_log_prob(drawn.sample())
    # one step of two numbers: their log-probs and a target of 2 x -2
    torch.testing.assert_close(excess, numbers[:, 0].sum(-1) - 4.0)


@pytest.mark.parametrize("num_q", [2, 3, 5, 10])
@pytest.mark.parametrize("reduction", ["min", "mean", "subset"])
def test_any_ensemble_size_and_reduction(num_q, reduction):
    subset = 2 if reduction == "subset" else None
    goal = build(num_q, target_reduction=reduction, target_subset=subset, actor_reduction="mean")
    values = losses(goal, make_batch(SOME))
    assert all(map(math.isfinite, values.values()))


def test_reductions_of_the_target():
    # Three members worth 1, 2 and 6 at the next state; gamma 1, reward 0, not terminated.
    batch = make_batch(ALL)
    batch["features"], batch["next", "features"] = torch.zeros(B, 1), torch.ones(B, 1)
    batch[schema.REWARD] = torch.zeros(B, 1)

    def target(kind, subset=None, update=0):
        goal = SoftActorCritic(
            chunk_actor(GaussianHead(1, H, A, 4)),
            [Constant(scale) for scale in (1.0, 2.0, 6.0)],
            no_images,
            gamma=1.0,
            alpha=1e-30,
            target_reduction=kind,
            target_subset=subset,
        )
        goal.updates = update
        return losses(goal, batch)["td_error"]  # all online values are 0

    assert target("min") == pytest.approx(1.0)
    assert target("mean") == pytest.approx(3.0)
    # the minimum of two of three: 1 if the first is drawn, else 2; which two depends on the update
    drawn = {round(target("subset", 2, update), 4) for update in range(20)}
    assert drawn == {1.0, 2.0}
    assert target("subset", 2, 7) == target("subset", 2, 7)


def test_statistics_of_q():
    goal, batch = build(), make_batch(ALL)
    q = torch.stack([head(batch["features"], batch[schema.CHUNK]) for head in goal.ensemble.online])
    out, mean = losses(goal, batch), q.mean(0)[:, 0]
    assert out["q_mean"] == pytest.approx(float(mean.mean()), rel=1e-5)
    assert out["q_std"] == pytest.approx(float((q[0] - q[1]).abs().mean() / 2), rel=1e-4)
    # outcomes 1, 0, 1, unknown, 0, 0
    assert out["q_success"] == pytest.approx(float(mean[[0, 2]].mean()), rel=1e-4)
    assert out["q_failure"] == pytest.approx(float(mean[[1, 4, 5]].mean()), rel=1e-4)
    assert out["demonstration_share"] == pytest.approx(2 / 6)
    batch[OUTCOME][:] = -1
    assert math.isnan(losses(goal, batch)["q_success"])


def test_the_actor_may_have_rows_of_its_own():
    goal, batch = build(cloning_weight=1.0), make_batch(ALL)
    other = batch.clone()
    other["features"] = other["features"] + 1
    other[schema.POLICY_VERSION][:] = -1
    alone = losses(goal, batch)
    batch[ACTOR_ROWS] = other.select(
        "features", schema.CHUNK, schema.EXECUTED_MASK, schema.NUM_EXECUTED, schema.POLICY_VERSION
    )
    both = losses(goal, batch)
    assert both["loss_critic"] == alone["loss_critic"]
    assert both["loss_actor"] != alone["loss_actor"]
    loc = goal.actor[0].module(other["features"])[0].tanh()
    expected = float(((loc - other[schema.CHUNK]) ** 2).mean())
    assert both["loss_cloning"] == pytest.approx(expected, rel=1e-5)


def test_an_alpha_that_stays_has_no_loss_and_no_parameter():
    fixed = {"alpha_kind": None, "target_entropy": None, "entropy_unit": None}
    goal, batch = build(alpha=0.1, **fixed), make_batch(SOME)
    out = losses(goal, batch)
    assert not any("alpha" in name for name in out)
    assert goal.alpha_parameters == []
    assert not any("alpha" in name for name, _ in goal.state.named_parameters())
    # everything else is what it is beside a learned alpha of the same value
    learned = losses(build(alpha=0.1), batch)
    assert {k: v for k, v in learned.items() if "alpha" not in k} == pytest.approx(out, rel=1e-6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_q": 1}, "1 critic given"),
        ({"gamma": 1.5}, "gamma is 1.5"),
        ({"alpha": 0.0}, "alpha is 0.0"),
        ({"alpha_kind": "log"}, "kind is 'log'"),
        ({"tau": 0.0}, "tau is 0.0"),
        ({"cloning_weight": -1.0}, "cloning_weight is -1.0"),
        ({"cloning_weight": 0.0}, "cloned_rows is 'demonstrations' with cloning_weight 0.0"),
        ({"cloned_rows": None}, "cloned_rows is None with cloning_weight 0.5"),
        ({"cloned_rows": "online"}, "cloned_rows is 'online'"),
        ({"critic_only_updates": -1}, "critic_only_updates is -1"),
        ({"actor_interval": 0}, "actor_interval is 0"),
        ({"entropy_unit": "step"}, "entropy_unit is 'step'"),
        ({"target_entropy": None}, "give all three for a learned alpha"),
        ({"target_reduction": "max"}, "reduction is 'max'"),
        ({"target_subset": 2}, "subset is 2 with reduction 'min'"),
        ({"target_reduction": "subset"}, "subset is None with reduction 'subset'"),
        ({"target_reduction": "subset", "target_subset": 3}, "the ensemble has 1..2"),
        ({"actor_reduction": "subset"}, "actor_reduction is 'subset'"),
    ],
)
def test_settings_that_cannot_be_used_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        build(**settings)
