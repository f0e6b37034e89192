"""Workers that die, hang, raise or deliver nonsense are named and replaced; the data stays right.

Run as a program (``__main__`` below), this file is the driver process that gets killed.
"""

import dataclasses
import math
import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from envs.counter import META, Counters, CounterSuite
from steer import (
    LAYOUT,
    Steer,
    check_no_leftovers,
    nothing_left,
    start,
    start_driver,
    wait_until_gone,
    weights,
)

from torchrl_vla import schema
from torchrl_vla.actors import Actors, WorkerError
from torchrl_vla.actors.supervision import RestartLimit
from torchrl_vla.replay import make_replay


def collect_for_ever(actors: Actors) -> None:
    while True:
        actors.collect()
        time.sleep(0.05)


def lane(batch, worker: int, envs: int = 3):
    return batch[worker * envs : (worker + 1) * envs]


def ids_of(rows):
    return set(rows[schema.INIT_STATE_ID].flatten().tolist())


@pytest.mark.slow
def test_a_round_goes_on_without_the_killed_worker(tmp_path: Path, caplog):
    # Field case B30, as are the next ones: killed, raising, hanging, and not to be built at all.
    # A limit far beyond the test's own: only the death itself can be the reason.
    suite = CounterSuite(lengths=(5, 9, math.inf, 2))
    with (
        nothing_left(),
        start(tmp_path, suite, timeout=1e6, max_restarts=1, positions=[0, 40]) as actors,
    ):
        actors.publish(weights(0.25), 1)
        before = actors.collect()
        pid = actors.pids[1]
        actors.publish(weights(0.5), 2)
        os.kill(pid, signal.SIGSTOP)  # it takes the order and does nothing of it
        actors.request()
        os.kill(pid, signal.SIGKILL)
        after = actors.receive()
        # one version in the whole round, the same for both workers
        assert after[schema.POLICY_VERSION].unique().tolist() == [2]
        assert after[schema.CHUNK].unique().tolist() == [0.5]
        assert after.shape == before.shape == (6, 5)
        # worker 0 went on in its episodes, worker 1 begins new ones, of states nobody has seen
        ended, begins = lane(before, 0)[:, -1], lane(after, 0)[:, 0]
        going = ~ended[schema.DONE].squeeze(-1)
        assert going.any()
        for key in (("observation", "state"), schema.EPISODE_ID):
            last = ended["next", *key] if isinstance(key, tuple) else ended["next", key]
            assert torch.equal(last[going], begins[key][going])
        assert not lane(after, 1)[schema.DECISION][:, 0].any()
        assert not ids_of(lane(before, 1)) & ids_of(lane(after, 1))
        assert min(ids_of(lane(before, 1))) == 10**6 + 40  # where the checkpoint said
        assert max(ids_of(lane(after, 1))) < 10**6 + 10**5  # the same stream
        assert not set(before[schema.EPISODE_ID][3:].flatten().tolist()) & set(
            after[schema.EPISODE_ID][3:].flatten().tolist()
        )
        assert actors.restarts == 1
        assert actors.pids[1] != pid
        assert actors.counts().decisions == before.numel() + after.numel()
        said = f"actor worker 1 (pid {pid}) ended with exit code -9"
        assert said in caplog.text
        # and once more is once too often
        os.kill(actors.pids[0], signal.SIGKILL)
        with pytest.raises(WorkerError, match=r"actors\.max_restarts is 1: remove the cause"):
            actors.collect()


