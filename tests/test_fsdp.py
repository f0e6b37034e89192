"""FSDP2 and HSDP do what one process does: gradients and three updates, PPO and SAC, two policies.

``python tests/test_fsdp.py`` prints the table of differences (``make fsdp-table``).
"""

import json
import tempfile
from collections.abc import Callable, Iterable
from functools import cache, partial
from pathlib import Path
from typing import Any

import fsdp_cases
import pytest
import torch
from fsdp_cases import ALONE, CASES, VARIANTS, build, run_case
from programs import torchrun
from safetensors.torch import load_file
from torch import Tensor

from torchrl_vla import topology as topo
from torchrl_vla.policies import openvla, pi0, tiny, vlm
from torchrl_vla.policies.deferred import place

PROGRAM = fsdp_cases.__file__
LAYOUTS = {"2": (2, 1), "4": (4, 1), "2x2": (4, 2)}
"""Ranks, and copies of the parameters."""
QUICK = ("together",)
"""What the default suite runs on two ranks; bfloat16 it compares on a mesh of one."""
MATRIX = [
    pytest.param(
        layout, variant, marks=() if layout == "2" and variant in QUICK else pytest.mark.slow
    )
    for layout in LAYOUTS
    for variant in VARIANTS
]
LIMITS = {"bfloat16": (2e-2, 1.5e-3)}
"""Relative errors allowed in gradients and weights; 1e-6 if not named. Partial sums of a gradient
are rounded to bfloat16 (2^-9) before they meet in float32; four ranks on a CPU without bfloat16
arithmetic differ by 1.3e-3 in the weights."""


@cache
def reference(case: str, variant: str) -> dict[str, Tensor]:
    # They must change nothing. Micro-batches stay: kernels for few rows round otherwise (1.1e-6 in
    # one process, on a CPU with AVX2), and test_learner.py compares any split with the whole.
    parallel = ("recompute", "offload")
    return run_case(
        case, ALONE, **{k: v for k, v in VARIANTS[variant].items() if k not in parallel}
    )  # fmt: skip


def train(ranks: int, folder: Path, variants: Iterable[str]) -> None:
    """Train every case on a number of ranks, in all layouts that there are for it."""
    copies = ",".join(str(n) for count, n in LAYOUTS.values() if count == ranks)
    torchrun(PROGRAM, folder, copies, ",".join(variants), ranks=ranks, timeout=900)


def results(layout: str, folder: Path) -> tuple[Path, dict]:
    own = folder / str(LAYOUTS[layout][1])
    return own, json.loads((own / "facts.json").read_text())


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory):
    @cache
    def once(ranks: int, variants: tuple[str, ...]) -> Path:
        folder = tmp_path_factory.mktemp(f"ranks{ranks}-")
        train(ranks, folder, variants)
        return folder

    def of(layout: str, variant: str) -> tuple[Path, dict]:
        ranks = LAYOUTS[layout][0]
        quick = ranks == 2 and variant in QUICK
        return results(layout, once(ranks, QUICK if quick else tuple(VARIANTS)))

    return of


def error(found: dict[str, Tensor], wanted: dict[str, Tensor], kind: str) -> float:
    """Return the largest relative error of a parameter group's gradients, or weights."""
    names = {name for name in wanted if name.startswith(f"{kind}/")}
    assert {name for name in found if name.startswith(f"{kind}/")} == names
    errors = []
    for group in {name.split(".")[0] for name in names}:
        own = [name for name in names if name.split(".")[0] == group]
        wrong = sum((found[name] - wanted[name]).double().square().sum() for name in own)
        errors.append((wrong / sum(wanted[name].double().square().sum() for name in own)).sqrt())
    return float(max(errors))


def check(found: dict[str, Tensor], case: str, variant: str) -> None:
    wanted = reference(case, variant)
    gradient, weights = LIMITS.get(variant, (1e-6, 1e-6))
    assert error(found, wanted, "grad") <= gradient
    assert error(found, wanted, "weights") <= weights
    # the comparison means something: every group has learned, much more than it may differ
    assert error(found, {k.replace("start/", "weights/"): v for k, v in wanted.items()
                         if k.startswith("start/")}, "weights") > 5 * weights  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("layout", "variant"), MATRIX)
def test_ranks_equal_one_process(trained, layout: str, case: str, variant: str):
    folder, facts = trained(layout, variant)
    check(load_file(folder / f"{case}-{variant}.safetensors"), case, variant)
    assert facts["same"][f"{case}/{variant}"]  # on every rank, bit for bit


