"""Flow policies as RL sees them, on a tiny pi0: paths, ratios, PPO, SAC, critics, cloning."""

import pytest
import torch
from small_checkpoints import META, observations, spread
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.objectives import SACLoss

from torchrl_vla import schema
from torchrl_vla.envs.chunked import ChunkedEnv, FixedInitStates
from torchrl_vla.envs.tabletop import TabletopSuite
from torchrl_vla.objectives.credit import Gae
from torchrl_vla.objectives.masks import action_mask
from torchrl_vla.objectives.policy_gradient import PolicyGradient
from torchrl_vla.objectives.ppo import log_ratio
from torchrl_vla.policies import pi0
from torchrl_vla.policies.flow import PATH, STEP_LOG_PROBS, path_log_prob
from torchrl_vla.policies.policy import FEATURES, VALUE
from torchrl_vla.policies.prefix import make_critics


def build(**settings):
    torch.manual_seed(0)
    return spread(pi0.make_policy(META, **({"size": "tiny", "steps": 4} | settings)))


@pytest.mark.parametrize("batch", [(), (4,), (2, 3)])
def test_shapes_for_any_batch_dims(batch: tuple[int, ...]):
    td = build()(observations(*batch))
    assert td[schema.CHUNK].shape == td[schema.LOG_PROBS].shape == (*batch, 4, 4)
    assert td[PATH].shape == (*batch, 5, 4, 4)
    assert td[STEP_LOG_PROBS].shape == (*batch, 4, 4, 4)
    assert td[VALUE].shape == (*batch, 1)
    keys = (schema.CHUNK, schema.LOG_PROBS, PATH, STEP_LOG_PROBS, VALUE)
    assert {td[key].dtype for key in keys} == {torch.float32}
    assert set(build().out_keys) == set(keys)
    assert td[schema.CHUNK].abs().max() <= 1


def test_the_learner_scores_what_the_actor_stored():
    policy = build()
    with torch.no_grad():
        td = policy(observations(5))
        scored = policy.score(td.clone())
        again = policy.get_dist(scored).number_log_prob(td[PATH])
        # another batch size, as minibatches are
        part = policy.get_dist(policy.score(td[1:3].clone())).number_log_prob(td[1:3][PATH])
    assert (again - td[schema.LOG_PROBS]).abs().max() < 1e-5
    assert (part - td[schema.LOG_PROBS][1:3]).abs().max() < 1e-4
    torch.testing.assert_close(scored[VALUE], td[VALUE])
    # the chunk is the path's end, in the range
    torch.testing.assert_close(td[schema.CHUNK], td[PATH][:, -1].clamp(-1, 1))


def test_decodes_of_an_evaluation():
    td = observations(3)
    for decode in ("ode", "mean", "sample"):
        policy = build(eval_decode=decode)
        with set_exploration_type(ExplorationType.DETERMINISTIC), torch.no_grad():
            first, second = policy(td.clone()), policy(td.clone())
            assert torch.equal(first[schema.CHUNK], second[schema.CHUNK]) == (decode == "mean")
            drawn = decode == "sample"
            assert first[schema.LOG_PROBS].isfinite().all() == drawn
            if decode == "mean":
                wanted = policy.get_dist(td).deterministic_sample
                torch.testing.assert_close(first[schema.CHUNK], wanted)
    quiet = build(store_log_probs=False, noise_level=0.0)
    assert quiet.out_keys == [schema.CHUNK]
    assert PATH not in quiet(td.clone()).keys(True)


def test_sampling_is_differentiable_down_to_the_images():
    policy = build(store_log_probs=False)
    dist = policy.get_dist(observations(2))
    assert dist.sample((3,)).shape == (3, 2, 4, 4)
    dist.rsample().sum().backward()
    silent = {n for n, p in policy.named_parameters() if p.requires_grad and p.grad is None}
    assert all("value_head" in name for name in silent), silent
    patch = policy.model.model.prefix.vlm.vision_tower.embeddings.patch_embedding.weight
    assert patch.grad.abs().sum() > 0


