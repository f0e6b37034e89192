"""pi0 on transformers' classes: the published numbers, one prefix pass, paths, critics, shards.

Run by torchrun (``__main__`` below), this file is also the program of the ranks.
"""

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_checkpoints import META, observations, save_pi0, spread
from tensordict import TensorDict
from torch.distributed.tensor import DTensor
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.objectives import SACLoss
from transformers import PI0ForConditionalGeneration

from torchrl_vla import schema
from torchrl_vla import topology as topo
from torchrl_vla.envs.chunked import ChunkedEnv, FixedInitStates
from torchrl_vla.envs.tabletop import TabletopSuite
from torchrl_vla.objectives.credit import Gae
from torchrl_vla.objectives.masks import action_mask
from torchrl_vla.objectives.policy_gradient import PolicyGradient
from torchrl_vla.objectives.ppo import log_ratio
from torchrl_vla.policies import families, pi0, pi0_checkpoint
from torchrl_vla.policies.flow import (
    PATH,
    STEP_LOG_PROBS,
    FlowSchedule,
    path_log_prob,
    sample_path,
)
from torchrl_vla.policies.policy import FEATURES, VALUE
from torchrl_vla.policies.prefix import make_critics
from torchrl_vla.policies.shard import all_reduce_replicated_grads, full_weights, shard
from torchrl_vla.policies.weights import save_weights

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


def build(**settings):
    torch.manual_seed(0)
    policy = pi0.make_policy(META, **({"size": "tiny", "steps": 4} | settings))
    return spread(policy) if settings.get("checkpoint") is None else policy


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("pi0")
    return folder, save_pi0(folder)


def published_inputs(policy, network, td, scale):
    """What transformers' own processor would make of the observation."""
    words = policy.model.instruction_table[td[schema.TASK_ID].squeeze(-1)]
    mean, std = (torch.tensor(part).reshape(3, 1, 1) for part in scale)
    cameras = torch.ones(len(td), len(META.cameras), dtype=torch.bool)
    return {
        "state": td[schema.STATE],
        "input_ids": words.clamp_min(0),
        "attention_mask": (words >= 0).long(),
        "pixel_values": (td[schema.IMAGE].float() / 255 - mean) / std,
        "pixel_attention_mask": cameras,
    }


SCALE = ([0.4, 0.5, 0.6], [0.5, 0.25, 0.5])


def test_ode_and_loss_are_transformers_own(published):
    folder, network = published
    policy = pi0.make_policy(META, checkpoint=str(folder), steps=5)
    td = observations(6)
    inputs = published_inputs(policy, network, td, SCALE)
    noise = torch.randn(6, 6, 4)
    wanted = network.sample_actions(**inputs, noise=noise, num_steps=5)
    with torch.no_grad():
        field = policy.actor.field(policy.features(td))
        path, _ = sample_path(field, noise, FlowSchedule(5))
        # training: mean squared error of the velocity, at times and noises of our choosing
        action, t = torch.rand(6, 6, 4), torch.rand(6)
        loss = network(**inputs, actions=action, noise=noise, timestep=t).loss
        x = t[:, None, None] * noise + (1 - t[:, None, None]) * action
        ours = (field(x, t) - (noise - action)).square().mean()
    assert wanted.std() > 0.1
    torch.testing.assert_close(path[:, -1], wanted, rtol=0, atol=1e-5)
    torch.testing.assert_close(ours, loss, rtol=1e-5, atol=1e-5)


def test_prompts_of_a_checkpoint(published):
    folder, network = published
    policy = pi0.make_policy(META, checkpoint=str(folder))
    table = policy.model.instruction_table
    image = network.config.vlm_config.image_token_id
    # (64 / 16)^2 = 16 image tokens, <bos>, the words, a newline, then padding
    assert (table[:, :16] == image).all()
    assert (table[:, 16] == 2).all()
    words = [len(text.split()) for text in META.instructions]
    assert [(row >= 0).sum().item() - 18 for row in table] == words
    assert table.shape[1] == 18 + max(words)
    assert not (table[:, 17:] == 0).any()  # no unknown word
    assert len({tuple(row.tolist()) for row in table}) == len(META.instructions)


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