@pytest.mark.parametrize(
    "layout", ["2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("4", "2x2"))]
)
def test_ranks_draw_different_noise_and_hold_equal_weights(trained, layout: str):
    _, facts = trained(layout, QUICK[0])
    ranks = LAYOUTS[layout][0]
    assert len(facts["weights"]) == ranks
    assert len(set(facts["weights"])) == 1
    assert len({tuple(action) for action in facts["actions"]}) == ranks
    assert f"{ranks} ranks on 1 nodes" in facts["layout"]


@pytest.mark.parametrize("variant", ["plain", "together", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_a_mesh_of_one_equals_plain_modules(one: topo.Topology, case: str, variant: str):
    check(run_case(case, one, **VARIANTS[variant]), case, variant)


@pytest.mark.parametrize("case", CASES)
def test_the_limit_of_clipping_bites(case: str):
    limit = VARIANTS["clipping"]["max_grad_norm"]
    found = reference(case, "clipping")
    assert found["norm/" + ("policy" if case.startswith("ppo") else "trunk")] > 10 * limit


def kept_bytes(ranks: topo.Topology, recompute: bool) -> int:
    """Return the bytes that one forward pass keeps for the backward pass."""
    _, learner, batches = build("ppo_llama", ranks, recompute=recompute)
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        totals = {k: v.float() for k, v in learner.objective.counts(batches[0]).items()}
        scalars = learner.objective(batches[0], totals)
    assert scalars["loss_policy"].requires_grad
    return sum(kept.values())


def test_recomputing_keeps_less(one: topo.Topology):
    assert kept_bytes(one, recompute=True) < 0.6 * kept_bytes(one, recompute=False)


@pytest.mark.parametrize(
    ("make", "refuses"),
    [
        (partial(tiny.make_policy, weights=None), False),
        (partial(openvla.make_policy, size="tiny", patch_size=16), False),
        (partial(vlm.make_policy, size="tiny", layer=1), False),
        (partial(pi0.make_policy, size="tiny"), True),
    ],
    ids=["tiny", "openvla", "vlm", "pi0"],
)
def test_every_family_recomputes_the_same_gradients_or_refuses(
    one: topo.Topology, make: Callable[..., Any], refuses: bool
):
    found = []
    for recompute in (False, True):
        torch.manual_seed(0)
        policy = make(fsdp_cases.META, chunk_size=fsdp_cases.STEPS)
        model = policy.model.model
        if recompute and refuses:
            with pytest.raises(ValueError, match=rf"layers of {type(model).__name__} may not run"):
                place(policy, one, recompute=True)
            return
        place(policy, one, recompute=recompute)
        rows = fsdp_cases.transitions(4, 0).exclude("next")
        out = policy.model(rows, ("features", "value"))
        (out["features"].square().mean() + out["value"].square().mean()).backward()
        grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        found.append({name: grad.full_tensor() for name, grad in grads.items()})
    assert len(found[0]) > 10
    for name, grad in found[0].items():
        torch.testing.assert_close(found[1][name], grad, rtol=1e-6, atol=1e-9, msg=name)


def test_a_rank_that_fails_brings_all_down_and_says_why_first():
    done = torchrun(PROGRAM, "raise", check=False)
    assert done.returncode != 0
    first = done.stderr.split("Traceback (most recent call last)")[1]
    assert "[rank1]: ZeroDivisionError: rank 1 divided by zero" in first


@pytest.mark.slow
def test_a_rank_that_hangs_is_noticed_in_time():
    # the timeout is 10 s; rank 0 says so, and torchrun ends the one that sleeps
    done = torchrun(PROGRAM, "hang", check=False)
    assert done.returncode != 0
    assert "Timed out waiting" in done.stderr


def table() -> None:
    """Print the largest relative error over parameter groups, of gradients and of weights."""
    columns = {"1": None, **LAYOUTS}
    found: dict[str, dict] = {name: {} for name in columns}
    for case in CASES:
        for variant in VARIANTS:
            reference(case, variant)
    ranks = topo.start("cpu")
    for case in CASES:
        for variant in VARIANTS:
            found["1"][case, variant] = run_case(case, ranks, **VARIANTS[variant])
    ranks.stop()
    with tempfile.TemporaryDirectory() as parent:
        for count in sorted({count for count, _ in LAYOUTS.values()}):
            folder = Path(parent) / str(count)
            folder.mkdir()
            train(count, folder, VARIANTS)
        for layout, (count, _) in LAYOUTS.items():
            own, _ = results(layout, Path(parent) / str(count))
            for case in CASES:
                for variant in VARIANTS:
                    found[layout][case, variant] = load_file(own / f"{case}-{variant}.safetensors")
    heads = "".join(f" | {name + (' rank' if name == '1' else ' ranks')}" for name in columns)
    print(f"| gradients, weights after 3 updates{heads} |\n|{' --- |' * (len(columns) + 1)}")
    for case in CASES:
        for variant in VARIANTS:
            wanted = reference(case, variant)
            cells = [
                f"{error(each[case, variant], wanted, 'grad'):.0e}, "
                f"{error(each[case, variant], wanted, 'weights'):.0e}"
                for each in found.values()
            ]
            print(f"| {case} {variant} | {' | '.join(cells)} |")


if __name__ == "__main__":
    table()
