"""The on-policy objective: options refused, terms worked by hand, what is dropped and why."""

import copy
import math

import pytest
import torch
from envs.counter import META
from lanes import ACTIONS, STEPS, Lanes, pairs
from tensordict import TensorDict
from torch import nn
from torchrl.objectives import ClipPPOLoss

from torchrl_vla import schema
from torchrl_vla.objectives.credit import (
    PROXIMAL,
    VALID,
    VALUE,
    Gae,
    GroupRelative,
    LeaveOneOut,
    ReinforcePlusPlus,
    VTrace,
)
from torchrl_vla.objectives.policy_gradient import (
    ADVANTAGE,
    LAG,
    REFERENCE,
    TARGET,
    WEIGHT,
    PolicyGradient,
)
from torchrl_vla.policies.tiny import make_policy

GRPO = {"advantage": GroupRelative(False), "gamma": 1.0, "group_size": 2, "max_hold": 2}
PPO = {"advantage": Gae(), "gamma": 1.0, "value_weight": 0.5}
RPP = {"advantage": ReinforcePlusPlus(), "gamma": 1.0, "max_hold": 2}


def tiny(head: str = "tokens", seed: int = 0, **settings) -> nn.Module:
    torch.manual_seed(seed)
    sizes = {"chunk_size": STEPS, "num_bins": 8, "width": 16, "heads": 2, "keypoints": 4}
    policy = make_policy(META, head=head, weights=None, **sizes, **settings)
    nn.init.normal_(policy.model.model.token_head.linear.weight, std=0.3)
    nn.init.normal_(policy.model.model.value_head.weight)
    return policy


POLICY = tiny()


def seen(td: TensorDict, policy: nn.Module = POLICY) -> TensorDict:
    """Add observations, and actions that ``policy`` chose on them."""
    g = torch.Generator().manual_seed(3)
    shape = td.batch_size
    for where in ((), ("next",)):
        image = torch.randint(0, 256, (*shape, 1, 3, 8, 8), generator=g, dtype=torch.uint8)
        td[(*where, *schema.IMAGE)] = image
        td[(*where, *schema.STATE)] = torch.randn(*shape, 3, generator=g)
        task = (*where, schema.TASK_ID)
        td[task if where else schema.TASK_ID] = torch.zeros(*shape, 1, dtype=torch.int64)
    torch.manual_seed(4)
    with torch.no_grad():
        return policy(td)


def shares(goal: PolicyGradient, batch: TensorDict) -> dict[str, torch.Tensor]:
    """Return the objective's scalars with this batch as the whole global batch."""
    goal.rounds = max(goal.rounds, 1)
    return goal(batch, goal.counts(batch))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (GRPO | {"value_weight": 0.5}, "value_weight=0.5 has no use with GroupRelative: it"),
        (GRPO | {"value_clip": 0.2}, "value_clip=0.2 has no use with GroupRelative"),
        (GRPO | {"value_only_rounds": 1}, "value_only_rounds=1 has no use with GroupRelative"),
        (RPP | {"value_weight": 0.5}, "value_weight=0.5 has no use with ReinforcePlusPlus"),
        (RPP | {"group_size": 8}, "group_size=8 has no use with ReinforcePlusPlus"),
        (RPP | {"dynamic_sampling": True}, "dynamic_sampling=True has no use with Reinforce"),
        (PPO | {"group_size": 8}, "group_size=8 has no use with Gae: it compares no"),
        (PPO | {"dynamic_sampling": True}, "dynamic_sampling=True has no use with Gae"),
        (PPO | {"min_groups": 4}, "min_groups=4 has no use with Gae"),
        (PPO | {"max_hold": 1}, "max_hold=1 has no use with Gae: it judges rounds as they"),
        (PPO | {"weighting": "trajectory"}, "weighting='trajectory' has no use with Gae"),
        (PPO | {"kl_kind": "k3"}, "kl_kind='k3' has no use with Gae: kl_weight is 0"),
        (
            PPO | {"advantage": VTrace(), "behaviour_cap": 2.0},
            "behaviour_cap=2.0 has no use with VTrace: its advantages carry",
        ),
        (PPO | {"value_weight": None}, "Gae needs value_weight"),
        (GRPO | {"max_hold": None}, "GroupRelative needs max_hold"),
        (GRPO | {"group_size": 1}, "GroupRelative needs actors.group_size"),
        (GRPO | {"kl_weight": 0.1}, "GroupRelative needs kl_kind"),
        (GRPO | {"gamma": 0.99}, "gamma is 0.99, but GroupRelative compares undiscounted"),
        (GRPO | {"advantage": LeaveOneOut(), "gamma": 0.5}, "but LeaveOneOut compares"),
        (PPO | {"gamma": 1.5}, "gamma is 1.5"),
        (PPO | {"clip_low": 0}, "clip_low is 0"),
        (PPO | {"clip_high": -1}, "clip_high is -1"),
        (PPO | {"dual_clip": 1.0}, "dual_clip is 1.0"),
        (PPO | {"value_clip": 0}, "value_clip is 0"),
        (PPO | {"behaviour_cap": 0}, "behaviour_cap is 0"),
        (PPO | {"entropy_weight": -1}, "entropy_weight is -1"),
        (PPO | {"value_weight": -1}, "value_weight is -1"),
        (PPO | {"max_lag": -1}, "max_lag is -1"),
        (PPO | {"ratio": "step"}, "ratio is 'step'"),
        (GRPO | {"weighting": "length"}, "weighting is 'length'"),
        (PPO | {"kl_weight": 1.0, "kl_kind": "k4"}, "kl_kind is 'k4'"),
    ],
)
def test_options_that_do_not_belong_together(options: dict, message: str):
    with pytest.raises(ValueError, match=message):
        PolicyGradient(POLICY, **options)


