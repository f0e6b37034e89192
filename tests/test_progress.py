"""The display on a terminal, in a log file and after a crash; the closing block."""

import io
import math
import re
import sys

import pytest
from rich.console import Console

from torchrl_vla import metrics
from torchrl_vla.progress import SHOWN, ProgressDisplay, summary

VALUES = {
    "update": 40,
    "train/success_rate": 0.615,
    "eval/success_rate": 0.8,
    "eval/success_low": 0.49,
    "eval/success_high": 0.943,
    "env_steps": 25_000,
    "rate/env_steps": 500.0,
    "rate/updates": 1.25,
    "episodes": 321,
    "wait/actors": 0.25,
    "wait/learner": 0.0,
    "memory/rss_gib": 1.234,
}


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def consoles(terminal):
    out = io.StringIO()
    return Console(file=out, force_terminal=terminal, width=80, color_system=None), out


def test_replaced_actors_are_shown_when_there_are_any():
    console, out = consoles(terminal=False)
    with ProgressDisplay(600, 100_000, True, console=console) as display:
        display.update(VALUES | {"actors/restarts": 0.0})
    assert "replaced" not in out.getvalue()
    console, out = consoles(terminal=False)
    with ProgressDisplay(600, 100_000, True, console=console) as display:
        display.update(VALUES | {"actors/restarts": 2.0})
    assert "actors replaced 2" in out.getvalue()


def test_the_names_shown_are_names_of_metrics():
    assert set(SHOWN) == set(metrics.NAMES)


def test_a_log_file_gets_one_plain_line_now_and_then():
    clock = Clock()
    console, out = consoles(terminal=False)
    with ProgressDisplay(600, 100_000, True, console=console, every=20, clock=clock) as display:
        for second in (30, 35, 49, 50, 60):
            clock.now = second
            display.update(VALUES)
        assert len(out.getvalue().splitlines()) == 2  # at 30 s and at 50 s
    lines = out.getvalue().splitlines()
    assert len(lines) == 3  # and the last numbers at the end
    assert "\x1b" not in out.getvalue()
    # 30 s: 30/600 = 5% of the time but 25000/100000 = 25% of the steps; the steps left need
    # 75000 / 500 = 150 s, the time left is 570 s: the steps end first
    assert lines[0].startswith("25%  0:30 elapsed, 2:30 left | ")
    for part in (
        "success, training 62%",
        "success, evaluation 80% [49%, 94%]",
        "env steps 25,000 (500/s)",
        "updates 40 (1.25/s)",
        "episodes 321",
        "waiting for actors 25%, learner 0%",
        "memory 1.23 GiB",
    ):
        assert part in lines[0]


def test_the_time_budget_leads_when_it_ends_first_and_never_passes_its_end():
    clock = Clock()
    console, out = consoles(terminal=False)
    display = ProgressDisplay(100, 100_000, True, console=console, every=1, clock=clock)
    with display:
        clock.now = 60
        display.update(VALUES)
        clock.now = 4000
        display.update(VALUES)
    lines = out.getvalue().splitlines()
    assert lines[0].startswith("60%  1:00 elapsed, 0:40 left")
    assert lines[1].startswith("100%  1:06:40 elapsed, 0:00 left")


def test_numbers_persist_and_missing_ones_are_dashes():
    console, out = consoles(terminal=False)
    with ProgressDisplay(None, None, True, console=console, every=0) as display:
        display.update({"eval/success_rate": 0.5, "loss": 3.0})
        display.update({"train/success_rate": math.nan, "rate/env_steps": math.inf})
    last = out.getvalue().splitlines()[-1]
    assert "no budget set" in last
    assert "success, training - " in last
    assert "success, evaluation 50% |" in last
    assert "env steps - (-/s)" in last
    assert "loss" not in last


def test_steps_without_a_rate_leave_the_end_open():
    console, out = consoles(terminal=False)
    with ProgressDisplay(None, 1000, True, console=console) as display:
        display.update({"env_steps": 0})
    assert out.getvalue().startswith("0%  0:00 elapsed, - left")


def test_a_disabled_display_prints_nothing():
    for terminal in (True, False):
        console, out = consoles(terminal)
        with ProgressDisplay(10, None, False, console=console, every=0) as display:
            display.update(VALUES)
        assert out.getvalue() == ""


