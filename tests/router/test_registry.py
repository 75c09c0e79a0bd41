"""Who may be planned with: alike, heard of, not suspect; and every life that ended is told of once."""

from __future__ import annotations

import msgspec
import pytest

from tests.router.workers import TTL_S, D, E, P, Told, info
from triptych.errors import ConfigError
from triptych.types import Heartbeat, Load


def beat(name: str, epoch: str = "1", num_running: int = 0) -> Heartbeat:
    return Heartbeat(name, f"{name}-{epoch}", Load(num_running=num_running), {"x": 1.0})


def test_a_worker_is_live_for_the_stages_that_it_hosts() -> None:
    told = Told(info("e0", [E]), info("pd0", [P, D]))
    assert (told.live(E), told.live(P), told.live(D)) == (["e0"], ["pd0"], ["pd0"])
    assert told.num_joined == 2


def test_s16_an_unlike_version_is_refused_and_both_are_named() -> None:
    told = Told()
    with pytest.raises(ConfigError, match=r"v2.*v1"):
        told.registry.register(info("e0", [E], version="v2"))
    assert told.registry.workers() == []


def test_an_unlike_restart_does_not_take_the_place_of_the_one_that_is_known() -> None:
    told = Told(info("e0", [E]))
    with pytest.raises(ConfigError):
        told.registry.register(info("e0", [E], "2", version="v2"))
    assert (told.live(E), told.lost) == (["e0"], [])


def test_registering_again_changes_nothing() -> None:
    told = Told(info("e0", [E]))
    (worker,) = told.registry.workers()
    told.registry.register(info("e0", [E]))
    assert told.registry.workers() == [worker]
    assert (told.lost, told.num_joined) == ([], 1)


def test_a_restart_loses_the_earlier_life_once() -> None:
    told = Told(info("e0", [E]))
    told.registry.register(info("e0", [E], "2"))
    told.registry.leave("e0", "e0-1")
    told.registry.sweep()
    assert told.lost == ["e0-1"]
    assert told.registry.find("e0", "e0-1") is None
    assert told.registry.find("e0", "e0-2") is not None
    assert told.num_joined == 2


def test_a_worker_that_leaves_is_lost_once() -> None:
    told = Told(info("e0", [E]))
    for _ in range(2):
        told.registry.leave("e0", "e0-1")
        told.registry.lost("e0")
    assert (told.lost, told.live(E)) == (["e0-1"], [])


def test_a_process_that_died_is_lost_whatever_its_epoch() -> None:
    told = Told(info("e0", [E], "7"))
    told.registry.lost("e0")
    told.registry.lost("nobody")
    assert told.lost == ["e0-7"]


def test_a_silent_worker_is_swept_and_one_that_beats_is_not() -> None:
    told = Told(info("e0", [E]), info("e1", [E]))
    told.pass_time(TTL_S)
    assert told.lost == []
    told.registry.heartbeat(beat("e1"))
    told.pass_time(0.5)
    told.registry.sweep()
    assert (told.lost, told.live(E)) == (["e0-1"], ["e1"])


def test_the_time_for_which_the_router_itself_was_stopped_is_nobodys_silence() -> None:
    told = Told(info("e0", [E]), info("e1", [E]))
    told.pass_time(TTL_S / 2)
    told.clock.advance(10 * TTL_S)
    told.registry.sweep()
    assert told.lost == []
    told.registry.heartbeat(beat("e1"))
    told.pass_time(TTL_S / 2 + 0.5)
    assert (told.lost, told.live(E)) == (["e0-1"], ["e1"])


def test_a_heartbeat_brings_load_and_counters() -> None:
    told = Told(info("e0", [E]))
    assert told.registry.heartbeat(beat("e0", num_running=3))
    (worker,) = told.registry.workers()
    assert (worker.load.num_running, worker.counters) == (3, {"x": 1.0})


@pytest.mark.parametrize(("name", "epoch"), [("e1", "1"), ("e0", "2")])
def test_a_heartbeat_of_an_unknown_life_is_not_taken(name: str, epoch: str) -> None:
    told = Told(info("e0", [E]))
    assert not told.registry.heartbeat(beat(name, epoch, num_running=3))
    assert told.registry.workers()[0].load.num_running == 0


def test_a_worker_that_was_swept_must_start_anew() -> None:
    told = Told(info("e0", [E]))
    told.pass_time(TTL_S + 1)
    assert not told.registry.heartbeat(beat("e0"))
    with pytest.raises(ConfigError, match="declared lost"):
        told.registry.register(info("e0", [E]))
    told.registry.register(info("e0", [E], epoch="2"))
    assert told.live(E) == ["e0"]


def test_a_worker_that_says_that_it_drains_gets_nothing_new_any_more() -> None:
    told = Told(info("e0", [E]))
    told.registry.heartbeat(msgspec.structs.replace(beat("e0"), draining=True))
    told.registry.heartbeat(beat("e0"))
    assert told.live(E) == []


def test_draining_and_suspect_workers_get_nothing_new_and_stay_known() -> None:
    told = Told(info("e0", [E]), info("e1", [E]), info("e2", [E]))
    first, second, _ = told.registry.workers()
    first.draining = True
    second.suspect = "the tower is broken"
    assert told.live(E) == ["e2"]
    assert [worker.state for worker in told.registry.workers()] == ["draining", "suspect", "live"]
    second.suspect = ""
    assert told.live(E) == ["e1", "e2"]
