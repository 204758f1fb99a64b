"""Where weights are: what is held, what gives way, what is forgotten."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sloop.actions import Evict
from sloop.core.ledger import Ledger, Reservation
from sloop.core.weights import DOUBT_NS, WeightRegistry
from sloop.units import s
from sloop.vocabulary import STORE, LayerSet, ModelWeights, Node, ReplicaId, TransferId

A, B = ModelWeights("a", 40), ModelWeights("b", 30)
NODES = [Node(name, "cpu", 8.0, 100, rack="r") for name in ("n0", "n1", "n2")]


class Kept:
    """A registry of three nodes with 100 bytes each."""

    def __init__(self) -> None:
        self.ledger = Ledger(NODES)
        self.registry = WeightRegistry(self.ledger)

    def bring(self, now_ns: int, weights: ModelWeights, node: str, *, keeps: bool = True) -> None:
        order = self.registry.order(now_ns, weights, STORE, [node], keeps)
        assert order is not None
        self.registry.arrived(now_ns, order.transfer, node)

    def free(self, node: str = "n0") -> int:
        return self.ledger.free_memory_bytes(node)


@pytest.fixture
def kept() -> Kept:
    return Kept()


def test_memory_is_held_from_the_order_until_nobody_needs_it(kept: Kept) -> None:
    order = kept.registry.order(0, A, STORE, ["n0"], keeps=True)
    assert order is not None
    assert kept.free() == 60, "the files arrive"
    kept.registry.use(0, ReplicaId(0), "n0", A, keeps=True)
    assert not kept.ledger.is_empty("n0")
    kept.registry.arrived(s(1), order.transfer, "n0")
    assert kept.free() == 60
    kept.registry.ready(s(2), ReplicaId(0))
    assert kept.free() == 100, "the files have been read"
    kept.registry.leave(s(3), ReplicaId(0))
    assert kept.ledger.is_empty("n0"), "it may be released"
    (view,) = kept.registry.views(s(3), A)
    assert (view.has_files, view.rack) == (True, "r"), "they stay as long as nobody wants memory"


def test_the_longest_unused_files_give_way_first(kept: Kept) -> None:
    """Flashpoint, section 2.10."""
    for number, weights in enumerate((A, B)):
        kept.bring(number, weights, "n0")
        kept.registry.use(s(number), ReplicaId(number), "n0", weights, keeps=True)
        kept.registry.ready(s(number), ReplicaId(number))
        kept.registry.leave(s(number), ReplicaId(number))
    for needed, evicted in ((30, []), (31, [Evict("n0", A)]), (70, []), (71, [Evict("n0", B)])):
        kept.ledger.release(ReplicaId(9))
        assert kept.ledger.reserve(ReplicaId(9), Reservation("n0", 0, needed))
        assert kept.registry.make_room(["n0"]) == evicted
    assert not kept.registry.views(0, A)


def test_what_is_read_or_used_is_not_evicted(kept: Kept) -> None:
    kept.bring(0, A, "n0", keeps=True)
    order = kept.registry.order(0, A, "n0", ["n1", "n2"], keeps=True)
    assert order is not None
    assert kept.registry.sends() == {"n0": 1, "n1": 1}, "the second node of the chain sends to the third"
    assert kept.free() == 60
    kept.registry.arrived(1, order.transfer, "n1")
    assert kept.free() == 60
    kept.registry.arrived(1, order.transfer, "n2")
    assert kept.free() == 100
    assert not kept.registry.transfers
    kept.registry.use(2, ReplicaId(0), "n0", A, keeps=True)
    assert kept.free() == 60
    kept.registry.ready(2, ReplicaId(0))
    assert kept.free() == 100, "each replica has loaded them for itself"


def test_what_nobody_keeps_is_there_only_for_the_starts_that_wait(kept: Kept) -> None:
    order = kept.registry.order(0, A, STORE, ["n0"], keeps=False)
    assert order is not None
    assert not order.is_kept
    kept.registry.use(0, ReplicaId(0), "n0", A, keeps=False)
    kept.registry.arrived(1, order.transfer, "n0")
    assert kept.free() == 60
    assert not kept.registry.views(1, A), "no other start may use it"
    kept.registry.ready(2, ReplicaId(0))
    assert kept.free() == 100
    kept.registry.leave(3, ReplicaId(0))
    assert kept.ledger.is_empty("n0")


def test_what_nobody_keeps_is_forgotten_also_while_another_transfer_brings_it(kept: Kept) -> None:
    """The start that it came for has been given up; else it would be evicted, although no node keeps it."""
    first, second = (kept.registry.order(0, A, STORE, ["n0"], keeps=False) for _ in range(2))
    assert first is not None
    assert second is not None
    kept.registry.use(0, ReplicaId(0), "n0", A, keeps=False)
    kept.registry.leave(1, ReplicaId(0))
    kept.registry.arrived(2, first.transfer, "n0")
    assert kept.ledger.reserve(ReplicaId(9), Reservation("n0", 0, 60))
    assert kept.registry.make_room(["n0"]) == []
    assert kept.free() == 0, "only what the second transfer brings is held"


def test_receivers_without_memory_are_left_out(kept: Kept) -> None:
    kept.ledger.force(ReplicaId(7), Reservation("n1", 0, 61))
    order = kept.registry.order(0, A, STORE, ["n0", "n1", "n2"], keeps=True)
    assert order is not None
    assert order.receivers == ("n0", "n2")
    kept.ledger.force(ReplicaId(8), Reservation("n0", 0, 60))
    assert kept.registry.order(0, A, STORE, ["n0", "n1"], keeps=True) is None


def test_a_source_from_which_a_transfer_fails_is_not_shown_as_one_for_a_while(kept: Kept) -> None:
    kept.bring(0, A, "n0")
    order = kept.registry.order(0, A, "n0", ["n1"], keeps=True)
    assert order is not None
    assert kept.registry.failed(1, order.transfer, "n1")
    assert not kept.registry.failed(1, order.transfer, "n1"), "once"
    assert kept.free("n1") == 100
    (view,) = kept.registry.views(1, A)
    assert not view.is_source
    assert kept.registry.views(1 + DOUBT_NS, A)[0].is_source


def test_a_lost_node_has_nothing_and_receives_nothing(kept: Kept) -> None:
    kept.bring(0, A, "n0")
    order = kept.registry.order(0, A, "n0", ["n1", "n2"], keeps=True)
    assert order is not None
    kept.registry.use(0, ReplicaId(0), "n1", A, keeps=True)
    kept.registry.lose("n1")
    kept.registry.lose("n0")
    assert [view.node for view in kept.registry.views(0, A)] == ["n2"]
    kept.registry.arrived(1, order.transfer, "n1")
    kept.registry.arrived(1, order.transfer, "n2")
    kept.registry.leave(2, ReplicaId(0))
    assert [view.node for view in kept.registry.views(2, A)] == ["n2"]
    assert [kept.free(node.name) for node in NODES] == [100, 100, 100]
    assert not kept.registry.transfers


PART, REST = ModelWeights("a", 10, LayerSet(0, 1)), ModelWeights("a", 30, LayerSet(1, 4).others)


def completing(kept: Kept, *, keeps: bool = True) -> TransferId:
    """A part of a model has started on a node; returns the transfer that brings the other layers."""
    registry = kept.registry
    first = registry.order_layers(0, PART, A, STORE, ["n0"], keeps)
    registry.use(0, ReplicaId(0), "n0", A, keeps, first.transfer, assembles=True)
    registry.arrived(1, first.transfer, "n0")
    assert kept.free() == 60, "a copy of all layers"
    order = registry.order_layers(2, REST, A, STORE, ["n0"], keeps, (ReplicaId(0),))
    registry.wait(ReplicaId(0), order.transfer)
    return order.transfer


def test_a_start_waits_for_the_transfer_that_completes_a_part_on_its_node(kept: Kept) -> None:
    transfer, registry = completing(kept), kept.registry
    (view,) = registry.views(3, A)
    assert (view.arriving, view.arriving_since_ns, view.has_files) == (transfer, 2, False)
    assert registry.extra_bytes("n0", A) == 0
    registry.use(3, ReplicaId(1), "n0", A, keeps=True, transfer=transfer)
    assert kept.free() == 60, "both load the same files"
    registry.arrived(4, transfer, "n0")
    assert registry.has_files(ReplicaId(0))
    assert [each.has_files for each in registry.views(4, A)] == [True]
    registry.ready(5, ReplicaId(0))
    assert kept.free() == 60, "the other one has yet to load them"
    registry.ready(6, ReplicaId(1))
    assert kept.free() == 100


def test_files_come_for_those_that_wait_when_the_part_that_they_complete_is_gone(kept: Kept) -> None:
    transfer, registry = completing(kept), kept.registry
    registry.use(3, ReplicaId(1), "n0", A, keeps=True, transfer=transfer)
    assert not registry.leave(4, ReplicaId(0), transfer)
    assert kept.free() == 60, "the memory is held for the other one"
    registry.arrived(5, transfer, "n0")
    assert [(each.has_files, each.arriving) for each in registry.views(5, A)] == [(True, None)]
    registry.ready(6, ReplicaId(1))
    assert kept.free() == 100


def test_what_completes_a_part_is_cancelled_with_the_last_one_that_waits(kept: Kept) -> None:
    transfer, registry = completing(kept), kept.registry
    registry.use(3, ReplicaId(1), "n0", A, keeps=True, transfer=transfer)
    assert not registry.leave(4, ReplicaId(0), transfer)
    assert [each.transfer for each in registry.leave(5, ReplicaId(1), transfer)] == [transfer]
    assert (kept.free(), kept.ledger.is_empty("n0")) == (100, True)


def test_no_start_waits_for_files_that_go_with_their_part(kept: Kept) -> None:
    completing(kept, keeps=False)
    assert not kept.registry.views(3, A)


def test_a_copy_of_the_ledger_holds_the_same(kept: Kept) -> None:
    kept.registry.order(0, A, STORE, ["n0"], keeps=True)
    assert kept.ledger.without(set()).free_memory_bytes("n0") == 60
    kept.ledger.add(Node("n0", "cpu", 8.0, 200), kept.ledger.states["n0"])
    assert kept.free() == 160


class RandomWeights(RuleBasedStateMachine):
    """Any orders and reports: nothing is held that nobody needs, and what is there always fits."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = Kept()
        self.now_ns = 0
        self.replicas: dict[ReplicaId, TransferId | None] = {}
        """Each with the transfer that it waits for."""
        self.next = 0

    nodes = st.sampled_from([node.name for node in NODES])
    models = st.sampled_from([A, B])

    @rule(weights=models, source=st.sampled_from(["", "n0", "n1"]), count=st.integers(1, 3), keeps=st.booleans())
    def order(self, weights: ModelWeights, source: str, count: int, keeps: bool) -> None:
        registry = self.kept.registry
        if source and source not in {view.node for view in registry.views(self.now_ns, weights) if view.is_source}:
            return
        registry.order(self.now_ns, weights, source, [n.name for n in NODES if n.name != source][:count], keeps)
        self.make_room()

    @rule(node=nodes, weights=models, keeps=st.booleans())
    def start(self, node: str, weights: ModelWeights, keeps: bool) -> None:
        registry = self.kept.registry
        views = {view.node: view for view in registry.views(self.now_ns, weights)}
        view = views.get(node)
        is_known = view is not None and (view.has_files or view.arriving is not None)
        if view is not None and is_known and registry.extra_bytes(node, weights) <= self.kept.free(node):
            id, transfer = ReplicaId(self.next), None if view.has_files else view.arriving
            registry.use(self.now_ns, id, node, weights, keeps, transfer)
            self.replicas[id] = transfer
            self.next += 1
            self.make_room()

    @rule(place=st.integers(0, 5), outcome=st.sampled_from(["arrived", "failed"]), at=st.integers(0, 2))
    def report(self, place: int, outcome: str, at: int) -> None:
        registry = self.kept.registry
        if registry.transfers:
            id = list(registry.transfers)[place % len(registry.transfers)]
            getattr(registry, outcome)(self.now_ns, id, NODES[at].name)

    @rule(place=st.integers(0, 5), gone=st.booleans())
    def end(self, place: int, gone: bool) -> None:
        if self.replicas:
            id = list(self.replicas)[place % len(self.replicas)]
            if gone:
                for order in self.kept.registry.leave(self.now_ns, id, self.replicas.pop(id)):
                    assert order.transfer not in self.replicas.values(), "another one waits"
            else:
                self.kept.registry.ready(self.now_ns, id)

    @rule(node=nodes)
    def lose(self, node: str) -> None:
        self.kept.registry.lose(node)

    @rule(node=nodes, bytes_=st.integers(0, 100))
    def reserve(self, node: str, bytes_: int) -> None:
        self.kept.ledger.release(ReplicaId(-1))
        self.kept.ledger.reserve(ReplicaId(-1), Reservation(node, 0, bytes_))
        self.make_room()

    def make_room(self) -> None:
        self.kept.registry.make_room([node.name for node in NODES])

    @invariant()
    def fits(self) -> None:
        self.now_ns += 1
        reserved = self.kept.ledger.reservations.get(ReplicaId(-1))
        for node in NODES:
            own = self.kept.registry.by_node.get(node.name, {}).values()
            held, spare = self.kept.registry.held_bytes(node.name), self.kept.registry.spare_bytes(node.name)
            taken = reserved.memory_bytes if reserved is not None and reserved.node == node.name else 0
            assert self.kept.free(node.name) == 100 - taken - held >= 0
            assert held + spare + taken <= 100, "never more than there is"
            arriving = {id for each in own for id in each.arriving}
            open_ = {id for id, each in self.kept.registry.transfers.items() if node.name in each.receivers}
            assert arriving == open_


RandomWeights.TestCase.settings = settings(max_examples=25, stateful_step_count=30)
TestRandomWeights = RandomWeights.TestCase
