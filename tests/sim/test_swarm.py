from collections import Counter

import msgspec

from sloop.actions import End, StartBatch
from sloop.events import Finished
from sloop.policies import POLICIES
from sloop.runlog import MemoryLog
from sloop.sim import simulate
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
    sizes = {*map(len, GRAPHS), *map(len, BRANCHING)}
    assert {len(played.application.stages) for played in WORLDS} == sizes
    assert {played.truth.network is None for played in WORLDS} == {True, False}
    assert min(min(played.errors.values()) for played in WORLDS) == 0.25
    assert max(max(played.errors.values()) for played in WORLDS) == 4.0


def test_worlds_are_small_enough_to_play_many() -> None:
    assert max(sum(1 for _ in played.trace.times_ns()) for played in WORLDS[:50]) < 4_000


def test_what_can_be_drawn_exists() -> None:
    assert all(set(names) <= POLICIES[verb].keys() for verb, names in CHOICES.items())


def test_worlds_branch_fan_out_join_and_have_paths() -> None:
    found = Counter[str]()
    for played in WORLDS:
        graph = played.application.graph
        edges = [edge for away in graph.edges.values() for edge in away]
        found["alone"] += len(graph.steps) == 1
        found["plain"] += len(graph.steps) > 1 and graph.is_plain
        found.update({edge.kind for edge in edges})
        found["when"] += any(edge.when for edge in edges)
        found["when, of parts"] += any(edge.when and edge.kind == "each" for edge in edges)
        found["paths"] += bool(graph.declared_paths)
        found["deadlines"] += graph.has_deadlines
        found["other parts than believed"] += bool(played.truth.fan_out)
        assert played.truth.fan_out.keys() <= {name for name, step in graph.steps.items() if step.each}
    assert all(found[kind] >= 60 for kind in ("alone", "plain", "one", "each", "when")), found
    assert all(found[kind] >= 20 for kind in ("join", "when, of parts", "paths", "deadlines")), found
    assert found["other parts than believed"] >= 15, found


def test_in_some_worlds_requests_fall_into_parts_none_one_many_and_too_many() -> None:
    found = Counter[str]()
    for seed in range(60):
        played = world_from_seed(seed)
        if played.application.graph.is_plain:
            continue
        simulate(played, [log := MemoryLog()])
        for _, record in log.records:
            if isinstance(record, StartBatch) and record.parts:
                found["a part"] += 1
                found["parts of one request together"] += len(set(record.requests)) < len(record.requests)
                found["parts of two requests together"] += len(set(record.requests)) > 1
            elif isinstance(record, Finished):
                found["a branch not taken"] += any(0 in ways for ways in record.edge_counts)
                found["several parts"] += any(count > 1 for ways in record.edge_counts for count in ways)
            elif isinstance(record, End):
                found[record.outcome] += 1
                found["too many parts"] += "of a request at most" in record.why
    assert min(found.values()) >= 100, found
    assert len(found) >= 10, found
