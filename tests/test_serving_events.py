"""Events, semaphores and locks keep working when a process is killed in the middle of them."""

import os
import signal
from collections.abc import Callable

import pytest

from torchrl_vla.serving.events import Event, Lock, Semaphore


def killed_in(action: Callable[[Event], None]) -> None:
    """Run ``action(reached)`` in another process and kill it there once ``reached`` is set."""
    reached = Event()
    pid = os.fork()
    if not pid:
        action(reached)
        os._exit(1)
    assert reached.wait(60.0)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


@pytest.mark.timeout(60)
def test_a_lock_is_free_when_its_owner_is_dead():
    lock = Lock()

    def hold(reached: Event) -> None:
        with lock:
            reached.set()
            signal.pause()

    killed_in(hold)
    with lock:
        pass


@pytest.mark.timeout(60)
def test_a_lock_excludes_another_process():
    lock, entered = Lock(), Event()
    with lock:
        pid = os.fork()
        if not pid:
            with lock:
                entered.set()
            os._exit(0)
        assert not entered.wait(0.3)
    assert entered.wait(60.0)
    os.waitpid(pid, 0)


@pytest.mark.timeout(60)
def test_an_event_can_be_set_when_those_who_slept_on_it_are_dead():
    event = Event()

    def sleep(reached: Event) -> None:
        reached.set()
        event.wait()

    killed_in(sleep)
    assert not event.wait(0.0)
    event.set()
    event.set()
    assert event.wait()
    assert event.is_set()  # until it is cleared, however often it was set
    event.clear()
    event.clear()
    assert not event.is_set()


@pytest.mark.timeout(60)
def test_a_semaphore_counts():
    semaphore = Semaphore(1)
    semaphore.release()
    assert semaphore.acquire()
    assert semaphore.acquire(block=False)
    assert not semaphore.acquire(block=False)
    assert not semaphore.acquire(timeout=0.01)
