"""Compare two evaluations case by case: ``python launch/compare.py A.json B.json``.

The files are those of ``launch/evaluate.py out=...``, of one evaluation list. Prints the success
rates, McNemar's exact test, the cases that only one of the two solved, and what else differs.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from torchrl_vla.evaluate.comparison import Comparison, compare


def print_comparison(result: Comparison, names: tuple[str, str], out: Console) -> None:
    """Print the counts, the test and the pairs."""
    rates = Table(title=f"{result.cases} cases, paired")
    for name in ("", "A", "B"):
        rates.add_column(name, justify="left" if not name else "right")
    rates.add_row("file", *names)
    rates.add_row("success", *(f"{100 * rate:.1f} %" for rate in result.rates))
    rates.add_row("solved by it alone", str(result.only_a), str(result.only_b))
    rates.add_row("solved by both", str(result.both), str(result.both))
    out.print(rates)
    low, high = (100 * bound for bound in result.interval)
    out.print(
        f"B - A: {100 * result.difference:+.1f} points, 95 % interval {low:+.1f} to {high:+.1f}; "
        f"McNemar's exact test p = {result.p_value:.4f}",
        soft_wrap=True,
    )
    if result.pairs:
        pairs = Table(title="cases that only one solved")
        for name in ("initial state", "seed", "task", "A", "B"):
            pairs.add_column(name, justify="right")
        for pair in result.pairs:
            pairs.add_row(*(str(pair[key]) for key in pair))
        out.print(pairs)
    for line in result.environment:
        out.print(f"differs: {line}", highlight=False, markup=False, soft_wrap=True)


def main(arguments: list[str] | None = None) -> None:
    """Read, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("a", type=Path, help="result of launch/evaluate.py")
    parser.add_argument("b", type=Path, help="result of another policy on the same list")
    args = parser.parse_args(arguments)
    try:
        result = compare(*(json.loads(path.read_text()) for path in (args.a, args.b)))
    except (OSError, ValueError) as error:
        sys.exit(f"cannot compare {args.a} and {args.b}: {error}")
    print_comparison(result, (str(args.a), str(args.b)), Console())


if __name__ == "__main__":
    main()
