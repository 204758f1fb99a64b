"""What follows from the declared edges: scopes, shares, visits, paths, conditions; and which declarations are
refused."""

from itertools import product
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sloop.app.graph import PATHS_MAX, Each, Graph, GraphStage, When, scopes_of
from sloop.app.progress import RequestProgress
from sloop.errors import InputError
from sloop.units import ms
from sloop.vocabulary import Path, Request, RequestId

OCR = (
    GraphStage("find"),
    GraphStage("turn", ("find",), each=Each("find", "boxes", mean=4.0, most=50)),
    GraphStage("read", ("turn",)),
    GraphStage("merge", ("find", "read"), join=True),
)


def kinds(graph: Graph) -> dict[tuple[str, str], str]:
    return {(edge.source, edge.target): edge.kind for edges in graph.edges.values() for edge in edges}


def test_stages_run_for_parts_between_fan_out_and_join() -> None:
    graph = Graph(OCR)
    assert graph.scopes == {"find": "", "turn": "turn", "read": "turn", "merge": ""}
    assert graph.stages_in("turn") == ("turn", "read")
    assert kinds(graph) == {
        ("find", "turn"): "each",
        ("find", "merge"): "one",
        ("turn", "read"): "one",
        ("read", "merge"): "join",
    }
    assert graph.parts_max["find"] == (50, 1)
    assert graph.predecessors == {"find": 1, "turn": 1, "read": 1, "merge": 2}
    assert not graph.is_plain


def test_edges_come_in_the_order_of_their_targets() -> None:
    graph = Graph((GraphStage("a"), GraphStage("b", ("a",)), GraphStage("c", ("a", "b"))))
    assert [edge.target for edge in graph.edges["a"]] == ["b", "c"]
    assert graph.edges["c"] == ()
    assert graph.is_plain


def test_requests_begin_at_entries() -> None:
    graph = Graph((GraphStage("a"), GraphStage("b", ("a",), entry=True), GraphStage("c", ("b",))))
    assert graph.entries == ("a", "b")
    assert graph.predecessors == {"a": 1, "b": 2, "c": 1}
    assert not graph.is_plain
    assert Graph((GraphStage("a", entry=True),)).is_plain, "where nothing comes before, that goes without saying"


EACH = Each("a")


@pytest.mark.parametrize(
    ("steps", "where", "what", "help"),
    [
        (
            (GraphStage("a"), GraphStage("b", ("a",), each=EACH), GraphStage("c", ("b",), each=Each("b"))),
            "c",
            "stage 'c' has `each`, and 'b' before it already runs for parts",
            "join the parts first: `join: true` at a stage between",
        ),
        (
            (GraphStage("a"), GraphStage("b"), GraphStage("c", ("a", "b"), each=EACH)),
            "c",
            "stage 'c' has `each` and comes after 2 stages",
            "keep in `after` only the stage whose output it fans out",
        ),
        (
            (GraphStage("a", each=EACH),),
            "a",
            "stage 'a' has `each` and comes after 0 stages",
            "whose output it fans out",
        ),
        (
            (GraphStage("a"), GraphStage("b", ("a",), each=EACH), GraphStage("c", ("b",), each=EACH, join=True)),
            "c",
            "stage 'c' has both `join` and `each`",
            "join the parts at a stage before it",
        ),
        (
            (GraphStage("a"), GraphStage("b", ("a",), join=True)),
            "b",
            "stage 'b' has `join`, and no stage before it runs for parts",
            "remove `join`, or add `each` to a stage before it",
        ),
        (
            (GraphStage("a"), GraphStage("b", ("a",), each=EACH), GraphStage("c", ("a", "b"))),
            "c",
            "stage 'c' comes after stages that run for different parts: a (whole requests), b (b)",
            "add `join: true`, so that it waits for all parts",
        ),
        (
            (
                GraphStage("a"),
                GraphStage("b", ("a",), each=EACH),
                GraphStage("c", ("a",), each=EACH),
                GraphStage("d", ("b", "c")),
            ),
            "d",
            "stage 'd' comes after stages that run for different parts: b (b), c (c)",
            "add `join: true`",
        ),
        (
            (GraphStage("a"), GraphStage("b", ("a",), each=EACH, entry=True)),
            "b",
            "stage 'b' runs for parts, and no request can begin with one",
            "remove `entry`",
        ),
    ],
)
def test_contradicting_declarations_are_refused(
    steps: tuple[GraphStage, ...], where: str, what: str, help: str
) -> None:
    with pytest.raises(InputError) as caught:
        scopes_of(steps)
    assert (caught.value.where, caught.value.what) == (where, f"{where}: {what}")
    assert help in caught.value.help


