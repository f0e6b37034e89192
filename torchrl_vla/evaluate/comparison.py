"""Paired comparison of two evaluations of one list: McNemar's exact test, with the pairs.

Both policies met the same initial states, so only the cases that one solved and the other did not
say anything about their difference. Comparing the two intervals instead would throw that away.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

LIST_KEYS = ("version", "suite", "max_steps", "cases", "sha256")


@dataclass(frozen=True)
class Comparison:
    """What two evaluations of one list say about each other."""

    cases: int
    both: int
    """Cases that both solved."""
    only_a: int
    only_b: int
    p_value: float
    """Two-sided, McNemar's exact test: the chance of so uneven a split if neither is better."""
    interval: tuple[float, float]
    """95 % interval of B's success rate minus A's."""
    pairs: tuple[dict[str, Any], ...]
    """The cases that differ: ``init_state_id``, ``seed``, ``task_id``, outcomes ``a`` and ``b``."""
    environment: tuple[str, ...]
    """What the two ran on and with, where it differs: ``"name: in A, in B"``."""

    @property
    def rates(self) -> tuple[float, float]:
        """Success rates of A and B."""
        return (self.both + self.only_a) / self.cases, (self.both + self.only_b) / self.cases

    @property
    def difference(self) -> float:
        """B's success rate minus A's."""
        return (self.only_b - self.only_a) / self.cases


def mcnemar_exact(only_a: int, only_b: int) -> float:
    """Return the two-sided p value of McNemar's exact test.

    Under the null hypothesis each of the ``n = only_a + only_b`` discordant cases falls to either
    side with probability 1/2, so ``p = min(1, 2 P(X <= min(only_a, only_b)))``, ``X ~ B(n, 1/2)``.

    Source: Q. McNemar, "Note on the sampling error of the difference between correlated proportions
    or percentages", Psychometrika 12 (1947) 153-157; the binomial instead of its approximation.

    Raises:
        ValueError: a negative count.
    """
    if only_a < 0 or only_b < 0:
        raise ValueError(f"counts are {only_a} and {only_b}; they must be at least 0")
    n = only_a + only_b
    tail = sum(math.comb(n, k) for k in range(min(only_a, only_b) + 1))
    return min(1.0, 2 * tail / 2**n)


def paired_interval(
    only_a: int, only_b: int, cases: int, confidence: float = 0.95
) -> tuple[float, float]:
    """Return the interval of B's rate minus A's, from matched pairs.

    The Wald interval after half a case is added to each of the four cells, so that it does not
    collapse where the two agree.

    Source: A. Agresti, Y. Min, "Simple improved confidence intervals for comparing matched
    proportions", Statistics in Medicine 24 (2005) 729-740.
    """
    b, c, n = only_a + 0.5, only_b + 0.5, cases + 2
    middle = (c - b) / n
    half = NormalDist().inv_cdf((1 + confidence) / 2) * math.sqrt(b + c - (c - b) ** 2 / n) / n
    return max(-1.0, middle - half), min(1.0, middle + half)


def compare(a: Mapping[str, Any], b: Mapping[str, Any]) -> Comparison:
    """Compare two result files of ``launch/evaluate.py``, case by case.

    Raises:
        ValueError: a file names no evaluation list, or the two are about different lists.
    """
    _check_lists(a, b)
    mine, other = _by_case(a["results"]), _by_case(b["results"])
    if mine.keys() != other.keys():
        raise ValueError(
            "the two files say that they are about one list, but their cases differ; one of them "
            "was edited: evaluate again"
        )
    pairs = [
        {
            "init_state_id": case[0],
            "seed": case[1],
            "task_id": mine[case]["task_id"],
            "a": mine[case]["outcome"],
            "b": other[case]["outcome"],
        }
        for case in mine
        if mine[case]["success"] != other[case]["success"]
    ]
    both = sum(bool(mine[case]["success"] and other[case]["success"]) for case in mine)
    only_a = sum(pair["a"] == "success" for pair in pairs)
    only_b = len(pairs) - only_a
    return Comparison(
        cases=len(mine),
        both=both,
        only_a=only_a,
        only_b=only_b,
        p_value=mcnemar_exact(only_a, only_b),
        interval=paired_interval(only_a, only_b, len(mine)),
        pairs=tuple(pairs),
        environment=tuple(_differences(a, b)),
    )


def _check_lists(a: Mapping[str, Any], b: Mapping[str, Any]) -> None:
    for name, file in (("A", a), ("B", b)):
        if "list" not in file or "results" not in file:
            raise ValueError(
                f"file {name} names no evaluation list; write it with launch/evaluate.py out=..."
            )
    differing = [
        f"{key} {a['list'].get(key)} in A and {b['list'].get(key)} in B"
        for key in LIST_KEYS
        if a["list"].get(key) != b["list"].get(key)
    ]
    if differing:
        raise ValueError(
            f"the files are about different evaluation lists: {'; '.join(differing)}. Rates of "
            "different episodes cannot be paired: evaluate both with equal env, episodes, "
            "first_state and seeds"
        )


def _by_case(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[int, int], Mapping[str, Any]]:
    return {(row["init_state_id"], row["seed"]): row for row in rows}


def _differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """What differs in versions, environment, policy and settings."""
    found = []
    # Older files say what the policy is under "environment".
    for parts in (("versions",), ("environment", "policy"), ("settings",)):
        one, two = (
            {name: value for part in parts for name, value in file.get(part, {}).items()}
            for file in (a, b)
        )
        found += [
            f"{name}: {one.get(name)}, {two.get(name)}"
            for name in sorted({*one, *two})
            if one.get(name) != two.get(name)
        ]
    return found
