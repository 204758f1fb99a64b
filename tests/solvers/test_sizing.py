"""From a view to a program and back to plans."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sloop.app.graph import Graph, Step
from sloop.core.views import ClusterView, NodeView, StageView, Traffic
from sloop.errors import InputError
from sloop.profile.estimate import Estimate
from sloop.profile.forms import Amdahl
from sloop.profile.profile import Profile
from sloop.solvers.sizing import Limits, sizing_of
from sloop.units import ms, s
from sloop.vocabulary import Node, Path, StagePlan

HALVING = Amdahl(100, 0, 0, 0)
LIMITS = Limits(1.0, 8, 16, "with_queue", 1.0, "")


def stage_of(name: str, form: Amdahl = HALVING, *, cores_max: float = 8, visits: float = 1) -> StageView:
    return StageView(
        name=name,
        slo_ns=ms(400),
        after=(),
        variants={"v": Estimate(Profile(latency_ms=form, max_batch=4, max_cores=cores_max))},
        replicas=(),
        queue=(),
        running=0,
        buckets=(),
        bucket_ns=s(1),
        visits=visits,
    )


def seen(*stages: StageView, cores: tuple[float, ...] = (16,), paths: tuple[Path, ...] = ()) -> ClusterView:
    nodes = tuple(NodeView(Node(f"n{i}", "local", own, 1), own, 1, {}) for i, own in enumerate(cores))
    names = tuple(stage.name for stage in stages)
    ingress = Traffic(buckets=(), bucket_ns=s(1))
    return ClusterView(stages, nodes, None, {}, ingress, 0.0, paths or (Path(names, ms(400)),))


def shape(view: ClusterView, limits: Limits = LIMITS) -> list[tuple[int, ...]]:
    return [model.latency_ms.shape for model in sizing_of(view, limits).program.models]


def test_sizes_are_whole_units_that_a_node_and_the_profile_allow() -> None:
    assert shape(seen(stage_of("a"), stage_of("b", cores_max=3))) == [(8, 4), (3, 4)]
    assert shape(seen(stage_of("a"), cores=(2,))) == [(2, 4)]
    assert shape(seen(stage_of("a"), cores=(2,)), Limits(0.25, 8, 2, "pure", 1.0, "")) == [(8, 2)]
    assert shape(seen(stage_of("a", cores_max=1)), Limits(0.25, 16, 2, "pure", 1.0, "")) == [(4, 2)]
    half = sizing_of(seen(stage_of("a"), cores=(0.5,)), LIMITS)
    assert half.unit == 0.5, "a node of less than a unit is the unit"
    assert sizing_of(seen(stage_of("a"), cores=()), LIMITS).cores_total == math.inf


def test_latencies_by_units() -> None:
    (model,) = sizing_of(seen(stage_of("a")), Limits(0.5, 4, 1, "pure", 1.0, "")).program.models
    assert model.latency_ms[:, 0].tolist() == pytest.approx([200, 100, 200 / 3, 50])


def test_visits_and_margins() -> None:
    program = sizing_of(seen(stage_of("a", visits=3)), Limits(1.0, 8, 16, "pure", 0.9, "")).program
    assert program.models[0].visits == 3
    assert program.segments[0].slots == 360


def test_stages_that_meet_are_cut_and_every_cut_keeps_the_paths() -> None:
    stages = [stage_of(name, Amdahl(40, 0, 5, 5)) for name in "abcd"]
    paths = (Path(("a", "b", "d"), ms(400)), Path(("a", "c", "d"), ms(300)))
    sizing = sizing_of(seen(*stages, paths=paths), LIMITS)
    assert len(sizing.program.forests) > 1
    found = sizing.program.horizontal(30)
    assert found is not None
    by_name = dict(zip("abcd", found, strict=True))
    for path in paths:
        assert sum(by_name[name].latency_ms + by_name[name].wait_ms for name in path.stages) <= path.slo_ns / 1e6


EDGES = st.integers(3, 9).flatmap(
    lambda count: st.tuples(*(st.sets(st.integers(0, stage - 1), min_size=1, max_size=3) for stage in range(1, count)))
)


@settings(max_examples=60, deadline=None)
@given(EDGES, st.integers(100, 140), st.integers(0, 20))
def test_what_is_quick_enough_one_at_a_time_has_an_answer_however_stages_meet(
    befores: tuple[set[int], ...], percent: int, rate_rps: int
) -> None:
    """Whether the quickest of everything holds is all there is to know, where cores are no matter."""
    graph = Graph([Step("s0"), *(Step(f"s{n}", tuple(f"s{b}" for b in own)) for n, own in enumerate(befores, 1))])
    stages = [stage_of(name, Amdahl(20 + 7 * place, 5, 0, 5)) for place, name in enumerate(graph.steps)]
    alone_ms = [math.ceil(stage.variants["v"].latency_ms(1, 8)) for stage in stages]
    longest_ms = max(sum(alone_ms[int(name[1:])] for name in path.stages) for path in graph.paths)
    paths = tuple(Path(path.stages, ms(math.ceil(longest_ms * percent / 100))) for path in graph.paths)
    sizing = sizing_of(seen(*stages, paths=paths, cores=(10_000,)), LIMITS)
    found = sizing.program.horizontal(rate_rps)
    assert found is not None
    for segment in sizing.program.segments:
        assert (
            sum(math.ceil(found[i].latency_ms) + math.ceil(found[i].wait_ms) for i in segment.stages) <= segment.slots
        )


def test_a_batch_of_more_than_a_second_has_its_throughput_all_the_same() -> None:
    view = seen(stage_of("a", Amdahl(0, 0, 0, 2500)), paths=(Path(("a",), ms(6000)),))
    sizing = sizing_of(view, LIMITS)
    assert sizing.program.throughput == "pure"
    found = sizing.program.horizontal(1)
    assert found is not None
    assert found[0].replicas == 1  # 4 in a batch of 2.5 s


def test_groups_of_one_size_are_one() -> None:
    sizing = sizing_of(seen(stage_of("a")), Limits(0.5, 4, 4, "pure", 1.0, ""))
    plan = sizing.plan(0, [(1, 2), (2, 1), (3, 2), (0, 4)], 3, wait_ms=20)
    assert [(group.count, group.spec.cores) for group in plan.groups] == [(4, 1.0), (2, 0.5)]
    assert (plan.batch_max, plan.wait_ns) == (3, ms(40))
    assert sizing.plan(0, [(1, 1)], 3, wait_ms=500).wait_ns == ms(100), "a quarter of the SLO"
    assert sizing.words([plan]) == "a 4 × 1 core + 2 × 0.5 cores, batch 3"
    kept = StagePlan("a", (), 2, wait_ns=7)
    assert (sizing.grown(0, [(1, 1)], kept).batch_max, sizing.grown(0, [(1, 1)], kept).wait_ns) == (2, 7)


def test_what_is_left_where_nothing_holds_and_why() -> None:
    sizing = sizing_of(seen(stage_of("a"), stage_of("b"), cores=(4,), paths=(Path(("a", "b"), ms(40)),)), LIMITS)
    assert sizing.program.horizontal(0) is None
    assert sizing.excess() == "a 25 ms, b 25 ms even alone on all cores: 10 ms more than the 40 ms there are"
    assert [choice.cores for choice in sizing.shortest()] == [2, 2]
    crowded = sizing_of(seen(stage_of("a"), stage_of("b"), cores=(1,)), LIMITS)
    assert crowded.excess() == "2 stages do not fit on 1 core of all nodes"


def test_an_unknown_variant() -> None:
    with pytest.raises(InputError, match="no variant"):
        sizing_of(seen(stage_of("a")), Limits(1.0, 8, 16, "pure", 1.0, "other"))


def test_long_deadlines_are_counted_in_coarser_steps() -> None:
    view = seen(stage_of("a", Amdahl(0, 0, 0, 1003)), paths=(Path(("a",), ms(20_001)),))
    program = sizing_of(view, LIMITS).program
    assert (program.slot_ms, program.segments[0].slots) == (5, 4000)
    found = program.horizontal(2)
    assert found is not None
    assert found[0].replicas == 1, "batches of 2 to 4, each of 1.003 s"
    tight = sizing_of(seen(stage_of("a", Amdahl(0, 0, 0, 21_000)), paths=(Path(("a",), ms(20_001)),)), LIMITS)
    assert tight.excess() == "a 21000 ms even alone on all cores: 1000 ms more than the 20000 ms there are"