def test_parts_of_two_kinds_may_meet() -> None:
    steps = (
        GraphStage("a"),
        GraphStage("b", ("a",), each=EACH),
        GraphStage("c", ("a",), each=EACH),
        GraphStage("d", ("b", "c"), join=True),
    )
    assert scopes_of(steps)["d"] == ""


def probabilities(*steps: GraphStage) -> list[float]:
    graph = Graph((GraphStage("a"), *steps))
    return [round(graph.probability(edge), 9) for edge in graph.edges["a"]]


def branch(name: str, output: str = "kind", values: tuple[int, ...] = (), share: float | None = None) -> GraphStage:
    return GraphStage(name, ("a",), (When("a", output, values, share),))


def test_alternatives_divide_what_declared_shares_leave() -> None:
    assert probabilities(GraphStage("b", ("a",))) == [1]
    assert probabilities(branch("b")) == [0.5], "a lone branch is taken, or not"
    assert probabilities(branch("b", share=0.3)) == [0.3]
    assert probabilities(branch("b", values=(1,)), branch("c", values=(2,))) == [0.5, 0.5]
    assert probabilities(branch("b", values=(1,), share=0.3), branch("c", values=(2,))) == [0.3, 0.7]
    others = [branch(name, values=(value,)) for name, value in (("c", 2), ("d", 3), ("e", 4))]
    assert probabilities(branch("b", values=(1,), share=0.4), *others) == [0.4, 0.2, 0.2, 0.2]
    assert probabilities(branch("b", "kind", (1,), 1.0), branch("c", "kind", (2,))) == [1, 0]
    assert probabilities(branch("b", "kind", share=0.9), branch("c", "size")) == [0.9, 0.5], "two questions"


def test_the_same_condition_is_one_alternative() -> None:
    declared, same, other = branch("b", values=(1,), share=0.3), branch("c", values=(1,)), branch("d", values=(2,))
    assert probabilities(declared, same, other) == [0.3, 0.3, 0.7]
    assert probabilities(same, declared, other) == [0.3, 0.3, 0.7]


def test_a_declared_share_of_zero_counts() -> None:
    never, same, other = branch("b", values=(1,), share=0.0), branch("c", values=(1,)), branch("d", values=(2,))
    assert probabilities(never, same, other) == [0, 0, 1]


def test_branches_without_an_output_exclude_each_other() -> None:
    assert probabilities(branch("b", "", share=0.25), branch("c", "")) == [0.25, 0.75]


def test_exhaustive_branches_are_recognised() -> None:
    def is_exhaustive(*steps: GraphStage) -> bool:
        return Graph((GraphStage("a"), *steps)).is_exhaustive("a")

    one, two = branch("b", values=(1,), share=0.7), branch("c", values=(2,), share=0.3)
    assert is_exhaustive(one, two)
    assert not is_exhaustive(one, branch("c", values=(2,), share=0.2))
    assert not is_exhaustive(branch("b", values=(1,)), branch("c", values=(2,))), "nobody said that there is no third"
    assert not is_exhaustive(one, branch("c", values=(2,)))
    assert is_exhaustive(branch("b", values=(0, 1)), branch("c")), "whatever it is"
    assert is_exhaustive(branch("b", "", share=0.25), branch("c", "", share=0.75))
    rows = GraphStage("b", ("a",), (When("a", "kind", share=1.0),), Each("a"))
    assert not is_exhaustive(rows), "there may be none"
    assert not is_exhaustive(branch("b"))
    assert not is_exhaustive(branch("b", "kind"), branch("c", "size")), "each may say no"
    assert not is_exhaustive(GraphStage("b", ("a",)))
    assert is_exhaustive(branch("b", share=1.0), GraphStage("c", ("a",)))


