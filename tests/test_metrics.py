"""Rows that survive kills and resumes, reductions, intervals and rates, checked by hand."""

import json
import math
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from torchrl_vla.metrics import (
    WAIT_ACTORS,
    WAIT_LEARNER,
    Means,
    MetricLog,
    Rate,
    Stopwatch,
    read_metrics,
    reduce_metrics,
    rss_gib,
    wilson_interval,
)


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def rows_of(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def scalars_of(run_dir, name):
    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    return {event.step: event.value for event in events.Scalars(name)}


def test_a_row_is_on_disk_before_close_and_tensors_become_numbers(tmp_path):
    log = MetricLog(tmp_path / "new" / "run", writers=("jsonl",))
    log.log({"loss": torch.tensor(0.5), "env_steps": torch.tensor([12]), "k": True}, step=0)
    (row,) = rows_of(tmp_path / "new" / "run")
    assert row.pop("time") >= 0
    assert row == {"update": 0, "loss": 0.5, "env_steps": 12, "k": 1}
    assert isinstance(row["env_steps"], int)
    assert not (tmp_path / "new" / "run" / "tensorboard").exists()
    log.close()
    log.close()
    with pytest.raises(RuntimeError, match="closed"):
        log.log({}, step=1)


def test_steps_must_grow_also_after_reopening(tmp_path):
    log = MetricLog(tmp_path, writers=("jsonl",))
    log.log({"a": 1}, step=3)
    with pytest.raises(ValueError, match="step 3 must be larger than the last logged step 3"):
        log.log({"a": 1}, step=3)
    log.close()
    again = MetricLog(tmp_path, writers=("jsonl",))
    with pytest.raises(ValueError, match=r"step 2 .* 3 .*truncate_after"):
        again.log({"a": 1}, step=2)
    again.log({"a": 2}, step=4)
    assert [row["update"] for row in rows_of(tmp_path)] == [3, 4]


def test_time_goes_on_from_the_last_row_after_a_resume(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"update": 1, "time": 500.0}\n')
    log = MetricLog(tmp_path, writers=("jsonl",))
    log.log({}, step=2)
    assert 500.0 <= read_metrics(tmp_path)[-1]["time"] < 600.0


def test_non_finite_values_are_null_and_named(tmp_path):
    log = MetricLog(tmp_path, writers=("jsonl",))
    log.log({"z": math.nan, "a": torch.tensor(math.inf), "fine": 1.0}, step=1)
    (row,) = rows_of(tmp_path)
    assert row["z"] is None
    assert row["a"] is None
    assert row["fine"] == 1.0
    assert row["non_finite"] == ["a", "z"]


@pytest.mark.parametrize(
    ("values", "error", "match"),
    [
        ({"time": 1.0}, ValueError, "time"),
        ({"grad": torch.zeros(2)}, ValueError, r"\(2,\)"),
        ({"name": "reach"}, TypeError, "reach"),
    ],
)
def test_what_is_not_a_metric_is_refused_and_writes_nothing(tmp_path, values, error, match):
    log = MetricLog(tmp_path, writers=("jsonl",))
    with pytest.raises(error, match=match):
        log.log(values, step=1)
    assert rows_of(tmp_path) == []


@pytest.mark.parametrize("writers", [("tensorboard",), ("jsonl", "wandb")])
def test_unknown_or_missing_writers_are_refused(tmp_path, writers):
    with pytest.raises(ValueError, match="jsonl"):
        MetricLog(tmp_path, writers=writers)


def test_tensorboard_has_the_scalars_and_forgets_truncated_steps(tmp_path):
    log = MetricLog(tmp_path)
    for step in (1, 2, 3):
        log.log({"loss": 10.0 * step}, step=step)
    assert scalars_of(tmp_path, "loss") == {1: 10.0, 2: 20.0, 3: 30.0}
    # TensorBoard reads event files by name: second, host, pid, number. Of two files of one second,
    # number 10 comes before number 9. A resume is another second and another process.
    time.sleep(1.1)
    log.truncate_after(1)
    log.log({"loss": 7.0}, step=2)
    log.close()
    assert scalars_of(tmp_path, "loss") == {1: 10.0, 2: 7.0}
    assert [(row["update"], row["loss"]) for row in rows_of(tmp_path)] == [(1, 10.0), (2, 7.0)]


def test_truncate_drops_later_rows_and_leaves_no_temporary(tmp_path):
    log = MetricLog(tmp_path, writers=("jsonl",))
    for step in (5, 10, 15):
        log.log({"a": step}, step=step)
    log.truncate_after(12)  # between two rows: 5 and 10 stay
    assert [row["update"] for row in rows_of(tmp_path)] == [5, 10]
    log.log({"a": 11}, step=11)
    assert [row["update"] for row in rows_of(tmp_path)] == [5, 10, 11]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("tail", ['{"update": 2, "ti', '{"update": 2, "n": "\xc3'])
def test_a_torn_last_line_is_dropped_with_a_warning(tmp_path, tail):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"update": 1, "time": 1.0}\n' + tail.encode("latin-1"))
    assert [row["update"] for row in read_metrics(tmp_path)] == [1]
    with pytest.warns(UserWarning, match="cut in writing"):
        log = MetricLog(tmp_path, writers=("jsonl",))
    log.log({}, step=2)
    assert [row["update"] for row in rows_of(tmp_path)] == [1, 2]


