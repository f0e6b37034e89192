"""Remote actors as real processes over loopback: they come late, die, are cut off and come back."""

import socket
import time
from pathlib import Path

import pytest
from remote_job import BATCH, BATCH_BYTES, KEYS, Job, check_once, committed
from remote_network import Relay, eventually, free_port
from remote_nursery import Nursery
from remote_tap import Tap
from steer import weights

from torchrl_vla import schema

pytestmark = pytest.mark.slow  # several processes each


@pytest.fixture(scope="module")
def nursery():
    nursery = Nursery()
    yield nursery
    nursery.close()


@pytest.fixture
def job(tmp_path: Path, nursery: Nursery):
    job = Job(tmp_path, nursery)
    yield job
    job.close()


def test_an_actor_joins_before_the_learner_and_another_one_late(job: Job):
    job.port = free_port()
    job.actor("early", ("127.0.0.1", job.port))
    time.sleep(1.0)  # it tries, and nobody is there
    job.listen()
    job.collect(5)
    assert {place["name"] for place in job.board()["present"]} == {"early"}
    job.actor("late")
    eventually(lambda: job.remote.present == 2)
    job.remote.publish(weights(0.5), 2)
    for _ in range(200):  # however quick the early one is while the other one still starts up
        job.collect(5)
        rows = job.rows()
        streams = {i // 10**6 for i in rows[schema.INIT_STATE_ID].flatten().tolist()}
        if len(streams) == 2:
            break
    check_once(rows)
    version, chunk = rows[schema.POLICY_VERSION].flatten(), rows[schema.CHUNK]
    assert (chunk[version == 1] == 0.25).all()
    assert (chunk[version == 2] == 0.5).all()
    assert {1, 2} == set(version.tolist())
    assert len(streams) == 2, "both actors brought rows"
    reports = [job.actors[name].ask_to_leave() for name in ("early", "late")]
    assert all(report["lost"] == 0 for report in reports)
    assert sum(report["rows"] for report in reports) == len(job.rows())
    eventually(lambda: job.remote.present == 0)
    assert job.remote.restarts == 0


def test_a_killed_actor_costs_its_batch_and_nobody_waits_for_it(job: Job):
    job.listen()
    victim = job.actor("victim")
    job.collect(3)
    job.remote.request()
    victim.kill()
    eventually(lambda: job.remote.present == 0)
    assert job.remote.restarts == 1
    assert job.remote.pending == 1, "its request waits for somebody else"
    job.actor("other")
    job.collect(5)
    assert [place["number"] for place in job.board()["present"]] == [1]
    check_once(job.rows())


def test_a_cut_connection_neither_loses_nor_repeats_a_batch(job: Job):
    job.listen()
    relay = Relay(job.address)
    job.actor("cut", relay.address)
    for number in range(6):
        job.collect(2)
        before = committed(job)
        if number % 2:
            relay.deaf_after = BATCH_BYTES  # a batch arrives, the word that it did does not
        job.remote.request()
        eventually(lambda before=before: committed(job) > before)
        relay.cut()
        relay.deaf, relay.deaf_after = False, None
        job.collect(1)
    check_once(job.rows())
    report = job.actors["cut"].ask_to_leave()
    assert report == {"rows": len(job.rows()), "lost": 0}
    assert len(job.rows()) % BATCH == 0
    assert job.remote.restarts >= 3
    relay.close()


def test_nobody_waits_for_what_a_silent_actor_was_asked_for(job: Job):
    job.listen(timeout=1e4)  # so long it keeps its place
    relay = Tap(job.address)
    job.actor("silent", relay.address)
    job.collect(2)
    relay.unplug()
    job.remote.request()  # and so it is asked
    eventually(lambda: job.remote.hub.places.all[0].owed == 1)
    job.actor("other")
    while not job.remote.receive():
        pass
    job.taken += 1
    assert job.remote.present == 2
    assert job.remote.pending == 0
    relay.plug()
    eventually(lambda: len(job.rows()) == 4 * BATCH)
    job.collect(5)
    check_once(job.rows())
    reports = [job.actors[name].ask_to_leave() for name in ("silent", "other")]
    assert all(report["lost"] == 0 for report in reports)
    assert sum(report["rows"] for report in reports) == len(job.rows())
    assert len(relay.confirmed) == reports[0]["rows"]
    relay.close()


def test_a_slow_link_carries_only_the_newest_weights(job: Job):
    job.listen()
    relay = Relay(job.address)
    relay.delay = 0.1
    job.actor("slow", relay.address)
    job.collect(1)
    for version in range(2, 50):
        job.remote.publish(weights(version / 100), version)
    job.collect(5)
    rows = job.rows()
    check_once(rows)
    version = rows[schema.POLICY_VERSION].flatten()
    assert len(set(version.tolist())) <= 3  # one may have been under way while 49 came
    assert (rows[schema.CHUNK][version == 49] == 0.49).all()
    assert int((version == 49).sum()) >= 2 * BATCH
    assert job.actors["slow"].ask_to_leave() == {"rows": len(job.rows()), "lost": 0}
    relay.close()


def test_a_restarted_learner_goes_back_and_its_actors_join_again(job: Job):
    job.listen()
    job.actor("stays")
    job.collect(4)
    cursor = job.replay.storage.cursor()
    job.collect(3)
    job.remote.close()
    assert job.actors["stays"].alive()
    job.cursor = cursor
    job.listen()
    assert len(job.rows()) == sum(lane["committed"] for lane in cursor["lanes"])
    job.remote.publish(weights(-0.5), 2)
    before = len(job.rows())
    job.collect(4)
    rows = job.rows()
    assert len(rows) == before + 4 * BATCH
    keys = list(zip(*(rows[k].flatten().tolist() for k in KEYS), strict=True))
    assert len(set(keys)) == len(keys)
    # what came after the restart was chosen by the restarted learner's weights, all of it
    assert int((rows[schema.POLICY_VERSION] == 2).sum()) == 4 * BATCH
    assert (rows[schema.CHUNK][rows[schema.POLICY_VERSION].flatten() == 2] == -0.5).all()


def test_an_actor_that_knows_the_learners_file_follows_it_to_another_port(job: Job):
    board = job.folder / "actors" / "remote.json"
    job.actor("follows", board)
    time.sleep(1.0)  # nobody has written it yet
    job.listen()
    job.collect(3)
    cursor, before = job.replay.storage.cursor(), job.port
    job.remote.close()
    with socket.create_server(("127.0.0.1", before)):  # somebody else has the port now
        job.port, job.cursor = 0, cursor
        job.listen()
        assert job.port != before
        job.collect(3)
    assert job.actors["follows"].alive()
    assert [place["name"] for place in job.board()["present"]] == ["follows"]
    check_once(job.rows())


def test_another_run_on_the_same_port_is_built_anew(job: Job, tmp_path: Path):
    job.listen()
    job.actor("stays")
    job.collect(2)
    job.remote.close()
    other = Job(tmp_path / "other", job.nursery)
    other.port, other.description = job.port, {"lengths": [1]}
    other.listen()
    try:
        other.collect(4)
        assert (other.rows()[schema.NUM_EXECUTED] == 1).all()
        check_once(other.rows())
    finally:
        other.close()


def test_when_the_run_is_over_actors_go_home(job: Job):
    job.listen()
    process = job.actor("worker")
    job.collect(2)
    with job.remote:
        pass
    assert process.report() == {"rows": len(job.rows()), "lost": 0}
    assert job.board()["ending"] == "over"


def test_a_wrong_secret_is_refused_and_costs_the_learner_nothing(job: Job):
    job.listen()
    job.actor("right")
    wrong = job.actor("wrong", secret=b"w" * 40)
    refused = wrong.report()["error"]
    assert refused == "RefusedError: the secret is not the one of this job"
    job.collect(2)
    assert job.remote.present == 1


def test_more_actors_than_places_wait_for_one(job: Job):
    job.listen(places=1)
    job.actor("first")
    job.collect(1)
    second = job.actor("second")
    time.sleep(1.0)
    job.collect(2)
    assert job.remote.present == 1
    job.actors["first"].ask_to_leave()
    eventually(lambda: [p["name"] for p in job.board()["present"]] == ["second"])
    job.collect(2)
    assert second.alive()
    check_once(job.rows())


def test_an_actor_collects_only_what_was_asked_for(job: Job):
    job.listen(places=1)
    job.actor("one")
    eventually(lambda: job.remote.present == 1)
    for _ in range(3):
        job.remote.request()
    eventually(lambda: len(job.rows()) == 3 * BATCH)
    time.sleep(1.0)
    assert len(job.rows()) == 3 * BATCH
    assert job.remote.pending == 3
    assert [job.remote.receive(wait=False) for _ in range(4)] == [True, True, True, None]
    job.remote.idle_share()
    eventually(lambda: job.remote.idle_share() > 0.99)  # of the time since: it has no request
