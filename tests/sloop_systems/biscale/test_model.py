"""Biscale's policy and its problem: sizes, segments and replicas from a view, plans and reasons from solutions."""

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sloop.app.graph import Graph, GraphStage
from sloop.core.views import ClusterView, NodeView, ReplicaView, StageView, Traffic
from sloop.errors import InputError
from sloop.policies.sizes import (
    SizeLimits,
    SizeModel,
    size_model,
    sizes_text,
    stage_replicas,
    within_node_room,
)
from sloop.profile.profile import Amdahl, Profile
from sloop.solvers.sizes import StageReplicas
from sloop.testing.views import by_kind, make_belief
from sloop.units import ms, s
from sloop.vocabulary import Life, Node, Path, ReplicaId, ReplicaSpec, Slot, StagePlan
from sloop_systems.biscale.experiments.runs import VIDEO
from sloop_systems.biscale.solver import (
    horizontal,
    horizontal_within_cores,
    replicas_carry,
    small_first,
    total_units,
    with_small,
)

HALVING = Amdahl(100, 0, 0, 0)
LIMITS = SizeLimits(1.0, 8, 16, "with_queue", 1.0, "")


def stage_of(name: str, form: Amdahl = HALVING, *, cores_max: float = 8, visits: float = 1) -> StageView:
    return StageView(
        name=name,
        slo_ns=ms(400),
        after=(),
        beliefs=by_kind(make_belief(Profile(latency_ms=form, max_batch=4, max_cores=cores_max))),
        replicas=(),
        queue=(),
        running=0,
        buckets=(),
        bucket_ns=s(1),
        visits=visits,
    )


def seen(*stages: StageView, cores: tuple[float, ...] = (16,), paths: tuple[Path, ...] = ()) -> ClusterView:
    nodes = tuple(NodeView(Node(f"n{i}", "local", own, 1), own, 1) for i, own in enumerate(cores))
    names = tuple(stage.name for stage in stages)
    ingress = Traffic(buckets=(), bucket_ns=s(1))
    return ClusterView(stages, nodes, None, {}, ingress, 0.0, paths or (Path(names, ms(400)),))


def shape(view: ClusterView, limits: SizeLimits = LIMITS) -> list[tuple[int, ...]]:
    return [own.latency_ms.shape for own in size_model(view, limits).problem.stages]


def test_sizes_are_whole_units_that_a_node_and_the_profile_allow() -> None:
    assert shape(seen(stage_of("a"), stage_of("b", cores_max=3))) == [(8, 4), (3, 4)]
    assert shape(seen(stage_of("a"), cores=(2,))) == [(2, 4)]
    assert shape(seen(stage_of("a"), cores=(2,)), SizeLimits(0.25, 8, 2, "pure", 1.0, "")) == [(8, 2)]
    assert shape(seen(stage_of("a", cores_max=1)), SizeLimits(0.25, 16, 2, "pure", 1.0, "")) == [(4, 2)]
    half = size_model(seen(stage_of("a"), cores=(0.5,)), LIMITS)
    assert half.unit == 0.5, "a node of less than a unit is the unit"
    assert size_model(seen(stage_of("a"), cores=()), LIMITS).cores_total == math.inf


def test_latencies_by_units() -> None:
    (own,) = size_model(seen(stage_of("a")), SizeLimits(0.5, 4, 1, "pure", 1.0, "")).problem.stages
    assert own.latency_ms[:, 0].tolist() == pytest.approx([200, 100, 200 / 3, 50])


def test_visits_and_margins() -> None:
    problem = size_model(seen(stage_of("a", visits=3)), SizeLimits(1.0, 8, 16, "pure", 0.9, "")).problem
    assert problem.stages[0].visits == 3
    assert problem.segments[0].slots == 360


def test_stages_that_meet_are_cut_and_every_cut_keeps_the_paths() -> None:
    stages = [stage_of(name, Amdahl(40, 0, 5, 5)) for name in "abcd"]
    paths = (Path(("a", "b", "d"), ms(400)), Path(("a", "c", "d"), ms(300)))
    model = size_model(seen(*stages, paths=paths), LIMITS)
    assert len(model.problem.forests) > 1
    found = horizontal(model.problem, 30)
    assert found is not None
    by_name = dict(zip("abcd", found, strict=True))
    for path in paths:
        assert sum(by_name[name].latency_ms + by_name[name].wait_ms for name in path.stages) <= path.slo_ns / 1e6


EDGES = st.integers(3, 9).flatmap(
    lambda count: st.tuples(*(st.sets(st.integers(0, stage - 1), min_size=1, max_size=3) for stage in range(1, count)))
)


