"""OpenVLA under FSDP2: two gloo ranks against one process on the global batch.

Run by torchrun (``__main__`` below), this file is also the program of the ranks.
"""

import sys
from pathlib import Path

import pytest
import torch
from programs import torchrun
from safetensors.torch import load_file, save_file
from tensordict import TensorDict
from torch.distributed.tensor import DTensor

from torchrl_vla import schema
from torchrl_vla import topology as topo
from torchrl_vla.policies.openvla import make_policy
from torchrl_vla.policies.openvla.model import OpenVLAModel
from torchrl_vla.policies.policy import LOGITS, VALUE
from torchrl_vla.policies.shard import full_weights, shard
from torchrl_vla.schema import SuiteMeta

META = SuiteMeta(
    name="two",
    instructions=("push it", "take the red one"),
    task_names=("push", "take"),
    cameras=("front",),
    image_size=32,
    state_names=("x", "y"),
    action_names=("dx", "dy", "dz"),
    max_steps=4,
    control_hz=10.0,
)
KINDS = {"parallel": {}, "autoregressive": {"decoding": "autoregressive"}}


def build(kind: str) -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = {"num_bins": 16, "patch_size": 16, "vision_width": 16, "width": 32, "heads": 2}
    policy = make_policy(META, size="tiny", chunk_size=2, **sizes, **KINDS[kind])
    torch.nn.init.normal_(policy.model.model.value_head[-1].weight)
    return policy


def batch() -> TensorDict:
    generator = torch.Generator().manual_seed(1)
    td = TensorDict(batch_size=[6])
    td[schema.IMAGE] = torch.randint(
        0, 256, (6, 1, 3, 32, 32), generator=generator, dtype=torch.uint8
    )
    td[schema.STATE] = torch.randn(6, 2, generator=generator)
    td[schema.TASK_ID] = torch.randint(0, 2, (6, 1), generator=generator)
    td[schema.TOKENS] = torch.randint(0, 16, (6, 2, 3), generator=generator)
    return td


def backward(policy: torch.nn.Module, td: TensorDict) -> None:
    td = policy.score(td)
    chosen = td[LOGITS].log_softmax(-1).gather(-1, td[schema.TOKENS][..., None])
    (td[VALUE].square().mean() - chosen.mean()).backward()


def gradients(policy: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: (p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad).clone()
        for name, p in policy.model.model.named_parameters()
    }


def ranks_main(out: Path) -> None:
    t = topo.start("cpu")
    for kind in KINDS:
        policy = build(kind)
        shard(policy.model.model, t.mesh, blocks=OpenVLAModel.shard_plan())
        backward(policy, batch().chunk(t.world_size)[t.rank])
        found = gradients(policy)
        weights = full_weights(policy.model.model).flatten_keys(".")
        if t.is_main:
            save_file(found, out / f"{kind}.safetensors")
            save_file(
                {k: v.contiguous() for k, v in weights.items()}, out / f"{kind}-w.safetensors"
            )
    t.stop()


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("ranks")
    torchrun(__file__, out)
    return out


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_two_ranks_have_the_gradients_of_one(two_ranks: Path, kind: str):
    policy = build(kind)
    backward(policy, batch())
    wanted, found = gradients(policy), load_file(two_ranks / f"{kind}.safetensors")
    assert found.keys() == wanted.keys()
    for name, grad in wanted.items():
        assert (found[name] - grad).norm() <= 1e-5 * grad.norm().clamp(min=1e-3), name
    assert sum(bool(grad.abs().max() > 0) for grad in wanted.values()) == len(wanted)


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_whole_weights_come_back(two_ranks: Path, kind: str):
    model = build(kind).model.model
    found = load_file(two_ranks / f"{kind}-w.safetensors")
    own = model.state_dict()
    assert own.keys() <= found.keys()
    assert all(torch.equal(found[name], value) for name, value in own.items())


if __name__ == "__main__":
    ranks_main(Path(sys.argv[1]))
