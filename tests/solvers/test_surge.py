"""What replicas carry as they are, and what has room beside what."""

from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from sloop.core.views import ClusterView, NodeView, ReplicaView, StageView, Traffic
from sloop.profile.estimate import Estimate
from sloop.reproduce.biscale.pipelines import VIDEO
from sloop.solvers import surge
from sloop.solvers.sizing import Limits, Sizing, sizing_of
from sloop.solvers.surge import Have
from sloop.units import ms, s
from sloop.vocabulary import Life, Node, Path, ReplicaId, ReplicaSpec


def stage_of(name: str, *sizes: tuple[float, Life, str]) -> StageView:
    replicas = tuple(
        ReplicaView(ReplicaId(number), ReplicaSpec(name, "v", cores, node), life, 0, 0)
        for number, (cores, life, node) in enumerate(sizes)
    )
    return StageView(
        name=name,
        slo_ns=ms(780),
        after=(),
        variants={"v": Estimate(VIDEO.profiles[name])},
        replicas=replicas,
        queue=(),
        running=0,
        buckets=(),
        bucket_ns=s(1),
    )


def seen(*stages: StageView, free: tuple[float, ...] = (64,), **changes: Any) -> ClusterView:
    nodes = tuple(NodeView(Node(f"n{i}", "local", 64, 1), cores, 1, {}) for i, cores in enumerate(free))
    names = tuple(stage.name for stage in stages)
    paths = changes.pop("paths", (Path(names, ms(780)),))
    return ClusterView(stages, nodes, None, {}, Traffic(buckets=(), bucket_ns=s(1)), 0.0, paths, **changes)


def video(cores: float = 64) -> Sizing:
    view = seen(stage_of("detect"), stage_of("classify"), free=(cores,))
    whole = sizing_of(view, Limits(1.0, 8, 8, "with_queue", 1.0, ""))
    return Sizing(replace(whole.program, cores_total=cores), whole.stages, whole.variants, whole.unit)


READY, STARTING = Life.READY, Life.STARTING


def test_what_there_is() -> None:
    stage = stage_of("detect", (1, READY, "n0"), (3, READY, "n0"), (3, READY, "n0"), (2, STARTING, "n0"))
    have = surge.have_of(stage, 1.0)
    assert have == Have((3, 3, 1), (2,))
    assert (have.count, have.most, have.least, have.largest) == (3, 3, 1, 2)
    assert surge.have_of(stage, 0.5) == Have((6, 6, 2), (4,))


def test_while_none_is_ready_those_that_start_stand_for_them() -> None:
    assert surge.have_of(stage_of("detect", (2, STARTING, "n0")), 1.0) == Have((2,), ())
    none = surge.have_of(stage_of("detect"), 1.0)
    assert (none.count, none.most, none.largest) == (1, 1, 1)


def test_the_large_alone_or_all_as_if_small() -> None:
    program = video().program
    assert surge.carry(program, 20, [Have((7,), ()), Have((2,), ())])
    assert not surge.carry(program, 20, [Have((1,), ()), Have((1,), ())])
    assert surge.carry(program, 20, [Have((7, 1, 1), ()), Have((2, 1), ())]), "as before small ones were there"
    assert surge.carry(program, 20, [Have((2, 1, 1, 1), ()), Have((1, 1), ())]), "as if all were small"


def test_small_replicas_for_the_highest_rate_there_are_cores_for() -> None:
    assert surge.most(video().program, 40) == video().program.horizontal(40)
    few = surge.most(video(6).program, 40)
    assert surge.units_of([[(one.replicas, one.cores)] for one in few]) <= 6
    assert few == video(6).program.horizontal(20)


def test_as_they_are_and_small_ones_beside() -> None:
    goal = video().program.horizontal(40)
    assert goal is not None
    assert surge.kept(Have((3, 3), (1,)), goal[0]) == [(2, 3), (6, 1)]
    assert surge.kept(Have((3,) * 9, ()), goal[0]) == [(9, 3), (0, 1)]


@settings(max_examples=60, deadline=None)
@given(st.integers(3, 30), st.integers(1, 60), st.integers(1, 6), st.integers(1, 6))
def test_what_stands_beside_each_other_has_room(cores: int, rate_rps: int, detect: int, classify: int) -> None:
    program = video(cores).program
    goal = surge.most(program, rate_rps)
    have = [Have((8,) * detect, ()), Have((8,) * classify, ())]
    groups, choices = surge.beside(program, rate_rps, have, goal)
    assert surge.units_of(groups) <= cores
    assert len(choices) == 2
    for group, small in zip(groups, goal, strict=True):
        assert sum(count for count, _ in group) == small.replicas


def test_replicas_grow_as_far_as_their_nodes_have_room() -> None:
    stages = (stage_of("detect", (1, READY, "n0"), (1, READY, "n1")), stage_of("classify", (2, READY, "n1")))
    program = video().program
    assert surge.on_their_nodes(program, seen(*stages, free=(5,)), 1.0) is program
    cut = surge.on_their_nodes(program, seen(*stages, free=(5, 2)), 1.0)
    assert [model.latency_ms.shape[0] for model in cut.models] == [3, 4]