def test_visits_follow_from_shares() -> None:
    assert Graph(OCR).visits() == {"find": 1, "turn": 4, "read": 4, "merge": 1}
    kinds = (
        GraphStage("a"),
        branch("b", values=(1,), share=0.3),
        branch("c", values=(2,)),
        GraphStage("d", ("b", "c")),
    )
    assert Graph(kinds).visits() == pytest.approx({"a": 1, "b": 0.3, "c": 0.7, "d": 1})
    diamond = (GraphStage("a"), GraphStage("b", ("a",)), GraphStage("c", ("a",)), GraphStage("d", ("b", "c")))
    assert Graph(diamond).visits() == {"a": 1, "b": 1, "c": 1, "d": 1}


def test_some_parts_may_be_left_out() -> None:
    steps = (
        *OCR[:2],
        GraphStage("read", ("turn",), (When("turn", "legible", share=0.5),)),
        GraphStage("note", ("turn", "read")),
    )
    assert Graph(steps).visits() == {"find": 1, "turn": 4, "read": 2, "note": 4}, "no part notes twice"


def test_a_join_is_entered_if_any_part_reaches_it() -> None:
    many = GraphStage("turn", ("find",), each=Each("find", mean=20.0))
    rare = GraphStage("warn", ("turn",), (When("turn", "is_odd", share=0.02),), join=True)
    assert Graph((OCR[0], many, rare)).visits()["warn"] == pytest.approx(0.4)
    often = GraphStage("warn", ("turn",), (When("turn", "is_odd", share=0.2),), join=True)
    assert Graph((OCR[0], many, often)).visits()["warn"] == 1


def test_a_join_is_entered_seldom_if_most_requests_have_no_part() -> None:
    few = GraphStage("turn", ("find",), each=Each("find", mean=0.2))
    assert Graph((OCR[0], few, GraphStage("tell", ("turn",), join=True))).visits()["tell"] == pytest.approx(0.2)


def test_paths_are_the_chains_from_entries_to_ends() -> None:
    graph = Graph(OCR, slo_ns=ms(300))
    assert graph.paths == (
        Path(("find", "turn", "read", "merge"), ms(300), 1.0),
        Path(("find", "merge"), ms(300), 1.0),
    )
    kinds = Graph(
        (GraphStage("a"), branch("b", values=(1,), share=0.25), branch("c", values=(2,)), GraphStage("d", ("c",)))
    )
    assert [(path.stages, path.share) for path in kinds.paths] == [(("a", "b"), 0.25), (("a", "c", "d"), 0.75)]
    entries = Graph((GraphStage("a"), GraphStage("b", ("a",), entry=True)))
    assert [path.stages for path in entries.paths] == [("a", "b"), ("b",)]


def test_more_paths_than_planners_can_treat_are_refused() -> None:
    steps = [GraphStage("s0"), GraphStage("t0")]
    for number in range(1, 20):
        before = (f"s{number - 1}", f"t{number - 1}")
        steps += [GraphStage(f"s{number}", before), GraphStage(f"t{number}", before)]
    with pytest.raises(InputError, match=f"more than {PATHS_MAX} paths lead through the stages") as caught:
        assert Graph(steps).paths
    assert caught.value.help == "join some of them"


WAYS = (Path(("a", "c", "d"), ms(100), 0.2), Path(("b", "c"), ms(40), 0.2), Path(("b", "c", "d"), ms(60), 0.4))
WAY_STEPS = (GraphStage("a"), GraphStage("b"), GraphStage("c", ("a", "b")), GraphStage("d", ("c",)))


