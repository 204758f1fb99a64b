"""Advice against every fleet there is; the requests of joined applications; the limits of a search."""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sloop.app.application import Deployment, SystemChoice
from sloop.app.load import load_deployment
from sloop.errors import InputError
from sloop.policies.forecast import OracleForecast
from sloop.sim.advice import AdviceSearch, Question, ServiceCounts, advise, first_rps, mean_rps, peak_rps
from sloop.sim.run import simulate
from sloop.sim.scenarios import summary_of
from sloop.solvers.frontier import cheapest, frontier
from sloop.systems import build_system
from sloop.systems.planning.advice import AdviceReport, Fleet, FleetChoice, FleetQuestion, offered_kinds
from sloop.units import s
from sloop.workload import Trace, trace_from, trace_of

SLOW = {"latency_ms": {"form": "quadratic", "alpha": 0, "beta": 10, "gamma": 20}, "max_batch": 8, "max_cores": 8}
FAST = {
    "latency_ms": {"form": "quadratic", "alpha": 0, "beta": 1, "gamma": 9},
    "max_batch": 16,
    "max_cores": 4,
    "accelerator": "T4",
}
BOTH = {"nodes": [{"hardware": "c5.2xlarge"}, {"hardware": "g4dn.xlarge"}]}
PROFILES = {"c5.2xlarge": SLOW, "g4dn.xlarge": FAST}


def deployment(**slos_ms: float) -> Deployment:
    found: list[dict[str, Any]] = [
        {"name": name, "slo_ms": slo_ms, "stages": [{"name": "only", "profiles": PROFILES}]}
        for name, slo_ms in slos_ms.items()
    ]
    return load_deployment([{**found[0], "cluster": BOTH}, *found[1:]])


def poisson(rate: float, seed: int = 0, duration_s: float = 20) -> Trace:
    return trace_from({"kind": "poisson", "rate": rate}, seed=seed, duration_s=duration_s, folder=Path())


def question(
    made: Deployment, traces: Mapping[str, Trace], *systems: str, wanted: float = 0.99, prices: Any = None
) -> Question:
    kinds, left_out = offered_kinds(made, (), {}, prices or {})
    fleets = FleetQuestion(
        made,
        kinds,
        tuple(map(SystemChoice, systems or ("mixed",))),
        {name: mean_rps(trace) for name, trace in traces.items()},
        {name: first_rps(trace) for name, trace in traces.items()},
    )
    return Question(fleets, traces, wanted, 0, left_out=left_out)


@lru_cache
def advised(rate: float, slo_ms: float = 150, wanted: float = 0.99, price: float = 0.526) -> AdviceReport:
    return advise(question(deployment(a=slo_ms), {"a": poisson(rate)}, wanted=wanted, prices={"g4dn.xlarge": price}))


# The search


@pytest.mark.parametrize(("rate", "price"), [(40.0, 0.526), (40.0, 2.0), (90.0, 0.9)])
def test_the_advice_is_the_cheapest_of_all_fleets(rate: float, price: float) -> None:
    """Every fleet of up to four and one nodes, simulated."""
    asked = question(deployment(a=150), {"a": poisson(rate)}, prices={"g4dn.xlarge": price})
    search = AdviceSearch(asked, lambda: False, lambda done, known, now: None)
    every = [search.simulated(FleetChoice(0, Fleet(counts))) for counts in product(range(5), range(2)) if any(counts)]
    best = cheapest([(each.usd_per_h, each.attainment_least) for each in every], 0.99)
    report = advise(asked)
    assert best is not None
    assert report.recommended is not None
    assert report.recommended.usd_per_h == pytest.approx(every[best].usd_per_h)
    assert report.recommended.nodes == every[best].nodes
    at_half = [each for each in every if each.attainment_least >= 0.5]
    for place in frontier([(each.usd_per_h, each.attainment_least) for each in at_half]):
        own = at_half[place]
        beaten = [
            each
            for each in report.frontier
            if each.usd_per_h <= own.usd_per_h + 1e-9 and each.attainment_least >= min(own.attainment_least, 0.9999)
        ]
        assert beaten, own


def test_a_forecast_that_knows_the_future_gets_the_requests() -> None:
    asked = question(deployment(a=150, b=150), {"a": poisson(40), "b": poisson(5, 1)})
    oracle = SystemChoice("mixed", {"forecast": {"name": "oracle", "horizon_s": 5}})
    asked = replace(asked, fleets=replace(asked.fleets, systems=(oracle,)))
    application = asked.world(FleetChoice(0, Fleet((1, 1)))).deployment.application
    known = build_system("mixed", application.system.declared).policies.forecast
    assert isinstance(known, OracleForecast)
    assert sum(known.counts) == sum(sum(trace.counts_per_s()) for trace in asked.traces.values())


