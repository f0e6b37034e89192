"""What on-policy objectives ask of a policy: log-probs as stored, one pass, one precision."""

import pytest
import torch
from envs.counter import META
from tensordict import TensorDict
from torch import nn
from torchrl.envs.utils import ExplorationType, set_exploration_type

from torchrl_vla import schema
from torchrl_vla.policies.policy import VALUE
from torchrl_vla.policies.tiny import make_policy

SIZES = {"weights": None, "chunk_size": 3, "num_bins": 8, "width": 16, "heads": 2, "keypoints": 4}
HEADS = ("tokens", "gaussian")


def build(head: str, **settings) -> nn.Module:
    torch.manual_seed(0)
    policy = make_policy(META, head=head, store_log_probs=head == "gaussian", **SIZES | settings)
    nn.init.normal_(policy.model.model.token_head.linear.weight, std=0.3)
    nn.init.normal_(policy.model.model.value_head.weight)
    return policy


def observations(*batch: int) -> TensorDict:
    g = torch.Generator().manual_seed(1)
    td = TensorDict(batch_size=batch)
    td[schema.IMAGE] = torch.randint(0, 256, (*batch, 1, 3, 8, 8), generator=g, dtype=torch.uint8)
    td[schema.STATE] = torch.randn(*batch, 3, generator=g)
    td[schema.TASK_ID] = torch.randint(0, 3, (*batch, 1), generator=g)
    return td


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("head", HEADS)
def test_what_was_stored_is_what_is_scored(head: str, precision: str):
    policy = build(head, precision=precision)
    with torch.no_grad():
        acted = policy(observations(6))
        scored = policy.score(observations(6))
    log_probs = policy.get_dist(scored).log_prob(acted[policy.action_key])
    assert acted[schema.LOG_PROBS].shape == log_probs.shape == (6, 3, META.action_dim)
    assert acted[schema.LOG_PROBS].dtype == acted[VALUE].dtype == torch.float32
    torch.testing.assert_close(acted[schema.LOG_PROBS], log_probs, atol=1e-5, rtol=0)
    torch.testing.assert_close(acted[VALUE], scored[VALUE])
    assert policy.get_dist(scored).entropy().shape == log_probs.shape
    assert set(policy.out_keys) <= set(acted.keys(True, True))


@pytest.mark.parametrize("head", HEADS)
def test_bfloat16_is_another_computation_with_float32_weights(head: str):
    whole, half = build(head), build(head, precision="bfloat16")
    with torch.no_grad():
        a, b = (p.score(observations(6)) for p in (whole, half))
    assert not torch.equal(a[VALUE], b[VALUE])
    torch.testing.assert_close(a[VALUE], b[VALUE], atol=0.1, rtol=0.05)
    assert all(p.dtype == torch.float32 for p in half.parameters())
    with pytest.raises(ValueError, match="precision is 'float16'"):
        build(head, precision="float16")


def test_a_gaussian_policy_that_stores_nothing_pays_nothing():
    policy = build("gaussian")
    plain = make_policy(META, head="gaussian", **SIZES)
    asked = []
    plain.model.model.register_forward_hook(lambda m, args, out: asked.append(sorted(out)))
    td = plain(observations(2))
    assert asked == [["features"]]
    assert not {schema.LOG_PROBS, VALUE} & set(td.keys(True, True))
    assert (plain.stores_log_probs, policy.stores_log_probs) == (False, True)


def test_value_and_action_share_one_pass_of_the_trunk():
    policy = build("gaussian")
    passes = []
    policy.model.model.register_forward_hook(lambda *_: passes.append(1))
    policy(observations(2))
    policy.score(observations(2))
    assert len(passes) == 2


def test_without_exploration_the_chunk_is_the_mean():
    policy = build("gaussian")
    with set_exploration_type(ExplorationType.DETERMINISTIC), torch.no_grad():
        td = policy(observations(4))
        scored = policy.score(observations(4))
    torch.testing.assert_close(td[schema.CHUNK], scored["loc"].tanh())


def test_a_chunk_is_scored_number_by_number():
    # The log-density of a chunk is the sum over its numbers.
    policy = build("gaussian")
    with torch.no_grad():
        td = policy(observations(4))
        whole = policy.actor.get_dist(TensorDict({"features": policy.features(td)}, [4]))
    total = whole.log_prob(td[schema.CHUNK])
    torch.testing.assert_close(td[schema.LOG_PROBS].sum((1, 2)), total, rtol=1e-4, atol=1e-4)
