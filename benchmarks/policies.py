"""Time of a decision and of an update: tiny members of the families against their bare networks.

The bare side (``bare_vla.py``) calls the same modules with the same weights in the shortest way
that works for equal prompts. Before anything is timed, both sides are shown to agree.

    OMP_NUM_THREADS=1 python benchmarks/policies.py --out build/policies.json
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial

import torch
from bare_vla import Bare, BareAutoregressive, BareOpenVLA, BarePI0, BareTiny, BareVLM
from side_by_side import Ratio, Sample, command_line, machine, report, take_turns
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from torchrl_vla import schema, topology
from torchrl_vla.envs.tabletop import TabletopSuite
from torchrl_vla.learner import Learner, ParameterGroup
from torchrl_vla.policies import openvla, pi0, tiny, vlm
from torchrl_vla.policies.flow import PATH
from torchrl_vla.policies.policy import VALUE

UNIT, LR, MAX_NORM = "ms", 1e-5, 1.0
META = TabletopSuite().meta
FAMILIES: dict[str, tuple[Callable[..., nn.Module], Callable[..., Bare]]] = {
    "tiny": (partial(tiny.make_policy, META, weights=None, temperature=1.0), BareTiny),
    "OFT": (partial(openvla.make_policy, META, size="tiny"), BareOpenVLA),
    "OpenVLA": (
        partial(openvla.make_policy, META, size="tiny", decoding="autoregressive"),
        BareAutoregressive,
    ),
    "VLM": (partial(vlm.make_policy, META, size="tiny"), BareVLM),
    "pi0": (partial(pi0.make_policy, META, size="tiny", steps=4), BarePI0),
}
RATIOS = tuple(
    Ratio(f"{name}: ours / bare", f"{name} ours", [f"{name} bare"], UNIT, 1.10, at_least=False)
    for family in FAMILIES
    for name in (f"{family} decision", f"{family} update")
)


def observations(policy: nn.Module, rows: int, chunk_size: int) -> TensorDict:
    """Return ``rows`` random observations of one instruction, with actions to score."""
    generator = torch.Generator().manual_seed(0)
    td = TensorDict(batch_size=[rows])
    image = (rows, len(META.cameras), 3, META.image_size, META.image_size)
    td[schema.IMAGE] = torch.randint(0, 256, image, generator=generator, dtype=torch.uint8)
    td[schema.STATE] = torch.randn(rows, META.state_dim, generator=generator)
    td[schema.TASK_ID] = torch.full((rows, 1), longest_prompt(policy))
    if policy.action_key == PATH:
        path = (rows, policy.actor.schedule.steps + 1, *policy.actor.head.shape)
        td[PATH] = torch.randn(path, generator=generator)
    else:
        chunk = (rows, chunk_size, META.action_dim)
        td[schema.TOKENS] = torch.randint(0, policy.vocab_size, chunk, generator=generator)
    return td


def longest_prompt(policy: nn.Module) -> int:
    """Return the task whose prompt fills the table: no pads on either side."""
    table = policy.model.instruction_table
    # OpenVLA's pad is an id of its vocabulary, the others' is 0 or -1.
    backbone = getattr(policy.model.model, "backbone", None)
    pad = getattr(backbone, "pad_id", min(0, int(table.min())))
    return int((table == pad).sum(-1).argmin())


def by_hand(make: Callable[..., Bare], policy: nn.Module, td: TensorDict, shared: bool) -> Bare:
    """Return the bare side of ``policy``, on the same modules or on copies."""
    words = policy.model.instruction_table[td[schema.TASK_ID][0, 0]].expand(len(td), -1)
    if policy.action_key == PATH:
        parts = (policy.model.model, policy.actor.head)
        trunk, expert = parts if shared else copy.deepcopy(parts)
        return make(trunk, expert, words, policy.actor.schedule)
    model = policy.model.model
    return make(model if shared else copy.deepcopy(model), words)


class Likelihood:
    """Log-likelihood of stored actions and a squared value: as small as an objective can be."""

    def __init__(self, policy: nn.Module) -> None:
        self.policy = policy

    def counts(self, batch: TensorDictBase) -> dict[str, Tensor]:
        """Return the number of rows."""
        return {"rows": torch.tensor(len(batch))}

    def __call__(self, batch: TensorDictBase, totals: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return both losses."""
        scored = self.policy.score(batch)
        log_prob = self.policy.get_dist(scored).log_prob(batch[self.policy.action_key])
        return {
            "loss_policy": -log_prob.mean((1, 2)).sum() / totals["rows"],
            "loss_value": scored[VALUE].square().sum() / totals["rows"],
        }


