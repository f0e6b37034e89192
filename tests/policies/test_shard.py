"""FSDP2 plan: two gloo ranks under torchrun against one process on the global batch.

Run by torchrun (``__main__`` below), this file is also the program of the ranks.
"""

import math
import sys
from pathlib import Path

import pytest
import torch
from programs import torchrun
from safetensors.torch import load_file, save_file
from tensordict import TensorDict
from torch import nn
from torch.distributed.tensor import DTensor

from torchrl_vla import topology as topo
from torchrl_vla.policies.shard import (
    all_reduce_replicated_grads,
    clip_grad_norm,
    full_weights,
    shard,
)

WIDTH, WORDS, BATCH, TOKENS = 16, 11, 8, 5


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 3 * WIDTH), nn.GELU(), nn.Linear(3 * WIDTH, WIDTH)
        )

    def forward(self, x):
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return x + self.mlp(x)


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.unused = nn.Linear(4, 2)
        self.three = nn.Linear(WIDTH, 3)
        self.register_buffer("scale", torch.tensor([0.5]))

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        # FSDP2 casts parameters and inputs, never buffers.
        return self.three(x.mean(1)) * self.scale.to(x.dtype)


def build() -> tuple[Backbone, nn.Linear]:
    torch.manual_seed(0)
    return Backbone(), nn.Linear(3, 2)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(0, WORDS, (BATCH, TOKENS), generator=g)
    return ids, torch.randn(BATCH, 2, generator=g)


def backward(backbone: nn.Module, head: nn.Module, ids: torch.Tensor, y: torch.Tensor) -> None:
    (head(backbone(ids)) - y).square().mean().backward()


def grads(*modules: nn.Module) -> dict[str, torch.Tensor]:
    found = {}
    for i, module in enumerate(modules):
        for name, p in module.named_parameters():
            if p.grad is not None:
                grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
                found[f"{i}.{name}"] = grad.detach().clone()
    return found


def flat(weights: TensorDict) -> dict[str, torch.Tensor]:
    return {".".join(k) if isinstance(k, tuple) else k: v for k, v in weights.items(True, True)}


def params(*modules: nn.Module) -> list[nn.Parameter]:
    return [p for m in modules for p in m.parameters()]