def test_a_policy_without_log_probs_is_refused():
    with pytest.raises(TypeError, match=r"use policy.head=tokens, or policy.store_log_probs=true"):
        PolicyGradient(tiny("gaussian"), **PPO)


@pytest.fixture
def batch() -> TensorDict:
    """Eight decisions with ratios off 1, some steps not executed, one void."""
    td = seen(Lanes(4, lambda e: 3).round(2)).reshape(-1)
    g = torch.Generator().manual_seed(1)
    td[schema.LOG_PROBS] = td[schema.LOG_PROBS] + 0.3 * torch.randn(8, STEPS, ACTIONS, generator=g)
    executed = torch.tensor([2, 2, 1, 2, 1, 2, 2, 1])
    td[schema.EXECUTED_MASK] = torch.arange(STEPS) < executed[:, None]
    td[schema.NUM_EXECUTED] = executed[:, None]
    td[ADVANTAGE], td[TARGET] = torch.randn(2, 8, 1, generator=g).unbind()
    td[VALID] = torch.ones(8, 1, dtype=torch.bool)
    td[VALID][3] = False
    return td


def mean_over(x: torch.Tensor, mask: torch.Tensor) -> float:
    return float(x[mask].mean())


@pytest.mark.parametrize("clip", [(0.2, 0.2), (0.1, 0.5)])
def test_the_surrogate_is_torchrls_where_both_apply(batch: TensorDict, clip):
    policy = tiny()
    goal = PolicyGradient(policy, **PPO, clip_low=clip[0], clip_high=clip[1])
    theirs = ClipPPOLoss(
        policy,
        None,
        clip_epsilon=clip,
        entropy_bonus=False,
        functional=False,
        reduction="none",
    )
    theirs.set_keys(action=schema.TOKENS, sample_log_prob=schema.LOG_PROBS)
    theirs.loss_mask_key = None
    expected = theirs(policy.score(batch.copy()))["loss_objective"][goal.numbers(batch)].mean()
    own = shares(goal, batch)["loss_policy"]
    torch.testing.assert_close(own, expected)
    params = list(policy.model.model.token_head.parameters())
    for a, b in zip(
        torch.autograd.grad(own, params), torch.autograd.grad(expected, params), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-7)


def log_probs(batch: TensorDict, policy: nn.Module = POLICY) -> torch.Tensor:
    with torch.no_grad():
        scored = policy.score(batch.select(*policy.in_keys))
        return policy.get_dist(scored).log_prob(batch[policy.action_key])


