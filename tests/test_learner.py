"""One update: the same gradient for any micro-batch split and any number of ranks.

Run by torchrun (``__main__`` below), this file is also the program of the ranks.
"""

import math
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from envs.counter import META, CounterSuite
from programs import torchrun
from safetensors.torch import load_file, save_file
from tensordict import TensorDict
from torch import nn
from torch.distributed.tensor import DTensor

from torchrl_vla import schema
from torchrl_vla import topology as topo
from torchrl_vla.learner import Learner, ParameterGroup
from torchrl_vla.loops import actor_critic, on_policy
from torchrl_vla.objectives.credit import VALID, Gae, GroupRelative
from torchrl_vla.objectives.critics import DEMONSTRATION
from torchrl_vla.objectives.policy_gradient import ADVANTAGE, TARGET, WEIGHT, PolicyGradient
from torchrl_vla.objectives.soft_actor_critic import SoftActorCritic
from torchrl_vla.policies.policy import VALUE
from torchrl_vla.policies.tiny import make_policy

ROWS, STEPS, ACTIONS, BINS = 8, 3, META.action_dim, 8
VALUE_TERM = {"advantage": Gae(), "value_weight": 0.5, "value_clip": 0.5}
ON_POLICY = {
    "ppo": VALUE_TERM | {"entropy_weight": 0.01},
    "grpo": {
        "advantage": GroupRelative(divide_by_std=False),
        "gamma": 1.0,
        "group_size": 2,
        "max_hold": 0,
        "weighting": "trajectory",
        "ratio": "chunk",
        "dual_clip": 3.0,
    },
    "ppo_gaussian": VALUE_TERM | {"entropy_weight": 0.01},
}
"""Options that differ from the defaults; together they reach every term of the loss."""
CASES = (*ON_POLICY, "sac_frozen", "sac_trunk")


def small_policy(head: str, **settings: object) -> nn.Module:
    torch.manual_seed(0)
    policy = make_policy(
        META,
        head=head,
        weights=None,
        chunk_size=STEPS,
        num_bins=BINS,
        width=16,
        heads=2,
        keypoints=4,
        **settings,
    )
    nn.init.normal_(policy.model.model.token_head.linear.weight, std=0.3)
    nn.init.normal_(policy.model.model.value_head.weight)
    return policy


def transitions() -> TensorDict:
    """Return 8 transitions; the second half has far fewer valid entries than the first."""
    g = torch.Generator().manual_seed(1)
    td = TensorDict(batch_size=[ROWS])
    for where in ((), ("next",)):
        image = torch.randint(0, 256, (ROWS, 1, 3, 8, 8), generator=g, dtype=torch.uint8)
        td[(*where, *schema.IMAGE)] = image
        td[(*where, *schema.STATE)] = torch.randn(ROWS, 3, generator=g)
    td[schema.TASK_ID] = torch.randint(0, 3, (ROWS, 1), generator=g)
    td[schema.CHUNK] = 2 * torch.rand(ROWS, STEPS, ACTIONS, generator=g) - 1
    td[schema.TOKENS] = torch.randint(0, BINS, (ROWS, STEPS, ACTIONS), generator=g)
    executed = torch.tensor([3, 3, 3, 2, 1, 1, 2, 1])
    td[schema.EXECUTED_MASK] = torch.arange(STEPS) < executed[:, None]
    td[schema.NUM_EXECUTED] = executed[:, None]
    td[schema.REWARD] = torch.rand(ROWS, 1, generator=g)
    td[schema.TERMINATED] = torch.tensor([0, 0, 1, 0, 1, 0, 0, 0], dtype=torch.bool)[:, None]
    td[schema.DONE] = td[schema.TERMINATED].clone()
    versions = [DEMONSTRATION] * 3 + [1] * 5  # no demonstration in the second half
    td[schema.POLICY_VERSION] = torch.tensor(versions)[:, None]
    td[ADVANTAGE], td[TARGET], td[VALUE] = torch.randn(3, ROWS, 1, generator=g).unbind()
    td[VALID] = torch.tensor([1, 1, 1, 1, 0, 1, 0, 0], dtype=torch.bool)[:, None]
    td[WEIGHT] = torch.tensor([4, 1, 1, 1, 2, 4, 1, 1]).float()[:, None] / 8
    td["seed"] = torch.arange(ROWS)[:, None] // 4
    return td


