"""Time of one update: our learner (objective, TorchRL losses, FSDP2) against a loop by hand.

Both sides update their own copy of the same model on the same batch, in turns. Before anything is
timed, one update of each is compared: the same losses, the same gradient norms, the same weights
moved. FSDP2 runs on one rank (gloo), which costs what it costs and saves nothing.

    OMP_NUM_THREADS=1 python benchmarks/learner.py --out benchmarks/results/learner.json
"""

from __future__ import annotations

import argparse
import copy
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from bare import BarePPO, BareSAC, PPOSettings, SACSettings
from configuration import arguments, settings_of
from hydra.utils import instantiate
from side_by_side import Ratio, Sample, command_line, machine, report, take_turns
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.collectors import Collector

from torchrl_vla import schema, topology
from torchrl_vla.actors import to_transitions
from torchrl_vla.envs.chunked import ChunkedEnv, InitStateStream
from torchrl_vla.envs.tabletop import TabletopSuite
from torchrl_vla.loops import actor_critic, off_policy, on_policy
from torchrl_vla.loops.replay_folder import layout_of
from torchrl_vla.objectives.critics import DEMONSTRATION, STEPS
from torchrl_vla.objectives.policy_gradient import ADVANTAGE, TARGET
from torchrl_vla.objectives.soft_actor_critic import SoftActorCritic
from torchrl_vla.policies.heads import QHead
from torchrl_vla.policies.shard import full_weights
from torchrl_vla.policies.tiny import make_policy
from torchrl_vla.replay import make_replay

CHUNK = 4
UNIT = "ms/update"
RATIOS = (
    Ratio("PPO: ours / by hand", "PPO ours", ["PPO by hand"], UNIT, 1.10, at_least=False),
    Ratio("SAC: ours / by hand", "SAC ours", ["SAC by hand"], UNIT, 1.10, at_least=False),
    Ratio(
        "PPO: second trunk pass for the critic",
        "PPO by hand, second pass",
        ["PPO by hand"],
        UNIT,
        None,
        at_least=False,
    ),
)
NO_WARM_UP = {"ppo": {"warm_up": 0}, "sac": {"actor_warm_up": 0}}
"""Warm-up would scale our compared steps only; it costs no time."""
Update = Callable[[], Mapping[str, float]]


def rollout(policy: torch.nn.Module, num_envs: int, decisions: int, gamma: float) -> TensorDictBase:
    """Collect ``[num_envs, decisions]`` with the shipped policy on training states."""
    suite = TabletopSuite()
    init_states = InitStateStream(suite.splits["train"], 0)
    env = ChunkedEnv(suite.simulators(num_envs), init_states, chunk_size=CHUNK, gamma=gamma)
    collector = Collector(
        env,
        policy,
        frames_per_batch=num_envs * decisions,
        total_frames=-1,
        auto_register_policy_transforms=False,
    )
    batch = next(iter(collector)).clone()
    collector.shutdown()
    batch[schema.POLICY_VERSION] = torch.zeros(*batch.shape, 1, dtype=torch.int64)
    return batch


def moved(before: TensorDict, after: TensorDict) -> Tensor:
    """Return all weight changes as one vector."""
    change = (after - before).flatten_keys(".")
    return torch.cat([change[key].flatten().double() for key in sorted(change.keys())])


def compare(
    name: str,
    ours: tuple[Update, Callable[[], TensorDict]],
    by_hand: tuple[Update, Callable[[], TensorDict]],
) -> None:
    """Take one update on both sides and demand the same result.

    Args:
        name: for messages.
        ours: the update, and the weights it trains.
        by_hand: the same of the loop by hand, with the same names.

    Raises:
        AssertionError: losses, gradient norms or the weights moved differ.
    """
    changes, reports = [], []
    for update, weights in (ours, by_hand):
        before = weights().clone()
        torch.manual_seed(0)
        reports.append(update())
        changes.append(moved(before, weights()))
    for key, value in reports[1].items():
        off = abs(reports[0][key] - value) / max(abs(value), 1e-3)
        if off > 1e-3:
            raise AssertionError(f"{name}: {key} is {reports[0][key]} ours, {value} by hand")
    sizes = [change.abs().sum().item() for change in changes]
    if abs(sizes[0] / sizes[1] - 1) > 1e-3:
        raise AssertionError(f"{name}: sum |dW| is {sizes[0]} ours, {sizes[1]} by hand")
    # Adam's first step has the size of the learning rate whatever the gradient: compare direction.
    apart = (changes[0] - changes[1]).abs().sum().item() / sizes[1]
    if apart > 2e-2:
        raise AssertionError(f"{name}: weights moved differ by {apart:.1%} of sum |dW|")
    print(f"{name}: sum |dW| {sizes[0]:.6g} and {sizes[1]:.6g}, apart by {apart:.2%}", flush=True)