def test_a_chunk_ratio_is_the_product_over_executed_numbers(batch: TensorDict):
    goal = PolicyGradient(POLICY, **PPO, ratio="chunk", dual_clip=3.0)
    numbers = goal.numbers(batch)
    difference = torch.where(numbers, log_probs(batch) - batch[schema.LOG_PROBS], 0)
    ratio = difference.sum((1, 2)).exp()
    advantage = batch[ADVANTAGE].squeeze(-1)
    loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    loss = torch.where(advantage < 0, torch.minimum(loss, -3 * advantage), loss)
    out = shares(goal, batch)
    valid = batch[VALID].squeeze(-1)
    assert out["loss_policy"].item() == pytest.approx(mean_over(loss, valid), abs=1e-5)
    outside = ((ratio < 0.8) | (ratio > 1.2)).float()
    assert out["clip_fraction"].item() == pytest.approx(mean_over(outside, valid))
    low, high = out["clip_fraction_low"].item(), out["clip_fraction_high"].item()
    assert low == pytest.approx(mean_over((ratio < 0.8).float(), valid))
    assert low + high == pytest.approx(out["clip_fraction"].item())


def test_the_effective_sample_size_is_that_of_all_entries(batch: TensorDict):
    goal = PolicyGradient(POLICY, **PPO)
    out = {name: x.item() for name, x in shares(goal, batch).items()}
    ratio = (log_probs(batch) - batch[schema.LOG_PROBS]).exp()[goal.numbers(batch)]
    expected = ratio.sum() ** 2 / (len(ratio) * ratio.square().sum())
    done = goal.finish(out)
    assert done["effective_sample_size"] == pytest.approx(float(expected), rel=1e-4)
    assert not any(name.startswith("importance") for name in done)


def test_the_value_may_not_move_further_than_its_clip(batch: TensorDict):
    # Smooth L1 of an error e: e² / 2 below 1, |e| - 1/2 above. Old value 0, new value v, clip 0.1:
    # the larger of both losses counts, and where the clipped one does, no gradient is left.
    batch[VALUE] = torch.zeros(8, 1)
    batch[TARGET] = torch.zeros(8, 1)
    value = POLICY.value(batch).detach()
    near = value.clamp(-0.1, 0.1)

    def smooth(x):
        return torch.where(x.abs() < 1, x.square() / 2, x.abs() - 0.5)

    expected = torch.maximum(smooth(value), smooth(near))
    goal = PolicyGradient(POLICY, **PPO, value_clip=0.1)
    mean = mean_over(expected, batch[VALID])
    assert shares(goal, batch)["loss_value"].item() == pytest.approx(0.5 * mean, abs=1e-6)
    batch[TARGET] = value + 2 * (value.sign() * 5)  # pulls the same way, beyond the clip
    free = PolicyGradient(POLICY, **PPO)
    assert shares(goal, batch)["loss_value"] > shares(free, batch)["loss_value"]


def test_terms_are_weighted_and_only_there_when_asked(batch: TensorDict):
    plain = shares(PolicyGradient(POLICY, **PPO), batch)
    assert {k for k in plain if k.startswith("loss_")} == {"loss_policy", "loss_value"}
    out = shares(PolicyGradient(POLICY, **PPO, entropy_weight=0.5), batch)
    assert out["loss_entropy"].item() == pytest.approx(-0.5 * out["entropy"].item(), rel=1e-5)
    critic_free = shares(PolicyGradient(POLICY, **GRPO), batch)
    assert {k for k in critic_free if k.startswith("loss_")} == {"loss_policy"}


def test_value_only_rounds_leave_the_policy_alone(batch: TensorDict):
    goal = PolicyGradient(POLICY, **PPO, value_only_rounds=1)
    assert "loss_policy" not in shares(goal, batch)
    goal.rounds = 2
    assert "loss_policy" in shares(goal, batch)


def test_a_long_trajectory_counts_as_much_as_a_short_one(batch: TensorDict):
    # Trajectory 0: 3 decisions, 1: one. Each executed number weighs 1 / (numbers of its own).
    td = batch[:4]
    td[VALID] = torch.ones(4, 1, dtype=torch.bool)
    td[schema.EPISODE_ID] = torch.tensor([[0], [0], [0], [1]])
    td[schema.LOG_PROBS] = log_probs(td)  # ratio 1: the loss of a number is -advantage
    td[ADVANTAGE] = torch.tensor([[1.0], [1.0], [1.0], [-3.0]])
    goal = PolicyGradient(POLICY, **GRPO, weighting="trajectory")
    numbers = td[schema.NUM_EXECUTED] * ACTIONS
    of_episode = torch.tensor([[5 * ACTIONS]] * 3 + [[2 * ACTIONS]])  # 2 + 2 + 1 steps; 2 steps
    assert numbers.sum() == 7 * ACTIONS
    td[WEIGHT] = 1 / of_episode
    # (-1 + 3) / 2 = 1; over entries it would be (-5 + 6) / 7
    assert shares(goal, td)["loss_policy"].item() == pytest.approx(1.0, abs=1e-5)
    entry = PolicyGradient(POLICY, **GRPO)
    assert shares(entry, td)["loss_policy"].item() == pytest.approx(1 / 7, abs=1e-5)