@pytest.mark.parametrize("heads", [2, 5])
def test_sac_and_td3_read_the_prefix(heads: int):
    """TorchRL's SAC on expert and critics, with the trunk's features, as any other head."""
    policy = build(store_log_probs=False)
    critics = make_critics(policy.model.model.layout, 4, 4, heads, hidden=32)
    td = observations(6)
    with torch.no_grad():
        td[FEATURES], td["next", FEATURES] = policy.features(td), policy.features(td)
    td[schema.CHUNK] = torch.rand(6, 4, 4)
    td[schema.REWARD] = torch.rand(6, 1)
    for key in (schema.DONE, schema.TERMINATED):
        td[key] = torch.zeros(6, 1, dtype=torch.bool)

    class Critic(torch.nn.Module):
        in_keys, out_keys = (FEATURES, schema.CHUNK), ("state_action_value",)

        def __init__(self, head):
            super().__init__()
            self.head = head

        def forward(self, rows):
            return rows.set("state_action_value", self.head(rows[FEATURES], rows[schema.CHUNK]))

    q = [critic(td[FEATURES], td[schema.CHUNK]) for critic in critics]
    assert all(value.shape == (6, 1) for value in q)
    assert torch.stack(q).std(0).min() > 0  # no two members alike
    loss = SACLoss(
        policy.actor,
        [Critic(critic) for critic in critics],
        num_qvalue_nets=heads,
        target_entropy=-16.0,
        deactivate_vmap=True,
    )
    loss.set_keys(action=schema.CHUNK)
    loss.make_value_estimator(gamma=0.9)
    losses = loss(td)
    total = losses["loss_actor"] + losses["loss_qvalue"] + losses["loss_alpha"]
    assert total.isfinite()
    total.backward()
    expert = policy.actor.head.network.action_out_proj.weight
    assert expert.grad.abs().sum() > 0
    pools = [p for n, p in loss.qvalue_network_params.items(True, True) if "query" in n]
    assert pools
    assert all(p.grad.abs().sum() > 0 for p in pools)


def test_critics_ignore_padding_and_see_the_rest():
    policy = build(store_log_probs=False)
    layout = policy.model.model.layout
    critic = spread(make_critics(layout, 4, 4, 2)[0])
    td = observations(3)
    td[schema.TASK_ID] = torch.zeros(3, 1, dtype=torch.int64)  # "reach ...": short, so padded
    with torch.no_grad():
        features, chunk = policy.features(td), torch.rand(3, 4, 4)
        base = critic(features, chunk)
        cache, hidden, mask, state = layout.unpack(features)
        assert not mask.all()
        spoiled = hidden.clone()
        spoiled[~mask] = 1e3
        same = layout.pack(type(layout.unpack(features))(cache, spoiled, mask, state))
        torch.testing.assert_close(critic(same, chunk), base)
        moved = torch.where(mask[..., None], hidden + 1, hidden)
        other = layout.pack(type(layout.unpack(features))(cache, moved, mask, state))
        assert (critic(other, chunk) - base).abs().min() > 1e-5
        assert (critic(features, 1 - chunk) - base).abs().min() > 1e-5
        repacked = layout.pack(layout.unpack(features))
        assert torch.equal(repacked, features)
    for heads in (1, 11):
        with pytest.raises(ValueError, match=f"critic heads is {heads}"):
            make_critics(layout, 4, 4, heads)
    with pytest.raises(ValueError, match="features have 7 numbers"):
        layout.unpack(torch.zeros(1, 7))