def test_a_whole_last_line_without_its_newline_is_kept(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"update": 1, "time": 1.0}')
    with pytest.warns(UserWarning, match="cut in writing"):
        log = MetricLog(tmp_path, writers=("jsonl",))
    log.log({}, step=2)
    assert [row["update"] for row in rows_of(tmp_path)] == [1, 2]


def test_truncate_tolerates_a_line_torn_while_open(tmp_path):
    log = MetricLog(tmp_path, writers=("jsonl",))
    log.log({}, step=1)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"upd')
    log.truncate_after(1)
    assert [row["update"] for row in rows_of(tmp_path)] == [1]


def test_damage_before_the_last_line_is_an_error_that_names_the_line(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"update": 1, "time": 1}\nxx\n{"update": 3}\n')
    with pytest.raises(ValueError, match="line 2"):
        read_metrics(tmp_path)


def test_a_folder_that_is_no_run_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="folder of a run"):
        read_metrics(tmp_path)


def test_rows_of_a_killed_process_are_all_there(tmp_path):
    code = (
        "import os, sys; from torchrl_vla.metrics import MetricLog\n"
        "log = MetricLog(sys.argv[1], writers=('jsonl',))\n"
        "for step in range(5): log.log({'a': step}, step=step)\n"
        "os._exit(9)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert done.returncode == 9
    assert [row["a"] for row in read_metrics(tmp_path)] == [0, 1, 2, 3, 4]


def reduce_over_ranks(*values):
    """``reduce_metrics`` on one thread per rank, with a sum that really waits for all of them."""
    world_size = len(values)
    barrier = threading.Barrier(world_size)
    sent = [None] * world_size

    def run(rank):
        def all_reduce_sum(own):
            sent[rank] = own
            barrier.wait(timeout=20)
            total = torch.stack(sent).sum(0)
            barrier.wait(timeout=20)
            return total

        try:
            return reduce_metrics(values[rank], all_reduce_sum, world_size, rank)
        except ValueError as error:
            return error

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(run, range(world_size)))


def test_reduction_means_sums_and_maxima_over_two_ranks():
    a = {"lag_max": 7.0, "loss": torch.tensor(1.0), "env_steps_sum": 10, "episodes_count": 1}
    b = {"loss": 4.0, "env_steps_sum": 30, "episodes_count": 5, "lag_max": 2.0}
    # loss (1+4)/2; env steps 10+30; episodes 1+5; lag max(7, 2)
    expected = {"env_steps_sum": 40.0, "episodes_count": 6.0, "lag_max": 7.0, "loss": 2.5}
    assert reduce_over_ranks(a, b) == [expected, expected]


def test_a_maximum_of_negative_numbers_is_not_the_zero_of_another_slot():
    out = reduce_over_ranks({"q_max": -3.0}, {"q_max": -2.0}, {"q_max": -5.0})
    assert out == [{"q_max": -2.0}] * 3


def test_reduction_over_one_rank_changes_nothing_and_needs_no_collective():
    def never(_):
        raise AssertionError("a collective was used")

    assert reduce_metrics({"a": 3.0, "b_max": 2}, never, 1) == {"a": 3.0, "b_max": 2.0}


def test_reduction_refuses_what_it_cannot_combine():
    with pytest.raises(ValueError, match=r"lag_max.*rank=0..1, got rank=None"):
        reduce_metrics({"lag_max": 1.0}, lambda own: own, 2)
    with pytest.raises(ValueError, match="world_size=0"):
        reduce_metrics({"a": 1.0}, lambda own: own, 0)
    # Two ranks agree, one does not: all three must hear of it, or the others wait for ever.
    errors = reduce_over_ranks({"a": 1.0}, {"b": 1.0}, {"a": 1.0})
    assert ["disagree" in str(error) for error in errors] == [True] * 3
    assert "['b']" in str(errors[1])