@pytest.mark.parametrize("ratio", ["token", "chunk"])
def test_credit_writes_the_weights_of_whole_trajectories(ratio: str):
    goal = PolicyGradient(POLICY, **GRPO, weighting="trajectory", ratio=ratio)
    rows, _ = goal.credit(seen(Lanes(2, lambda e: 3 - 2 * (e % 2), group_size=2).round(3)), 0)
    # Episodes of 3 and 1 decisions; every decision has 2 steps of 2 numbers.
    size = STEPS * ACTIONS if ratio == "token" else 1
    assert pairs(rows) == [(0, 0), (0, 1), (0, 2), (1, 0)]
    expected = torch.tensor([1 / 3] * 3 + [1.0]) / size
    torch.testing.assert_close(rows[WEIGHT].flatten(), expected)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_the_kl_to_the_start_is_zero_at_the_start_and_pulls_back_later(kind: str):
    policy = tiny()
    start = copy.deepcopy(policy)
    goal = PolicyGradient(policy, **PPO, kl_weight=0.3, kl_kind=kind, make_reference=lambda: start)
    rows, _ = goal.credit(seen(Lanes(2, lambda e: 2).round(4), policy), 0)
    flat = rows.reshape(-1)
    assert shares(goal, flat)["loss_kl"].item() == pytest.approx(0.0, abs=1e-6)
    with torch.no_grad():
        policy.model.model.token_head.linear.weight += 0.3
        policy.model.model.token_head.linear.weight[::3] -= 0.5
    d = log_probs(flat, policy) - flat[REFERENCE]
    wanted = {"k1": d, "k2": d.square() / 2, "k3": (-d).exp() - 1 + d}[kind]
    out = shares(goal, flat)
    assert out["loss_kl"].item() == pytest.approx(0.3 * float(wanted.mean()), rel=1e-3, abs=1e-5)
    # the reference itself did not move, and no gradient reaches it
    out["loss_kl"].backward()
    assert all(p.grad is None for p in start.parameters())
    torch.testing.assert_close(flat[REFERENCE], log_probs(flat, start))


def test_no_reference_is_built_without_a_penalty():
    def never():
        raise AssertionError("built")

    PolicyGradient(POLICY, **PPO, make_reference=never)
    with pytest.raises(ValueError, match="needs make_reference"):
        PolicyGradient(POLICY, **PPO, kl_weight=0.1, kl_kind="k3")


def test_decoupled_clips_around_the_start_and_weighs_by_it(batch: TensorDict):
    goal = PolicyGradient(POLICY, **PPO, behaviour_cap=1.1)
    g = torch.Generator().manual_seed(9)
    noise = 0.3 * torch.randn(8, STEPS, ACTIONS, generator=g)
    batch[PROXIMAL] = log_probs(batch) + noise
    ratio = (-noise).exp()
    weight = (batch[PROXIMAL] - batch[schema.LOG_PROBS]).exp().clamp(max=1.1)
    advantage = batch[ADVANTAGE].unsqueeze(-1)
    loss = -weight * torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    numbers = goal.numbers(batch)
    out = shares(goal, batch)
    assert out["loss_policy"].item() == pytest.approx(mean_over(loss, numbers), abs=1e-5)
    outside = ((ratio < 0.8) | (ratio > 1.2)).float()
    assert out["clip_fraction"].item() == pytest.approx(mean_over(outside, numbers), abs=1e-6)


@pytest.mark.parametrize("options", [PPO | {"behaviour_cap": 2.0}, PPO | {"advantage": VTrace()}])
def test_the_start_of_the_round_is_scored_once(options: dict):
    policy = tiny()
    rollout = seen(Lanes(2, lambda e: 3).round(3), policy)
    with torch.no_grad():  # the learner has moved on since
        policy.model.model.token_head.linear.weight += 0.1
        policy.model.model.value_head.bias += 1.0
    goal = PolicyGradient(policy, **options)
    rows, _ = goal.credit(rollout, 0)
    torch.testing.assert_close(rows[PROXIMAL], log_probs(rows, policy))
    torch.testing.assert_close(rows[VALUE], policy.value(rows).detach())
    out = shares(goal, rows.reshape(-1))
    # relative to the start nothing has moved yet
    assert out["approx_kl"].item() == pytest.approx(0.0, abs=1e-9)
    assert out["clip_fraction"].item() == 0