@settings(max_examples=40)
@given(EDGES, st.integers(100, 140), st.integers(0, 20))
def test_what_is_quick_enough_one_at_a_time_has_an_answer_however_stages_meet(
    befores: tuple[set[int], ...], percent: int, rate_rps: int
) -> None:
    """Whether the quickest of everything holds is all there is to know, where cores are no matter."""
    graph = Graph(
        [GraphStage("s0"), *(GraphStage(f"s{n}", tuple(f"s{b}" for b in own)) for n, own in enumerate(befores, 1))]
    )
    stages = [stage_of(name, Amdahl(20 + 7 * place, 5, 0, 5)) for place, name in enumerate(graph.stages)]
    alone_ms = [math.ceil(stage.beliefs["v", "local"].latency_ms(1, Slot(8, "local"))) for stage in stages]
    longest_ms = max(sum(alone_ms[int(name[1:])] for name in path.stages) for path in graph.paths)
    paths = tuple(Path(path.stages, ms(math.ceil(longest_ms * percent / 100))) for path in graph.paths)
    model = size_model(seen(*stages, paths=paths, cores=(10_000,)), LIMITS)
    found = horizontal(model.problem, rate_rps)
    assert found is not None
    for segment in model.problem.segments:
        assert (
            sum(math.ceil(found[i].latency_ms) + math.ceil(found[i].wait_ms) for i in segment.stages) <= segment.slots
        )


def test_a_batch_of_more_than_a_second_has_its_throughput_all_the_same() -> None:
    view = seen(stage_of("a", Amdahl(0, 0, 0, 2500)), paths=(Path(("a",), ms(6000)),))
    model = size_model(view, LIMITS)
    assert model.problem.throughput == "pure"
    found = horizontal(model.problem, 1)
    assert found is not None
    assert found[0].replicas == 1  # 4 in a batch of 2.5 s


def test_groups_of_one_size_are_one() -> None:
    model = size_model(seen(stage_of("a")), SizeLimits(0.5, 4, 4, "pure", 1.0, ""))
    plan = model.stage_plan(0, [(1, 2), (2, 1), (3, 2), (0, 4)], 3, wait_ms=20)
    assert [(group.count, group.spec.cores) for group in plan.groups] == [(4, 1.0), (2, 0.5)]
    assert (plan.batch_max, plan.wait_ns) == (3, ms(40))
    assert model.stage_plan(0, [(1, 1)], 3, wait_ms=500).wait_ns == ms(100), "a quarter of the SLO"
    assert sizes_text([plan]) == "a 4 × 1 core + 2 × 0.5 cores, batch 3"
    kept = StagePlan("a", (), 2, wait_ns=7)
    assert (model.with_groups(0, [(1, 1)], kept).batch_max, model.with_groups(0, [(1, 1)], kept).wait_ns) == (2, 7)


def test_what_is_left_where_nothing_holds_and_why() -> None:
    model = size_model(seen(stage_of("a"), stage_of("b"), cores=(4,), paths=(Path(("a", "b"), ms(40)),)), LIMITS)
    assert horizontal(model.problem, 0) is None
    assert model.infeasibility() == "a 25 ms, b 25 ms even alone on all cores: 10 ms more than the 40 ms there are"
    assert [choice.cores for choice in model.quickest()] == [2, 2]
    crowded = size_model(seen(stage_of("a"), stage_of("b"), cores=(1,)), LIMITS)
    assert crowded.infeasibility() == "2 stages of 1 core do not fit on the 1 core of all nodes"


def test_an_unknown_variant() -> None:
    with pytest.raises(InputError, match="no variant"):
        size_model(seen(stage_of("a")), SizeLimits(1.0, 8, 16, "pure", 1.0, "other"))


def test_long_deadlines_are_counted_in_coarser_steps() -> None:
    view = seen(stage_of("a", Amdahl(0, 0, 0, 1003)), paths=(Path(("a",), ms(20_001)),))
    problem = size_model(view, LIMITS).problem
    assert (problem.slot_ms, problem.segments[0].slots) == (5, 4000)
    found = horizontal(problem, 2)
    assert found is not None
    assert found[0].replicas == 1, "batches of 2 to 4, each of 1.003 s"
    tight = size_model(seen(stage_of("a", Amdahl(0, 0, 0, 21_000)), paths=(Path(("a",), ms(20_001)),)), LIMITS)
    assert tight.infeasibility() == "a 21000 ms even alone on all cores: 1000 ms more than the 20000 ms there are"