def test_declared_paths_determine_shares() -> None:
    graph = Graph(WAY_STEPS, WAYS, ms(60))
    assert graph.paths == WAYS
    assert graph.has_deadlines
    assert graph.shares() == pytest.approx(
        {("", "a"): 0.25, ("", "b"): 0.75, ("a", "c"): 1.0, ("b", "c"): 1.0, ("c", "d"): 0.75}
    )
    assert graph.visits() == pytest.approx({"a": 0.25, "b": 0.75, "c": 1.0, "d": 0.75})
    assert graph.paths_through == {"a": 0b001, "b": 0b110, "c": 0b111, "d": 0b101}


def test_a_declared_path_counts_every_part() -> None:
    steps = (GraphStage("a"), GraphStage("b", ("a",), each=Each("a", mean=3.0)), GraphStage("c", ("a", "b"), join=True))
    paths = (Path(("a", "b", "c"), ms(50), 0.5), Path(("a", "c"), ms(50), 0.5))
    assert Graph(steps, paths, ms(50)).visits() == pytest.approx({"a": 1, "b": 1.5, "c": 1})


def test_measured_shares_replace_declared_ones() -> None:
    graph = Graph(OCR)
    measured = graph.shares() | {("find", "turn"): 2.5}
    assert graph.visits(measured) == {"find": 1, "turn": 2.5, "read": 2.5, "merge": 1}


@given(st.lists(st.floats(0, 1), min_size=1, max_size=4), st.floats(0.1, 8))
def test_no_stage_is_visited_more_often_than_its_parts_allow(shares: list[float], mean: float) -> None:
    steps = [GraphStage("a"), GraphStage("p", ("a",), each=Each("a", mean=mean))]
    for number, share in enumerate(shares):
        after = ("p",) if not number else (f"s{number - 1}", "p")
        steps.append(GraphStage(f"s{number}", after, (When("p", f"o{number}", share=share),)))
    steps.append(GraphStage("z", ("a", f"s{len(shares) - 1}"), join=True))
    visits = Graph(steps).visits()
    assert all(0 <= visits[f"s{number}"] <= mean * (1 + 1e-9) for number in range(len(shares)))
    assert visits["z"] == 1


def test_conditions_of_a_stage_hold_on_every_path_to_it() -> None:
    graph = Graph(
        [
            GraphStage("look"),
            GraphStage("cats", ("look",), (When("look", "kind", (1,), 0.2),)),
            GraphStage("dogs", ("look",), (When("look", "kind", (2, 3)),)),
            GraphStage("pets", ("cats", "dogs")),
            GraphStage("loud", ("dogs",), (When("dogs", "barks"),)),
            GraphStage("silent", ("dogs",), (When("dogs", "barks", (0,)),)),
            GraphStage("scene", ("look",), (When("look", "outdoors"),)),
        ]
    )
    assert graph.conditions["look"] == graph.conditions["pets"] == frozenset()
    assert graph.conditions["loud"] == {When("look", "kind", (2, 3)), When("dogs", "barks")}
    pairs = {("cats", "dogs"), ("cats", "loud"), ("cats", "silent"), ("loud", "silent")}
    names = list(graph.stages)
    found = {(a, b) for i, a in enumerate(names) for b in names[i + 1 :] if graph.are_alternatives(a, b)}
    assert found == pairs
    assert graph.descendants["dogs"] == {"pets", "loud", "silent"}
    assert [name for name in names if graph.may_end_at(name)] == ["look", "pets", "loud", "silent", "scene"]


def test_conditions_of_parts_are_forgotten_after_a_join() -> None:
    graph = Graph(
        [
            GraphStage("look"),
            GraphStage("large", ("look",), (When("look", "size", (1,)),), Each("look")),
            GraphStage("small", ("look",), (When("look", "size", (0,)),), Each("look")),
            GraphStage("cat", ("large",), (When("large", "kind", (1,)),)),
            GraphStage("dog", ("large",), (When("large", "kind", (2,)),)),
            GraphStage("cats", ("cat",), join=True),
            GraphStage("dogs", ("dog",), join=True),
        ]
    )
    assert graph.are_alternatives("cat", "dog"), "for a part"
    assert not graph.are_alternatives("cats", "dogs")
    assert not graph.are_alternatives("large", "small")
    assert graph.conditions["cats"] == frozenset()


