"""Evaluation is the same to the bit for any number of simulators and ranks, and a second time.

One tiny policy, one list of initial states, run in several ways; every row hashes all episodes with
every action and proprioceptive state (``EpisodeResult.trace``). Exit code 1 if two hashes differ.

    OMP_NUM_THREADS=1 python benchmarks/evaluation.py --only tabletop
    OMP_NUM_THREADS=1 build/venvs/metaworld/bin/python benchmarks/evaluation.py --only metaworld

Run by torchrun (``--rank-out``), this file is also the program of the two ranks.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from torchrl_vla import topology
from torchrl_vla.envs.simulator import Suite
from torchrl_vla.evaluate import as_rows, fingerprint, run_on_ranks
from torchrl_vla.policies.tiny import make_policy

CHUNK, RANK_ENVS = 4, 4
WAYS = ((1, "first run"), (4, "first run"), (10, "first run"), (4, "second run"))
"""Simulators side by side in one process."""


def tabletop() -> tuple[Suite, str | None]:
    """Return our own suite and the shipped weights."""
    from torchrl_vla.envs.tabletop import TabletopSuite

    return TabletopSuite(), "shipped"


def metaworld() -> tuple[Suite, str | None]:
    """Return two Meta-World tasks in turn, short episodes, and fresh weights."""
    from torchrl_vla.envs.metaworld import MetaWorldSuite

    return MetaWorldSuite(["reach-v3", "drawer-open-v3"], image_size=64, max_steps=60), None


SUITES = {"tabletop": tabletop, "metaworld": metaworld}


def evaluate(
    name: str, num_envs: int, args: argparse.Namespace, ranks: topology.Topology
) -> dict[str, object]:
    """Evaluate once; return successes, control steps, the hash of all episodes and seconds."""
    suite, weights = SUITES[name]()
    torch.manual_seed(0)
    policy = make_policy(suite.meta, weights=weights, chunk_size=CHUNK, eval_decode=args.decode)
    simulators = suite.simulators(num_envs)
    first = suite.splits["eval"].start
    ids = range(first, first + args.episodes)
    started = time.perf_counter()
    results = run_on_ranks(policy, simulators, ids, ranks, chunk_size=CHUNK)
    seconds = time.perf_counter() - started
    simulators.close()
    text = json.dumps(as_rows(results))
    return {
        "successes": sum(result.success for result in results),
        "env_steps": sum(result.env_steps for result in results),
        "sha256": hashlib.sha256(text.encode()).hexdigest()[:16],
        "seconds": seconds,
    }


def on_two_ranks(name: str, args: argparse.Namespace) -> dict[str, object]:
    """Evaluate in two new processes; return what rank 0 found."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rank-0.json"
        program = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__)
        settings = ("--only", name, "--episodes", str(args.episodes), "--decode", args.decode)
        subprocess.run(
            [sys.executable, *program, *settings, "--rank-out", str(out)],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            check=True,
        )
        return json.loads(out.read_text())


def main() -> None:
    """Evaluate in every way and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=SUITES, default=["tabletop"])
    parser.add_argument("--episodes", type=int, default=24)
    parser.add_argument("--decode", choices=("mean", "argmax", "sample"), default="mean")
    parser.add_argument("--out", type=Path, default=None, help="write the result here as JSON")
    parser.add_argument("--rank-out", type=Path, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    ranks = topology.start("cpu")
    if args.rank_out is not None:
        found = evaluate(args.only[0], RANK_ENVS, args, ranks)
        if ranks.is_main:
            args.rank_out.write_text(json.dumps(found))
        ranks.stop()
        return
    rows = []
    print(f"{'suite':<10} {'ranks':>5} {'simulators':>10} {'run':>11}  successes  steps  sha256")
    for name in args.only:
        ways = [(1, n, run, lambda n=n, s=name: evaluate(s, n, args, ranks)) for n, run in WAYS]
        ways.append((2, RANK_ENVS, "first run", lambda s=name: on_two_ranks(s, args)))
        for count, num_envs, run, action in ways:
            row = {"suite": name, "ranks": count, "simulators": num_envs, "run": run, **action()}
            rows.append(row)
            print(
                f"{name:<10} {count:>5} {num_envs:>10} {run:>11}  {row['successes']:>9}  "
                f"{row['env_steps']:>5}  {row['sha256']}",
                flush=True,
            )
    ranks.stop()
    different = [n for n in args.only if len({r["sha256"] for r in rows if r["suite"] == n}) > 1]
    print(f"differs: {', '.join(different)}" if different else "all equal, to the bit")
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        settings = {"episodes": args.episodes, "decode": args.decode, "chunk": CHUNK}
        result = {"rows": rows, "settings": settings, "versions": fingerprint()}
        args.out.write_text(json.dumps(result, indent=1))
    sys.exit(1 if different else 0)


if __name__ == "__main__":
    main()
