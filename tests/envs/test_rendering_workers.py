"""Many processes that draw their first picture at the same time (field case B35)."""

import multiprocessing

import pytest

from torchrl_vla.envs.tabletop import TabletopSuite

SPAWN = multiprocessing.get_context("spawn")


def draw_first(barrier, results, worker: int) -> None:
    simulators = TabletopSuite(image_size=128).simulators(1)
    simulators.reset(0, worker)
    barrier.wait(300)
    image = simulators.render(0)
    results.put((worker, image.shape, float(image.mean()), float(image.std())))
    simulators.close()


@pytest.mark.slow
def test_eight_workers_draw_their_first_picture_at_once():
    barrier, results = SPAWN.Barrier(8), SPAWN.Queue()
    workers = [SPAWN.Process(target=draw_first, args=(barrier, results, i)) for i in range(8)]
    for worker in workers:
        worker.start()
    found = [results.get(timeout=400) for _ in workers]
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0] * 8
    assert sorted(number for number, *_ in found) == list(range(8))
    for _, shape, mean, spread in found:
        assert shape == (1, 3, 128, 128)
        assert mean > 20
        assert spread > 5
