"""Where requests really go: the shares that are asked for, the same for any system."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import exp, factorial, sqrt
from statistics import fmean, variance

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sloop.actions import StartBatch
from sloop.app.graph import Each, Graph, GraphStage, When
from sloop.sim.truth.branches import BranchSampler, EdgeCounts
from sloop.vocabulary import BatchId, Path, ReplicaId, Request, RequestId

MANY = 5_000


def taken(sampler: BranchSampler, stage: str, requests: Sequence[int], parts: tuple[int, ...] = ()) -> EdgeCounts:
    return sampler.taken(StartBatch(BatchId(0), ReplicaId(0), stage, tuple(map(RequestId, requests)), parts))


def all_taken(graph: Graph, *, seed: int = 1, shares: Mapping[str, float] | None = None) -> Counter[tuple[int, ...]]:
    """How often requests that leave `a` go each way."""
    return Counter(taken(BranchSampler(seed, graph, shares=shares), "a", range(MANY)))


def is_near(count: int, share: float) -> bool:
    """Within five standard errors of what is expected of so many requests."""
    return abs(count - MANY * share) <= 5 * sqrt(MANY * share * (1 - share)) + 1e-9


def branch(name: str, output: str, values: tuple[int, ...] = (), share: float | None = None) -> GraphStage:
    return GraphStage(name, ("a",), (When("a", output, values, share),))


A = GraphStage("a")
KINDS = Graph((A, branch("b", "kind", (1,), 0.3), branch("c", "kind", (2,), 0.5), branch("d", "kind", (3,), 0.1)))


def test_alternatives_exclude_each_other_and_come_as_often_as_believed() -> None:
    found = all_taken(KINDS)
    assert found.keys() == {(1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 0)}
    expected = {(1, 0, 0): 0.3, (0, 1, 0): 0.5, (0, 0, 1): 0.1, (0, 0, 0): 0.1}
    assert all(is_near(found[counts], share) for counts, share in expected.items()), found


def test_where_one_must_be_taken_one_is() -> None:
    tenths = [branch(f"b{number}", "kind", (number,), 0.1) for number in range(10)]
    found = all_taken(Graph((A, *tenths)))
    assert all(sum(counts) == 1 for counts in found)
    assert all(is_near(count, 0.1) for count in found.values())


def test_equal_conditions_are_taken_together() -> None:
    graph = Graph((A, branch("b", "kind", (1,), 0.3), branch("c", "kind", (2,)), branch("d", "kind", (1,))))
    found = all_taken(graph)
    assert found.keys() == {(1, 0, 1), (0, 1, 0)}
    assert is_near(found[1, 0, 1], 0.3)


def test_different_outputs_have_nothing_to_do_with_each_other() -> None:
    found = all_taken(
        Graph((A, branch("b", "kind", share=0.3), branch("c", "size", share=0.6), GraphStage("d", ("a",))))
    )
    expected = {(1, 1, 1): 0.18, (1, 0, 1): 0.12, (0, 1, 1): 0.42, (0, 0, 1): 0.28}
    assert found.keys() == expected.keys()
    assert all(is_near(found[counts], share) for counts, share in expected.items()), found


def test_branches_of_which_no_output_is_known_exclude_each_other() -> None:
    found = all_taken(Graph((A, branch("b", "", share=0.25), branch("c", ""))))
    assert found.keys() == {(1, 0), (0, 1)}
    assert is_near(found[1, 0], 0.25)


@pytest.mark.parametrize("order", [("b", "c"), ("c", "b")])
def test_the_scenario_says_how_many_really_take_a_branch(order: tuple[str, ...]) -> None:
    both = {"b": branch("b", "kind", (1,), 0.3), "c": branch("c", "kind", (2,))}
    found = all_taken(Graph((A, *(both[name] for name in order))), shares={"b": 0.9})
    counts = (1, 0) if order == ("b", "c") else (0, 1)
    assert found.keys() == {counts, counts[::-1]}, "all others take the other one, as before"
    assert is_near(found[counts], 0.9)


def test_alternatives_without_a_share_divide_the_rest_in_proportion() -> None:
    found = all_taken(KINDS, shares={"b": 0.65})
    expected = {(1, 0, 0): 0.65, (0, 1, 0): 0.25, (0, 0, 1): 0.05, (0, 0, 0): 0.05}
    assert all(is_near(found[counts], share) for counts, share in expected.items()), found
    found = all_taken(KINDS, shares={"b": 0.0, "c": 0.0, "d": 1.0})
    assert found == {(0, 0, 1): MANY}


def test_what_the_application_left_nothing_for_may_come_all_the_same() -> None:
    graph = Graph((A, branch("b", "kind", (1,), 1.0), branch("c", "kind", (2,)), branch("d", "kind", (3,))))
    found = all_taken(graph, shares={"b": 0.4})
    assert is_near(found[1, 0, 0], 0.4)
    assert is_near(found[0, 1, 0], 0.3)
    assert is_near(found[0, 0, 1], 0.3)


def parts(mean: float, most: int = 1_000, *, fan_out: Sequence[int] = (), count: int = MANY) -> list[int]:
    """Of many requests, how many parts each falls into."""
    graph = Graph((A, GraphStage("b", ("a",), each=Each("a", "rows", mean, most))))
    sampler = BranchSampler(3, graph, fan_out={"b": fan_out} if fan_out else None)
    return [found for (found,) in taken(sampler, "a", range(count))]


@pytest.mark.parametrize("mean", [0.2, 1.0, 4.5, 60.0])
def test_parts_are_poisson_around_the_believed_mean(mean: float) -> None:
    found = parts(mean)
    assert fmean(found) == pytest.approx(mean, abs=5 * sqrt(mean / MANY))
    assert variance(found) == pytest.approx(mean, rel=0.1)
    for number in range(12):
        assert is_near(found.count(number), exp(-mean) * mean**number / factorial(number))


def test_there_are_no_more_parts_than_allowed() -> None:
    found = parts(3.0, 4)
    assert set(found) == {0, 1, 2, 3, 4}
    weights = [3.0**number / factorial(number) for number in range(5)]
    assert all(is_near(found.count(number), weight / sum(weights)) for number, weight in enumerate(weights))
    assert set(parts(1.0, 1, count=1_000)) == {0, 1}
    assert 99_000 < fmean(parts(100_000.0, 100_000, count=20)) <= 100_000


def test_the_scenario_says_how_many_parts_there_are_even_too_many() -> None:
    found = Counter(parts(3.0, 4, fan_out=(0, 2, 2, 9)))
    assert found.keys() == {0, 2, 9}
    assert is_near(found[2], 0.5)
    assert set(parts(3.0, fan_out=(7,), count=100)) == {7}


def test_who_takes_the_same_output_apart_finds_the_same_rows() -> None:
    def rows_of(*outputs: str) -> set[tuple[int, ...]]:
        steps = [GraphStage(f"b{at}", ("a",), each=Each("a", output, 3.0)) for at, output in enumerate(outputs)]
        return set(taken(BranchSampler(1, Graph((A, *steps))), "a", range(200)))

    assert all(one == other for one, other in rows_of("boxes", "boxes"))
    assert any(one != other for one, other in rows_of("boxes", "faces"))
    assert any(one != other for one, other in rows_of("", "")), "nothing says that they are the same"


def test_only_some_of_the_parts_meet_a_condition() -> None:
    graph = Graph((A, GraphStage("b", ("a",), (When("a", "large", share=0.25),), Each("a", "rows", 8.0))))
    found = [count for (count,) in taken(BranchSampler(1, graph), "a", range(MANY))]
    assert fmean(found) == pytest.approx(2.0, rel=0.1)
    told = [
        count for (count,) in taken(BranchSampler(1, graph, shares={"b": 0.5}, fan_out={"b": (4,)}), "a", range(MANY))
    ]
    assert fmean(told) == pytest.approx(2.0, rel=0.1)
    assert max(told) == 4


INSIDE = Graph(
    (
        A,
        GraphStage("b", ("a",), each=Each("a", "rows", 3.0)),
        GraphStage("c", ("b",), (When("b", "legible", share=0.5),)),
        GraphStage("d", ("c",), join=True),
    )
)


def test_each_part_is_decided_independently() -> None:
    sampler = BranchSampler(1, INSIDE)
    found = taken(sampler, "b", [0] * MANY, tuple(range(MANY)))
    assert is_near(sum(count for (count,) in found), 0.5)
    assert sampler.taken(StartBatch(BatchId(0), ReplicaId(0), "c", (RequestId(0),), (0,))) == (), "all go on from there"
    assert sampler.taken(StartBatch(BatchId(0), ReplicaId(0), "d", (RequestId(0),))) == ()


@settings(max_examples=30)
@given(st.permutations(list(range(12))), st.integers(1, 5), st.integers(0, 5))
def test_it_is_the_same_in_whatever_batches_and_order_they_come(order: list[int], size: int, seed: int) -> None:
    alone = {
        (id, part): taken(BranchSampler(seed, INSIDE), "b", [id], (part,))[0] for id in range(4) for part in range(3)
    }
    sampler = BranchSampler(seed, INSIDE)
    sampler.taken(StartBatch(BatchId(0), ReplicaId(0), "a", (RequestId(77),)))
    for start in range(0, 12, size):
        visits = [divmod(number, 3) for number in order[start : start + size]]
        found = taken(sampler, "b", [id for id, _ in visits], tuple(part for _, part in visits))
        assert found == tuple(alone[visit] for visit in visits)


def test_another_seed_is_another_world() -> None:
    assert taken(BranchSampler(1, INSIDE), "a", range(50)) != taken(BranchSampler(2, INSIDE), "a", range(50))


def test_where_every_request_goes_everywhere_there_is_nothing_to_decide() -> None:
    plain = BranchSampler(1, Graph((A, GraphStage("b", ("a",)), GraphStage("c", ("a",)))))
    assert not plain
    assert taken(plain, "a", [0, 1]) == ()
    assert BranchSampler(1, KINDS)


PATHS = (Path(("a", "c", "d"), 1, 0.2), Path(("b", "c"), 1, 0.3), Path(("b", "c", "d"), 1, 0.4))
STEPS = (A, GraphStage("b"), GraphStage("c", ("a", "b")), GraphStage("d", ("c",)))


def arrivals(count: int) -> Iterator[tuple[int, Request]]:
    for id in range(count):
        yield 10 * id, Request(RequestId(id), 10 * id, 10 * id, 10 * id + 100)


def test_a_request_is_on_one_of_the_declared_paths_from_its_beginning_to_its_end() -> None:
    sampler = BranchSampler(1, Graph(STEPS, PATHS, 1))
    found = Counter[tuple[str, ...]]()
    for at_ns, request in sampler.entering(arrivals(MANY)):
        assert at_ns == request.arrived_ns == request.deadline_ns - 100
        (first,) = request.enters
        assert taken(sampler, first, [request.id]) == ((1,),)
        ((last,),) = taken(sampler, "c", [request.id])
        found[(first, "c", "d")[: 2 + last]] += 1
    assert found.keys() == {path.stages for path in PATHS}
    assert all(is_near(found[path.stages], path.share / 0.9) for path in PATHS), "shares of those that take one at all"


def test_without_paths_requests_enter_wherever_they_can() -> None:
    assert [request.enters for _, request in BranchSampler(1, KINDS).entering(arrivals(3))] == [()] * 3


def test_a_path_may_lead_through_parts() -> None:
    steps = (A, GraphStage("b", ("a",), each=Each("a", mean=3.0)), GraphStage("c", ("a", "b"), join=True))
    paths = (Path(("a", "b", "c"), 1, 0.5), Path(("a", "c"), 1, 0.5))
    sampler = BranchSampler(1, Graph(steps, paths, 1), fan_out={"b": (3,)})
    assert set(taken(sampler, "a", range(500))) == {(3, 0), (0, 1)}


def test_as_recorded_requests_go_where_they_went_and_others_like_one_of_them() -> None:
    went = {"b": {(0, 0): (0,), (0, 1): (1,)}, "a": {(id, 0): (count,) for id, count in enumerate((2, 0, 7, 7))}}
    sampler = BranchSampler(5, INSIDE, fan_out={"b": (1,)}, shares={"c": 1.0}, recorded=went)
    assert taken(sampler, "a", range(4)) == ((2,), (0,), (7,), (7,))
    assert taken(sampler, "b", [0, 0], (1, 0)) == ((1,), (0,))
    others = Counter(taken(sampler, "a", range(4, MANY + 4)))
    assert others.keys() == {(2,), (0,), (7,)}
    assert is_near(others[7,], 0.5)
    assert not taken(sampler, "d", [0])


def test_requests_are_on_the_paths_that_are_given() -> None:
    paths = (Path(("x",), 10, 0.5), Path(("y", "z"), 20, 0.5))
    graph = Graph((GraphStage("x"), GraphStage("y"), GraphStage("z", ("y",))), paths, 20)
    given_paths = (1, 0, 0, 1, 1)
    sampler = BranchSampler(1, graph, paths=given_paths)
    arrivals = [(at, Request(RequestId(at), at, at, at + 20)) for at in range(5)]
    found = [request.enters for _, request in sampler.entering(arrivals)]
    assert found == [paths[at].stages[:1] for at in given_paths]
    assert taken(sampler, "y", [0, 3, 4]) == ((1,), (1,), (1,))