def test_a_nan_on_one_rank_is_not_hidden():
    names = {"a": 1.0, "b_max": 1.0, "c": 1.0}
    for out in reduce_over_ranks(names, names | {"a": math.nan, "b_max": math.nan}):
        assert math.isnan(out["a"])
        assert math.isnan(out["b_max"])
        assert out["c"] == 1.0


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [
        # z = 1.959964, z^2 = 3.841459.
        # 8/10: centre 0.8 + 0.1920729 = 0.9920729; root of 0.016 + 0.0096036 = 0.1600114, times z
        #       0.3136167; both over 1.3841459: 0.716740 -+ 0.226578
        (8, 10, 0.490162, 0.943318),
        # 1/2: centre 0.5 + 0.9603647 = 1.4603647; root of 0.125 + 0.2400912 = 0.6042278, times z
        #      1.1842648; over 2.9207294: 0.5 -+ 0.405469
        (1, 2, 0.094531, 0.905469),
        # 0/10: z^2 / (n + z^2) = 3.841459 / 13.841459; 10/10 mirrors it
        (0, 10, 0.0, 0.277533),
        (10, 10, 0.722467, 1.0),
        # 0/1: 3.841459 / 4.841459
        (0, 1, 0.0, 0.793451),
    ],
)
def test_wilson_interval_by_hand(successes, n, low, high):
    assert wilson_interval(successes, n) == pytest.approx((low, high), abs=2e-6)


def test_wilson_ends_are_exact_and_other_confidences_differ():
    assert all(wilson_interval(0, n)[0] == 0.0 for n in range(1, 200))
    assert all(wilson_interval(n, n)[1] == 1.0 for n in range(1, 200))
    # z = 1 at confidence 0.682689: 5/10 gives centre 0.55/1.1 = 0.5 and
    # sqrt(0.025 + 0.0025) / 1.1 = 0.165831 / 1.1 = 0.150756
    assert wilson_interval(5, 10, 0.6826894921) == pytest.approx((0.349244, 0.650756), abs=2e-6)
    widths = [high - low for low, high in (wilson_interval(n // 2, n) for n in (2, 10, 50, 500))]
    assert all(wide > narrow for wide, narrow in pairwise(widths))


@pytest.mark.parametrize(
    ("args", "match"),
    [((0, 0), "n=0"), ((3, 2), "successes=3"), ((-1, 2), "successes=-1"), ((1, 2, 1.0), "1.0")],
)
def test_wilson_refuses_bad_arguments(args, match):
    with pytest.raises(ValueError, match=match):
        wilson_interval(*args)


def test_rate_looks_back_one_window_only():
    clock = Clock()
    rate = Rate(window=10.0, clock=clock)
    assert rate.per_second() == 0.0
    clock.now += 5
    rate.add(100)
    assert rate.per_second() == 20.0  # 100 in the 5 s since the start
    clock.now += 10
    rate.add(30)
    # the mark at 5 s is exactly one window old: 30 in 10 s
    assert rate.per_second() == 3.0
    assert rate.total == 130
    clock.now += 100
    assert rate.per_second() == 0.0
    with pytest.raises(ValueError, match="window=0"):
        Rate(window=0)


def test_stopwatch_shares_of_wall_time():
    clock = Clock()
    watch = Stopwatch(clock=clock)
    for _ in range(2):
        with watch.wait(WAIT_ACTORS):
            clock.now += 1
    clock.now += 6
    # 2 s of 8 s waiting for actors; the other wait never happened
    assert watch.pop_shares() == {WAIT_ACTORS: 0.25, WAIT_LEARNER: 0.0}
    clock.now += 4
    assert watch.pop_shares() == {WAIT_ACTORS: 0.0, WAIT_LEARNER: 0.0}
    assert watch.pop_shares() == {WAIT_ACTORS: 0.0, WAIT_LEARNER: 0.0}  # no time passed


def test_stopwatch_splits_a_wait_that_spans_a_pop_and_counts_one_that_raises():
    clock = Clock()
    watch = Stopwatch(names=(), clock=clock)

    def work():
        with watch.wait("disk"):
            clock.now += 2
            assert watch.pop_shares() == {"disk": 1.0}
            clock.now += 1
            raise KeyError("work")

    with pytest.raises(KeyError, match="work"):
        work()
    clock.now += 3
    assert watch.pop_shares() == {"disk": 0.25}  # 1 s of 4 s
    with pytest.raises(RuntimeError, match="disk"), watch.wait("disk"), watch.wait("disk"):
        pass


def test_means_are_over_the_reports_that_have_the_name():
    means = Means()
    for report in ({"a": 1.0}, {"a": 3.0, "b": 5.0}, {"a": 5.0, "b": -1.0, "c": 7.0}):
        means.add(report)
    assert means.pop() == {"a": 3.0, "b": 2.0, "c": 7.0}
    means.add({"b": 4.0})
    assert means.pop() == {"b": 4.0}
    assert means.pop() == {}


def test_memory_counts_children():
    before = rss_gib()
    code = "x = bytearray(1 << 27); print('up', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as child:
        child.stdout.readline()
        grown = rss_gib() - before
        child.communicate(b"\n")
    assert grown > 0.1  # 2^27 B = 0.125 GiB, zeroed and so resident, plus the interpreter
