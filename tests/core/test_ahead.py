"""What is ahead of a request: a lower bound on every way it can go, and all of it where there is but one."""

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from sloop.app.graph import Each, Graph, Step, When
from sloop.core.ahead import ahead
from sloop.vocabulary import Path


def rests(graph: Graph, **alone_ns: int) -> dict[str, int]:
    """Alone; full batches take ten times as long everywhere."""
    found = ahead(graph, {name: (alone_ns[name], 10 * alone_ns[name]) for name in graph.steps})
    assert all(full == 10 * alone for alone, full in found.values())
    return {name: alone for name, (alone, _) in found.items()}


def branch(name: str, value: int, share: float | None = None) -> Step:
    return Step(name, ("a",), (When("a", "kind", (value,), share),))


def test_of_stages_that_are_all_visited_the_longest_way_counts() -> None:
    diamond = Graph((Step("a"), Step("b", ("a",)), Step("c", ("a",)), Step("d", ("b", "c"))))
    assert rests(diamond, a=1, b=2, c=30, d=400) == {"a": 430, "b": 400, "c": 400, "d": 0}


def test_of_alternatives_the_quickest_counts() -> None:
    graph = Graph((Step("a"), branch("b", 1), branch("c", 2), Step("d", ("c",))))
    assert rests(graph, a=1, b=70, c=20, d=40) == {"a": 60, "b": 0, "c": 40, "d": 0}


def test_what_may_be_left_out_counts_for_nothing() -> None:
    graph = Graph((Step("a"), branch("b", 1, 0.5), branch("c", 2, 0.3), Step("d", ("a",))))
    assert rests(graph, a=1, b=70, c=20, d=4)["a"] == 4
    lone = Graph((Step("a"), branch("b", 1, 0.9)))
    assert rests(lone, a=1, b=70)["a"] == 0


def test_parts_count_where_there_is_one_at_least_on_average() -> None:
    def first(mean: float) -> int:
        steps = (Step("a"), Step("b", ("a",), each=Each("a", mean=mean)), Step("c", ("b",), join=True))
        return rests(Graph(steps), a=1, b=20, c=300)["a"]

    assert (first(1.0), first(0.9)) == (320, 0)


def test_of_declared_paths_the_quickest_through_a_stage_counts() -> None:
    steps = (Step("a"), Step("b"), Step("c", ("a", "b")), Step("d", ("c",)))
    ways = (Path(("a", "c", "d"), 1), Path(("b", "c"), 1), Path(("b", "c", "d"), 1))
    assert rests(Graph(steps, ways), a=1, b=20, c=300, d=4000) == {"a": 4300, "b": 300, "c": 0, "d": 0}


@given(st.integers(0, 2**32))
def test_no_request_needs_less_than_is_ahead_of_it(seed: int) -> None:
    random = Random(seed)
    names = [f"s{number}" for number in range(random.randint(1, 7))]
    steps: list[Step] = []
    for at, name in enumerate(names):
        after = tuple(random.sample(names[:at], min(at, random.randint(0, 2))))
        when = tuple(When(other, "kind", (random.randint(0, 2),)) for other in after if random.random() < 0.6)
        steps.append(Step(name, after, when))
    graph = Graph(steps)
    least_ns = {name: random.randint(1, 100) for name in names}
    rest_ns = {name: alone for name, (alone, _) in ahead(graph, {n: (t, t) for n, t in least_ns.items()}).items()}
    longest_ns: dict[str, int] = {}
    for name in reversed(names):
        conditions = sorted({edge.when.values for edge in graph.edges[name] if edge.when})
        chosen = random.choice(conditions) if conditions and graph.is_exhaustive(name) else (3,)
        taken = [edge.target for edge in graph.edges[name] if edge.when is None or edge.when.values == chosen]
        longest_ns[name] = max((least_ns[target] + longest_ns[target] for target in taken), default=0)
        assert rest_ns[name] <= longest_ns[name]
        if not conditions and all(rest_ns[target] == longest_ns[target] for target in taken):
            assert rest_ns[name] == longest_ns[name]
