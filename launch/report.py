"""Draw the curve and write the page of run folders: ``python launch/report.py RUN_DIR ...``.

A run writes them at its end by itself; this is for one that still trains, or was killed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from torchrl_vla.report import write_page


def main(arguments: list[str] | None = None) -> None:
    """Write ``success.png`` and ``index.html`` into every folder and print where they are."""
    parser = argparse.ArgumentParser(description="Write success.png and index.html of runs.")
    parser.add_argument("run_dir", nargs="+", type=Path, help="folder of a run")
    for folder in parser.parse_args(arguments).run_dir:
        try:
            print(write_page(folder))
        except (FileNotFoundError, KeyError, ValueError) as error:
            sys.exit(f"{folder}: {error}")


if __name__ == "__main__":
    main()
