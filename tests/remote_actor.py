"""What an actor process does in tests: counters instead of physics, a policy of two numbers."""

import json
import traceback
from functools import partial
from pathlib import Path

from envs.counter import CounterSuite
from steer import Steer

from torchrl_vla.remote import serve


def build(description):
    if "small" in description:
        from small import POLICY, SUITE  # beside the tests of the loops

        return SUITE, partial(POLICY, SUITE.meta, head="gaussian")
    return CounterSuite(lengths=tuple(description["lengths"])), Steer


def run(address, secret: bytes, name: str, report: Path) -> None:
    """Serve; leaves what it delivered, or why it failed, in ``report``."""
    try:
        rows, lost = serve(address, secret, name, build)
        said = {"rows": rows, "lost": lost}
    except Exception as error:
        traceback.print_exc()
        said = {"error": f"{type(error).__name__}: {error}"}
    report.write_text(json.dumps(said))