class Seeded:
    """An objective whose random numbers depend on the rows, not on who computes them."""

    def __init__(self, objective):
        self.objective, self.counts = objective, objective.counts

    def __call__(self, batch, totals):
        torch.manual_seed(int(batch["seed"][0]))
        return self.objective(batch, totals)


def build(case: str, ranks: topo.Topology, micro_batch_size: int | None):
    """Return learner and minibatch (this rank's rows) as the loops put them together."""
    run = SimpleNamespace(topology=ranks, suite=CounterSuite(), chunk_size=STEPS)
    on_tokens = case in ("ppo", "grpo")
    stores = case == "ppo_gaussian"
    policy = small_policy("tokens" if on_tokens else "gaussian", store_log_probs=stores)
    batch = transitions()
    if case in ON_POLICY:
        with torch.no_grad():
            dist = policy.get_dist(policy.score(batch.copy()))
            if stores:  # a chunk from far outside would have gradients that no rounding survives
                batch[schema.CHUNK] = dist.sample()
            own = dist.log_prob(batch[policy.action_key])
        g = torch.Generator().manual_seed(2)
        batch[schema.LOG_PROBS] = own + 0.3 * torch.randn(own.shape, generator=g)
        settings = on_policy.UpdateSettings(
            minibatch_size=8,
            epochs=1,
            lr=1e-3,
            max_grad_norm=1e9,
            value_lr=None if case == "grpo" else 1e-3,
            head_lr=1e-3 if stores else None,
            micro_batch_size=micro_batch_size,
        )
        options = {"gamma": 0.9} | ON_POLICY[case]
        learner, goal = on_policy.make_learner(ranks, policy, PolicyGradient, settings, **options)
        goal.rounds = 1
    else:
        trunk_lr = 1e-3 * (case == "sac_trunk")
        if not trunk_lr:
            following = batch["next"].copy()
            following[schema.TASK_ID] = batch[schema.TASK_ID]
            with torch.no_grad():
                batch["features"] = policy.features(batch)
                batch["next", "features"] = policy.features(following)
        settings = actor_critic.UpdateSettings(
            1e-3, 1e-3, 1e-3, 1e9, trunk_lr=trunk_lr, micro_batch_size=micro_batch_size
        )
        objective = partial(SoftActorCritic, alpha=0.1, critic_only_updates=0)
        learner, goal = actor_critic.make_learner(run, policy, objective, settings, 0.9)
    learner.objective = Seeded(goal)
    return learner, batch.chunk(ranks.world_size)[ranks.rank]


def gradients_of_an_update(learner: Learner, batch: TensorDict):
    """Take one update; return the gradients that the optimizer saw, and the report."""
    seen = {}

    def look(*_):
        for group in learner.groups:
            for number, p in enumerate(group.params):
                if p.grad is not None:
                    grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
                    seen[f"{group.name}.{number}"] = grad.detach().clone()

    handle = learner.optimizer.register_step_pre_hook(look)
    report = learner.update(batch)
    handle.remove()
    return seen, report


def ranks_main(out: Path) -> None:
    ranks = topo.start("cpu")
    result = {}
    for case in CASES:
        learner, batch = build(case, ranks, None)
        seen, report = gradients_of_an_update(learner, batch)
        result |= {f"{case}/grad/{name}": value for name, value in seen.items()}
        result |= {f"{case}/report/{k}": torch.tensor(v) for k, v in report.items()}
        # a fault on one rank is a fault on all, and nobody takes the step
        if ranks.rank == 1:
            batch[ADVANTAGE][1] = batch[schema.REWARD][1] = math.nan
        before = [p.detach().clone() for group in learner.groups for p in group.params]
        with pytest.raises(FloatingPointError):
            learner.update(batch)
        after = [p.detach() for group in learner.groups for p in group.params]
        assert all(torch.equal(local(a), local(b)) for a, b in zip(before, after, strict=True))
    save_file({k: v.contiguous() for k, v in result.items()}, out / f"{ranks.rank}.safetensors")
    ranks.stop()


