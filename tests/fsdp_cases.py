"""What the FSDP2 proofs train: two algorithms on two policies, the same on any number of ranks.

Run by torchrun, this file is the program of the ranks; without a process group ``run_case`` trains
plain modules, to which the ranks are compared.
"""

import hashlib
import json
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import save_file
from tensordict import TensorDict
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from torchrl_vla import schema
from torchrl_vla import topology as topo
from torchrl_vla.loops import actor_critic, updates
from torchrl_vla.objectives.credit import VALID, Gae
from torchrl_vla.objectives.policy_gradient import ADVANTAGE, TARGET, PolicyGradient
from torchrl_vla.objectives.soft_actor_critic import SoftActorCritic
from torchrl_vla.policies import deferred, openvla, tiny
from torchrl_vla.policies.policy import VALUE
from torchrl_vla.policies.shard import shard

META = schema.SuiteMeta(
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
STEPS, BINS, ROWS, UPDATES, LR = 2, 16, 16, 3, 1e-3
CASES = [f"{algorithm}_{family}" for algorithm in ("ppo", "sac") for family in ("tiny", "llama")]
VARIANTS = {
    "plain": {},
    "accumulation": {"micro_batch_size": 2},
    "clipping": {"max_grad_norm": 1e-2},
    "recompute": {"recompute": True},
    "offload": {"offload": True},
    "uneven": {"rows": ROWS - 1},
    "bfloat16": {"precision": "bfloat16"},
}
VARIANTS["together"] = {
    key: value
    for name in ("accumulation", "clipping", "recompute", "offload", "uneven")
    for key, value in VARIANTS[name].items()
}
FAMILIES = {
    "tiny": partial(tiny.make_policy, weights=None, num_bins=BINS, width=32, heads=2, keypoints=4),
    "llama": partial(
        openvla.make_policy, size="tiny", num_bins=BINS, patch_size=16, vision_width=16, width=32,
        heads=2,
    ),
}  # fmt: skip
ALONE = SimpleNamespace(world_size=1, rank=0, mesh=None, device=torch.device("cpu"))
"""One process with plain modules and no process group."""
EPS = 1e-3
"""Of Adam. Its own 1e-8 turns gradients that are 0 up to rounding (the key bias of attention) into
whole steps of a random sign, and no two orders of summation would agree."""


class PerRows:
    """An objective whose noise belongs to rows, two by two, and not to who computes them."""

    def __init__(self, objective):
        self.objective, self.counts = objective, objective.counts

    def __call__(self, batch, totals):
        parts = []
        for rows in batch.split(2):
            torch.manual_seed(int(rows["seed"][0]))
            parts.append(self.objective(rows, totals))
        return {name: sum(part[name] for part in parts) for name in parts[0]}


def transitions(rows: int, update: int) -> TensorDict:
    g = torch.Generator().manual_seed(update)
    td = TensorDict(batch_size=[rows])
    for where in ((), ("next",)):
        image = torch.randint(0, 256, (rows, 1, 3, 32, 32), generator=g, dtype=torch.uint8)
        td[(*where, *schema.IMAGE)] = image
        td[(*where, *schema.STATE)] = torch.randn(rows, 2, generator=g)
    td[schema.TASK_ID] = torch.randint(0, 2, (rows, 1), generator=g)
    td[schema.CHUNK] = 2 * torch.rand(rows, STEPS, 3, generator=g) - 1
    td[schema.TOKENS] = torch.randint(0, BINS, (rows, STEPS, 3), generator=g)
    executed = torch.randint(1, STEPS + 1, (rows, 1), generator=g)
    td[schema.EXECUTED_MASK] = torch.arange(STEPS) < executed
    td[schema.NUM_EXECUTED] = executed
    td[schema.REWARD] = torch.rand(rows, 1, generator=g)
    td[schema.TERMINATED] = torch.rand(rows, 1, generator=g) < 0.2
    td[schema.DONE] = td[schema.TERMINATED].clone()
    td[schema.POLICY_VERSION] = (torch.arange(rows)[:, None] % 3 > 0).long() * 2 - 1
    td[ADVANTAGE], td[TARGET], td[VALUE] = torch.randn(3, rows, 1, generator=g).unbind()
    td[VALID] = torch.rand(rows, 1, generator=g) < 0.7
    td["seed"] = 1000 * update + torch.arange(rows)[:, None] // 2
    return td


@contextmanager
def sharding(how: Callable):
    """Let the loops' builders call ``how`` instead of ``shard``."""
    deferred.shard = how
    try:
        yield
    finally:
        deferred.shard = shard


def build(case: str, ranks, *, precision="float32", rows=ROWS, **settings):
    """Return policy, learner and minibatches of all rows; sharded if ``ranks`` is a topology."""
    algorithm, family = case.split("_")
    torch.manual_seed(0)
    kind = {"head": "tokens"} if algorithm == "ppo" else {"head": "gaussian", "eval_decode": "mean"}
    policy = FAMILIES[family](META, **kind, chunk_size=STEPS, precision=precision)
    for name, parameter in policy.model.model.named_parameters():
        if "head" in name and "weight" in name and parameter.ndim == 2:
            nn.init.normal_(parameter, std=0.3)  # heads that begin at 0 would hide the trunk
    batches = [transitions(rows, update) for update in range(UPDATES)]
    limit = settings.pop("max_grad_norm", 1e9)
    plain = not isinstance(ranks, topo.Topology)
    how = (lambda module, *_, **__: module) if plain else shard
    if algorithm == "ppo":
        for batch in batches:
            with torch.no_grad():
                own = policy.get_dist(policy.score(batch.copy())).log_prob(batch[schema.TOKENS])
            batch[schema.LOG_PROBS] = own + 0.3 * torch.randn(own.shape)
        given = updates.UpdateSettings(ROWS, 1, LR, limit, value_lr=LR, **settings)
        goal = partial(PolicyGradient, advantage=Gae(), value_weight=0.5, entropy_weight=0.01)
        with sharding(how):
            learner, goal = updates.make_learner(ranks, policy, goal, given, gamma=0.9)
        goal.rounds = 1
    else:
        run = SimpleNamespace(topology=ranks, suite=SimpleNamespace(meta=META), chunk_size=STEPS)
        given = actor_critic.UpdateSettings(LR, LR, LR, limit, trunk_lr=LR, **settings)
        objective = partial(SoftActorCritic, alpha=0.1, critic_only_updates=0)
        with sharding(how):
            learner, goal = actor_critic.make_learner(run, policy, objective, given, 0.9)
        learner.objective = PerRows(goal)
    if plain:
        learner.sharded = ()
    for group in learner.optimizer.param_groups:
        group["eps"] = EPS
    return policy, learner, batches


def whole(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return tensor.detach().clone().contiguous()


def run_case(case: str, ranks, **variant) -> dict[str, torch.Tensor]:
    """Train three updates; return the first gradients, and the weights before and after.

    Keys are ``grad/GROUP.N``, ``start/GROUP.N``, ``weights/GROUP.N`` and ``norm/GROUP``.
    """
    _, learner, batches = build(case, ranks, **variant)
    named = {f"{g.name}.{n}": p for g in learner.groups for n, p in enumerate(g.params)}
    found = {f"start/{name}": whole(p) for name, p in named.items()}

    def look(*_):
        if not learner.updates:
            found.update(
                {f"grad/{name}": whole(p.grad) for name, p in named.items() if p.grad is not None}
            )

    learner.optimizer.register_step_pre_hook(look)
    for number, batch in enumerate(batches):
        world = ranks.world_size
        report = learner.update(batch.chunk(world)[ranks.rank] if world > 1 else batch)
        if number == 0:
            norms = {k: v for k, v in report.items() if k.startswith("grad_norm/")}
            found.update(
                {k.replace("grad_norm", "norm"): torch.tensor(v) for k, v in norms.items()}
            )
    return found | {f"weights/{name}": whole(p) for name, p in named.items()}


def digest(tensors: dict[str, torch.Tensor]) -> str:
    sha = hashlib.sha256()
    for name in sorted(tensors):
        sha.update(tensors[name].numpy().tobytes())
    return sha.hexdigest()


def noise_and_weights(ranks: topo.Topology) -> dict[str, list]:
    """Train SAC as the loop does, each rank with its own noise; return what every rank has."""
    policy, learner, batches = build("sac_tiny", ranks)
    learner.objective = learner.objective.objective
    torch.manual_seed(ranks.rank)
    for batch in batches:
        learner.update(batch.chunk(ranks.world_size)[ranks.rank])
    named = {f"{g.name}.{n}": p for g in learner.groups for n, p in enumerate(g.params)}
    features = torch.ones(1, policy.model.model.feature_dim)
    with torch.no_grad():
        rows = TensorDict({"features": features}, batch_size=[1])
        action = policy.actor.get_dist(rows).sample()
    return {
        "weights": ranks.gather_objects(digest({k: whole(p) for k, p in named.items()})),
        "actions": ranks.gather_objects(action.flatten().tolist()),
    }


def relaid(ranks: topo.Topology, copies: int) -> topo.Topology:
    """Return the same ranks with ``copies`` copies of the parameters."""
    per_node = ranks.layout.ranks_per_node
    layout = topo.plan(ranks.world_size, ranks_per_node=per_node, gpus=0, replicate=copies)
    shape, names = tuple(layout.mesh.values()), tuple(layout.mesh)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    return replace(ranks, layout=layout, mesh=mesh)


def ranks_main(parent: Path, layouts: list[int], variants: list[str]) -> None:
    """Train every case in every layout; write tensors and facts to ``parent/COPIES``."""
    ranks = topo.start("cpu")
    for copies in layouts:
        train_layout(parent / str(copies), relaid(ranks, copies), variants)
    ranks.stop()


def train_layout(out: Path, ranks: topo.Topology, variants: list[str]) -> None:
    out.mkdir(exist_ok=True)
    facts = {"same": {}, "layout": str(ranks.layout)}
    for case in CASES:
        for variant in variants:
            found = run_case(case, ranks, **VARIANTS[variant])
            facts["same"][f"{case}/{variant}"] = len(set(ranks.gather_objects(digest(found)))) == 1
            if ranks.is_main:
                save_file(found, out / f"{case}-{variant}.safetensors")
    facts |= noise_and_weights(ranks)
    if ranks.is_main:
        (out / "facts.json").write_text(json.dumps(facts))


def fail_main(how: str) -> None:
    """Let rank 1 raise, or stop answering, in the second update."""
    ranks = topo.start("cpu", timeout=timedelta(seconds=10))
    _, learner, batches = build("ppo_tiny", ranks)
    objective = learner.objective

    class Failing:
        counts = objective.counts

        def __call__(self, batch, totals):
            if ranks.rank == 1 and learner.updates == 1:
                if how == "hang":
                    time.sleep(3600)
                raise ZeroDivisionError("rank 1 divided by zero")
            return objective(batch, totals)

    learner.objective = Failing()
    for batch in batches:
        learner.update(batch.chunk(2)[ranks.rank])


if __name__ == "__main__" and sys.argv[1] in ("raise", "hang"):
    fail_main(sys.argv[1])
elif __name__ == "__main__":
    folder, copies, kinds = sys.argv[1:]
    ranks_main(Path(folder), [int(word) for word in copies.split(",")], kinds.split(","))