def test_a_round_is_judged_by_gae_through_the_objective():
    # One lane, episode of 2 decisions paying 1 at the end, gamma 1, lambda 1, value 0 everywhere:
    # advantage 1, 1, then the next episode's first decision, bootstrapped by V(next) = 0.25.
    policy = tiny()
    with torch.no_grad():
        policy.model.model.value_head.weight.zero_()
        policy.model.model.value_head.bias.fill_(0.25)
    rollout = seen(Lanes(1, lambda e: 2).round(3), policy)
    rollout[VALUE] = torch.zeros(1, 3, 1)
    goal = PolicyGradient(policy, **PPO | {"advantage": Gae(lmbda=1.0)})
    rows, facts = goal.credit(rollout, 0)
    torch.testing.assert_close(rows[TARGET].flatten(), torch.tensor([1.0, 1.0, 0.25]))
    assert facts["valid_fraction"] == 1.0
    assert (facts["policy_lag"], facts["policy_lag_max"]) == (0.0, 0.0)
    # explained variance: values 0 explain nothing of targets that vary
    assert facts["explained_variance"] == pytest.approx(0.0, abs=1e-6)


def test_gae_can_wait_for_whole_trajectories():
    # Episodes of 3 decisions paying 1 at the end; gamma 1, lambda 1, value 0 where decisions are
    # made and 0.25 behind a truncation. Rounds of 2: nothing is complete after the first.
    policy = tiny()
    with torch.no_grad():
        policy.model.model.value_head.weight.zero_()
        policy.model.model.value_head.bias.fill_(0.25)
    whole = {"advantage": Gae(lmbda=1.0, whole_trajectories=True), "max_hold": 3}
    goal = PolicyGradient(policy, **PPO | whole, weighting="trajectory")
    lanes = Lanes(1, lambda e: 3)
    targets = []
    for version in range(3):
        rollout = seen(lanes.round(2, version), policy)
        rollout[VALUE] = torch.zeros(1, 2, 1)
        if version == 2:  # the end of the second episode, now by a time limit from outside
            rollout[schema.TERMINATED] = torch.zeros(1, 2, 1, dtype=torch.bool)
            rollout[schema.TRUNCATED] = rollout[schema.DONE].clone()
        rows, _ = goal.credit(rollout, version)
        targets.append(rows[TARGET].flatten().tolist() if len(rows) else [])
    # no bootstrap at the end of a round; the truncated episode: 1 + 0.25, carried back by lambda 1
    assert targets == [[], [1.0] * 3, [1.25] * 3]


def test_old_decisions_leave_the_loss_and_are_counted():
    goal = PolicyGradient(POLICY, **PPO, max_lag=2)
    rollout = seen(Lanes(1, lambda e: 1).round(4))
    rollout[schema.POLICY_VERSION] = torch.tensor([[[2], [3], [5], [4]]])
    rows, facts = goal.credit(rollout, 5)
    assert rows[LAG].flatten().tolist() == [3, 2, 0, 1]
    assert rows[VALID].flatten().tolist() == [False, True, True, True]
    assert facts["dropped_stale"] == 1
    assert facts["valid_fraction"] == 0.75
    assert facts["policy_lag"] == pytest.approx(1.0)  # (2 + 0 + 1) / 3
    assert facts["policy_lag_max"] == 2
    shares_of = [facts[f"policy_lag_share/{k}"] for k in range(3)]
    assert shares_of == pytest.approx([1 / 3] * 3)
    # a NaN where the stale decision is cannot reach the loss
    flat = rows.reshape(-1)
    flat[schema.LOG_PROBS][0] = -1e30
    assert shares(goal, flat)["loss_policy"].isfinite()


def test_void_episodes_leave_a_round_judged_along_time():
    goal = PolicyGradient(POLICY, **PPO)
    rows, facts = goal.credit(seen(Lanes(2, lambda e: 2, broken=lambda e: e == 1).round(2)), 0)
    assert rows[VALID].squeeze(-1).tolist() == [[True, True], [False, False]]
    assert facts["dropped_void"] == 2