def video_stage(name: str, *sizes: tuple[float, Life, str]) -> StageView:
    replicas = tuple(
        ReplicaView(ReplicaId(number), ReplicaSpec(name, "v", Slot(cores, "local")), life, 0, 0, node)
        for number, (cores, life, node) in enumerate(sizes)
    )
    return StageView(
        name=name,
        slo_ns=ms(780),
        after=(),
        beliefs=by_kind(make_belief(VIDEO.profiles[name])),
        replicas=replicas,
        queue=(),
        running=0,
        buckets=(),
        bucket_ns=s(1),
    )


def video_view(*stages: StageView, free: tuple[float, ...] = (64,), **changes: Any) -> ClusterView:
    nodes = tuple(NodeView(Node(f"n{i}", "local", 64, 1), cores, 1) for i, cores in enumerate(free))
    names = tuple(stage.name for stage in stages)
    paths = changes.pop("paths", (Path(names, ms(780)),))
    return ClusterView(stages, nodes, None, {}, Traffic(buckets=(), bucket_ns=s(1)), 0.0, paths, **changes)


def video(cores: float = 64) -> SizeModel:
    view = video_view(video_stage("detect"), video_stage("classify"), free=(cores,))
    whole = size_model(view, SizeLimits(1.0, 8, 8, "with_queue", 1.0, ""))
    return replace(whole, problem=replace(whole.problem, cores_total=cores))


READY, STARTING = Life.READY, Life.STARTING


def test_what_there_is() -> None:
    stage = video_stage("detect", (1, READY, "n0"), (3, READY, "n0"), (3, READY, "n0"), (2, STARTING, "n0"))
    have = stage_replicas(stage, 1.0)
    assert have == StageReplicas((3, 3, 1), (2,))
    assert (have.count, have.largest, have.smallest, have.largest_count) == (3, 3, 1, 2)
    assert stage_replicas(stage, 0.5) == StageReplicas((6, 6, 2), (4,))


def test_while_none_is_ready_those_that_start_stand_for_them() -> None:
    assert stage_replicas(video_stage("detect", (2, STARTING, "n0")), 1.0) == StageReplicas((2,), ())
    none = stage_replicas(video_stage("detect"), 1.0)
    assert (none.count, none.largest, none.largest_count) == (1, 1, 1)


def test_the_large_alone_or_all_as_if_small() -> None:
    problem = video().problem
    assert replicas_carry(problem, 20, [StageReplicas((7,), ()), StageReplicas((2,), ())])
    assert not replicas_carry(problem, 20, [StageReplicas((1,), ()), StageReplicas((1,), ())])
    assert replicas_carry(problem, 20, [StageReplicas((7, 1, 1), ()), StageReplicas((2, 1), ())]), (
        "as before small ones were there"
    )
    assert replicas_carry(problem, 20, [StageReplicas((2, 1, 1, 1), ()), StageReplicas((1, 1), ())]), (
        "as if all were small"
    )


def test_small_replicas_for_the_highest_rate_there_are_cores_for() -> None:
    assert horizontal_within_cores(video().problem, 40) == horizontal(video().problem, 40)
    few = horizontal_within_cores(video(6).problem, 40)
    assert total_units([[(one.replicas, one.cores)] for one in few]) <= 6
    assert few == horizontal(video(6).problem, 20)


def test_as_they_are_and_small_ones_beside() -> None:
    goal = horizontal(video().problem, 40)
    assert goal is not None
    assert with_small(StageReplicas((3, 3), (1,)), goal[0]) == [(2, 3), (6, 1)]
    assert with_small(StageReplicas((3,) * 9, ()), goal[0]) == [(9, 3), (0, 1)]


@settings(max_examples=40)
@given(st.integers(3, 30), st.integers(1, 60), st.integers(1, 6), st.integers(1, 6))
def test_what_stands_beside_each_other_has_room(cores: int, rate_rps: int, detect: int, classify: int) -> None:
    problem = video(cores).problem
    goal = horizontal_within_cores(problem, rate_rps)
    have = [StageReplicas((8,) * detect, ()), StageReplicas((8,) * classify, ())]
    groups, choices = small_first(problem, rate_rps, have, goal)
    assert total_units(groups) <= cores
    assert len(choices) == 2
    for group, small in zip(groups, goal, strict=True):
        assert sum(count for count, _ in group) == small.replicas


def test_replicas_grow_as_far_as_their_nodes_have_room() -> None:
    stages = (
        video_stage("detect", (1, READY, "n0"), (1, READY, "n1")),
        video_stage("classify", (2, READY, "n1")),
    )
    problem = video().problem
    assert within_node_room(problem, video_view(*stages, free=(5,)), 1.0) is problem
    cut = within_node_room(problem, video_view(*stages, free=(5, 2)), 1.0)
    assert [own.latency_ms.shape[0] for own in cut.stages] == [3, 4]