def local(p: torch.Tensor) -> torch.Tensor:
    return p.to_local() if isinstance(p, DTensor) else p


def rel_error(a: dict, b: dict) -> float:
    """Return the relative error of the whole gradient ``a``."""
    assert a.keys() == b.keys()
    wrong = sum((a[k] - b[k]).double().square().sum() for k in b)
    return (wrong / sum(b[k].double().square().sum() for k in b)).sqrt().item()


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    out = tmp_path_factory.mktemp("ranks")
    torchrun(__file__, out)
    return [load_file(out / f"{rank}.safetensors") for rank in range(2)]


def assert_ranks_equal(
    ranks: list[dict], case: str, wanted: dict[str, torch.Tensor], report: dict[str, float]
) -> None:
    """Compare gradients by group, and reports, that ranks wrote with those of one process."""
    for rank in ranks:
        prefix = f"{case}/grad/"
        got = {k.removeprefix(prefix): v for k, v in rank.items() if k.startswith(prefix)}
        assert rel_error(got, wanted) <= 1e-6
        for group in {name.split(".")[0] for name in wanted}:
            mine, theirs = (
                {k: v for k, v in grads.items() if k.startswith(f"{group}.")}
                for grads in (got, wanted)
            )
            assert rel_error(mine, theirs) <= 1e-6, group
        for name, value in report.items():
            assert rank[f"{case}/report/{name}"].item() == pytest.approx(value, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_equal_one_on_the_global_batch(case: str, one: topo.Topology, two_ranks):
    # Random numbers are drawn per half, so the single process takes the halves one by one, too.
    learner, batch = build(case, one, None if case in ON_POLICY else ROWS // 2)
    wanted, report = gradients_of_an_update(learner, batch)
    expected = {
        "ppo": {"policy", "value"},
        "grpo": {"policy"},
        "ppo_gaussian": {"policy", "head", "value"},
        "sac_frozen": {"actor", "critic", "alpha"},
    }
    expected["sac_trunk"] = expected["sac_frozen"] | {"trunk"}
    assert {name.split(".")[0] for name in wanted} == expected[case]
    assert_ranks_equal(two_ranks, case, wanted, report)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("size", [1, 3, 5])
def test_any_micro_batch_split_gives_the_same_gradient(case: str, size: int, one: topo.Topology):
    class Noiseless(Seeded):
        """Random numbers of a row are its own, whatever rows are beside it."""

        def __call__(self, batch, totals):
            rows = [super(Noiseless, self).__call__(row, totals) for row in batch.split(1)]
            return {name: sum(row[name] for row in rows) for name in rows[0]}

    results = []
    for micro_batch_size in (None, size):
        learner, batch = build(case, one, micro_batch_size)
        batch["seed"] = torch.arange(ROWS)[:, None]
        if case not in ON_POLICY:
            learner.objective = Noiseless(learner.objective.objective)
        results.append(gradients_of_an_update(learner, batch))
    (whole, report), (split, split_report) = results
    # one row at a time takes other convolution kernels, which round differently
    assert rel_error(split, whole) <= 1e-5
    assert split_report == pytest.approx(report, rel=1e-4, abs=1e-6)


def ppo_rows(valid: list[bool]) -> tuple[Learner, TensorDict]:
    """Return a learner and rows with 1 and 3 executed steps (then 2), advantages 1, -1, ratio 1."""
    policy = small_policy("tokens")
    goal = PolicyGradient(policy, gamma=1.0, advantage=Gae(), value_weight=0.5)
    goal.rounds = 1
    params = list(policy.model.model.parameters())
    learner = Learner(goal, [ParameterGroup("policy", params, 0.0)], ALONE)
    rows = transitions()[:3]
    with torch.no_grad():
        scored = policy.score(rows.copy())
    rows[schema.LOG_PROBS] = policy.get_dist(scored).log_prob(rows[schema.TOKENS])
    rows[schema.EXECUTED_MASK] = torch.arange(STEPS) < torch.tensor([1, 3, 2])[:, None]
    rows[ADVANTAGE] = torch.tensor([[1.0], [-1.0], [9.0]])
    rows[VALID] = torch.tensor(valid)[:, None]
    return learner, rows


ALONE = SimpleNamespace(world_size=1, device=torch.device("cpu"))


@pytest.mark.parametrize("rows", [2, 3])
@pytest.mark.parametrize("size", [None, 1, 2])
def test_masked_mean_is_global(rows: int, size: int | None):
    # Field case B22. Executed numbers 1 x 2 and 3 x 2: -(2 * 1 + 6 * -1) / 8 = 0.5. The mean of
    # the two means would be 0; the third row is void and must not count (0.4 or less if it did).
    learner, batch = ppo_rows([True, True, False])
    learner.micro_batch_size = size
    report = learner.update(batch[:rows])
    assert report["loss_policy"] == pytest.approx(0.5, abs=1e-6)
    # with equal weights no ratio differs from 1 (field case B20)
    assert report["clip_fraction"] == 0
    assert report["approx_kl"] == pytest.approx(0, abs=1e-7)


@pytest.mark.parametrize("size", [None, 1])
def test_a_minibatch_of_void_rows_only_gives_zeros(size: int | None):
    learner, batch = ppo_rows([False] * 3)
    learner.micro_batch_size = size
    seen, report = gradients_of_an_update(learner, batch)
    assert report["loss_policy"] == report["loss_value"] == report["grad_norm/policy"] == 0
    assert not any(grad.any() for grad in seen.values())


class Lines:
    """Loss per term: mean over rows of ``slope * parameter``; gradients known by hand."""

    def __init__(self, **terms):
        self.terms = terms

    def counts(self, batch):
        return {"rows": torch.tensor(len(batch))}

    def __call__(self, batch, totals):
        share = len(batch) / totals["rows"]
        return {
            f"loss_{name}": share * sum(slope * p.sum() for slope, p in parts)
            for name, parts in self.terms.items()
        } | {"rows_seen": torch.tensor(float(len(batch)))}


def batch_of(rows: int) -> TensorDict:
    return TensorDict({"x": torch.zeros(rows)}, batch_size=[rows])


def numbers(*values: float) -> list[nn.Parameter]:
    return [nn.Parameter(torch.tensor([value])) for value in values]


@pytest.mark.parametrize("size", [None, 1, 2, 4])
def test_splits_give_the_same_parameters(size: int | None):
    a, b = numbers(1.0, 2.0)
    learner = Learner(
        Lines(fit=[(3.0, a), (-4.0, b)]),
        [ParameterGroup("all", [a, b], 0.5)],
        ALONE,
        micro_batch_size=size,
    )
    for _ in range(3):
        report = learner.update(batch_of(5))
    assert report["grad_norm/all"] == pytest.approx(5.0)
    assert report["rows_seen"] == 5
    # Adam's step on a constant gradient is lr x sign: 3 x 0.5 down and up
    assert a.item() == pytest.approx(1.0 - 1.5, abs=1e-5)
    assert b.item() == pytest.approx(2.0 + 1.5, abs=1e-5)
    assert learner.updates == 3


def test_groups_have_their_own_rates_limits_and_decay():
    a, b, c, d = numbers(1.0, 1.0, 1.0, 1.0)
    learner = Learner(
        Lines(first=[(3.0, a), (4.0, b)], second=[(6.0, c), (8.0, d)]),
        [
            ParameterGroup("slow", [a, b], 0.01, max_grad_norm=1.0),
            ParameterGroup("fast", [c, d], 0.1, weight_decay=0.5),
        ],
        ALONE,
    )
    seen, report = gradients_of_an_update(learner, batch_of(4))
    # reported before clipping: sqrt(9 + 16) and sqrt(36 + 64); clipped to norm 1: 3/5 and 4/5
    assert (report["grad_norm/slow"], report["grad_norm/fast"]) == (5.0, 10.0)
    assert seen["slow.0"].item() == pytest.approx(0.6, rel=1e-5)
    assert seen["slow.1"].item() == pytest.approx(0.8, rel=1e-5)
    assert (seen["fast.0"].item(), seen["fast.1"].item()) == (6.0, 8.0)
    assert (report["lr/slow"], report["lr/fast"]) == (0.01, 0.1)
    # step = lr x sign; decoupled decay shrinks the second group by 0.1 x 0.5 first
    assert a.item() == pytest.approx(0.99, abs=1e-6)
    assert c.item() == pytest.approx(0.95 - 0.1, abs=1e-6)


def test_a_schedule_scales_every_rate():
    a, b = numbers(0.0, 0.0)
    learner = Learner(
        Lines(fit=[(1.0, a), (1.0, b)]),
        [ParameterGroup("a", [a], 0.1), ParameterGroup("b", [b], 0.4)],
        ALONE,
        schedule=lambda update: 1.0 / (1 + update),
    )
    reports = [learner.update(batch_of(1)) for _ in range(3)]
    assert [r["lr/a"] for r in reports] == pytest.approx([0.1, 0.05, 0.1 / 3])
    # 0.4 (1 + 1/2 + 1/3)
    assert b.item() == pytest.approx(-0.4 * 11 / 6, abs=1e-5)
    # the schedule follows the update count, which a resume sets
    learner.updates = 9
    assert learner.update(batch_of(1))["lr/b"] == pytest.approx(0.04)


def test_a_group_without_a_loss_is_left_alone():
    a, b = numbers(1.0, 1.0)
    groups = [ParameterGroup("a", [a], 0.1), ParameterGroup("b", [b], 0.1, weight_decay=0.5)]
    learner = Learner(Lines(fit=[(1.0, a)]), groups, ALONE)
    report = learner.update(batch_of(2))
    assert "grad_norm/b" not in report
    assert b.item() == 1.0


def test_metrics_are_not_differentiated():
    a, b = numbers(1.0, 1.0)

    class Both(Lines):
        def __call__(self, batch, totals):
            return super().__call__(batch, totals) | {"penalty": 100 * a.sum()}

    learner = Learner(Both(fit=[(1.0, b)]), [ParameterGroup("all", [a, b], 0.1)], ALONE)
    report = learner.update(batch_of(2))
    assert report["penalty"] == 100
    assert a.item() == 1.0


def test_a_gradient_that_is_not_finite_stops_the_run_and_changes_nothing():
    a, b = numbers(1.0, 1.0)
    steps = []
    lines = Lines(first=[(1.0, a)], second=[(math.inf, b)])
    learner = Learner(
        lines,
        [ParameterGroup("fine", [a], 0.1), ParameterGroup("broken", [b], 0.1)],
        ALONE,
        after_step=lambda: steps.append(1),
    )
    with pytest.raises(FloatingPointError, match="norm of 'broken' is inf at update 0"):
        learner.update(batch_of(2))
    assert (a.item(), b.item()) == (1.0, 1.0)
    assert (learner.updates, steps) == (0, [])
    # nothing of it is left in the next update
    lines.terms["second"] = [(1.0, b)]
    assert learner.update(batch_of(2))["grad_norm/fine"] == 1.0
    assert (learner.updates, steps) == (1, [1])
    assert (a.item(), b.item()) == pytest.approx((0.9, 0.9), abs=1e-6)


def test_after_step_sees_the_new_parameters():
    (a,) = numbers(1.0)
    seen = []
    learner = Learner(
        Lines(fit=[(1.0, a)]),
        [ParameterGroup("a", [a], 0.25)],
        ALONE,
        after_step=lambda: seen.append(a.item()),
    )
    learner.update(batch_of(1))
    assert seen == pytest.approx([0.75], abs=1e-6)


def test_settings_out_of_range():
    with pytest.raises(ValueError, match="group 'policy' is empty"):
        ParameterGroup("policy", [], 0.1)
    with pytest.raises(ValueError, match=r"lr of .policy. is -0\.1"):
        ParameterGroup("policy", numbers(1.0), -0.1)
    with pytest.raises(ValueError, match="micro_batch_size is 0"):
        Learner(Lines(), [ParameterGroup("a", numbers(1.0), 0.1)], ALONE, micro_batch_size=0)


if __name__ == "__main__":
    ranks_main(Path(sys.argv[1]))
