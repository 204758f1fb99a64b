"""Few nodes stand for many: whoever chooses by what they have chooses the same."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sloop.core.ledger import Ledger, Reservation, millicores
from sloop.policies.build import build
from sloop.systems.planning.alike import Alike
from sloop.vocabulary import Node, ReplicaId, ReplicaSpec

KINDS = st.sampled_from([(4.0, 100, ()), (4.0, 100, ("gpu",)), (2.0, 100, ()), (4.0, 50, ())])


@st.composite
def clusters(draw: st.DrawFn) -> list[Node]:
    kinds = draw(st.lists(KINDS, min_size=1, max_size=9))
    return [Node(f"n{place}", "kind", *kind) for place, kind in enumerate(kinds)]


@pytest.mark.parametrize("name", ["best_fit", "spread"])
@settings(max_examples=100, deadline=None)
@given(cluster=clusters(), data=st.data())
def test_replicas_go_where_they_would_if_all_nodes_were_shown(name: str, cluster: list[Node], data: Any) -> None:
    place: Any = build("place", name, {})
    few, every = Alike(cluster), Ledger(cluster)
    for number in range(data.draw(st.integers(1, 20))):
        device = data.draw(st.sampled_from(["", "", "gpu"]))
        spec = ReplicaSpec("a", "a", data.draw(st.sampled_from([0.5, 1.0, 3.0])), device=device, share=0.4)
        memory_bytes = data.draw(st.sampled_from([0, 30]))
        wanted = place.choose(0, spec, memory_bytes, every.views())
        assert place.choose(0, spec, memory_bytes, few.first()) == wanted
        name = data.draw(st.sampled_from([wanted or "n0", "n0"]))  # or where the plan says
        reservation = Reservation(name, millicores(spec.cores), memory_bytes, device, round(spec.share * 1e6))
        assert few.reserve(ReplicaId(number), reservation) == every.reserve(ReplicaId(number), reservation)
        assert tuple(few.all()) == every.views()


def test_one_of_each_state_is_shown() -> None:
    room = Alike([Node(f"n{place}", "kind", 4.0, 100) for place in range(1000)])
    assert [view.node.name for view in room.first()] == ["n0"]
    assert room.reserve(ReplicaId(0), Reservation("n7", 1000, 0, "", 0))
    assert [view.node.name for view in room.first()] == ["n0", "n7"]
    assert room.reserve(ReplicaId(1), Reservation("n0", 1000, 0, "", 0))
    assert [view.node.name for view in room.first()] == ["n0", "n1"]
    assert not room.reserve(ReplicaId(2), Reservation("n2000", 1000, 0, "", 0))