def rel_error(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


def ranks_main(out: Path, replicate: int) -> None:
    t = topo.start("cpu", replicate=replicate)
    backbone, head = build()
    shard(backbone, t.mesh, blocks=[Block])
    ids, y = (x.chunk(t.world_size)[t.rank] for x in batch())
    backward(backbone, head, ids, y)
    all_reduce_replicated_grads(params(backbone, head), t)
    before = grads(backbone, head)
    norm = clip_grad_norm(params(backbone, head), 0.1)
    with torch.no_grad():
        backbone(ids)
    one_sided = nn.Linear(1, 1)
    if t.rank == 0:
        one_sided.weight.grad = torch.full((1, 1), 6.0)
    all_reduce_replicated_grads(one_sided.parameters(), t)
    result = {f"grad.{k}": v for k, v in before.items()}
    result |= {f"clipped.{k}": v for k, v in grads(backbone, head).items()}
    result |= {f"weights.{k}": v for k, v in flat(full_weights(backbone)).items()}
    result |= {"norm": norm, "one_sided": one_sided.weight.grad}
    assert one_sided.bias.grad is None
    # Every rank writes: the answers must be the same on both.
    save_file({k: v.contiguous() for k, v in result.items()}, out / f"{t.rank}.safetensors")
    t.stop()


@pytest.mark.parametrize("replicate", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_two_ranks_equal_one_process(tmp_path: Path, replicate: int):
    torchrun(__file__, tmp_path, replicate)
    backbone, head = build()
    backward(backbone, head, *batch())
    wanted = grads(backbone, head)
    assert not any("unused" in name for name in wanted)
    norm = torch.nn.utils.clip_grad_norm_(params(backbone, head), 0.1)
    assert norm > 0.1
    clipped = grads(backbone, head)
    for rank in range(2):
        got = load_file(tmp_path / f"{rank}.safetensors")
        assert {k for k in got if k.startswith("grad.")} == {f"grad.{k}" for k in wanted}
        errors = {k: rel_error(got[f"grad.{k}"], v) for k, v in wanted.items()}
        # The key bias of attention has a gradient of zero up to rounding; in_proj_bias holds it
        # beside the other two thirds, so its relative error still means something.
        assert max(errors.values()) < 1e-6, errors
        for k, v in clipped.items():
            torch.testing.assert_close(got[f"clipped.{k}"], v, rtol=1e-5, atol=1e-8)
        assert rel_error(got["norm"], norm) < 1e-6
        # (6 from rank 0 + 0 from rank 1, which has none) / 2 ranks
        assert got["one_sided"].item() == 3.0
        weights = {k.removeprefix("weights."): v for k, v in got.items() if k.startswith("weights")}
        plain = flat(TensorDict.from_module(build()[0]).data)
        assert weights.keys() == plain.keys()
        assert all(torch.equal(weights[k], v) for k, v in plain.items())


def test_one_rank_has_shards_too(one: topo.Topology):
    backbone, head = build()
    plain = flat(TensorDict.from_module(build()[0]).data)
    assert shard(backbone, one.mesh, blocks=[Block]) is backbone
    assert all(isinstance(p, DTensor) for p in backbone.parameters())
    weights = flat(full_weights(backbone))
    weights["embed.weight"].add_(1.0)
    weights["scale"].add_(1.0)
    # Copies: what we did to them reaches neither the shards nor a second gather.
    again = flat(full_weights(backbone))
    assert again.keys() == plain.keys()
    assert all(torch.equal(again[k], v) for k, v in plain.items())
    assert not any(v.requires_grad for v in again.values())
    assert full_weights(head)["weight"].data_ptr() != head.weight.data_ptr()


def test_full_weights_load_into_a_plain_module(one: topo.Topology):
    backbone, _ = build()
    shard(backbone, one.mesh, blocks=[Block])
    torch.manual_seed(5)
    actor = Backbone()
    full_weights(backbone).to_module(actor)
    ids, _ = batch()
    torch.testing.assert_close(actor(ids), backbone(ids).detach())


def test_bfloat16_compute_keeps_float32_masters(one: topo.Topology):
    backbone, head = build()
    shard(backbone, one.mesh, blocks=[Block], param_dtype=torch.bfloat16)
    ids, y = batch()
    with torch.no_grad():
        features = backbone(ids)
    assert features.dtype == torch.bfloat16
    head.bfloat16()
    backward(backbone, head, ids, y.bfloat16())
    assert {p.grad.dtype for p in backbone.parameters() if p.grad is not None} == {torch.float32}
    assert {v.dtype for v in full_weights(backbone).values(True, True)} == {torch.float32}


def test_frozen_parameters_may_be_bfloat16(one: topo.Topology):
    backbone, head = build()
    backbone.embed.bfloat16().requires_grad_(False)
    shard(backbone, one.mesh, blocks=[Block], param_dtype=torch.bfloat16)
    ids, y = batch()
    backward(backbone, head.bfloat16(), ids, y.bfloat16())
    assert backbone.embed.weight.grad is None
    assert full_weights(backbone)["embed", "weight"].dtype == torch.bfloat16


def test_clip_by_hand():
    a, b, c = (nn.Parameter(torch.zeros(1)) for _ in range(3))
    a.grad, b.grad = torch.tensor([3.0]), torch.tensor([4.0])
    # sqrt(9 + 16) = 5, already below the limit: nothing changes
    assert clip_grad_norm([a, b, c], math.inf).item() == 5.0
    assert clip_grad_norm(iter([a, b, c]), 10.0).item() == 5.0
    assert (a.grad.item(), b.grad.item(), c.grad) == (3.0, 4.0, None)
    # scaled to norm 1: 3/5 and 4/5
    assert clip_grad_norm([a, b, c], 1.0).item() == 5.0
    assert a.grad.item() == pytest.approx(0.6, rel=1e-6)
    assert b.grad.item() == pytest.approx(0.8, rel=1e-6)


def test_refusals(one: topo.Topology):
    with pytest.raises(ValueError, match="max_norm is 0"):
        clip_grad_norm([], 0.0)
    with pytest.raises(ValueError, match="backward"):
        clip_grad_norm([nn.Parameter(torch.zeros(1))], 1.0)
    with pytest.raises(TypeError, match=r"bfloat16.*5e-6"):
        shard(build()[0].bfloat16(), one.mesh, blocks=[Block])
    with pytest.raises(ValueError, match=r"no \['Conv2d'\] in Backbone"):
        shard(build()[0], one.mesh, blocks=[nn.Conv2d])
    backbone = shard(build()[0], one.mesh, blocks=[Block])
    with pytest.raises(ValueError, match="sharded parts already"):
        shard(backbone, one.mesh, blocks=[Block])


if __name__ == "__main__":
    ranks_main(Path(sys.argv[1]), int(sys.argv[2]))
