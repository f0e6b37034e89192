"""Paired comparison of two evaluations: McNemar by hand, the pairs, and lists that do not match."""

import json
from dataclasses import replace

import pytest
from envs.counter import META
from programs import program

from torchrl_vla.evaluate import EpisodeResult, as_rows, compare, list_of
from torchrl_vla.evaluate.comparison import mcnemar_exact, paired_interval


def report(solved: str, *, meta=META, first=100, seed=0, **more):
    """A report with one case per letter of ``solved``: "x" is a success."""
    results = [
        EpisodeResult(first + i, i % 3, c == "x", "success" if c == "x" else "time out", 4, seed)
        for i, c in enumerate(solved)
    ]
    return {"list": list_of(results, meta), "results": as_rows(results), **more}


@pytest.mark.parametrize(
    ("only_a", "only_b", "p"),
    [
        (0, 0, 1.0),
        (3, 3, 1.0),
        (1, 5, 14 / 64),  # 2 (1 + 6) / 2^6
        (5, 1, 14 / 64),
        (0, 10, 2 / 1024),
        (2, 9, 2 * (1 + 11 + 55) / 2048),
    ],
)
def test_mcnemar_by_hand(only_a: int, only_b: int, p: float):
    assert mcnemar_exact(only_a, only_b) == pytest.approx(p, abs=1e-12)


def test_negative_counts_are_refused():
    with pytest.raises(ValueError, match="-1 and 2"):
        mcnemar_exact(-1, 2)


def test_the_interval_by_hand():
    # b = 1.5, c = 5.5, n = 22: middle 4 / 22, half 1.95996 sqrt(7 - 16 / 22) / 22 = 0.22313
    assert paired_interval(1, 5, 20) == pytest.approx((-0.04131, 0.40495), abs=1e-4)
    low, high = paired_interval(0, 0, 20)
    assert low == pytest.approx(-high)
    assert high > 0.05  # two that agree 20 times need not be equal


def test_pairs_counts_and_rates():
    a, b = report("xx..x."), report("x.xx..")
    found = compare(a, b)
    assert (found.cases, found.both, found.only_a, found.only_b) == (6, 1, 2, 2)
    assert found.rates == (0.5, 0.5)
    assert found.difference == 0.0
    assert found.p_value == 1.0
    assert [(pair["init_state_id"], pair["a"], pair["b"]) for pair in found.pairs] == [
        (101, "success", "time out"),
        (102, "time out", "success"),
        (103, "time out", "success"),
        (104, "success", "time out"),
    ]
    other = compare(b, a)
    assert (other.only_a, other.only_b, other.p_value) == (2, 2, 1.0)
    better = compare(report("......"), report("xxxxxx"))
    assert (better.difference, better.p_value) == (1.0, 2 / 64)
    assert better.interval[0] > 0


def test_the_order_of_the_cases_does_not_matter():
    a, b = report("xx..x."), report("x.xx..")
    b["results"] = b["results"][::-1]
    assert compare(a, b) == compare(a, report("x.xx.."))


def test_differences_of_the_environment_are_listed():
    a = report("x", versions={"torch": "1", "gl": "egl"}, environment={"renderer": "one"})
    b = report("x", versions={"torch": "2", "gl": "egl"}, environment={"renderer": "two"})
    assert compare(a, b).environment == ("torch: 1, 2", "renderer: one, two")


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (report("xx"), "cases 3 in A and 2 in B"),
        (report("xxx", first=101), "sha256 .* in A and .* in B"),
        (report("xxx", seed=1), "sha256"),
        (report("xxx", meta=replace(META, name="other")), "suite counter in A and other in B"),
        (report("xxx", meta=replace(META, max_steps=13)), "max_steps 12 in A and 13 in B"),
        (report("xxx", meta=replace(META, instructions=("a", "b", "c"))), "sha256"),
        ({"results": []}, "file B names no evaluation list; write it with launch/evaluate.py"),
    ],
)
def test_different_lists_are_refused(other, message: str):
    with pytest.raises(ValueError, match=message):
        compare(report("x.x"), other)


def test_an_edited_file_is_refused():
    edited = report("x.x")
    edited["results"] = edited["results"][:2]
    with pytest.raises(ValueError, match="one of them was edited"):
        compare(report("x.x"), edited)


def test_the_program_prints_the_test_and_the_pairs(tmp_path, capsys):
    comparison = program("compare")
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, solved in zip(files, ("xx....", "xxxxx."), strict=True):
        path.write_text(json.dumps(report(solved)))
    comparison.main([str(path) for path in files])
    shown = capsys.readouterr().out
    assert "33.3 %" in shown
    assert "83.3 %" in shown
    assert "p = 0.2500" in shown  # 2 / 2^3
    assert all(str(case) in shown for case in (102, 103, 104))
    files[1].write_text(json.dumps(report("xx")))
    with pytest.raises(SystemExit, match=r"b\.json: the files are about different evaluation"):
        comparison.main([str(path) for path in files])


def test_what_differs_in_the_policy_is_named_wherever_a_file_says_it():
    facts = {"attention": "causal", "precision": "float32"}
    old = report("x", environment={"renderer": "r", "cameras": ["a"], **facts})
    new = report("x", environment={"renderer": "r", "cameras": ["a"]}, policy=facts)
    assert compare(old, new).environment == ()
    other = report("x", environment={"renderer": "r"}, policy=facts | {"attention": "full"})
    assert compare(new, other).environment == (
        "attention: causal, full",
        "cameras: ['a'], None",
    )
