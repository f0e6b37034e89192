"""Workers that ask a policy server: true versions, replaced workers, a server that dies or hangs.

Run as a program (``__main__`` below), this file is the driver process that gets killed.
"""

import os
import signal
import sys
from pathlib import Path

import psutil
import pytest
import torch
from envs.counter import CounterSuite
from steer import (
    LAYOUT,
    check_no_leftovers,
    nothing_left,
    start,
    start_driver,
    wait_until_gone,
    weights,
)

from torchrl_vla import schema
from torchrl_vla.actors import Actors
from torchrl_vla.replay import make_replay
from torchrl_vla.serving import PolicyServerError

SUITE = CounterSuite(lengths=(5, 9, 2))


def collect_for_ever(actors: Actors):
    while True:
        actors.collect()


def check_round(batch, value: float, version: int):
    schema.check_transitions(batch, where="test")
    assert batch[schema.POLICY_VERSION].unique().tolist() == [version]
    assert batch[schema.CHUNK].unique().tolist() == [value]


@pytest.mark.timeout(280)
def test_rounds_are_of_the_published_version_until_the_server_dies(tmp_path: Path):
    with (
        nothing_left(),
        start(tmp_path, SUITE, groups=2, timeout=1e6, max_restarts=1) as actors,
    ):
        for version, value in ((1, 0.25), (2, 0.5)):
            actors.publish(weights(value), version)
            check_round(actors.collect(), value, version)

        # the server stands still, so the worker has no answer when it is killed
        actors.publish(weights(-0.5), 3)
        os.kill(actors.server.pid, signal.SIGSTOP)
        actors.request()
        before = actors.pids
        os.kill(before[1], signal.SIGKILL)
        os.kill(actors.server.pid, signal.SIGCONT)
        check_round(actors.receive(), -0.5, 3)
        assert actors.restarts == 1
        assert actors.pids[0] == before[0]
        assert actors.pids[1] != before[1]
        actors.publish(weights(0.0, noise=0.3), 4)
        noise = actors.collect()[schema.CHUNK].flatten(1)
        assert len(noise.unique(dim=0)) == 6

        pid = actors.server.pid
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(PolicyServerError, match=rf"pid {pid}\) ended with exit code -9"):
            collect_for_ever(actors)
        assert actors.restarts == 1  # no worker is blamed


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_rows_in_the_replay_name_the_version_that_chose_them(tmp_path: Path):
    replay = make_replay(tmp_path / "replay", 4000, LAYOUT, lanes=2)
    with (
        nothing_left(),
        start(tmp_path / "actors", SUITE, replay=replay, groups=1, timeout=1e6) as actors,
    ):
        for version in range(1, 7):
            actors.publish(weights(version / 64), version)
            for _ in range(2):
                actors.request()
            assert actors.receive() is True
        while actors.pending:
            actors.receive()
    rows = replay[:]
    assert torch.equal(
        rows[schema.CHUNK], (rows[schema.POLICY_VERSION] / 64)[..., None].expand(-1, 4, 2)
    )
    assert len(rows[schema.POLICY_VERSION].unique()) > 3


@pytest.mark.slow
def test_a_server_that_hangs_is_named(tmp_path: Path):
    with nothing_left(), start(tmp_path, SUITE, groups=1, timeout=3.0) as actors:
        actors.publish(weights(0.0), 1)
        actors.collect()
        pid = actors.server.pid
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(PolicyServerError, match=rf"pid {pid}\) (hangs|does not answer)"):
            collect_for_ever(actors)


def test_groups_that_do_not_divide_the_workers_are_refused_before_anything_starts(tmp_path: Path):
    message = r"groups is 2 with 3 clients.*\[1, 3\] \(topology\.server_groups"
    with nothing_left(), pytest.raises(ValueError, match=message):
        start(tmp_path, SUITE, workers=3, groups=2)


def driver_main(folder: Path) -> None:
    suite = CounterSuite(broken=(True,), fault="hang", fault_step=5)
    actors = start(folder, suite, groups=2)
    actors.publish(weights(0.0), 1)
    actors.request()
    print("ready", actors.server.pid, *actors.pids, flush=True)
    signal.pause()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_server_and_workers_die_with_their_driver(tmp_path: Path, number: signal.Signals):
    driver, temporary = start_driver(__file__, tmp_path)
    try:
        line = next(line for line in driver.stdout if line.startswith("ready"))
        pids = {int(pid) for pid in line.split()[1:]}
        assert len(pids) == 3
        for pid in pids:  # a signal to everyone: they leave it to the driver
            os.kill(pid, signal.SIGTERM)
            os.kill(pid, signal.SIGINT)
        assert all(psutil.pid_exists(pid) for pid in pids)
    finally:
        driver.send_signal(number)
        driver.wait()
    assert not wait_until_gone(pids)
    check_no_leftovers(temporary, {*pids, driver.pid})


if __name__ == "__main__":
    driver_main(Path(sys.argv[1]))
