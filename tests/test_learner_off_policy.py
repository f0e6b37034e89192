"""The off-policy family through the learner: any split and number of ranks, the same gradient.

Run by torchrun (``__main__`` below), this file is also the program of the ranks.
"""

import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from envs.counter import CounterSuite
from programs import torchrun
from safetensors.torch import load_file, save_file
from test_learner import (
    ROWS,
    STEPS,
    Seeded,
    assert_ranks_equal,
    gradients_of_an_update,
    rel_error,
    small_policy,
    transitions,
)

from torchrl_vla import schema
from torchrl_vla import topology as topo
from torchrl_vla.loops import actor_critic
from torchrl_vla.objectives.cql import ConservativeSoftActorCritic
from torchrl_vla.objectives.critics import ACTOR_ROWS, OUTCOME
from torchrl_vla.objectives.soft_actor_critic import SoftActorCritic
from torchrl_vla.objectives.td3_bc import TD3BC

CASES = {
    "rlpd": partial(
        SoftActorCritic,
        alpha=0.1,
        alpha_kind="softplus",
        entropy_unit="executed_number",
        target_entropy=-1.0,
        target_reduction="subset",
        target_subset=2,
        actor_reduction="mean",
        cloning_weight=0.0,
        cloned_rows=None,
        critic_only_updates=0,
    ),
    "cql": partial(
        ConservativeSoftActorCritic, alpha=0.1, critic_only_updates=0, conservative_weight=0.5
    ),
    "td3_bc": partial(TD3BC, critic_only_updates=0, actor_interval=1),
    "td3_bc_actor_rows": partial(
        TD3BC, critic_only_updates=0, actor_interval=1, cloned_rows="demonstrations"
    ),
}
"""Options that differ from the defaults; together they reach every term."""


def build(case: str, ranks: topo.Topology, micro_batch_size: int | None):
    """Return learner and minibatch (this rank's rows) as the loop puts them together."""
    run = SimpleNamespace(topology=ranks, suite=CounterSuite(), chunk_size=STEPS)
    policy, batch = small_policy("gaussian"), transitions()
    batch[OUTCOME] = torch.tensor([1, 1, 1, 0, 1, -1, 0, 0], dtype=torch.int8)[:, None]
    following = batch["next"].copy()
    following[schema.TASK_ID] = batch[schema.TASK_ID]
    with torch.no_grad():
        batch["features"] = policy.features(batch)
        batch["next", "features"] = policy.features(following)
    if case.endswith("actor_rows"):
        keys = ("features", schema.CHUNK, schema.EXECUTED_MASK, schema.POLICY_VERSION)
        batch[ACTOR_ROWS] = batch.select(*keys)[torch.tensor([3, 0, 6, 1, 0, 4, 2, 2])]
    settings = actor_critic.UpdateSettings(
        1e-3,
        1e-3,
        None if case.startswith("td3") else 1e-3,
        1e9,
        q_heads=3,
        micro_batch_size=micro_batch_size,
    )
    learner, goal = actor_critic.make_learner(run, policy, CASES[case], settings, 0.9)
    learner.objective = Seeded(goal)
    return learner, batch.chunk(ranks.world_size)[ranks.rank]


def ranks_main(out: Path) -> None:
    ranks = topo.start("cpu")
    result = {}
    for case in CASES:
        learner, batch = build(case, ranks, None)
        seen, report = gradients_of_an_update(learner, batch)
        result |= {f"{case}/grad/{name}": value for name, value in seen.items()}
        result |= {f"{case}/report/{k}": torch.tensor(v) for k, v in report.items()}
    save_file({k: v.contiguous() for k, v in result.items()}, out / f"{ranks.rank}.safetensors")
    ranks.stop()


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    out = tmp_path_factory.mktemp("ranks")
    torchrun(__file__, out)
    return [load_file(out / f"{rank}.safetensors") for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_equal_one_on_the_global_batch(case: str, one: topo.Topology, two_ranks):
    # Random numbers are drawn per half, so the single process takes the halves one by one, too.
    learner, batch = build(case, one, ROWS // 2)
    wanted, report = gradients_of_an_update(learner, batch)
    groups = {"actor", "critic"} | ({"alpha"} if not case.startswith("td3") else set())
    assert {name.split(".")[0] for name in wanted} == groups
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
        learner.objective = Noiseless(learner.objective.objective)
        results.append(gradients_of_an_update(learner, batch))
    (whole, report), (split, split_report) = results
    assert rel_error(split, whole) <= 1e-5
    assert split_report == pytest.approx(report, rel=1e-4, abs=1e-6)


def test_a_learning_rate_that_nothing_uses_is_refused(one: topo.Topology):
    run = SimpleNamespace(topology=one, suite=CounterSuite(), chunk_size=STEPS)
    for case, alpha_lr in (("td3_bc", 1e-3), ("rlpd", None)):
        settings = actor_critic.UpdateSettings(1e-3, 1e-3, alpha_lr, 1e9, q_heads=3)
        with pytest.raises(ValueError, match=r"updates\.alpha_lr is"):
            actor_critic.make_learner(run, small_policy("gaussian"), CASES[case], settings, 0.9)


if __name__ == "__main__":
    ranks_main(Path(sys.argv[1]))