def plain_ppo(batch: TensorDictBase) -> dict[str, Tensor]:
    """Return what :class:`BarePPO` reads of a minibatch."""
    return {
        "image": batch[schema.IMAGE],
        "state": batch[schema.STATE],
        "task_id": batch[schema.TASK_ID],
        "tokens": batch[schema.TOKENS],
        "log_probs": batch[schema.LOG_PROBS],
        "executed_mask": batch[schema.EXECUTED_MASK],
        "advantage": batch[ADVANTAGE],
        "target": batch[TARGET],
    }


def plain_sac(batch: TensorDictBase) -> dict[str, Tensor]:
    """Return what :class:`BareSAC` reads of a minibatch."""
    return {
        "features": batch["features"],
        "next_features": batch["next", "features"],
        "chunk": batch[schema.CHUNK],
        "reward": batch[schema.REWARD],
        "terminated": batch[schema.TERMINATED],
        "steps": batch[STEPS],
        "executed_mask": batch[schema.EXECUTED_MASK],
        "demonstrated": batch[schema.POLICY_VERSION] == DEMONSTRATION,
    }


def ppo_variants(ranks: topology.Topology, minibatch: int) -> dict[str, Update]:
    """Build the PPO sides, check that they agree, and return their updates."""
    conf = settings_of("ppo")
    algo, gamma = conf["algo"], conf["gamma"]
    torch.manual_seed(0)
    policy = make_policy(TabletopSuite().meta, head="tokens")
    models = [copy.deepcopy(policy.model.model) for _ in range(2)]
    collected = rollout(policy, minibatch // 8, 8, gamma)
    updates = on_policy.UpdateSettings(**arguments(algo["updates"]) | NO_WARM_UP["ppo"])
    objective = instantiate(algo["objective"])
    learner, goal = on_policy.make_learner(ranks, policy, objective, updates, gamma=gamma)
    for _ in range(goal.value_only_rounds + 1):
        rows, _ = goal.credit(collected, 0)
    goal.pop_gap()  # measured in a round's first update only
    batch = rows.reshape(-1)
    plain = plain_ppo(batch)
    numbers = PPOSettings(
        lr=updates.lr,
        value_lr=updates.value_lr,
        betas=updates.betas,
        max_grad_norm=updates.max_grad_norm,
        clip=(goal.clip_low, goal.clip_high),
        value_weight=goal.value_weight,
        temperature=policy.temperature,
    )
    table = policy.model.instruction_table
    by_hand = BarePPO(models[0], table, numbers)
    twice = BarePPO(models[1], table, numbers, second_pass=True)
    compare(
        "PPO",
        (lambda: learner.update(batch), lambda: full_weights(policy.model.model)),
        (lambda: by_hand.update(plain), lambda: TensorDict.from_module(models[0]).data.clone()),
    )
    return {
        "PPO ours": lambda: learner.update(batch),
        "PPO by hand": lambda: by_hand.update(plain),
        "PPO by hand, second pass": lambda: twice.update(plain),
    }


def sac_batch(policy: torch.nn.Module, conf: Mapping[str, Any], folder: Path) -> TensorDictBase:
    """Return a minibatch as the loop draws it: online rows and demonstrations, cached features."""
    alone = SimpleNamespace(rank=0, world_size=1, device=torch.device("cpu"))
    run = SimpleNamespace(suite=TabletopSuite(), chunk_size=CHUNK, topology=alone)
    settings = off_policy.ReplaySettings(
        **{**arguments(conf["algo"]["replay"]), "demonstration_episodes": 8, "capacity": 512}
    )
    buffer = make_replay(folder / "replay", settings.capacity, layout_of(policy, run))
    buffer.extend(to_transitions(rollout(policy, 16, 16, conf["gamma"])))
    feed = off_policy.make_feed(
        run, policy, buffer, settings, frozen=True, seed=0, gamma=conf["gamma"]
    )
    feed.absorb()
    return feed.sample()


def sac_by_hand(
    actor: torch.nn.Module,
    critics: list[torch.nn.Module],
    updates: actor_critic.UpdateSettings,
    terms: Mapping[str, Any],
    gamma: float,
) -> BareSAC:
    """Build the loop by hand with the numbers of the configuration."""
    numbers = SACSettings(
        lr=updates.lr,
        critic_lr=updates.critic_lr,
        alpha_lr=updates.alpha_lr,
        max_grad_norm=updates.max_grad_norm,
        gamma=gamma,
        **{key: terms[key] for key in ("alpha", "target_entropy", "tau", "cloning_weight")},
    )
    targets = [copy.deepcopy(critic).requires_grad_(False) for critic in critics]
    return BareSAC(actor, critics, targets, numbers)


def sac_variants(ranks: topology.Topology, folder: Path) -> dict[str, Update]:
    """Build both SAC sides, check that they agree, and return their updates."""
    conf = settings_of("sac")
    algo, gamma = conf["algo"], conf["gamma"]
    torch.manual_seed(0)
    policy = make_policy(TabletopSuite().meta, head="gaussian")
    batch = sac_batch(policy, conf, folder)
    updates = actor_critic.UpdateSettings(**arguments(algo["updates"]) | NO_WARM_UP["sac"])
    objective = partial(SoftActorCritic, **arguments(algo["objective"]))
    run = SimpleNamespace(topology=ranks, suite=TabletopSuite(), chunk_size=CHUNK)
    actor = copy.deepcopy(policy.actor[0].module)
    torch.manual_seed(1)
    learner, goal = actor_critic.make_learner(run, policy, objective, updates, gamma)
    goal.updates = goal.critic_only_updates  # measure the update that has every term
    torch.manual_seed(1)
    sizes = policy.model.model.feature_dim, CHUNK, run.suite.meta.action_dim
    critics = [QHead(*sizes) for _ in range(updates.q_heads)]
    by_hand = sac_by_hand(actor, critics, updates, algo["objective"], gamma)
    plain = plain_sac(batch)

    def our_weights() -> TensorDict:
        head = TensorDict.from_module(policy.actor[0].module).data.clone()
        heads = [TensorDict.from_module(q).data.clone() for q in goal.ensemble.online]
        return TensorDict({"actor": head, "critics": torch.stack(heads)})

    def weights_by_hand() -> TensorDict:
        q = torch.stack([TensorDict.from_module(critic).data.clone() for critic in critics])
        head = TensorDict.from_module(actor).data.clone()
        return TensorDict({"actor": head, "critics": q})

    compare(
        "SAC",
        (lambda: learner.update(batch), our_weights),
        (lambda: by_hand.update(plain), weights_by_hand),
    )
    return {
        "SAC ours": lambda: learner.update(batch),
        "SAC by hand": lambda: by_hand.update(plain),
    }


def timed(update: Update, number: int) -> Sample:
    """Return the median time of ``number`` updates."""
    times = []
    for _ in range(number):
        started = time.perf_counter()
        update()
        times.append(1e3 * (time.perf_counter() - started))
    return {UNIT: statistics.median(times)}


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = command_line(__doc__.splitlines()[0], turns=15)
    parser.add_argument("--minibatch", type=int, default=128, help="decisions of a PPO update")
    parser.add_argument("--ppo-updates", type=int, default=3, help="PPO updates per turn")
    parser.add_argument("--sac-updates", type=int, default=25, help="SAC updates per turn")
    parser.add_argument("--only", nargs="+", choices=["ppo", "sac"], default=["ppo", "sac"])
    return parser.parse_args()


def main() -> None:
    """Check, measure and report."""
    args = parse()
    if args.minibatch % 8:
        raise SystemExit(f"--minibatch is {args.minibatch}; it must be a multiple of 8")
    ranks = topology.start("cpu", threads=1)
    conditions = machine()
    numbers = {"ppo": args.ppo_updates, "sac": args.sac_updates}
    with tempfile.TemporaryDirectory(prefix="learner-") as folder:
        updates: dict[str, Update] = {}
        if "ppo" in args.only:
            updates |= ppo_variants(ranks, args.minibatch)
        if "sac" in args.only:
            updates |= sac_variants(ranks, Path(folder))
        variants = {
            name: partial(timed, update, numbers[name.split()[0].lower()])
            for name, update in updates.items()
        }
        samples = take_turns(variants, args.turns)
    settings = {key: value for key, value in vars(args).items() if key != "out"}
    report("learner", samples, RATIOS, settings=settings, conditions=conditions, out=args.out)
    ranks.stop()


if __name__ == "__main__":
    main()