def parameters(policy: nn.Module) -> list[nn.Parameter]:
    """Return what an update trains."""
    return [p for p in policy.parameters() if p.requires_grad]


def bare_update(
    bare: Bare, params: list[nn.Parameter], optimizer: torch.optim.Optimizer, td: TensorDict
) -> float:
    """Take one update by hand; return the loss."""
    loss = bare.loss(td)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(params, MAX_NORM)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def variants(
    name: str, ranks: topology.Topology, args: argparse.Namespace
) -> dict[str, Callable[[], object]]:
    """Build both sides of a family, check that they agree, and return what is timed."""
    make, kind = FAMILIES[name]
    torch.manual_seed(0)
    policy = make(chunk_size=args.chunk_size)
    acting = observations(policy, args.envs, args.chunk_size)
    td = observations(policy, args.minibatch, args.chunk_size)
    actor, bare = by_hand(kind, policy, acting, True), by_hand(kind, policy, td, False)
    with torch.no_grad():
        torch.manual_seed(1)
        log_probs = policy(acting.clone())[schema.LOG_PROBS].flatten(1)
        torch.manual_seed(1)
        torch.testing.assert_close(actor.act(acting).flatten(1), log_probs, atol=1e-3, rtol=1e-4)
    learner = Learner(
        Likelihood(policy), [ParameterGroup("all", parameters(policy), LR, MAX_NORM)], ranks
    )
    copied = [bare.trunk, bare.expert] if kind is BarePI0 else [bare.model]
    params = [p for module in copied for p in parameters(module)]
    optimizer = torch.optim.AdamW(params, LR, weight_decay=0.0, fused=True)
    first, other = learner.update(td.clone()), bare_update(bare, params, optimizer, td)
    gap = abs(first["loss_policy"] + first["loss_value"] - other)
    if gap > 1e-4 * max(1.0, abs(other)):
        raise AssertionError(f"{name}: losses differ by {gap} of {other}")

    def decide(choose: Callable[[TensorDict], object]) -> None:
        with torch.no_grad():
            choose(acting.clone(recurse=False))

    return {
        f"{name} decision ours": partial(decide, policy),
        f"{name} decision bare": partial(decide, actor.act),
        f"{name} update ours": lambda: learner.update(td.clone(recurse=False)),
        f"{name} update bare": partial(bare_update, bare, params, optimizer, td),
    }


def timed(call: Callable[[], object], number: int, clock: Callable[[], float]) -> Sample:
    """Return the median time of ``number`` calls."""
    times = []
    for _ in range(number):
        started = clock()
        call()
        times.append(1e3 * (clock() - started))
    return {UNIT: statistics.median(times)}


def main() -> None:
    """Check, measure and report."""
    parser = command_line(__doc__.splitlines()[0], turns=15)
    parser.add_argument("--envs", type=int, default=8, help="rows of a decision")
    parser.add_argument("--minibatch", type=int, default=16, help="rows of an update")
    parser.add_argument("--chunk-size", type=int, default=4, help="control steps per decision")
    parser.add_argument("--calls", type=int, default=3, help="decisions and updates per turn")
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=list(FAMILIES))
    clocks = {"wall": time.perf_counter, "cpu": time.process_time}
    parser.add_argument("--clock", choices=clocks, default="wall", help="cpu: on a shared machine")
    args = parser.parse_args()
    ranks = topology.start("cpu", threads=1)
    conditions = machine()
    found: dict[str, Callable[[], object]] = {}
    for name in args.families:
        found |= variants(name, ranks, args)
    samples = take_turns(
        {
            name: partial(timed, call, args.calls, clocks[args.clock])
            for name, call in found.items()
        },
        args.turns,
    )
    settings = {key: value for key, value in vars(args).items() if key != "out"}
    report("policies", samples, RATIOS, settings=settings, conditions=conditions, out=args.out)
    ranks.stop()


if __name__ == "__main__":
    main()
