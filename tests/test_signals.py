"""Stop signals in a real process: asked once, told twice, and the second time at once.

Run as a program (``__main__`` below), this file is the process that gets them.
"""

import ctypes
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from torchrl_vla.signals import ECHO_SECONDS, STOPPING, StopSignals


def program(how: str) -> None:
    with StopSignals(graceful=how != "abrupt") as stop:
        print("ready", flush=True)
        if how == "stuck":  # as in a collective: no Python runs in the main thread any more
            threading.Thread(target=tell, args=(stop,), daemon=True).start()
            mutex, libc = ctypes.create_string_buffer(64), ctypes.CDLL(None)
            libc.pthread_mutex_lock(mutex)
            libc.pthread_mutex_lock(mutex)
        tell(stop)
        time.sleep(3600 if how == "waits" else 0)
    sys.exit(75)


def tell(stop: StopSignals) -> None:
    while not stop.asked():
        time.sleep(0.01)
    print(stop.received.name, flush=True)


@pytest.fixture
def start():
    started = []

    def run(how: str) -> subprocess.Popen:
        process = subprocess.Popen(
            [sys.executable, __file__, how], stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        assert process.stdout.readline() == "ready\n"
        return process

    yield run
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.parametrize("number", STOPPING)
def test_the_first_signal_is_a_request(start, number):
    process = start("asked")
    process.send_signal(number)
    assert process.stdout.readline() == f"{number.name}\n"
    assert process.wait() == 75


@pytest.mark.parametrize("how", ["waits", "stuck"])
def test_an_echo_counts_as_the_same_one_and_a_second_signal_is_the_end(start, how):
    process = start(how)
    process.send_signal(signal.SIGUSR1)
    assert process.stdout.readline() == "SIGUSR1\n"
    process.send_signal(signal.SIGUSR1)  # as torchrun passes it on
    time.sleep(ECHO_SECONDS + 0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 128 + signal.SIGTERM


def test_where_nobody_looks_the_first_signal_is_the_end(start):
    process = start("abrupt")
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 128 + signal.SIGTERM


def test_handlers_are_given_back():
    before = [signal.getsignal(number) for number in STOPPING]
    with StopSignals() as stop:
        assert not stop.asked()
        assert [signal.getsignal(number) for number in STOPPING] != before
    assert [signal.getsignal(number) for number in STOPPING] == before


if __name__ == "__main__":
    program(Path(sys.argv[1]).name)
