"""Meta-World evaluations to the bit, whatever runs side by side: ``pytest -m metaworld``."""

import pytest
import torch

from torchrl_vla.envs.metaworld import MetaWorldSuite
from torchrl_vla.evaluate import run_episodes
from torchrl_vla.policies.tiny import make_policy

pytestmark = pytest.mark.metaworld
TASKS = ["reach-v3", "drawer-open-v3", "push-v3"]


@pytest.fixture(scope="module")
def suite():
    return MetaWorldSuite(TASKS, image_size=64, max_steps=24)


def test_results_do_not_depend_on_the_number_of_simulators(suite):
    first = suite.splits["eval"].start
    ids = range(first, first + 7)
    torch.manual_seed(0)
    policy = make_policy(suite.meta, weights=None, eval_decode="sample")
    results = []
    for number, num_envs in enumerate((1, 4, 10, 4)):  # the last is a second run
        torch.manual_seed(number)
        simulators = suite.simulators(num_envs)
        results.append(run_episodes(policy, simulators, ids, chunk_size=4))
        simulators.close()
    assert results[0] == results[1] == results[2] == results[3]
    assert len({result.trace for result in results[0]}) == len(ids)
    assert [result.task_id for result in results[0]] == [i % len(TASKS) for i in range(7)]


def test_the_hash_of_the_scenes_is_of_the_package_and_not_of_the_task(suite):
    other = MetaWorldSuite("reach-v3", image_size=64)
    assert len(suite.assets_sha256()) == 64
    assert suite.assets_sha256() == other.assets_sha256()
