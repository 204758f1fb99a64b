"""Applications: the order of stages, and where a key was declared."""

from itertools import pairwise, permutations
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sloop.app.application import Application, Stage, SystemChoice, Variant, find_cycle
from sloop.app.document import parse_yaml
from sloop.app.load import read_application


def test_locates_keys_and_the_nearest_above(demo: str) -> None:
    app = read_application(parse_yaml(demo, "a.yaml"), Path())
    assert app.locate("system.margin") == "a.yaml:20: system.margin"
    assert app.locate("system.nothing") == "a.yaml:20: system.nothing"
    assert app.locate("stages[1].variants[1].accuracy") == "a.yaml:12: stages[1].variants[1].accuracy"
    assert app.locate("nowhere") == "a.yaml:1: nowhere"


def test_order_is_topological_whatever_the_files_order() -> None:
    stages = (Stage("c", (), ("a", "b")), Stage("b", (), ("a",)), Stage("a", ()), Stage("lone", ()))
    app = Application("x", 1.5, stages, SystemChoice("elastic"))
    assert [stage.name for stage in app.order] == ["a", "b", "c", "lone"]
    assert app.graph.entries == ("a", "lone")
    follow = {name: tuple(edge.target for edge in edges) for name, edges in app.graph.edges.items()}
    assert follow == {"c": (), "b": ("c",), "a": ("b", "c"), "lone": ()}
    assert app.slo_ns == 1_500_000


GRAPHS = st.integers(1, 6).flatmap(
    lambda size: st.lists(st.sets(st.integers(0, size - 1), max_size=size), min_size=size, max_size=size)
)


@given(GRAPHS)
@settings(max_examples=200)
def test_finds_a_cycle_where_and_only_where_there_is_one(graph: list[set[int]]) -> None:
    after = {str(stage): tuple(str(other) for other in sorted(others)) for stage, others in enumerate(graph)}
    possible = any(
        all(order.index(other) < order.index(stage) for stage in after for other in after[stage])
        for order in permutations(after)
    )
    cycle = find_cycle(after)
    assert bool(cycle) is not possible
    if cycle:
        assert cycle[0] == cycle[-1]
        assert all(later in after[earlier] for earlier, later in pairwise(cycle))
    else:
        stages = tuple(Stage(name, (), waits) for name, waits in after.items())
        names = [stage.name for stage in Application("x", 1, stages, SystemChoice("elastic")).order]
        assert all(names.index(other) < names.index(name) for name in names for other in after[name])


def test_finds_a_variant_by_name() -> None:
    stage = Stage("s", (Variant("small"), Variant("large")))
    assert stage.variant("large").name == "large"
    with pytest.raises(KeyError):
        stage.variant("huge")