@pytest.mark.slow
def test_the_others_write_on_while_one_worker_is_replaced(tmp_path: Path):
    replay = make_replay(tmp_path / "replay", 4000, LAYOUT, lanes=2)
    suite = CounterSuite(lengths=(5, 9, 3))
    killed = 0
    with (
        nothing_left(),
        start(tmp_path, suite, replay=replay, timeout=1e6, max_restarts=2) as actors,
    ):
        actors.publish(weights(0.0), 1)
        while killed < 2 or actors.restarts < 2 or len(ids_of(replay[:])) < 60:
            if killed == actors.restarts and killed < 2 and len(replay) > 100 * killed + 30:
                os.kill(actors.pids[killed], signal.SIGKILL)
                killed += 1
            actors.collect()
        actors.collect()
    rows = replay[:]
    schema.check_transitions(rows, where="test")
    keys = torch.cat([rows[schema.EPISODE_ID], rows[schema.DECISION]], -1)
    assert len(keys.unique(dim=0)) == len(keys)  # nothing is there twice
    for episode in rows[schema.EPISODE_ID].unique().tolist():
        mine = rows[(rows[schema.EPISODE_ID] == episode).squeeze(-1)]
        decisions = mine[schema.DECISION].flatten().sort().values.tolist()
        assert decisions == list(range(len(decisions)))  # cut perhaps, but without a gap
    assert {i // 10**6 for i in ids_of(rows)} == {0, 1}


def test_a_bug_in_the_environment_is_told_with_its_traceback(tmp_path: Path, caplog):
    # The second state of the stream breaks, the third one is where the replacement begins.
    suite = CounterSuite(
        lengths=(9,), broken=(False, True, False, False), fault="raise", fault_step=5
    )
    with (
        nothing_left(),
        start(tmp_path, suite, workers=1, envs=1, timeout=1e6, max_restarts=1) as actors,
    ):
        actors.publish(weights(0.0), 1)
        pid = actors.pids[0]
        rounds = [actors.collect() for _ in range(2)]
        assert actors.restarts == 1
    assert f"actor worker 0 (pid {pid}) raised, exit code 1" in caplog.text
    assert "ZeroDivisionError: counter 0 has a bug" in caplog.text
    assert "counter.py" in caplog.text
    assert 1 not in ids_of(torch.cat(rounds))  # its partial episode is discarded


def test_a_hanging_environment_is_told_with_its_stack(tmp_path: Path, caplog):
    suite = CounterSuite(
        lengths=(9,), broken=(False, True, False, False), fault="hang", fault_step=5
    )
    with (
        nothing_left(),
        start(tmp_path, suite, workers=1, envs=1, timeout=2.0, max_restarts=1) as actors,
    ):
        actors.publish(weights(0.0), 1)
        rounds = [actors.collect() for _ in range(2)]
        assert actors.restarts == 1
    assert "hangs: no sign of life for" in caplog.text
    assert "limit 2 s" in caplog.text
    assert "in _fail" in caplog.text  # where it sleeps
    assert 1 not in ids_of(torch.cat(rounds))


@pytest.mark.slow
def test_one_hanging_worker_is_named_while_the_other_delivers(tmp_path: Path):
    # Worker 1 starts with states 1000000 and 1000001: the second one hangs, and no state of worker
    # 0 does, whose two episodes never end.
    suite = CounterSuite(
        broken=(False,) * 5 + (True,),
        fault="hang",
        fault_step=6,
        meta=dataclasses.replace(META, max_steps=10**9),
    )
    replay = make_replay(tmp_path / "replay", 1000, LAYOUT, lanes=2)
    with nothing_left(), start(tmp_path, suite, envs=2, replay=replay, timeout=3.0) as actors:
        actors.publish(weights(0.0), 1)
        backend = rf"\(MUJOCO_GL={os.environ.get('MUJOCO_GL', 'unset')}\)"
        said = rf"actor worker 1 \(pid {actors.pids[1]}\) hangs: .*limit 3 s; .*{backend}"
        with pytest.raises(WorkerError, match=said):
            collect_for_ever(actors)


class NanCounters(Counters):
    def state(self, index):
        state = super().state(index)
        state[2] = math.nan if self.episode[index] % 4 == 1 and self.steps[index] > 4 else state[2]
        return state


class NanSuite(CounterSuite):
    def simulators(self, num_envs):
        return NanCounters(self, num_envs)


def test_numbers_that_are_not_finite_never_leave_the_worker(tmp_path: Path, caplog):
    suite = NanSuite(lengths=(9,))
    with (
        nothing_left(),
        start(tmp_path, suite, workers=1, envs=1, timeout=1e6, max_restarts=1) as actors,
    ):
        actors.publish(weights(0.0), 1)
        rounds = torch.cat([actors.collect() for _ in range(2)])
        assert actors.restarts == 1
    assert "NonFiniteError: ('next', 'observation', 'state') is not finite" in caplog.text
    assert rounds["next", "observation", "state"].isfinite().all()


def broken_env(**kwargs):
    raise FileNotFoundError("the suite's assets are missing")


def test_an_environment_that_cannot_be_built_is_an_error_at_once(tmp_path: Path):
    limit = RestartLimit(9, 9.0)
    with nothing_left(), pytest.raises(WorkerError, match="assets are missing") as caught:
        Actors(broken_env, Steer, num_workers=1, steps_per_batch=1, folder=tmp_path, limit=limit)
    assert "not tried again" in str(caught.value)
    assert limit.total == 0


def test_restarts_of_long_ago_do_not_count(monkeypatch):
    limit, now = RestartLimit(2, minutes=1.0), 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    limit.admit("a")
    now += 50
    limit.admit("b")
    now += 20  # the first is out of the window
    limit.admit("c")
    with pytest.raises(WorkerError, match="d\n2 actor workers were replaced in the last 1 minutes"):
        limit.admit("d")
    assert limit.total == 3


@pytest.mark.slow
def test_descriptors_do_not_pile_up(tmp_path: Path):
    with nothing_left(), start(tmp_path, CounterSuite(), workers=1, max_restarts=3) as actors:
        actors.publish(weights(0.0), 1)
        counts = []
        for _ in range(3):
            actors.collect()
            counts.append(len(os.listdir("/proc/self/fd")))
            os.kill(actors.pids[0], signal.SIGKILL)
        actors.collect()
        assert actors.restarts == 3
    assert counts[0] == counts[1] == counts[2]


def driver_main(folder: Path) -> None:
    # Workers that hang in a step notice nothing by themselves.
    suite = CounterSuite(broken=(True,), fault="hang", fault_step=5)
    actors = start(folder, suite, workers=2)
    actors.publish(weights(0.0), 1)
    actors.request()
    while not (actors.board["beat"] > 0).all():
        time.sleep(0.1)
    (folder / "pids").write_text(" ".join(map(str, actors.pids)))
    print("ready", flush=True)
    time.sleep(3600)


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_workers_die_with_their_driver_and_leave_nothing(tmp_path: Path, number):
    driver, temporary = start_driver(__file__, tmp_path)
    try:
        assert any(line == "ready\n" for line in driver.stdout)
        pids = {int(pid) for pid in (tmp_path / "pids").read_text().split()}
        assert len(pids) == 2
        assert all(psutil.pid_exists(pid) for pid in pids)
        for pid in pids:  # a signal to everyone: workers leave it to the driver
            os.kill(pid, signal.SIGTERM)
            os.kill(pid, signal.SIGUSR1)
    finally:
        driver.send_signal(number)
        driver.wait()
    survivors = wait_until_gone(pids)
    for pid in survivors:
        os.kill(pid, signal.SIGKILL)
    assert not survivors
    check_no_leftovers(temporary, {*pids, driver.pid})


if __name__ == "__main__":
    driver_main(Path(sys.argv[1]))