def test_executing_part_of_a_longer_chunk(published):
    folder, _ = published
    policy = pi0.make_policy(META, checkpoint=str(folder), steps=3, chunk_size=2)
    td = policy(observations(3))
    assert td[schema.CHUNK].shape == td[schema.LOG_PROBS].shape == (3, 2, 4)
    assert td[PATH].shape == (3, 4, 6, 4)
    again = policy.get_dist(td).number_log_prob(td[PATH])
    assert (again - td[schema.LOG_PROBS]).abs().max() < 1e-5


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


def test_images_are_encoded_once_per_decision(monkeypatch: pytest.MonkeyPatch):
    policy = build()
    calls = []
    encode = policy.model.model.prefix.embed_prefix
    monkeypatch.setattr(
        policy.model.model.prefix, "embed_prefix", lambda *a: calls.append(1) or encode(*a)
    )
    td = policy(observations(2))
    assert len(calls) == 1  # four denoising steps, the value
    policy.get_dist(policy.score(td)).number_log_prob(td[PATH])
    assert len(calls) == 2


def test_mixed_prompts_equal_each_row_alone():
    policy = build()
    table = policy.model.instruction_table
    lengths = (table >= 0).sum(-1)
    assert lengths.min() < lengths.max()
    td = observations(2)
    td[schema.TASK_ID] = torch.tensor([[int(lengths.argmin())], [int(lengths.argmax())]])
    noise = torch.randn(2, 4, 4)

    def end(rows: TensorDict, start: torch.Tensor) -> torch.Tensor:
        field = policy.actor.field(policy.features(rows))
        return sample_path(field, start, FlowSchedule(4))[0][:, -1]

    with torch.no_grad():
        both, values = end(td, noise), policy.value(td)
        # the short row without any padding, in a network of that prompt length
        shorter = build()
        short = int(lengths.min())
        shorter.model.instruction_table = table[:, :short].clone()
        layout = shorter.model.model.layout
        fitted = type(layout)(**{**vars(layout), "tokens": short})
        shorter.model.model.layout = shorter.actor.head.layout = fitted
        field = shorter.actor.field(shorter.features(td[:1]))
        alone = sample_path(field, noise[:1], FlowSchedule(4))[0][:, -1]
        torch.testing.assert_close(alone, both[:1], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(shorter.value(td[:1]), values[:1], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(end(td[1:], noise[1:]), both[1:], atol=1e-5, rtol=1e-5)


def test_every_input_matters():
    policy = build(eval_decode="mean")
    td = observations(4)
    changed = {
        "image": td.clone().set(schema.IMAGE, 255 - td[schema.IMAGE]),
        "state": td.clone().set(schema.STATE, td[schema.STATE] + 0.3),
        "words": td.clone().set(schema.TASK_ID, (td[schema.TASK_ID] + 1) % 12),
    }
    with torch.no_grad():
        base, value = policy.get_dist(td).ode_path(centre=True)[0][:, -1], policy.value(td)
        for name, other in changed.items():
            path = policy.get_dist(other).ode_path(centre=True)[0][:, -1]
            assert (path - base).abs().amax((1, 2)).min() > 1e-4, name
            assert (policy.value(other) - value).abs().min() > 1e-5, name


def test_statistics_of_the_checkpoint(tmp_path: Path):
    # x * std + mean: state 0.5 -> (0.5 - 0.1) / 0.2 = 2; action 1 -> 1 * 0.5 + 0.25 = 0.75;
    # dim 3 never moved in the data: always its constant
    save_pi0(
        tmp_path,
        state_mean=[0.1] * 6,
        state_std=[0.2] * 6,
        actions_mean=[0.25, 0.25, 0.25, 0.5],
        actions_std=[0.5, 0.5, 0.5, 0.0],
    )
    with pytest.warns(UserWarning, match=r"actions dimensions \[3\] are constant"):
        policy = pi0.make_policy(META, checkpoint=str(tmp_path), chunk_size=6)
    state = policy.model.state_normalizer.normalise(torch.full((1, 6), 0.5))
    torch.testing.assert_close(state, torch.full((1, 6), 2.0))
    chunk = policy.actor.to_chunk(torch.ones(1, 6, 4))
    torch.testing.assert_close(chunk[0, 0], torch.tensor([0.75, 0.75, 0.75, 0.5]))
    back = policy.actor.from_chunk(chunk)
    torch.testing.assert_close(back[0, 0], torch.tensor([1.0, 1.0, 1.0, 0.0]))
    facts = policy.model.describe()
    assert facts["checkpoint"] == str(tmp_path)
    assert facts["images"]["size"] == 64
    assert len(facts["statistics"]) == 16
    save_pi0(tmp_path, actions_mean=[0.0] * 7, actions_std=[1.0] * 7)
    with pytest.raises(ValueError, match="actions statistics have 7 numbers, the suite 4"):
        pi0.make_policy(META, checkpoint=str(tmp_path))


# --- reinforcement learning ------------------------------------------------------------------


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


# --- checkpoints -----------------------------------------------------------------------------


def test_a_checkpoint_is_loaded_strictly(published, tmp_path: Path):
    folder, network = published
    policy = pi0.make_policy(META, checkpoint=str(folder))
    own = policy.model.model.prefix.state_dict(prefix="model.")
    own |= policy.actor.head.network.state_dict()
    wanted = network.state_dict()
    assert own.keys() == wanted.keys()
    assert all(torch.equal(own[key], value) for key, value in wanted.items())
    broken = dict(load_file(folder / "model.safetensors"))
    broken["model.extra"] = broken.pop("action_out_proj.bias")
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    save_file(broken, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ValueError,
        match=r"not a whole PI0ForConditionalGeneration checkpoint.*action_out_proj\.bias",
    ):
        pi0.make_policy(META, checkpoint=str(tmp_path))


def test_weights_of_a_training_run(tmp_path: Path):
    path = tmp_path / "policy.safetensors"
    policy = build()
    words = policy.model.vocabulary
    save_weights(path, modules=policy.parts(), vocabulary=words, recipe={})
    again = pi0.make_policy(META, size="tiny", steps=4, weights=str(path))
    state = again.state_dict()
    assert all(torch.equal(state[key], value) for key, value in policy.state_dict().items())
    save_weights(
        path, modules={"model": policy.model.model}, vocabulary=policy.model.vocabulary, recipe={}
    )
    with pytest.raises(ValueError, match="does not fit the policy's flow"):
        pi0.make_policy(META, size="tiny", weights=str(path))


def test_export_loads_back_bit_equal(published, tmp_path: Path):
    folder, _ = published
    policy = spread(pi0.make_policy(META, checkpoint=str(folder), steps=3), seed=3)
    pi0_checkpoint.export(policy, tmp_path / "out", source=folder)
    again = pi0.make_policy(META, checkpoint=str(tmp_path / "out"), steps=3)
    for (name, wanted), (_, got) in zip(
        policy.state_dict().items(), again.state_dict().items(), strict=True
    ):
        assert torch.equal(wanted, got), name
    td = observations(2)
    torch.manual_seed(5)
    first = policy(td.clone())
    torch.manual_seed(5)
    second = again(td.clone())
    assert all(torch.equal(first[key], second[key]) for key in policy.out_keys)
    plain = PI0ForConditionalGeneration.from_pretrained(tmp_path / "out")
    assert torch.equal(
        plain.action_out_proj.weight, policy.actor.head.network.action_out_proj.weight
    )
    with pytest.raises(FileExistsError, match="not empty"):
        pi0_checkpoint.export(policy, tmp_path / "out", source=folder)


def test_what_is_refused(published, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder, _ = published
    where = {"checkpoint": str(folder)}
    for settings, message in [
        ({}, "exactly one of a checkpoint and size=tiny"),
        ({"size": "huge"}, "size is 'huge'"),
        ({"size": "tiny", "head": "tokens"}, "head is 'tokens'; pi0 acts by its flow head"),
        ({"size": "tiny", "noise_level": 0.0}, "noise_level is 0, so paths"),
        ({"size": "tiny", "eval_decode": "argmax"}, "eval_decode is 'argmax'"),
        ({"size": "tiny", "attention_heads": 7}, "attention heads is 7"),
        ({"size": "tiny", "chunk_size": 0}, "chunk_size is 0"),
        (where | {"chunk_size": 7}, "chunk_size: 7, the checkpoint .* takes 1 to 6"),
    ]:
        with pytest.raises(ValueError, match=message):
            pi0.make_policy(META, **settings)
    with pytest.raises(ValueError, match="gives id 9, the network's vocabulary has 8"):
        families.check_vocabulary([[3], [9, 1]], 8, folder)
    (tmp_path / "bare").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "bare" / name).write_bytes((folder / name).read_bytes())
    with pytest.raises(FileNotFoundError, match="holds no tokenizer"):
        pi0.make_policy(META, checkpoint=str(tmp_path / "bare"))


def test_a_hub_id_without_network_is_one_line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(FileNotFoundError) as caught:
        pi0.make_policy(META, checkpoint="lerobot/pi0_base_of_nobody")
    text = str(caught.value)
    assert "\n" not in text
    assert "lerobot/pi0_base_of_nobody" in text
    assert "policy.checkpoint=FOLDER" in text


# --- shards ----------------------------------------------------------------------------------


def update_like(policy, td):
    """Backward of a policy-gradient and a value term, the mean over the rows given."""
    scored = policy.score(td.copy())
    log_prob = policy.get_dist(scored).number_log_prob(td[PATH])
    loss = -(log_prob.mean((1, 2)) * td["advantage"]).mean() + scored[VALUE].square().mean()
    loss.backward()


def round_of_data():
    policy = build()
    torch.manual_seed(1)
    with torch.no_grad():
        td = policy(observations(4))
    td["advantage"] = torch.tensor([1.0, -1.0, 0.5, 2.0])
    return policy, td


def gradients(policy) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in policy.named_parameters():
        grad = parameter.grad
        if grad is not None:
            found[name] = grad.full_tensor() if isinstance(grad, DTensor) else grad
    return found


def ranks_main(out: Path) -> None:
    t = topo.start("cpu")
    policy, td = round_of_data()
    shard(policy.model.model, t.mesh, blocks=policy.model.model.shard_plan())
    update_like(policy, td.chunk(t.world_size)[t.rank])
    all_reduce_replicated_grads(policy.parameters(), t)
    found = gradients(policy)
    save_file({k: v.contiguous() for k, v in found.items()}, out / f"{t.rank}.safetensors")
    t.stop()


@pytest.mark.slow
def test_two_ranks_have_the_gradient_of_one(tmp_path: Path):
    run = subprocess.run(
        [*TORCHRUN, __file__, str(tmp_path)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    policy, td = round_of_data()
    update_like(policy, td)
    wanted = gradients(policy)
    scale = max(grad.abs().max().item() for grad in wanted.values())
    for rank in range(2):
        got = load_file(tmp_path / f"{rank}.safetensors")
        assert got.keys() == wanted.keys()
        worst = max((got[k] - v).abs().max().item() for k, v in wanted.items())
        assert worst <= 1e-5 * scale, (worst, scale)


@pytest.fixture
def one():
    t = topo.start("cpu")
    yield t
    t.stop()


def test_bfloat16_compute_keeps_float32_masters(one: topo.Topology):
    policy, td = round_of_data()
    trunk = policy.model.model
    shard(trunk, one.mesh, blocks=trunk.shard_plan(), param_dtype=torch.bfloat16)
    update_like(policy, td)
    assert {p.dtype for p in policy.parameters()} == {torch.float32}
    assert all(grad.isfinite().all() for grad in gradients(policy).values())
    with torch.no_grad():
        scored = policy.score(td.copy())
    assert scored[FEATURES].dtype == scored[VALUE].dtype == torch.float32
    weights = full_weights(policy)
    plain = copy.deepcopy(build())
    weights.to_module(plain)
    assert plain(observations(1))[schema.CHUNK].isfinite().all()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    ranks_main(Path(sys.argv[1]))
