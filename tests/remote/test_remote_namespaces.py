"""Learner and actor in two network namespaces; the link between them is slow, or unplugged."""

import ctypes
import os
import subprocess
from pathlib import Path

import pytest
import remote_actor
from remote_job import SECRET, Job, check_once
from remote_nursery import Nursery

pytestmark = pytest.mark.slow  # several processes each

LEARNER, ACTOR = "10.213.77.1", "10.213.77.2"
CLONE_NEWNET = 0x40000000


def sh(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True)
    if done.returncode:
        raise PermissionError(f"{command}: {done.stderr.strip()}")


@pytest.fixture(scope="module")
def nursery():
    nursery = Nursery()
    yield nursery
    nursery.close()


class Cable:
    """A pair of interfaces: ``here`` in this namespace, its other end in the actor's."""

    def __init__(self) -> None:
        self.space, self.here, self.there = (f"vla{os.getpid()}{end}" for end in "nab")
        sh(f"ip netns add {self.space}")
        sh(f"ip link add {self.here} type veth peer name {self.there} netns {self.space}")
        sh(f"ip addr add {LEARNER}/30 dev {self.here}")
        sh(f"ip link set {self.here} up")
        inside = f"ip netns exec {self.space}"
        sh(f"{inside} ip addr add {ACTOR}/30 dev {self.there}")
        sh(f"{inside} ip link set {self.there} up")

    def slow(self, how: str) -> None:
        sh(f"tc qdisc replace dev {self.here} root netem {how}")
        inside = f"ip netns exec {self.space}"
        sh(f"{inside} tc qdisc replace dev {self.there} root netem {how}")

    def plug(self, state: str) -> None:
        sh(f"ip link set {self.here} {state}")

    def remove(self) -> None:
        subprocess.run(["ip", "link", "del", self.here], capture_output=True)
        subprocess.run(["ip", "netns", "del", self.space], capture_output=True)


@pytest.fixture
def cable(nursery):
    try:
        cable = Cable()
    except (PermissionError, FileNotFoundError) as error:
        pytest.skip(f"network namespaces are not to be had here: {error}")
    yield cable
    cable.remove()


def act_in(space: str, *arguments) -> None:
    """Run an actor in a network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{space}") as opened:
        assert libc.setns(opened.fileno(), CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
    remote_actor.run(*arguments)


@pytest.fixture
def far(cable: Cable, nursery: Nursery, tmp_path: Path):
    """A job whose actor is at the other end of the cable."""
    job = Job(tmp_path, nursery, LEARNER)
    job.listen(timeout=3.0)
    report = tmp_path / "far.json"
    arguments = (cable.space, job.address, SECRET, "far", report)
    job.actors["far"] = nursery.start(act_in, arguments, report)
    job.collect(3)
    yield job
    job.close()


@pytest.mark.slow
def test_a_link_that_is_unplugged_for_a_while(cable: Cable, far: Job):
    for _ in range(2):
        cable.plug("down")
        far.remote.request()
        while far.remote.present:  # it is missed after the timeout, and nobody stands still
            far.taken += bool(far.remote.receive())
        cable.plug("up")
        far.collect(3)
    assert far.remote.restarts >= 2
    check_once(far.rows())
    assert far.actors["far"].ask_to_leave() == {"rows": len(far.rows()), "lost": 0}


@pytest.mark.slow
def test_a_slow_link_that_loses_packets(cable: Cable, far: Job):
    try:
        cable.slow("delay 100ms rate 1mbit loss 1%")
    except PermissionError as error:
        pytest.skip(f"netem is not to be had here: {error}")
    far.collect(10)
    check_once(far.rows())
    assert far.actors["far"].ask_to_leave() == {"rows": len(far.rows()), "lost": 0}