def test_unfinished_groups_wait_and_their_age_shows():
    goal = PolicyGradient(POLICY, **GRPO)  # max_hold 2
    lanes = Lanes(2, lambda e: 3, pay=lambda e: float(e % 2), group_size=2)
    rows, facts = goal.credit(seen(lanes.round(2, version=0)), 0)
    assert (len(rows), facts, goal.rounds, goal.held) == (0, {}, 0, 4)
    rows, facts = goal.credit(seen(lanes.round(2, version=1)), 1)
    assert pairs(rows) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert rows[LAG].flatten().tolist() == [1, 1, 0, 1, 1, 0]
    assert rows[ADVANTAGE].flatten().tolist() == [-0.5] * 3 + [0.5] * 3
    assert facts["policy_lag"] == pytest.approx(2 / 3)
    assert facts["held_decisions"] == goal.held == 2
    assert facts["zero_contrast_fraction"] == 0.0


def test_a_decision_that_waited_too_long_leaves_the_loss_but_not_the_return():
    goal = PolicyGradient(POLICY, **GRPO | {"max_hold": 1})
    lanes = Lanes(2, lambda e: 3, pay=lambda e: float(e % 2), group_size=2)
    for version in range(2):
        assert not len(goal.credit(seen(lanes.round(1, version)), version)[0])
    rows, facts = goal.credit(seen(lanes.round(1, 2)), 2)
    assert rows[VALID].flatten().tolist() == [False, True, True] * 2
    assert facts["dropped_stale"] == 2
    assert rows[ADVANTAGE].flatten().tolist() == [-0.5] * 3 + [0.5] * 3


def test_dynamic_sampling_redraws_until_enough_groups_have_contrast():
    # Groups (0, 0), (0, 1), (1, 1), (1, 0): rounds of one group each.
    pays = [0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 0.0]
    lanes = Lanes(2, lambda e: 1, pay=lambda e: pays[e % 8], group_size=2)
    goal = PolicyGradient(POLICY, **GRPO, dynamic_sampling=True, min_groups=2)
    sizes = [len(goal.credit(seen(lanes.round(1)), 0)[0]) for _ in range(3)]
    assert sizes == [0, 0, 0]
    rows, facts = goal.credit(seen(lanes.round(1)), 0)
    assert rows[schema.EPISODE_ID].flatten().tolist() == [2, 3, 6, 7]
    assert facts["zero_contrast_fraction"] == 0.5
    # without it, groups that teach nothing stay in the round and in its means
    lanes = Lanes(2, lambda e: 1, pay=lambda e: pays[e % 8], group_size=2)
    rows, facts = PolicyGradient(POLICY, **GRPO).credit(seen(lanes.round(1)), 0)
    assert (rows.numel(), facts["zero_contrast_fraction"]) == (2, 1.0)


def test_the_gap_is_of_the_newest_version_and_of_the_first_update_only():
    goal = PolicyGradient(POLICY, **PPO, max_lag=1)
    rollout = seen(Lanes(1, lambda e: 1).round(2))
    rollout[schema.POLICY_VERSION] = torch.tensor([[[0], [1]]])
    rollout[schema.LOG_PROBS][0, 0] += 5.0  # an old decision may differ
    rollout[schema.LOG_PROBS][0, 1, 1, 0] += 0.125
    rows, _ = goal.credit(rollout, 1)
    flat = rows.reshape(-1)
    shares(goal, flat[:1])
    shares(goal, flat)
    assert goal.pop_gap() == pytest.approx(0.125, abs=1e-5)
    flat[schema.LOG_PROBS][1] += 3.0
    shares(goal, flat)
    assert math.isnan(goal.pop_gap())


def test_the_gaussian_head_is_scored_as_it_acted():
    policy = tiny("gaussian", store_log_probs=True)
    rollout = seen(Lanes(2, lambda e: 2).round(4), policy)
    assert rollout[schema.LOG_PROBS].dtype == torch.float32
    goal = PolicyGradient(policy, **PPO, entropy_weight=0.1)
    rows, _ = goal.credit(rollout, 0)
    out = shares(goal, rows.reshape(-1))
    assert goal.pop_gap() < 1e-5
    assert out["clip_fraction"].item() == 0
    (out["loss_policy"] + out["loss_value"] + out["loss_entropy"]).backward()
    with_grad = {n for n, p in policy.named_parameters() if p.grad is not None and p.grad.any()}
    assert any(name.startswith("actor") for name in with_grad)
    assert any("blocks" in name for name in with_grad)
    assert not any("token_head" in name for name in with_grad)