def test_an_exponential_number_of_paths_is_not_enumerated() -> None:
    """Forty diamonds one after the other: 10^12 paths."""
    steps = [GraphStage("s0")]
    for level in range(40):
        steps += [GraphStage(f"a{level}", (f"s{level}",)), GraphStage(f"b{level}", (f"s{level}",))]
        steps.append(GraphStage(f"s{level + 1}", (f"a{level}", f"b{level}")))
    graph = Graph(steps)
    assert len(graph.descendants["s0"]) == 120
    assert graph.conditions["s40"] == frozenset()
    assert graph.visits()["s40"] == 1.0


def test_more_items_than_an_edge_allows_are_a_fault() -> None:
    graph = Graph(
        (GraphStage("find"), GraphStage("read", ("find",), each=Each("find", most=6)), GraphStage("tell", ("find",)))
    )
    assert graph.fault("find", (6, 1)) == graph.fault("find", (0, 0)) == graph.fault("tell", ()) == ""
    assert graph.fault("find", (7, 1)) == "find sends 7 parts to read, which takes at most 6 per request"
    assert graph.fault("find", (2, 2)) == "find sends 2 parts to tell, which takes at most 1 per request"


@given(st.integers(0, 2**32))
def test_combinations_before_a_stage_are_those_that_outputs_can_lead_to(seed: int) -> None:
    random = Random(seed)
    names = [f"s{number}" for number in range(random.randint(2, 5))]
    steps = []
    for at, name in enumerate(names):
        after = tuple(random.sample(names[:at], min(at, random.randint(0, 3))))
        chosen = [other for other in after if random.random() < 0.7]
        whens = [When(other, "kind", random.choice(((), (0,), (1,), (0, 2)))) for other in chosen]
        steps.append(GraphStage(name, after, tuple(whens)))
    graph = Graph(steps)
    seen: dict[str, set[frozenset[str]]] = {name: set() for name in names}
    for kinds in product(range(4), repeat=len(names)):
        kind, progress = dict(zip(names, kinds, strict=True)), RequestProgress(graph, Request(RequestId(1), 0, 0, 1))
        entered = progress.begin()
        while entered:
            name, _ = entered.pop()
            asked = [edge.when for edge in graph.edges[name]]
            counts = [w is None or (kind[name] in w.values if w.values else kind[name] != 0) for w in asked]
            entered += progress.finish(name, 0, [int(taken) for taken in counts])
        for name in progress.visited:
            seen[name].add(frozenset(progress.visited).intersection(graph.stages[name].after))
    assert {name: graph.combinations_before(name, graph.stages[name].after) for name in names} == seen


def test_fan_outs_may_be_empty_and_complete_shares_leave_nothing_out() -> None:
    parts = Graph((GraphStage("a"), GraphStage("b", ("a",), each=Each("a")), GraphStage("c", ("a", "b"), join=True)))
    assert parts.combinations_before("c", ("a", "b")) == {frozenset("a"), frozenset("ab")}
    assert parts.combinations_before("b", ("a",)) == {frozenset("a")}
    one, two, end = (
        branch("b", values=(1,), share=0.4),
        branch("c", values=(2,), share=0.6),
        GraphStage("d", ("a", "b", "c")),
    )
    assert Graph((GraphStage("a"), one, two, end)).combinations_before("d", ("b", "c")) == {
        frozenset("b"),
        frozenset("c"),
    }
    incomplete = branch("c", values=(2,), share=0.5)
    assert frozenset() in (Graph((GraphStage("a"), one, incomplete, end)).combinations_before("d", ("b", "c")) or ())


def test_too_many_combinations_are_reported_as_none() -> None:
    many = [GraphStage(f"b{n}", ("a",), (When("a", f"kind{n}"),)) for n in range(40)]
    graph = Graph((GraphStage("a"), *many, GraphStage("end", tuple(step.name for step in many))))
    assert graph.combinations_before("end", ("b0",)) is None
    assert graph.combinations_before("b0", ("a",)) == {frozenset("a")}
