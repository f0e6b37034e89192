"""Evaluation on two ranks gives what one gives, and no rank waits for one that failed.

Run by torchrun (``__main__`` below), this file is also the program of the ranks.
"""

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
from programs import torchrun

from torchrl_vla.envs.tabletop import TabletopSuite
from torchrl_vla.evaluate import as_rows, run_episodes, run_on_ranks
from torchrl_vla.policies.tiny import make_policy
from torchrl_vla.topology import start

SUITE = TabletopSuite()
FIRST = SUITE.splits["eval"].start
IDS = range(FIRST, FIRST + 5)


class Failing(torch.nn.Module):
    def forward(self, td):
        raise ArithmeticError("a policy that fails")


def ranks_main(out: Path) -> None:
    t = start("cpu", timeout=timedelta(seconds=120))
    policy, simulators = make_policy(SUITE.meta, eval_decode="sample"), SUITE.simulators(2)
    facts = {
        "whole": as_rows(run_on_ranks(policy, simulators, IDS, t, chunk_size=4, seed=3)),
        # one state for two ranks: the second has nothing to do
        "one": as_rows(run_on_ranks(policy, simulators, IDS[:1], t, chunk_size=4, seed=3)),
    }
    try:
        run_on_ranks(policy if t.rank else Failing(), simulators, IDS, t, chunk_size=4)
    except (ArithmeticError, RuntimeError) as error:
        facts["failure"] = f"{type(error).__name__}: {error}"
    (out / f"{t.rank}.json").write_text(json.dumps(facts))
    t.stop()


def test_two_ranks_find_what_one_finds(tmp_path: Path):
    torchrun(__file__, tmp_path)
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    policy = make_policy(SUITE.meta, eval_decode="sample")
    alone = as_rows(run_episodes(policy, SUITE.simulators(3), IDS, chunk_size=4, seed=3))
    assert [row["init_state_id"] for row in alone] == list(IDS)
    for rank in ranks:
        assert rank["whole"] == alone
        assert rank["one"] == alone[:1]
    assert ranks[0]["failure"] == "ArithmeticError: a policy that fails"
    assert ranks[1]["failure"].startswith("RuntimeError: other ranks failed: {0: 'ArithmeticError")


if __name__ == "__main__":
    ranks_main(Path(sys.argv[1]))
