"""Places and credits without a network: who may have which, and what comes back."""

import time
from pathlib import Path

import pytest
from steer import LAYOUT

from torchrl_vla.remote.places import Places
from torchrl_vla.remote.wire import Channel
from torchrl_vla.replay import make_replay

HERE = Channel.__new__(Channel)  # a connection that nobody uses


@pytest.fixture
def places(tmp_path: Path) -> Places:
    replay = make_replay(tmp_path / "replay", 100, LAYOUT, lanes=2)
    return Places([7, 8], [0, 40], replay, patience=1000.0)


def join(places: Places, actor: str, before: int | None = None):
    place, own = places.join(actor, actor, "somewhere", before)
    if place is not None:
        place.channel = HERE
    return place, own


def test_an_absent_actor_keeps_its_place_for_a_while(places: Places):
    (a, own), (b, _) = join(places, "a"), join(places, "b")
    assert (a.stream, b.stream, own) == (7, 8, False)
    places.leave(a, for_good=False)
    assert join(places, "c") == (None, False)
    assert join(places, "a") == (a, True)
    places.leave(a, for_good=False)
    places.patience = 0.0
    a.committed = 5
    assert join(places, "c") == (a, False)
    assert (a.committed, a.users) == (0, 2)
    places.leave(b, for_good=True)
    places.patience = 1000.0
    assert join(places, "a") == (b, False)
    assert places.lost == 2


def test_an_actor_gets_the_place_it_had_with_an_earlier_learner(places: Places):
    assert join(places, "a", before=1)[0].number == 1
    assert join(places, "b", before=1)[0].number == 0


def test_requests_go_to_whoever_has_nothing_to_do(places: Places):
    a, b = join(places, "a")[0], join(places, "b")[0]
    places.wanted = 2
    assert [places.grant(a), places.grant(a), places.grant(b)] == [1, 0, 1]
    places.wanted = 3
    assert [places.grant(a), places.grant(a), places.grant(b), places.grant(b)] == [1, 0, 1, 0]
    assert (places.wanted, places.pending) == (1, 5)


def test_the_requests_of_a_silent_actor_are_for_others_until_it_speaks_again(places: Places):
    a, b = join(places, "a")[0], join(places, "b")[0]
    places.wanted = 2
    assert places.grant(a) + places.grant(a) == 1  # the second one is for b
    places.wanted = 1
    a.heard = b.heard = time.monotonic()
    assert not places.pass_over_silent()
    assert (a.owed, places.wanted) == (1, 1)
    a.heard = 0.0
    assert places.pass_over_silent()
    assert (a.owed, places.wanted, places.pending) == (0, 2, 2)
    assert places.grant(b) + places.grant(b) == 2
    places.heard_from(a, 1)
    assert (a.owed, places.wanted, places.pending) == (1, 0, 3)
    places.arrived(a)
    assert (places.done, places.pending) == (1, 3)
    places.heard_from(a, 7)  # it counts on what the learner knows as long as it speaks
    assert a.owed == 0


def test_what_an_actor_owes_comes_back_when_it_leaves_and_returns_with_it(places: Places):
    a = join(places, "a")[0]
    places.wanted = 2
    assert places.grant(a) + places.grant(a) == 2
    places.leave(a, for_good=False)
    assert (places.wanted, places.pending) == (2, 2)
    join(places, "a")
    places.bring_back(a, 1)
    assert (places.wanted, a.owed, places.pending) == (1, 1, 2)
    places.arrived(a)
    assert (places.done, a.owed, places.pending) == (1, 0, 2)


def test_the_idle_share_is_that_of_the_time_since_the_last_call(places: Places):
    a, b = join(places, "a")[0], join(places, "b")[0]
    assert places.idle_share() == 0.0
    a.hear(500.0, now=10.0)  # idle for another learner before: not of this run
    assert places.idle_share() == 0.0
    a.hear(503.0, now=14.0)
    assert places.idle_share() == 3 / 4
    assert places.idle_share() == 3 / 4  # nothing was said since
    a.hear(503.0, now=18.0)
    b.hear(0.0, now=16.0)
    b.hear(2.0, now=18.0)
    assert places.idle_share() == 2 / 6
    places.leave(a, for_good=False)
    join(places, "a")
    a.hear(590.0, now=118.0)  # it was away: nobody's time
    a.hear(590.5, now=120.0)
    assert places.idle_share() == 0.5 / 2
    a.hear(593.0, now=122.0)  # what it says is late by part of a question
    assert places.idle_share() == 1.0
