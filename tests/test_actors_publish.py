"""Published weights in shared memory: whole, newest, of one version, whoever reads when."""

import multiprocessing
import time

import pytest
import torch
from tensordict import TensorDict

from torchrl_vla.actors.memory import SharedMemory
from torchrl_vla.actors.weights import Publisher, Subscriber

SPAWN = multiprocessing.get_context("spawn")
SIZE = 200_000


def weights(value: float, *names: str) -> TensorDict:
    made = TensorDict({})
    for name in names or ("trunk", "head", "count"):
        dtype = torch.int64 if name == "count" else torch.float32
        made["model", name] = torch.full((SIZE,) if name != "count" else (), value, dtype=dtype)
    return made


@pytest.fixture
def both():
    memory = SharedMemory("weights")
    return Publisher(memory), Subscriber(memory)


def test_the_newest_weights_are_taken_once(both):
    publisher, subscriber = both
    mine = weights(0.0)
    assert subscriber.take(mine) is None
    publisher.publish(weights(1.0), 7)
    publisher.publish(weights(2.0), 8)
    assert subscriber.take(mine) == 8
    assert (mine == weights(2.0)).all()
    assert subscriber.take(mine) is None


@pytest.mark.parametrize("reads", [(1, 2, 3, 4, 5), (4, 5), (5,), (2, 5), (1, 4)])
def test_what_is_not_trained_travels_once(both, reads):
    publisher, subscriber = both
    mine = weights(0.0)
    for count in range(1, 6):
        part = weights(count) if count == 1 else weights(count, "head")
        publisher.publish(part, 10 * count)
        if count in reads:
            assert subscriber.take(mine) == 10 * count
            assert (mine["model", "trunk"] == 1.0).all()
            assert mine["model", "count"] == 1
            assert (mine["model", "head"] == count).all()


def test_another_part_than_before_is_refused(both):
    publisher, _ = both
    publisher.publish(weights(1.0), 1)
    with pytest.raises(ValueError, match=r"\['model.nose'\] were not in the first publish"):
        publisher.publish(weights(2.0, "nose"), 2)
    publisher.publish(weights(2.0, "head"), 2)
    with pytest.raises(ValueError, match="has 2 tensors, the ones before had 1"):
        publisher.publish(weights(3.0, "head", "trunk"), 3)


def test_in_the_background_it_is_there_after_wait():
    memory = SharedMemory("weights")
    publisher, subscriber = Publisher(memory, background=True), Subscriber(memory)
    mine = weights(0.0)
    publisher.publish(weights(1.0), 1)
    publisher.publish(weights(2.0), 2)
    publisher.wait()
    assert subscriber.take(mine) == 2
    wrong = weights(3.0)
    wrong["model", "head"] = torch.zeros(5)
    publisher.publish(wrong, 3)
    with pytest.raises(RuntimeError, match="size"):
        publisher.wait()
    publisher.close()


def read_for_ever(memory, pipe):
    subscriber, mine, seen = Subscriber(memory), weights(0.0), 0
    pipe.send("ready")
    while not pipe.poll():
        version = subscriber.take(mine)
        if version is None:
            continue
        values = mine["model", "trunk"].unique().tolist() + mine["model", "head"].unique().tolist()
        if values != [float(version)] * 2 or int(mine["model", "count"]) != version:
            pipe.send(f"version {version} has {values}")
            return
        seen += 1
    pipe.send(seen)


def test_readers_never_see_two_versions_at_once():
    memory = SharedMemory("weights")
    publisher = Publisher(memory)
    mine, theirs = SPAWN.Pipe()
    reader = SPAWN.Process(target=read_for_ever, args=(memory, theirs))
    reader.start()
    assert mine.recv() == "ready"
    deadline, version = time.monotonic() + 2.0, 0
    while time.monotonic() < deadline:
        version += 1
        publisher.publish(weights(version), version)
    mine.send("stop")
    seen = mine.recv()
    reader.join()
    assert isinstance(seen, int), seen
    assert seen > 3


def test_memory_grows_and_keeps_what_is_there():
    memory = SharedMemory("test", 8)
    first = memory.bytes()
    first[:] = 7
    memory.reserve(100)
    assert memory.bytes()[:9].tolist() == [7] * 8 + [0]
    first[0] = 5  # an old view still shows the same memory
    assert memory.bytes()[0] == 5
