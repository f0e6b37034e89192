"""Supervised stages: ground the tiny VLA on labels, clone the expert. Not reinforcement learning.

make data ──▶ for update in updates: draw a minibatch ──▶ learner.update ──▶ look, save
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from torch import nn

from torchrl_vla import schema
from torchrl_vla.data import demonstrations, grounding
from torchrl_vla.data.demonstrations import Episode
from torchrl_vla.learner import Learner, ParameterGroup
from torchrl_vla.loops.run import Run
from torchrl_vla.loops.stage import Draws, Stage
from torchrl_vla.objectives.supervised import GroundingObjective
from torchrl_vla.policies.deferred import features_on_host, place, without_weights
from torchrl_vla.schema import SuiteMeta

ENCODED_ROWS = 128
"""Rows whose features are computed at once."""


def warm_up_and_decay(updates: int, warm_up: int) -> Callable[[int], float]:
    """Return the learning-rate factor by update: linear warm-up, then linear decay to 2 %."""
    return lambda update: min(1.0, (update + 1) / warm_up) * max(0.02, 1.0 - update / updates)


def train_grounding(
    run: Run,
    *,
    make_policy: Callable[..., nn.Module],
    seed: int,
    scenes: int,
    held_out: int,
    updates: int,
    batch_size: int,
    lr: float,
    warm_up: int,
    max_error_cm: float,
    resume: bool = False,
) -> dict[str, float]:
    """Regress where the named block is (privileged labels; stands in for a VLM's grounding).

    Raises:
        RuntimeError: the held-out error is above ``max_error_cm`` at the end.
    """
    torch.manual_seed(seed)
    simulators = run.suite.simulators(1)
    first = run.suite.splits["ground"].start
    train = grounding.render_scenes(simulators, range(first, first + scenes), seed=seed)
    start = first + 10 * scenes
    test = grounding.render_scenes(simulators, range(start, start + held_out), seed=seed + 1)
    policy, evaluated = make_policy(run.suite.meta), make_policy(run.suite.meta)
    model = policy.model.model
    _normalise_state(model, train)
    place(policy, run.topology)
    objective = GroundingObjective(
        lambda batch: policy.model(batch, ("position",))["position"],
        grounding.POSITION,
        grounding.UNIT,
    )
    untouched = ("token_head", "value_head")
    params = [p for name, p in model.named_parameters() if not name.startswith(untouched)]
    learner = Learner(
        objective,
        [ParameterGroup("policy", params, lr, max_grad_norm=1.0, weight_decay=0.01)],
        run.topology,
        sharded=[model],
        schedule=warm_up_and_decay(updates, warm_up),
    )
    draws = Draws(batch_size, 1 + run.topology.rank)
    stage = Stage(run, policy, evaluated, learner, draws, updates)
    stage.begin(resume)
    num_tasks = len(run.suite.meta.instructions)

    def batch(draws: Draws) -> TensorDict:
        scenes, task_id = train[draws.uniform(len(train))], draws.uniform(num_tasks)
        return grounding.label(scenes, task_id[:, None], simulators)

    stage.fit(batch)
    if run.interrupted:
        return {}
    labelled = grounding.label(test, test[schema.TASK_ID], simulators).to(run.topology.device)
    with torch.no_grad():
        held = objective(labelled, objective.counts(labelled))
    error = 100 * float(held["position_error_m"])
    stage.export({"stage": "ground", "seed": seed, "held_out_error_cm": round(error, 3)})
    stage.save(last=True)
    if run.log is not None:
        print(f"grounding: held-out error {error:.2f} cm over {len(test)} scenes", flush=True)
    if error > max_error_cm:
        raise RuntimeError(f"held-out error is {error:.2f} cm, the bar is {max_error_cm} cm")
    return {"held_out_error_cm": error}


def train_cloning(
    run: Run,
    *,
    make_policy: Callable[..., nn.Module],
    objective: Callable[[nn.Module], Any],
    seed: int,
    demonstrations_per_task: int | None,
    noise: float | None,
    epochs: int,
    batch_size: int,
    lr: float,
    warm_up: int,
    trainable: str,
    dataset: Callable[[SuiteMeta], list[Episode]] | None = None,
    resume: bool = False,
) -> dict[str, float]:
    """Clone the scripted expert, or a data set, from the policy's current weights.

    Args:
        run: the run.
        make_policy: builds the policy.
        objective: builds the objective on the policy.
        seed: seed of initialisation, noise and draws.
        demonstrations_per_task: episodes per kind of task (first word of the instruction).
        noise: action noise of the recorded expert.
        epochs: passes over the samples.
        batch_size: samples per update on this rank.
        lr: learning rate at its peak.
        warm_up: updates of linear warm-up.
        trainable: ``"all"``, or ``"head"`` for the actor (Gaussian, flow) on a frozen trunk.
        dataset: reads recorded episodes; the two settings of the expert must then be ``None``.
        resume: continue from the folder's last checkpoint.

    The start, and every ``evaluation.every_minutes``, is evaluated as the end is.

    Returns:
        The metrics of the last evaluation; none if the run was asked to stop before its end.

    Raises:
        ValueError: both a data set and settings of the expert, or neither; unknown ``trainable``.
    """
    torch.manual_seed(seed)
    episodes = _episodes(run, dataset, demonstrations_per_task, noise, seed)
    samples = demonstrations.cloning_samples(episodes, run.chunk_size)
    with without_weights():
        policy = make_policy(run.suite.meta)
    evaluated = make_policy(run.suite.meta)
    groups, sharded = _trained(run, policy, trainable, lr)
    if trainable == "all":
        _normalise_state(policy.model.model, samples)
    if trainable == "head":
        encode = features_on_host(policy, run.topology)
        samples["features"] = torch.cat([encode(part) for part in samples.split(ENCODED_ROWS)])
    updates = epochs * (len(samples) // batch_size)
    schedule = warm_up_and_decay(updates, warm_up)
    learner = Learner(objective(policy), groups, run.topology, sharded=sharded, schedule=schedule)
    draws = Draws(batch_size, 1 + run.topology.rank)
    stage = Stage(run, policy, evaluated, learner, draws, updates)
    stage.begin(resume)

    def look(*, final: bool = False) -> dict[str, float]:
        stage.copy()
        return run.evaluate(evaluated, final=final)

    if not run.history:
        run.record(look(final=True))
    stage.fit(lambda draws: samples[draws.shuffled(len(samples))], look)
    if run.interrupted:
        return {}
    stage.export({"stage": "bc", "trainable": trainable, "seed": seed, "episodes": len(episodes)})
    metrics = run.evaluate(evaluated, final=True)
    run.counters["updates"] += 1
    run.record(metrics)
    stage.save(last=True)
    run.finish(evaluated)
    return metrics


def _trained(
    run: Run, policy: nn.Module, trainable: str, lr: float
) -> tuple[list[ParameterGroup], list[nn.Module]]:
    """Return what is trained and what is sharded; freezes what cloning never reads."""
    make = partial(ParameterGroup, lr=lr, max_grad_norm=1.0, weight_decay=0.01)
    if trainable == "head":
        place(policy, run.topology, sharded=False)
        return [make("head", [p for p in policy.actor.parameters() if p.requires_grad])], []
    if trainable != "all":
        raise ValueError(f"algo.trainable is {trainable!r}; use 'all' or 'head'")
    model, idle = policy.model.model, (*policy.idle, "value_head")
    for name, parameter in model.named_parameters():
        if name.startswith(idle):
            parameter.requires_grad_(False)
    place(policy, run.topology)
    sharded = [p for p in model.parameters() if p.requires_grad]
    inside = {id(p) for p in model.parameters()}
    head = [p for p in policy.parameters() if p.requires_grad and id(p) not in inside]
    # An optimizer's kernels take either sharded or whole parameters.
    groups = [make("policy", sharded)] if sharded else []
    return groups + ([make("head", head)] if head else []), [model]


def _normalise_state(model: nn.Module, samples: TensorDict) -> None:
    """Take the state's mean and spread from ``samples``, if the model has none of its own yet."""
    if hasattr(model, "state_mean") and bool((model.state_std == 1).all()):
        model.state_mean.copy_(samples[schema.STATE].mean(0))
        model.state_std.copy_(samples[schema.STATE].std(0).clamp_min(1e-3))


def _episodes(
    run: Run,
    dataset: Callable[[SuiteMeta], list[Episode]] | None,
    per_task: int | None,
    noise: float | None,
    seed: int,
) -> list[Episode]:
    expert = {"demonstrations_per_task": per_task, "noise": noise}
    wrong = [name for name, value in expert.items() if (value is None) == (dataset is None)]
    if wrong:
        raise ValueError(
            f"{', '.join(f'{name}={expert[name]}' for name in wrong)} with "
            f"{'no' if dataset is None else 'a'} data set: they are settings of the scripted "
            "expert; give numbers, or null together with algo.dataset"
        )
    if dataset is not None:
        return dataset(run.suite.meta)
    ids = balanced_ids(run, per_task)
    return demonstrations.record(run.suite.simulators(1), ids, noise=noise, seed=seed)


def balanced_ids(run: Run, per_kind: int) -> list[int]:
    """Return demonstration ids with ``per_kind`` episodes of each first word of the instruction."""
    simulators = run.suite.simulators(1)
    counts: dict[str, int] = {}
    kinds = {text.split()[0] for text in run.suite.meta.instructions}
    ids: list[int] = []
    for init_state_id in run.suite.splits["demo"]:
        simulators.reset(0, init_state_id)
        kind = run.suite.meta.instructions[simulators.task_id(0)].split()[0]
        if counts.get(kind, 0) < per_kind:
            counts[kind] = counts.get(kind, 0) + 1
            ids.append(init_state_id)
        if len(ids) == per_kind * len(kinds):
            return ids
    raise RuntimeError("the demonstration split ran out of initial states")
