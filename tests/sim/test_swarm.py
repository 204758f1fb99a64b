from collections import Counter

import msgspec

from sloop.policies import POLICIES
from sloop.sim.swarm import BRANCHING, CHOICES, FAULTS, GRAPHS, world_from_seed

WORLDS = [world_from_seed(seed) for seed in range(300)]


def test_a_seed_is_a_world() -> None:
    again = world_from_seed(5)
    assert msgspec.json.encode(again.application) == msgspec.json.encode(WORLDS[5].application)
    assert (again.faults, again.truth, again.errors) == (WORLDS[5].faults, WORLDS[5].truth, WORLDS[5].errors)
    assert list(again.trace.times_ns()) == list(WORLDS[5].trace.times_ns())


def test_each_kind_of_fault_is_on_in_one_world_out_of_four() -> None:
    calm = Counter[str]()
    for played in WORLDS:
        calm.update(kind for kind in FAULTS if getattr(played.faults, kind))
    assert all(45 <= calm[kind] <= 105 for kind in FAULTS), calm


def test_worlds_are_of_every_shape() -> None:
    assert {len(played.application.stages) for played in WORLDS} == {len(graph) for graph in (*GRAPHS, *BRANCHING)}
    assert {played.truth.network is None for played in WORLDS} == {True, False}
    assert min(min(played.errors.values()) for played in WORLDS) == 0.25
    assert max(max(played.errors.values()) for played in WORLDS) == 4.0


def test_worlds_are_small_enough_to_play_many() -> None:
    assert max(sum(1 for _ in played.trace.times_ns()) for played in WORLDS[:50]) < 4_000


def test_what_can_be_drawn_exists() -> None:
    assert all(set(names) <= POLICIES[verb].keys() for verb, names in CHOICES.items())
