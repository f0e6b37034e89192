"""pi0 on transformers' classes: the published numbers, one prefix pass, checkpoints, shards.

Run by torchrun (``__main__`` below), this file is also the program of the ranks.
"""

import copy
import sys
from pathlib import Path

import pytest
import torch
from programs import torchrun
from safetensors.torch import load_file, save_file
from small_checkpoints import META, observations, save_pi0, spread
from tensordict import TensorDict
from transformers import PI0ForConditionalGeneration
from two_ranks import assert_equal_to_one_process, gradients, save_gradients

from torchrl_vla import schema
from torchrl_vla import topology as topo
from torchrl_vla.policies import families, pi0, pi0_checkpoint
from torchrl_vla.policies.flow import (
    PATH,
    FlowSchedule,
    sample_path,
)
from torchrl_vla.policies.policy import FEATURES, VALUE
from torchrl_vla.policies.shard import full_weights, shard
from torchrl_vla.policies.weights import save_weights


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


def test_executing_part_of_a_longer_chunk(published):
    folder, _ = published
    policy = pi0.make_policy(META, checkpoint=str(folder), steps=3, chunk_size=2)
    td = policy(observations(3))
    assert td[schema.CHUNK].shape == td[schema.LOG_PROBS].shape == (3, 2, 4)
    assert td[PATH].shape == (3, 4, 6, 4)
    again = policy.get_dist(td).number_log_prob(td[PATH])
    assert (again - td[schema.LOG_PROBS]).abs().max() < 1e-5


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
    assert len(facts["statistics_sha256"]) == 16
    save_pi0(tmp_path, actions_mean=[0.0] * 7, actions_std=[1.0] * 7)
    with pytest.raises(ValueError, match="actions statistics have 7 numbers, the suite 4"):
        pi0.make_policy(META, checkpoint=str(tmp_path))


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


@pytest.mark.slow
def test_two_ranks_have_the_gradient_of_one(tmp_path: Path):
    torchrun(__file__, tmp_path)
    assert_equal_to_one_process(tmp_path, *round_of_data(), update_like)


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
    save_gradients(*round_of_data(), update_like, Path(sys.argv[1]))
