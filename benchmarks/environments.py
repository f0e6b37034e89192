"""What a decision costs per environment, part by part; and our renderer against the packages' own.

One simulator, a tiny policy with fresh weights, H = 4, 128-pixel pictures (two cameras in LIBERO).
Every environment's own package is needed, and their MuJoCo versions exclude each other, so run it
once per environment (``make test-all`` leaves one virtual environment for each):

    OMP_NUM_THREADS=1 python benchmarks/environments.py --only tabletop arm
    OMP_NUM_THREADS=1 build/venvs/metaworld/bin/python benchmarks/environments.py --only metaworld
    OMP_NUM_THREADS=1 build/venvs/libero/bin/python benchmarks/environments.py --only libero

``--clock cpu`` counts the process's own time, which a busy machine does not disturb (rendering on a
GPU is not in it).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import numpy as np
import torch
from side_by_side import Ratio, Sample, command_line, machine, report, take_turns
from tensordict import TensorDict

from torchrl_vla import schema
from torchrl_vla.envs.simulator import Simulators, StepOutcome, Suite
from torchrl_vla.policies.tiny import make_policy

CHUNK, SIZE = 4, 128
PICTURED = "control steps/s, a picture each"
RATIOS = (
    Ratio(
        "Meta-World: our renderer / its own", "metaworld", ["metaworld, its own"], PICTURED, 5, True
    ),
    # What LIBERO claims is a speed, 5 control steps/s with two pictures each on an idle core.
    Ratio(
        "LIBERO: our renderer / robosuite's", "libero", ["libero, its own"], PICTURED, None, True
    ),
)
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def tabletop() -> Suite:
    """Return our own suite."""
    from torchrl_vla.envs.tabletop import TabletopSuite

    return TabletopSuite(image_size=SIZE)


def arm() -> Suite:
    """Return our own suite with the 7-DoF arm."""
    from torchrl_vla.envs.tabletop import TabletopSuite

    return TabletopSuite(image_size=SIZE, embodiment="arm")


def metaworld() -> Suite:
    """Return a Meta-World task of usual size."""
    from torchrl_vla.envs.metaworld import MetaWorldSuite

    return MetaWorldSuite("drawer-open-v3", image_size=SIZE)


def libero() -> Suite:
    """Return a LIBERO task of usual size."""
    from torchrl_vla.envs.libero import LiberoSuite

    return LiberoSuite("libero_goal", [7], image_size=SIZE)


SUITES = {"tabletop": tabletop, "arm": arm, "metaworld": metaworld, "libero": libero}


def metaworld_picture(sims: Simulators, stack: ExitStack) -> Callable[[], object]:
    """Return what draws Meta-World's scene as the package does."""
    from metaworld.env_dict import ALL_V3_ENVIRONMENTS

    env = ALL_V3_ENVIRONMENTS["drawer-open-v3"](
        render_mode="rgb_array", camera_name="corner4", width=SIZE, height=SIZE
    )
    env._set_task_called, env._freeze_rand_vec = True, False
    env.reset()
    env.render()
    stack.callback(env.close)

    def draw() -> None:
        env.mujoco_renderer.viewer.make_context_current()  # ours was; the package does not ask
        env.render()

    return draw


def libero_picture(sims: Simulators, stack: ExitStack) -> Callable[[], object]:
    """Return what draws LIBERO's scene as robosuite does: both cameras."""
    from mujoco.egl import GLContext
    from robosuite.utils import binding_utils

    # Our import of robosuite leaves its backend out; two EGL displays in a process do not get on.
    binding_utils.GLContext = lambda max_width, max_height, device_id: GLContext(SIZE, SIZE)
    sim = sims._scene(0).env.sim
    context = binding_utils.MjRenderContextOffscreen(sim, device_id=0)
    context.vopt.geomgroup[0] = 0
    stack.callback(context.gl_ctx.free)  # while there is a display to free it of

    def draw() -> None:
        context.gl_ctx.make_current()  # ours was; robosuite does not ask
        for name in sims.meta.cameras:
            sim.render(width=SIZE, height=SIZE, camera_name=name)

    return draw


THEIRS = {"metaworld": metaworld_picture, "libero": libero_picture}


def _ended(outcome: StepOutcome) -> bool:
    return outcome.terminated or outcome.truncated


def decisions(sims: Simulators, count: int, clock: Callable[[], float]) -> Sample:
    """Run ``count`` decisions; return milliseconds and shares of their parts."""
    policy = make_policy(sims.meta, weights=None, chunk_size=CHUNK)
    sims.reset(0, 0)
    sims.render(0)
    seconds = dict.fromkeys(("policy", "physics", "pictures"), 0.0)
    for _ in range(count):
        td = TensorDict(batch_size=[1])
        started = clock()
        td[schema.IMAGE] = torch.from_numpy(sims.render(0)[None])
        td[schema.STATE] = torch.from_numpy(sims.state(0)[None])
        td[schema.TASK_ID] = torch.tensor([[sims.task_id(0)]])
        drawn = clock()
        with torch.no_grad():
            chunk = policy(td)[schema.CHUNK][0].numpy()
        decided = clock()
        if any(map(_ended, (sims.step(0, action) for action in chunk))):
            sims.reset(0, 0)
        seconds["pictures"] += drawn - started
        seconds["policy"] += decided - drawn
        seconds["physics"] += clock() - decided
    whole = sum(seconds.values())
    shares = {f"{name} %": 100 * value / whole for name, value in seconds.items()}
    per_step = seconds["physics"] / CHUNK + seconds["pictures"]
    return {
        "decisions/s": count / whole,
        "control steps/s": count * CHUNK / whole,
        PICTURED: count / per_step,
        **shares,
    }


def their_pictures(
    sims: Simulators, draw: Callable[[], object], count: int, clock: Callable[[], float]
) -> Sample:
    """Step and draw as the package does, ``count`` times."""
    rng = np.random.default_rng(0)
    sims.reset(0, 0)
    started = clock()
    for _ in range(count):
        if _ended(sims.step(0, rng.uniform(-1, 1, sims.meta.action_dim).astype(np.float32))):
            sims.reset(0, 0)
        draw()
    return {PICTURED: count / (clock() - started)}


def main() -> None:
    """Measure and report."""
    parser = command_line(__doc__.splitlines()[0], turns=3)
    parser.add_argument("--only", nargs="+", choices=SUITES, default=["tabletop"])
    parser.add_argument("--decisions", type=int, default=20, help="per turn and environment")
    parser.add_argument("--theirs", type=int, default=3, help="pictures of theirs per turn; slow")
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    args = parser.parse_args()
    torch.set_num_threads(1)
    conditions = machine()
    clock = CLOCKS[args.clock]
    variants, stack = {}, ExitStack()
    for name in args.only:
        print(f"starting {name}", flush=True)
        sims = SUITES[name]().simulators(1)
        variants[name] = partial(decisions, sims, args.decisions, clock)
        if name in THEIRS:
            sims.reset(0, 0)
            draw = THEIRS[name](
                sims, stack
            )  # before ours lowers the quality that the scene asks for
            draw()
            variants[f"{name}, its own"] = partial(their_pictures, sims, draw, args.theirs, clock)
    with stack:
        samples = take_turns(variants, args.turns)
    settings = {"decisions": args.decisions, "clock": args.clock, "chunk": CHUNK, "pixels": SIZE}
    report("environments", samples, RATIOS, settings=settings, conditions=conditions, out=args.out)


if __name__ == "__main__":
    main()
