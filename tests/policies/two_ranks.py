"""The gradients of a policy on two gloo ranks, for a comparison with those of one process."""

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tensordict import TensorDict
from torch.distributed.tensor import DTensor

from torchrl_vla import topology as topo
from torchrl_vla.policies.shard import all_reduce_replicated_grads, shard

Backward = Callable[[torch.nn.Module, TensorDict], None]
"""Leaves the gradients of a mean over the rows in the policy."""


def gradients(policy: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return whole gradients by name; collective if the policy is sharded."""
    found = {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}
    return {k: g.full_tensor() if isinstance(g, DTensor) else g for k, g in found.items()}


def save_gradients(policy: torch.nn.Module, td: TensorDict, backward: Backward, out: Path) -> None:
    """Shard, take this rank's share of the rows backward, write ``out/RANK.safetensors``."""
    t = topo.start("cpu")
    shard(policy.model.model, t.mesh, blocks=policy.model.model.shard_plan())
    backward(policy, td.chunk(t.world_size)[t.rank])
    all_reduce_replicated_grads(policy.parameters(), t)
    found = {name: grad.contiguous() for name, grad in gradients(policy).items()}
    save_file(found, out / f"{t.rank}.safetensors")
    t.stop()


def assert_equal_to_one_process(
    out: Path, policy: torch.nn.Module, td: TensorDict, backward: Backward
) -> None:
    """Compare what both ranks wrote with all rows in this process: 1e-5 of the largest gradient."""
    backward(policy, td)
    wanted = gradients(policy)
    scale = max(grad.abs().max().item() for grad in wanted.values())
    for rank in range(2):
        got = load_file(out / f"{rank}.safetensors")
        assert got.keys() == wanted.keys()
        worst = max((got[k] - v).abs().max().item() for k, v in wanted.items())
        print(f"rank {rank}: largest difference of a gradient {worst / scale:.1e} of the largest")
        assert worst <= 1e-5 * scale, (worst, scale)