def test_the_search_does_not_end_below_what_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a fleet were good enough that serves half in time."""
    monkeypatch.setattr("sloop.sim.advice.ENOUGH", 0.5)
    report = advise(question(deployment(a=150), {"a": poisson(90)}))
    assert report.recommended is not None
    assert report.recommended == advised(90.0).recommended
    assert any(0.5 <= each.attainment_least < 0.99 for each in report.choices)


def test_the_frontier_is_that_of_all_choices_and_the_steps_lead_down_it() -> None:
    report = advised(90.0)
    points = [(each.usd_per_h, each.attainment_least) for each in report.choices]
    assert report.frontier == tuple(report.choices[at] for at in frontier(points))
    assert all(each.on_frontier == (each in report.frontier) for each in report.choices)
    assert report.steps
    assert report.steps[0].instead_of == report.closest.name
    for step in report.steps:
        (cheaper,) = (each for each in report.frontier if each.name == step.choice)
        (dearer,) = (each for each in report.frontier if each.name == step.instead_of)
        assert step.saves_usd_per_h == dearer.usd_per_h - cheaper.usd_per_h
        assert step.late_per_million == 1e6 * (dearer.attainment - cheaper.attainment)
        assert min(step.saves_usd_per_h, step.late_per_million) > 0


@settings(max_examples=8, deadline=None)
@given(st.sampled_from([40.0, 90.0]), st.floats(0.3, 1), st.floats(0.3, 1))
def test_who_wants_more_deadlines_pays_no_less(rate: float, one: float, other: float) -> None:
    asked = question(deployment(a=150), {"a": poisson(rate)})
    points = [(each.usd_per_h, each.attainment_least) for each in advised(rate).choices]
    less, more = cheapest(points, min(one, other)), cheapest(points, max(one, other))
    if more is not None:
        assert less is not None
        assert points[less][0] <= points[more][0]
    assert asked.wanted == 0.99


def test_a_dearer_kind_is_rented_less() -> None:
    def rented(price: float) -> int:
        best = advised(90.0, price=price).closest
        return sum(each.nodes for each in best.nodes if each.hardware == "g4dn.xlarge")

    found = [rented(price) for price in (0.2, 0.526, 5.0)]
    assert found == sorted(found, reverse=True)
    assert found[0] > found[-1]


def test_the_same_seed_gives_the_same_advice() -> None:
    asked = question(deployment(a=150), {"a": poisson(40.0)})
    one, other = advise(asked), advise(replace(asked))
    assert msgspec.json.encode(one) == msgspec.json.encode(other)


def test_what_nobody_can_serve_is_said() -> None:
    report = advised(40.0, slo_ms=11, wanted=1.0)
    assert report.recommended is None
    assert report.closest.attainment_least == max(each.attainment_least for each in report.choices)


def test_a_search_that_is_over_has_simulated_one_choice() -> None:
    asked = question(deployment(a=150), {"a": poisson(40.0)})
    report = advise(asked, is_over=lambda: True)
    assert report.simulated == 1
    assert report.unfinished > 0


def test_progress_names_what_is_simulated() -> None:
    rows: list[tuple[int, int, str]] = []
    asked = question(deployment(a=150), {"a": poisson(40.0)})
    report = advise(asked, progress=lambda done, known, now: rows.append((done, known, now)))
    assert all(done < known for done, known, _ in rows)
    assert {each.name for each in report.choices} <= {now for _, _, now in rows}


def test_a_model_that_fits_on_no_node_is_named() -> None:
    huge = FAST | {"device_memory_bytes": 99 << 30}
    stages = [{"name": "only", "profiles": {"g4dn.xlarge": huge}}]
    made = load_deployment({"name": "a", "slo_ms": 150, "stages": stages, "cluster": BOTH})
    with pytest.raises(
        InputError, match=r"no system can serve these applications: mixed: no node has room for .* only"
    ):
        advise(question(made, {"a": poisson(20.0)}))


def test_one_more_node_is_tried_under_every_system() -> None:
    """Batches of one, which take a third of the deadline: `static` with one replica can do nothing with more nodes."""
    made = deployment(a=150)
    asked = question(made, {"a": poisson(90.0)}, "static", "mixed", prices={"g4dn.xlarge": 9.0})
    report = advise(asked)
    assert report.recommended is not None
    assert report.recommended.system == "mixed"
    assert sum(each.nodes for each in report.recommended.nodes) > 1


# Requests


def test_joined_applications_get_exactly_their_own_requests() -> None:
    traces = {"a": poisson(30.0), "b": trace_of([s(1), s(1), s(2)], duration_ns=s(20), name="b", provenance="assumed")}
    asked = question(deployment(a=150, b=400), traces)
    candidate = FleetChoice(0, Fleet((0, 2)))
    world = asked.world(candidate)
    (name,) = asked.clients
    counts = ServiceCounts(["a", "b"], asked.clients[name].paths)
    summary = summary_of(world, world.setup())
    simulate(world, [summary, counts])
    assert counts.requests == {"a": sum(traces["a"].counts_per_s()), "b": 3}
    assert sum(counts.served.values()) == summary.row(system="mixed", seed=0).served
    stages = {row.stage: row.visits for row in summary.row(system="mixed", seed=0).stages}
    assert stages == counts.requests


def test_requests_are_judged_by_the_deadline_of_their_own_application() -> None:
    """12 ms on an accelerator: in time for one, too late for the other."""
    traces = {"tight": poisson(5.0), "wide": poisson(5.0, 1)}
    asked = question(deployment(tight=9.0, wide=400.0), traces)
    found = AdviceSearch(asked, lambda: False, lambda done, known, now: None).simulated(FleetChoice(0, Fleet((0, 2))))
    by_name = {each.application: each.attainment for each in found.applications}
    assert by_name["wide"] == 1
    assert by_name["tight"] < 0.5
    assert found.attainment_least == by_name["tight"]


def test_applications_with_branches_are_simulated_side_by_side() -> None:
    stages = [
        {"name": "x", "profiles": PROFILES},
        {"name": "y", "after": ["x"], "when": {"output": "o", "share": 0.5}, "profiles": PROFILES},
    ]
    one: dict[str, Any] = {"name": "a", "slo_ms": 200, "stages": stages, "cluster": BOTH}
    other = {"name": "b", "slo_ms": 200, "stages": [{"name": "z", "profiles": PROFILES}]}
    traces = {"a": poisson(10.0), "b": poisson(10.0, 1)}
    report = advise(question(load_deployment([one, other]), traces))
    assert [each.requests for each in report.closest.applications] == [
        sum(trace.counts_per_s()) for trace in traces.values()
    ]
    assert any("side by side" in note for note in report.notes)


# Rates


def test_the_rates_of_traces() -> None:
    steps = trace_of([s(10) + index * s(1) // 20 for index in range(200)], duration_ns=s(40), name="t", provenance="x")
    assert mean_rps(steps) == 5
    assert first_rps(steps) == 0
    assert peak_rps([steps]) == 20
    assert peak_rps([steps, steps]) == 40
    short = trace_of([0, 1, 2], duration_ns=s(2), name="t", provenance="x")
    assert (peak_rps([short]), first_rps(short)) == (1.5, 1.5)


def test_nodes_that_come_and_go_are_tried_where_the_rate_changes_much() -> None:
    times = [s(5) + index * s(1) // 2 for index in range(50)] + [s(60) + index * s(1) // 80 for index in range(1600)]
    bursts = trace_of(sorted(times), duration_ns=s(100), name="bursts", provenance="assumed")
    asked = question(deployment(a=150), {"a": bursts})
    assert asked.is_bursty
    report = advise(asked)
    rented = [each for each in report.choices if each.as_needed]
    assert rented
    for each in rented:
        prices = {node.hardware: node.usd_per_h for node in asked.fleets.kinds}
        assert 0 < each.usd_per_h <= sum(kind.nodes * prices[kind.hardware] for kind in each.nodes)
        assert each.usd_per_h == pytest.approx(sum(kind.usd_per_h for kind in each.nodes))
    assert not question(deployment(a=150), {"a": poisson(5.0)}).is_bursty


def test_nodes_of_a_users_kind_take_as_long_as_it_says(tmp_path: Path) -> None:
    """What is rented as needed comes after `acquire_s`; all else is equal."""

    def most_served(acquire_s: float) -> float:
        kinds = [{"name": "box", "cores": 8, "usd_per_h": 0.34, "acquire_s": acquire_s, "idle_w": 20, "max_w": 60}]
        stages = [{"name": "only", "profiles": {"box": SLOW}}]
        cluster = {"kinds": kinds, "nodes": [{"hardware": "box"}]}
        made = load_deployment({"name": "a", "slo_ms": 200, "stages": stages, "cluster": cluster})
        times = [index * s(1) // 2 for index in range(20)] + [s(10) + index * s(1) // 150 for index in range(4500)]
        trace = trace_of(times, duration_ns=s(40), name="jump", provenance="assumed")
        asked = question(made, {"a": trace})
        search = AdviceSearch(asked, lambda: False, lambda done, known, now: None)
        found = search.simulated(FleetChoice(0, Fleet((4,), as_needed=True)))
        assert found.watts is not None
        assert 20 < found.watts < 4 * 60
        return found.attainment

    assert most_served(1) > most_served(25) + 0.2