def test_a_terminal_gets_one_block_that_fits_80_columns():
    clock = Clock()
    console, out = consoles(terminal=True)
    with ProgressDisplay(600, None, True, console=console, clock=clock) as display:
        clock.now = 300
        display.update(VALUES)
    text = out.getvalue()
    # The display stands still here, so whatever was drawn last is after the last line erasure.
    block = text[text.rfind("\x1b[2K") + 1 :]
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", block).splitlines()
    assert lines[0].count("━") == 16  # half of 32
    assert "50%  5:00 elapsed, 5:00 left" in lines[0]
    for part in ("62%", "80% [49%, 94%]", "25,000 (500/s)", "1.23 GiB", "actors 25%, learner 0%"):
        assert sum(part in line for line in lines) == 1, part
    assert max(map(len, lines)) <= 80


def crash(display):
    with display:
        display.update(VALUES)
        raise KeyError("simulator")


def test_an_exception_gives_the_terminal_back():
    console, out = consoles(terminal=True)
    before = (sys.stdout, sys.stderr)
    with pytest.raises(KeyError, match="simulator"):
        crash(ProgressDisplay(600, None, True, console=console))
    text = out.getvalue()
    assert "\x1b[?25l" in text  # cursor hidden ...
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")  # ... and shown again
    assert (sys.stdout, sys.stderr) == before


@pytest.mark.parametrize("budget", [(0, None), (None, -1)])
def test_a_budget_of_nothing_is_refused(budget):
    with pytest.raises(ValueError, match="must be positive"):
        ProgressDisplay(*budget, True)


def evaluation(rate, interval, steps, tasks):
    return {
        "success_rate": rate,
        "interval": interval,
        "episodes": 100,
        "env_steps": steps,
        "minutes": steps / 10_000,
        "per_task": tasks,
    }


def printed(history, **places):
    console, out = consoles(terminal=False)
    summary(history, console=console, **places)
    return out.getvalue()


def test_the_summary_says_from_where_to_where_and_what_is_where(tmp_path):
    reach = {"success_rate": 0.1, "interval": [0.03, 0.3], "episodes": 20}
    learned = {"success_rate": 0.95, "interval": [0.76, 0.99], "episodes": 20}
    start = evaluation(0.12, [0.07, 0.2], 5_000, {"reach": reach, "[push]": reach})
    middle = evaluation(0.3, [0.22, 0.4], 20_000, {})
    end = evaluation(
        0.86, [0.78, 0.915], 65_000, {"reach": learned, "[push]": reach, "pick": reach}
    )
    text = printed([start, middle, end], curve=tmp_path / "success.png", checkpoint="ckpt/40")
    assert text.startswith("Learned. Evaluation success 12% [7%, 20%] -> 86% [78%, 92%] in ")
    assert "60,000 env steps, 6.0 min; 100 episodes at the end." in text
    rows = [line.split() for line in text.splitlines()]
    assert ["reach", "10%", "[3%,", "30%]", "->", "95%", "[76%,", "99%]"] in rows
    assert ["[push]", "10%", "[3%,", "30%]", "->", "10%", "[3%,", "30%]"] in rows
    assert ["pick", "-", "->", "10%", "[3%,", "30%]"] in rows
    assert f"curve      {tmp_path / 'success.png'}" in text
    assert "video      not made" in text
    assert "checkpoint ckpt/40" in text


@pytest.mark.parametrize(
    ("history", "words"),
    [
        ([], "never evaluated"),
        ([evaluation(0.5, [0.4, 0.6], 0, {})], "evaluated once"),
        (
            [evaluation(0.5, [0.4, 0.6], 0, {}), evaluation(0.6, [0.5, 0.7], 9, {})],
            "Not settled",
        ),
        (
            [evaluation(0.5, [0.4, 0.6], 0, {}), evaluation(0.2, [0.1, 0.3], 9, {})],
            "Got worse",
        ),
    ],
)
def test_the_summary_claims_no_more_than_the_intervals_show(history, words):
    text = printed(history)
    assert words in text
    assert "Learned" not in text