def test_cloning_lowers_its_error():
    torch.manual_seed(0)
    policy = pi0.make_policy(META, size="tiny", store_log_probs=False)
    td = observations(16)
    with torch.no_grad():
        td[FEATURES] = policy.features(td)  # the expert learns on cached prefixes
    target = torch.tensor([0.6, -0.6, 0.3, -1.0])
    td[schema.CHUNK] = target.expand(16, 4, 4).clone()
    parameters = [p for p in policy.actor.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(parameters, lr=1e-2)
    errors = []
    for _ in range(60):
        error = policy.cloning_error(td)
        assert error.shape == (16, 4, 4)
        optimizer.zero_grad()
        error.mean().backward()
        optimizer.step()
        errors.append(error.mean().item())
    assert sum(errors[-10:]) / 10 < 0.4 * sum(errors[:5]) / 5
    with set_exploration_type(ExplorationType.DETERMINISTIC), torch.no_grad():
        chunk = policy(td.exclude(FEATURES))[schema.CHUNK]
    print(errors[0], errors[-1], (chunk - target).abs().mean())
    assert (chunk - target).abs().mean() < 0.4


def test_ratios_are_one_before_any_update():
    """What the on-policy objectives compute of stored paths, executed numbers only."""
    policy = build()
    with torch.no_grad():
        td = policy(observations(8))
    td[schema.EXECUTED_MASK] = torch.ones(8, 4, dtype=torch.bool)
    td[schema.EXECUTED_MASK][3:, 2:] = False
    for level, shape in (("token", (8, 4, 4)), ("chunk", (8, 1))):
        scored = policy.score(td.select(*policy.in_keys))
        new = policy.get_dist(scored).log_prob(td[policy.action_key])
        mask = action_mask(td[schema.EXECUTED_MASK], 4)
        ratio = log_ratio(new, td[schema.LOG_PROBS], mask, level)
        assert ratio.shape == shape
        assert ratio.abs().max() < 1e-5
    wanted = path_log_prob(td[STEP_LOG_PROBS], td[schema.EXECUTED_MASK])
    summed = torch.where(mask, td[schema.LOG_PROBS], 0).sum((1, 2))
    torch.testing.assert_close(summed[:, None], wanted, atol=1e-4, rtol=1e-5)
    assert policy.get_dist(scored).entropy().shape == (8, 4, 4)


def test_ppo_on_paths_from_the_tabletop():
    """Real simulators, a real rollout, the package's own objective; lr 0, then one step."""
    policy = build(steps=3)
    suite = TabletopSuite()
    env = ChunkedEnv(suite.simulators(2), FixedInitStates(list(range(6))), chunk_size=4)
    torch.manual_seed(0)
    with torch.no_grad():
        rollout = env.rollout(3, policy, break_when_any_done=False, auto_cast_to_device=False)
    rollout[schema.POLICY_VERSION] = torch.zeros(2, 3, 1, dtype=torch.int64)
    rollout[schema.REWARD] = torch.rand(2, 3, 1)
    goal = PolicyGradient(policy, advantage=Gae(), gamma=0.99, value_weight=0.5, ratio="chunk")
    rows, _ = goal.credit(rollout, version=0)
    batch = rows.reshape(-1)
    out = goal(batch, goal.counts(batch))
    assert out["approx_kl"].abs() < 1e-8
    assert out["clip_fraction"] == 0
    optimizer = torch.optim.SGD([p for p in policy.parameters() if p.requires_grad], lr=1e-3)
    sum(value for name, value in out.items() if name.startswith("loss_")).backward()
    optimizer.step()
    assert goal(batch, goal.counts(batch))["approx_kl"] > 0


def test_bfloat16_arithmetic_keeps_float32_densities():
    policy = build(precision="bfloat16")
    with torch.no_grad():
        td = policy(observations(4))
        again = policy.get_dist(policy.score(td.clone())).log_prob(td[PATH])
        full = build().get_dist(td).log_prob(td[PATH])
    assert td[schema.LOG_PROBS].dtype == td[PATH].dtype == td[VALUE].dtype == torch.float32
    assert (again - td[schema.LOG_PROBS]).abs().max() < 1e-5
    assert (full - again).abs().max() > 0
    with pytest.raises(ValueError, match="precision is 'float16'"):
        build(precision="float16")
