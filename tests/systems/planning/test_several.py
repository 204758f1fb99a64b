"""Several applications on one cluster: their rates, their plans together, and which of them limits which."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sloop.actions import Decided
from sloop.app.load import load_deployment, load_scenario
from sloop.errors import InputError
from sloop.runlog import read_log
from sloop.sim.scenarios import run_scenario
from sloop.systems.planning import PlanReport, explain_plan, rates_for
from sloop.systems.setup import Setup, set_up
from sloop.units import s
from tests.systems.planning.scene import ENOUGH, nodes, profile, stage

Applications = dict[str, dict[str, Any]]


def deployed(system: Any = "static", cluster: dict[str, Any] | None = None, **applications: dict[str, Any]) -> Setup:
    """Applications by name: keys of their entries; each has one stage `a` of 10 ms and 500 ms of time unless they say
    otherwise."""
    entries = [{"name": name, "slo_ms": 500, "stages": [stage("a")]} | keys for name, keys in applications.items()]
    document = {"name": "all", "applications": entries, "system": system, "cluster": cluster or nodes()}
    return set_up(load_deployment(document), must_fit=False)


def test_each_application_has_a_part_of_its_own() -> None:
    found = explain_plan(deployed(ENOUGH, x={}, y={"slo_ms": 100}), {"x": 150, "y": 20})
    assert [(each.application, each.rate_rps, each.slo_ms, each.cores) for each in found.applications] == [
        ("x", 150, 500, 2),
        ("y", 20, 100, 1),
    ]
    assert [(row.application, row.stage, row.replicas) for row in found.stages] == [("x", "x/a", 2), ("y", "y/a", 1)]
    assert [(path.application, path.slo_ms) for path in found.paths] == [("x", 500), ("y", 100)]
    assert (found.feasible, found.cores, found.rate_rps) == (True, 3, 170)
    assert found.one_more is None
    assert found.applications[0].one_more is not None
    assert found.why.startswith("x: 150 requests/s → 2 replicas")
    assert "; y: 20 requests/s → 1 replica" in found.why


def test_a_rate_for_all_or_for_each() -> None:
    made = deployed(x={}, y={})
    assert rates_for(made, 5) == {"x": 5, "y": 5}
    assert rates_for(made, {"": 5, "y": 7}) == {"x": 5, "y": 7}
    with pytest.raises(InputError, match="no application is called 'yy'"):
        rates_for(made, {"x": 1, "yy": 1})
    with pytest.raises(InputError, match="no rate is given for y"):
        rates_for(made, {"x": 1})


def test_an_application_that_is_limited_says_by_whom_and_what_it_needs() -> None:
    """Eight cores: with max-min fairness `x` gets the three that it wants, `y` the five that are left of its eight."""
    made = deployed(ENOUGH, x={}, y={})
    found = explain_plan(made, {"x": 250, "y": 750})
    x, y = found.applications
    assert (x.feasible, x.cores, x.limits) == (True, 3, ())
    assert (y.feasible, y.cores) == (False, 5)
    (limit,) = y.limits
    assert (limit.hardware, limit.needs, limit.has, limit.others) == ("custom", 8, 5, (("x", 3.0),))
    assert limit.why == "the other applications leave it 5 of the 8 cores that it would have alone: x has 3"
    assert [(each.kind, each.application) for each in found.shortfalls] == [
        ("cores", ""),
        ("throughput", "y"),
        ("cores", "y"),
    ]
    assert "the rates of all 2 applications together need 10 cores even on the cheapest" in found.shortfalls[0].why
    assert limit.why in y.why
    assert not found.feasible


def test_a_limit_that_does_no_harm_is_a_note() -> None:
    """`hpa` wants more replicas than `y` needs to keep up."""
    made = deployed({"name": "hpa", "target": 0.4}, x={}, y={})
    found = explain_plan(made, {"x": 100, "y": 300})
    y = found.applications[1]
    assert (found.feasible, y.feasible) == (True, True)
    assert [(limit.needs > limit.has, name) for limit in y.limits for name, _ in limit.others] == [(True, "x")]
    assert f"y: {y.limits[0].why}" in found.notes


def test_weights_divide_the_cores() -> None:
    made = deployed(ENOUGH, x={"weight": 3}, y={})
    x, y = explain_plan(made, 2000).applications
    assert (x.cores, y.cores, x.weight) == (6, 2, 3)


def test_one_more_request_while_the_others_keep_their_cores() -> None:
    made = deployed(ENOUGH, x={}, y={})
    found = explain_plan(made, {"x": 300, "y": 500})
    assert found.feasible
    x = found.applications[0].one_more
    assert x is not None
    assert (x.feasible, x.cores) == (False, 0)
    assert x.summary.startswith("cannot: ")
    assert x.shortfalls[-1].why == "the other applications leave it 3 of the 4 cores that it would have alone: y has 5"
    less = explain_plan(made, {"x": 300, "y": 400}).applications[0].one_more
    assert less is not None
    assert (less.feasible, less.summary) == (True, "+1 replica of x/a (1 core)")


def test_one_more_request_where_all_want_too_much_divides_the_cores_anew() -> None:
    """`x` gets the four of eight cores that are its fair part; `y`, which has five, gives one up."""
    made = deployed(ENOUGH, x={}, y={})
    found = explain_plan(made, {"x": 300, "y": 750})
    assert [each.cores for each in found.applications] == [3, 5]
    x, y = [each.one_more for each in found.applications]
    assert x is not None
    assert (x.feasible, x.summary) == (True, "+1 replica of x/a (1 core)")
    then = explain_plan(made, {"x": 301, "y": 750})
    assert [each.cores for each in then.applications] == [4, 4]
    assert y is not None
    assert (y.feasible, y.summary) == (False, "the plan is not feasible as it is")


def test_an_application_without_requests_may_rest() -> None:
    made = deployed(ENOUGH, x={"rest_after_s": 60, "stages": [stage("a", profile=profile() | {"load_s": 4})]}, y={})
    found = explain_plan(made, {"x": 0, "y": 5})
    assert (found.feasible, found.applications[0].cores) == (True, 0)
    assert "x: it rests without replicas; the first request waits until one has started, about 4 s" in found.notes
    assert found.applications[0].one_more is not None
    assert found.applications[0].one_more.summary == "+1 replica of x/a (1 core)"
    assert explain_plan(deployed(ENOUGH, x={}), 0).cores == 1
    assert explain_plan(deployed(ENOUGH, x={"rest_after_s": 60}), 0).feasible
    slow = deployed(ENOUGH, x={"rest_after_s": 60, "stages": [stage("a", profile=profile() | {"load_s": 40})]}, y={})
    assert any(
        note.endswith("about 40 s; at most for 30 s (`wake_s`)") for note in explain_plan(slow, {"x": 0, "y": 5}).notes
    )


def test_a_policy_of_one_application_that_fails_is_not_hidden() -> None:
    with pytest.raises(InputError, match=r"application 'y'.*serves one model"):
        deployed("headstart", x={}, y={"stages": [stage("a"), stage("b", "a")]})


@pytest.mark.parametrize(
    ("system", "rate_rps"),
    [("static", 10), ("elastic", 10), (ENOUGH, 10), (ENOUGH, 37)],
)
def test_a_simulated_run_settles_on_the_same_plans(system: str, rate_rps: int, tmp_path: Path) -> None:
    """At 10 requests/s the four cores suffice, at 37 they do not."""
    estimates = {"correct": False}
    entries = [
        {"name": "x", "slo_ms": 1500, "stages": [stage("a", profile=profile(60))], "weight": 2, "estimates": estimates},
        {"name": "y", "slo_ms": 2700, "stages": [stage("b", profile=profile(90, 30))], "estimates": estimates},
    ]
    document = {"name": "all", "applications": entries, "system": system, "cluster": nodes(4, 1)}
    found = explain_plan(set_up(load_deployment(document), must_fit=False), rate_rps)
    trace = {"kind": "equal", "rate": rate_rps}
    scenario = load_scenario(document | {"traces": {"x": trace, "y": trace}, "duration_s": 29})
    run_scenario(scenario, scenario.systems[0], log=tmp_path / "log")
    last = {
        record.application: record.plan
        for now_ns, record in read_log(tmp_path / "log")
        if isinstance(record, Decided) and record.plan is not None and now_ns < s(29)
    }
    for name, plan in last.items():
        groups = [(target, group) for target in plan.stages for group in target.groups]
        assert cores(found, name) == [
            (group.spec.variant, group.count, group.spec.cores, target.batch_max_of(group)) for target, group in groups
        ]
    assert any(each.limits for each in found.applications) == (rate_rps == 37)


SIZES = st.dictionaries(
    st.sampled_from(["u", "v", "w", "x"]),
    st.tuples(st.integers(1, 40), st.sampled_from([60, 200, 900]), st.sampled_from([1.0, 2.0])),
    min_size=2,
)


def cores(report: PlanReport, application: str) -> list[tuple[str, int, float, int]]:
    return [
        (row.variant, row.replicas, row.cores, row.batch) for row in report.stages if row.application == application
    ]


@settings(max_examples=40)
@given(SIZES, st.sampled_from(["static", ENOUGH, "hpa", "mixed", "elastic"]), st.floats(0, 250))
@example({"u": (1, 60, 1.0), **dict.fromkeys("vwx", (30, 60, 1.0))}, "elastic", 85.0)  # keeps more than its part
def test_plans_together_are_those_alone_if_all_fit_and_else_fit_the_cluster(
    sizes: dict[str, tuple[int, int, float]], system: str, rate_rps: float
) -> None:
    keys = {
        name: {"stages": [stage("a", profile=profile(each, 5))], "slo_ms": slo_ms, "weight": weight}
        for name, (each, slo_ms, weight) in sizes.items()
    }
    together = explain_plan(deployed(system, nodes(4, 3), **keys), rate_rps)
    alone = {name: explain_plan(deployed(system, nodes(4, 3), **{name: keys[name]}), rate_rps) for name in keys}
    wanted = sum(each.cores for each in alone.values())
    assert together.cores == pytest.approx(sum(each.cores for each in together.applications))
    if wanted <= 12:
        assert not any(each.limits for each in together.applications)
        assert [cores(together, name) for name in keys] == [cores(alone[name], name) for name in keys]
        for each in together.applications:
            assert each.predicted_ms == pytest.approx(alone[each.application].predicted_ms)
    else:
        assert together.cores <= 12 + 1e-6
        limited = {each.application for each in together.applications if each.limits}
        assert limited
        for each in together.applications:
            for limit in each.limits:
                assert limit.needs == pytest.approx(min(12, alone[each.application].cores))
                assert limit.has < limit.needs
                assert each.cores <= limit.has + 1e-6
    assert together.feasible == (not together.shortfalls)
    assert together.feasible == all(each.feasible for each in together.applications)


def test_a_policy_that_cannot_plan_for_few_cores_has_an_empty_plan(tmp_path: Path) -> None:
    """It is not an error of the whole deployment; an error without the others is."""
    (tmp_path / "picky.py").write_text(PICKY)
    made = deployed(str(tmp_path / "picky.py"), x={}, y={"weight": 7})
    found = explain_plan(made, 500)
    x = found.applications[0]
    assert (x.feasible, x.cores, x.plan_feasible) == (False, 0, False)
    assert x.plan_why == "picky has no plan for the cores that the other applications leave it: RuntimeError: too few"
    with pytest.raises(InputError, match=r"picky.py:16: it cannot plan: RuntimeError: too few"):
        explain_plan(deployed(str(tmp_path / "picky.py"), nodes(1, 1), x={}), 500)


PICKY = """
from dataclasses import dataclass, replace

from sloop.core.protocols import Scale
from sloop.systems.catalogue import build_system
from sloop.policies.scale.static import Static
from sloop.systems.system import System


@dataclass(frozen=True)
class Picky(Scale):
    period_ns: int = 10**9

    def plan(self, now_ns, view, memory):
        if view.forecast_rps and sum(node.node.cores for node in view.nodes) < 2:
            raise RuntimeError("too few")
        return Static(replicas=7).plan(now_ns, view, memory)


static = build_system("static")
SYSTEM = System("picky", "system", "a test", replace(static.policies, scale=Picky()))
"""
