"""Requests of several rows, and of rows of several sizes: what a batch of them takes, and what checkers say of it."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from sloop.actions import Action, End, Piece, StartBatch
from sloop.app.load import load_scenario
from sloop.app.scenario import Truth
from sloop.errors import InputError
from sloop.events import Finished
from sloop.runlog import FileLog
from sloop.sim import Violation, World, simulate
from sloop.sim.world import recorded_in
from sloop.systems.replay import header_of
from sloop.units import ms, s
from sloop.vocabulary import Outcome
from sloop.workload import Work, trace_of
from sloop.workload.trace import first_works
from tests.sim.scene import WORK_CONSERVING, Broken, Tamper, graph_world, once, records_of, with_clients, world

FIXED = {"service": {"ratio": 1.0, "shape": "deterministic"}}
"""A pass of n rows takes 10 + 2n ms, no more and no less."""


def served(works: Sequence[Work], *, at_ms: Sequence[float] = (), replicas: int = 1, **options: Any) -> World:
    """So many replicas, and requests that bring these at 1 s, or at these times. `options` are those of `world`."""
    times_ns = [ms(each) for each in at_ms] or [s(1)] * len(works)
    trace = trace_of(times_ns, name="some", provenance="assumed: a test", works=works.__iter__)
    system = WORK_CONSERVING | {"replicas": replicas, "cores": 1.0}
    return with_clients(world(system=system, truth=FIXED, slo_ms=10_000, **options), trace=trace)


def batches(made: World) -> list[tuple[float, float, int, int]]:
    """Of each batch: its start and end in ms after 1 s, its rows and its passes."""
    begun, found = dict[int, tuple[int, StartBatch]](), []
    for now_ns, record in records_of(made):
        if isinstance(record, StartBatch):
            begun[record.batch] = now_ns, record
        elif isinstance(record, Finished):
            from_ns, order = begun[record.batch]
            found.append(((from_ns - s(1)) / 1e6, (now_ns - s(1)) / 1e6, order.rows, record.passes))
    return found


def test_rows_of_a_request_run_together_and_count_for_the_batch() -> None:
    """The first runs alone. Then 2 + 3 rows are one batch, since 4 more would be more than the 8 of a pass."""
    made = served([Work(1), Work(2), Work(3), Work(4)], at_ms=[1_000, 1_001, 1_002, 1_003])
    assert batches(made) == [(0, 12, 1, 1), (12, 32, 5, 1), (32, 50, 4, 1)]


PLAIN = {
    "latency_ms": {"form": "quadratic", "alpha": 0.0, "beta": 2.0, "gamma": 10.0},
    "max_batch": 8,
    "max_cores": 16,
}


def test_a_request_of_more_rows_than_a_pass_takes_several() -> None:
    """20 rows: two passes of 8, which take 26 ms each, and one of 4, which takes 18. If rows may meet, they are one
    batch."""
    assert batches(served([Work(20)])) == [(0, 26, 8, 1), (26, 52, 8, 1), (52, 70, 4, 1)]
    assert batches(served([Work(16), Work(1)])) == [(0, 26, 8, 1), (26, 52, 8, 1), (52, 64, 1, 1)]
    assert batches(served([Work(20)], stage={"profile": PLAIN, "joins_rows": False})) == [(0, 70, 20, 3)]
    assert batches(served([Work(20)], replicas=2)) == [(0, 26, 8, 1), (0, 26, 8, 1), (26, 44, 4, 1)]


def test_rows_of_other_sizes_run_in_other_batches() -> None:
    found = batches(served([Work(1, 16), Work(1, 512), Work(1, 16), Work(1, 512)]))
    assert sorted(rows for _, _, rows, _ in found) == [2, 2]


SIZED = PLAIN | {
    "sizes": [
        {"size": 16, "latency_ms": {"form": "quadratic", "alpha": 0.0, "beta": 2.0, "gamma": 10.0}},
        {"size": 512, "latency_ms": {"form": "quadratic", "alpha": 0.0, "beta": 64.0, "gamma": 10.0}},
    ],
}
"""A pass of n rows of size 16 takes 10 + 2n ms; of 512, 10 + 64n ms; in between, linearly."""


def test_a_pass_takes_as_long_as_its_rows_are_large() -> None:
    works = [Work(1, 16), Work(2, 512), Work(3, 264)]
    found = batches(served(works, at_ms=[1_000, 1_001, 1_002], stage={"profile": SIZED}))
    assert found == [(0, 12, 1, 1), (12, 150, 2, 1), (150, 259, 3, 1)]


def test_rows_are_padded_to_the_largest_of_their_pass() -> None:
    """Declared to be padded, up to 512 together: 16 and 264 run as two of 264, which take 10 + 2 × 33 ms."""
    stage = {"profile": SIZED, "sizes": [512], "pad": {"ids": 0}}
    works = [Work(1, 512), Work(1, 16), Work(1, 264)]
    made = served(works, at_ms=[1_000, 1_001, 1_002], stage=stage)
    assert batches(made) == [(0, 74, 1, 1), (74, 150, 2, 1)]
    finished = [record for _, record in records_of(made) if isinstance(record, Finished)]
    assert [(each.elements, each.padded) for each in finished] == [(512, 0), (280, 248)]


@pytest.mark.parametrize("system", ["static", "early-drop", "elastic", "headstart", "mixed", "hpa", "harbor"])
@pytest.mark.parametrize(
    "brings",
    [{"rows": [1, 2, 5, 20]}, {"sizes": {"kind": "uniform", "least": 8, "most": 64}}, {"rows": 3, "sizes": [8, 9]}],
)
def test_under_every_system_no_rows_run_together_that_cannot(system: str, brings: dict[str, Any]) -> None:
    made = world(trace={"kind": "poisson", "rate": 60, **brings}, system={"name": system}, duration_s=5)
    records = records_of(made, check_first=None)
    ends = Counter(record.request for _, record in records if isinstance(record, End))
    assert set(ends.values()) == {1}
    for order in (record for _, record in records if isinstance(record, StartBatch)):
        assert order.rows <= 8 or len(order.requests) == 1


def test_the_same_seed_gives_the_same_log() -> None:
    made = world(trace={"kind": "poisson", "rate": 60, "rows": [1, 3], "sizes": [8, 9]})
    assert records_of(made) == records_of(made)


def crowd() -> World:
    """Two classes of sizes, two rows each, more than two replicas can serve."""
    trace = {"kind": "poisson", "rate": 400, "rows": 2, "sizes": [16, 512]}
    return world(trace=trace, system=WORK_CONSERVING | {"replicas": 2, "batch_max": 4})


def joined(*, are_equal: bool) -> Tamper:
    """A batch of two requests is kept back, and runs with the next one on the other replica whose rows are equally
    large, or are not."""
    kept: list[StartBatch] = []

    def tamper(action: Action) -> Sequence[Action]:
        if not isinstance(action, StartBatch) or len(action.requests) < 2:
            return [action]
        kept.append(action)
        if len(kept) == 1:
            return []
        if (action.size == kept[0].size) is not are_equal:
            return [action]
        return [replace(action, requests=kept[0].requests + action.requests, together=kept[0].rows + action.rows)]

    return tamper


@pytest.mark.parametrize(
    ("tamper", "complaint"),
    [
        (once(StartBatch, lambda order: [replace(order, together=0)]), r"a batch of \(2, 2\) rows .* is one of 2 rows"),
        (once(StartBatch, lambda order: [replace(order, size=8)]), r"a batch of \(2, 2\) rows .* up to 8"),
        (joined(are_equal=False), "a batch of rows that cannot run together: .*only up to 16.*only up to 512"),
        (joined(are_equal=True), r"a batch of \(2, 2, 2, 2\) rows of several requests, where 4 are planned"),
    ],
)
def test_a_batch_of_other_rows_than_it_may_have_is_caught(tamper: Tamper, complaint: str) -> None:
    made = crowd()
    with pytest.raises(Violation, match=complaint):
        simulate(made, core=Broken(made.setup().core(), tamper))


def large(**stage: Any) -> World:
    """Requests of ten rows, of which a pass takes four."""
    return world(
        trace={"kind": "poisson", "rate": 20, "rows": 10},
        system=WORK_CONSERVING | {"replicas": 2},
        stage={"profile": PLAIN | {"max_batch": 4}, **stage},
    )


def second(change: Callable[[StartBatch], StartBatch]) -> Tamper:
    """The second batch is another one."""
    count = 0

    def tamper(action: Action) -> Sequence[Action]:
        nonlocal count
        if not isinstance(action, StartBatch):
            return [action]
        count += 1
        return [change(action) if count == 2 else action]

    return tamper


@pytest.mark.parametrize(
    ("tamper", "complaint"),
    [
        (second(lambda order: replace(order, pieces=(Piece(0, 4, 10),))), "of which 4 rows have begun"),
        (second(lambda order: replace(order, pieces=(Piece(8, 4, 10),))), "of which 4 rows have begun"),
        (second(lambda order: replace(order, pieces=(Piece(4, 4, 11),))), "Piece.*of=11.* of request"),
        (
            second(lambda order: replace(order, pieces=(Piece(4, 3, 10),))),
            r"a batch of \(3,\) rows .* is one of 4 rows",
        ),
        (second(lambda order: replace(order, pieces=())), r"a batch of \(10,\) rows .* is one of 4 rows"),
        (second(lambda order: replace(order, pieces=order.pieces * 2)), "2 pieces of 1 requests"),
        (
            second(lambda order: replace(order, pieces=(Piece(4, 6, 10),), together=6)),
            "a batch of 6 rows of one request",
        ),
    ],
)
def test_a_piece_of_other_rows_than_are_left_is_caught(tamper: Tamper, complaint: str) -> None:
    made = large()
    simulate(made)
    with pytest.raises(Violation, match=complaint):
        simulate(made, core=Broken(made.setup().core(), tamper))


def test_a_request_whose_rows_may_meet_runs_whole() -> None:
    made = large(joins_rows=False)
    with pytest.raises(Violation, match="where its rows may meet"):
        simulate(
            made,
            core=Broken(
                made.setup().core(),
                once(StartBatch, lambda order: [replace(order, pieces=(Piece(0, 4, 10),), together=4)]),
            ),
        )


# Against an ideal server, on one core


def per_token(size: int) -> dict[str, Any]:
    """A pass of n rows of this size takes 5 + 0.1 × n × size ms."""
    return {"form": "quadratic", "alpha": 0.0, "beta": 0.1 * size, "gamma": 5.0}


TYPICAL = {"latency_ms": per_token(128), "max_batch": 8, "max_cores": 1}
SIZES = [{"size": size, "latency_ms": per_token(size)} for size in (8, 512)]
MIXES = {
    "uniform": {"rate": 40, "sizes": {"kind": "uniform", "least": 8, "most": 248}},
    "few long": {"rate": 60, "sizes": {"kind": "choice", "values": [16, 512], "weights": [9, 1]}},
    "texts": {"rate": 55, "sizes": {"kind": "lognormal", "median": 60, "sigma": 0.9, "most": 512}},
}


def ideal(made: World, cost_ms: Callable[[int], float] = lambda size: 5 + 0.1 * size) -> float:
    """The share in time of a server that knows what each request takes, and serves one after the other those that it
    can serve in time."""
    free_ns = served = count = 0
    for at_ns, work in zip(made.trace.times_ns(), first_works(made.trace, 10**6), strict=True):
        end_ns = max(at_ns, free_ns) + ms(cost_ms(work.size))
        count += 1
        if end_ns - at_ns <= ms(made.application.slo_ms):
            free_ns, served = end_ns, served + 1
    return served / count


def attainment(made: World) -> float:
    ends = Counter(record.outcome for _, record in records_of(made, check_first=0) if isinstance(record, End))
    return ends[Outcome.SERVED] / ends.total()


@pytest.mark.parametrize("system", ["early-drop", "elastic"])
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("knows", [True, False])
def test_mixed_lengths_are_served_as_by_a_server_that_knows_what_each_takes(
    system: str, mix: str, *, knows: bool
) -> None:
    """Also if the profile knows only the typical length, and the true ones have to be learnt."""
    made = world(
        stage={"profile": TYPICAL | ({"sizes": SIZES} if knows else {})},
        truth={"service": {"ratio": 1.0, "cv": 0.01}, "sizes": {"only": SIZES}},
        trace={"kind": "poisson", **MIXES[mix]},
        system={"name": system},
        slo_ms=200,
        duration_s=30,
        cores=1,
    )
    assert attainment(made) >= 0.97 * ideal(made)


TEXT_MS = {8: 4.5, 16: 7.0, 64: 18.0, 128: 38.0, 256: 76.0, 512: 194.0}
"""What a text of so many tokens took on one core (benchmarks/results/lengths.md)."""


def text_ms(size: int) -> float:
    return float(np.interp(size, list(TEXT_MS), list(TEXT_MS.values())))


TEXT_SIZES = [
    {"size": size, "latency_ms": {"form": "quadratic", "alpha": 0.0, "beta": own_ms - 1, "gamma": 1.0}}
    for size, own_ms in TEXT_MS.items()
]
TEXTS = {
    "reviews": {16: 2, 64: 2, 128: 2, 200: 2, 256: 1, 300: 2, 400: 2, 512: 3},
    "tweets and documents": {16: 6, 32: 3, 512: 1},
    "three classes": {16: 5, 128: 3, 512: 2},
}
"""The lengths that come, and how often."""


@pytest.mark.parametrize("mix", TEXTS)
@pytest.mark.parametrize("load", [1.4, 2.0])
def test_more_texts_than_it_can_serve_are_served_as_by_a_server_that_knows_what_each_takes(
    mix: str, load: float
) -> None:
    """A request is neither refused for large ones that will be dropped, nor dropped for their time."""
    weights = TEXTS[mix]
    lengths = [length for length, count in weights.items() for _ in range(count)]
    rate = load * 1e3 / fmean(map(text_ms, lengths))
    made = world(
        stage={"profile": TYPICAL | {"sizes": TEXT_SIZES}, "pad": {"ids": 0}},
        truth={"service": {"ratio": 1.0, "cv": 0.04}},
        trace={
            "kind": "poisson",
            "rate": rate,
            "sizes": {"kind": "choice", "values": list(weights), "weights": list(weights.values())},
        },
        system={"name": "early-drop"},
        slo_ms=776,
        duration_s=40,
        cores=1,
    )
    assert attainment(made) >= 0.97 * ideal(made, text_ms)


@pytest.mark.parametrize("system", ["early-drop", "elastic"])
def test_clients_that_batch_themselves_are_served_as_single_rows(system: str) -> None:
    """At 0.7 of the rows that one core can serve: 16 in 74 ms."""
    profile = {"latency_ms": {"form": "quadratic", "alpha": 0.0, "beta": 4.0, "gamma": 10.0}, "max_batch": 16}
    rate = 0.7 * 16 / 0.074
    single, batched = (
        world(
            stage={"profile": profile},
            trace={"kind": "poisson", "rate": rate / rows, "rows": rows},
            system={"name": system},
            slo_ms=450,
            duration_s=60,
            cores=1,
        )
        for rows in (1, 16)
    )
    assert attainment(batched) >= attainment(single) - 0.01


def test_a_recorded_run_of_mixed_lengths_is_played_again_size_by_size(tmp_path: Path) -> None:
    """Its batches of one class take what those of this class took, although the profile knows only typical rows."""
    made = world(
        stage={"profile": TYPICAL, "sizes": [16, 512]},
        truth={"service": {"ratio": 1.0, "cv": 0.05}, "sizes": {"only": SIZES}},
        trace={"kind": "poisson", "rate": 30, "sizes": [16, 512]},
        system={"name": "early-drop"},
        slo_ms=200,
        duration_s=30,
        cores=1,
    )
    log = tmp_path / "run.jsonl"
    with FileLog(log, header_of(made.setup(), origin="sim", seed=1)) as sink:
        simulate(made, [sink])
    recorded = recorded_in(log, made.deployment)
    assert set(recorded.durations_ns) == {0, 16, 512}
    again = dataclasses.replace(made, truth=Truth(), recorded=recorded)
    took = {id(run): durations(run) for run in (made, again)}
    for size, rows in ((16, 1), (512, 1)):
        assert fmean(took[id(again)][size, rows]) == pytest.approx(fmean(took[id(made)][size, rows]), rel=0.02)
    assert attainment(again) == pytest.approx(attainment(made), abs=0.02)


def durations(made: World) -> dict[tuple[int, int], list[int]]:
    """Of each batch, by class and rows."""
    begun, found = dict[int, StartBatch](), dict[tuple[int, int], list[int]]()
    for _, record in records_of(made, check_first=0):
        if isinstance(record, StartBatch):
            begun[record.batch] = record
        elif isinstance(record, Finished):
            order = begun[record.batch]
            found.setdefault((order.size, order.rows), []).append(record.service_ns)
    return found


# Behind other stages


def passing(**stages: dict[str, Any]) -> World:
    """Two requests in a graph, of rows of 16 and of 512; all durations are fixed."""
    trace = trace_of([s(1), s(3)], name="two", provenance="assumed: a test", works=[Work(1, 16), Work(1, 512)].__iter__)
    system = WORK_CONSERVING | {"replicas": 1, "cores": 1.0}
    truth = FIXED | {"fan_out": {"each": 3}} if "each" in stages else FIXED
    return with_clients(graph_world(stages, truth=truth, system=system, slo_ms=10_000), trace=trace)


def ran(made: World) -> dict[str, list[tuple[int, int, int]]]:
    """Of each batch, by stage: its rows, the class of their size, and what it took in ms."""
    begun, found = dict[int, StartBatch](), dict[str, list[tuple[int, int, int]]]()
    for _, record in records_of(made, check_first=None):
        if isinstance(record, StartBatch):
            begun[record.batch] = record
        elif isinstance(record, Finished):
            order = begun[record.batch]
            found.setdefault(order.stage, []).append((order.rows, order.size, round(record.service_ns / 1e6)))
    return found


def test_rows_of_later_stages_are_as_large_as_those_of_the_request() -> None:
    """Also behind a stage whose profile has one size for all rows."""
    made = passing(first={"profile": SIZED}, plain={"after": ["first"]}, last={"after": ["plain"], "profile": SIZED})
    assert ran(made) == {
        "first": [(1, 19, 12), (1, 512, 74)],
        "plain": [(1, 0, 12), (1, 0, 12)],
        "last": [(1, 19, 12), (1, 512, 74)],
    }
    assert "last: its rows are as large as those of the request" in made.assumed_sizes([16, 512])


def test_each_part_has_a_row_as_large_as_the_request_and_what_joins_them_a_typical_one() -> None:
    made = passing(
        first={"profile": SIZED},
        each={"after": ["first"], "each": {"output": "found", "mean": 3}, "profile": SIZED},
        joined={"after": ["each"], "join": True, "profile": SIZED},
    )
    assert ran(made) == {
        "first": [(1, 19, 12), (1, 512, 74)],
        "each": [(3, 19, 16), (3, 512, 202)],
        "joined": [(1, 0, 12), (1, 0, 12)],
    }
    assumed = made.assumed_sizes([16, 512])
    assert "each: its rows are as large as those of the request" in assumed
    assert "joined: its rows are of typical size" in assumed


def test_a_later_stage_that_pads_counts_its_padding() -> None:
    stage = {"profile": SIZED, "sizes": [512], "pad": {"ids": 0}}
    made = passing(first={}, last={"after": ["first"], **stage})
    assert [size for _, size, _ in ran(made)["last"]] == [512, 512]
    ended = [record for _, record in records_of(made) if isinstance(record, Finished) and record.elements]
    assert [(each.elements, each.padded) for each in ended] == [(16, 0), (512, 0)]


def test_true_sizes_are_of_stages_and_at_least_two() -> None:
    with pytest.raises(InputError, match="at least two sizes"):
        world(truth={"sizes": {"only": SIZES[:1]}})
    with pytest.raises(InputError, match="unknown key 'other'"):
        world(truth={"sizes": {"other": SIZES}})
    with pytest.raises(InputError, match="sizes ascend"):
        world(truth={"sizes": {"only": SIZES[::-1]}})


# Requests that no server would take

ONLY = [{"name": "only", "profile": SIZED}]


@pytest.mark.parametrize(
    ("stages", "limits", "brings", "complaint"),
    [
        (
            [
                {"name": "detect", "profile": PLAIN},
                {"name": "read", "profile": PLAIN, "after": "detect", "each": {"of": "detect"}},
            ],
            {},
            {"rows": [1, 2]},
            r"trace\.rows: a request to strange has one row: the outputs of detect decide for it as a whole which",
        ),
        (
            [
                {"name": "detect", "profile": PLAIN},
                {"name": "read", "profile": PLAIN, "after": "detect", "when": {"of": "detect", "share": 0.5}},
            ],
            {},
            {"rows": 3},
            r"trace\.rows: a request to strange has one row",
        ),
        (ONLY, {"rows": 4}, {"rows": {"kind": "uniform", "least": 1, "most": 5}}, "5 rows exceed the limit of 4 rows"),
        (
            ONLY,
            {},
            {"sizes": 2049},
            "rows of 2,049 elements, where the profile of strange says something of up to 2,048",
        ),
    ],
)
def test_a_trace_brings_only_what_the_application_takes(
    stages: list[dict[str, Any]], limits: dict[str, int], brings: dict[str, Any], complaint: str
) -> None:
    declared = {
        "name": "strange",
        "slo_ms": 500,
        "stages": stages,
        "system": {"name": "static", "cores": 1.0},
        "cluster": {"nodes": [{"hardware": "custom", "cores": 16, "memory_bytes": 10**9}]},
        "duration_s": 5,
    }
    World.from_scenario(load_scenario({**declared, "trace": {"kind": "poisson", "rate": 20}}))
    limited = {"limits": limits} if limits else {}
    with pytest.raises(InputError, match=complaint):
        World.from_scenario(load_scenario({**declared, **limited, "trace": {"kind": "poisson", "rate": 20, **brings}}))
