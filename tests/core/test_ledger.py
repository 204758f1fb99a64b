"""What fits on a node, and that reservations free exactly what they took."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from sloop.core.ledger import Ledger, Reservation, could_hold, replicas_max, sites, why_impossible
from sloop.core.views import DeviceView, NodeView, Site
from sloop.vocabulary import Device, Node, NodeState, ReplicaId, ReplicaSpec, Slot
from tests.core.scene import Belief

GPU = Device("gpu0", "T4", memory_bytes=50, clients_max=3)
NODE = Node("n0", "x", cores=2, memory_bytes=100, devices=(GPU,))


def spec_of(cores: float, share: float | None = None, *, accelerator: str = "T4", hardware: str = "x") -> ReplicaSpec:
    """A replica that uses an accelerator if `share` is given."""
    slot = Slot(cores, hardware) if share is None else Slot(cores, hardware, accelerator, share)
    return ReplicaSpec("s", "v", slot)


def reservation(cores: float, memory: int = 0, share: float | None = None, on_device: int = 0) -> Reservation:
    belief = Belief(memory_bytes=memory, device_memory_bytes=on_device)
    return Reservation.of(spec_of(cores, share), belief, "n0", None if share is None else "gpu0")


def test_a_reservation_that_does_not_fit_reserves_nothing() -> None:
    ledger = Ledger([NODE])
    assert ledger.reserve(ReplicaId(0), reservation(1.5, 60, 0.7, 30))
    refusals = (
        reservation(0.6),
        reservation(0.1, 41),
        reservation(0.1, 0, 0.4),
        reservation(0.1, 0, 0.1, on_device=21),
    )
    for refused in refusals:
        assert not ledger.reserve(ReplicaId(1), refused)
    view = ledger.views()[0]
    assert (view.free_cores, view.free_memory_bytes) == (0.5, 40)
    assert view.devices == (DeviceView(GPU, 0.3, 20, 2),)


def test_a_device_has_a_limited_number_of_clients_even_if_they_reserve_no_share() -> None:
    ledger = Ledger([NODE])
    taken = [ledger.reserve(ReplicaId(id), reservation(0.1, 0, 0.0, 10)) for id in range(4)]
    assert taken == [True, True, True, False]
    ledger.release(ReplicaId(1))
    assert ledger.reserve(ReplicaId(3), reservation(0.1, 0, 0.0, 10))


def test_only_ready_nodes_have_room() -> None:
    ledger = Ledger([NODE, Node("n1", "x", 2, 100, on_demand=True)])
    wanted = spec_of(1)
    assert [site.node.node.name for site in sites(wanted, Belief(), ledger.views())] == ["n0"]
    ledger.set_state("n1", NodeState.READY)
    assert [site.node.node.name for site in sites(wanted, Belief(), ledger.views())] == ["n0", "n1"]
    ledger.set_state("n0", NodeState.LOST)
    assert [site.node.node.name for site in sites(wanted, Belief(), ledger.views())] == ["n1"]


def test_every_free_device_of_the_kind_is_a_site() -> None:
    other = Device("gpu1", "T4", 50)
    ledger = Ledger([Node("n0", "x", 2, 100, (GPU, other, Device("v", "V100", 50)))])
    found = sites(spec_of(1, 0.5), Belief(memory_bytes=0), ledger.views())
    assert [site.device.device.name for site in found if site.device] == ["gpu0", "gpu1"]
    ledger.reserve(ReplicaId(0), reservation(0.5, 0, 0.6))
    found = sites(spec_of(1, 0.5), Belief(memory_bytes=0), ledger.views())
    assert [site.device.device.name for site in found if site.device] == ["gpu1"]


@given(
    st.floats(0.1, 2.5),
    st.none() | st.sampled_from([0.0, 0.3, 0.34, 0.5, 1.0]),
    st.integers(0, 60),
    st.integers(0, 40),
    st.integers(1, 2),
)
def test_as_many_replicas_fit_on_an_empty_node_as_can_be_placed_there(
    cores: float, share: float | None, memory: int, on_device: int, devices: int
) -> None:
    node = Node("n0", "x", 2, 100, (GPU, Device("gpu1", "T4", 50))[:devices], on_demand=True)
    spec, belief = spec_of(cores, share), Belief(memory_bytes=memory, device_memory_bytes=on_device)
    ledger, placed = Ledger.all_ready([node]), 0
    while ledger.place(ReplicaId(placed), spec, belief):
        placed += 1
    assert replicas_max(node, spec.slot, belief) == placed
    assert could_hold(node, spec, belief) is (placed > 0)


@pytest.mark.parametrize(
    ("node", "device", "expected"), [("n0", "gpu0", True), ("n1", None, False), (None, "v", False)]
)
def test_a_replica_that_names_its_place_fits_nowhere_else(node: str, device: str, expected: bool) -> None:
    spec = structs.replace(spec_of(1, 0.5), node=node, device=device)
    assert could_hold(NODE, spec, Belief()) is expected


def test_a_copy_without_some_replicas_has_their_room() -> None:
    ledger = Ledger([NODE, Node("n1", "x", 2, 100, on_demand=True)])
    for id in range(2):
        ledger.reserve(ReplicaId(id), reservation(1, 50, 0.5))
    copy = ledger.without({ReplicaId(0)})
    assert [view.free_cores for view in copy.views()] == [1, 2]
    assert copy.states == ledger.states
    copy.resize(ReplicaId(1), 0.5)
    assert ledger.views()[0].free_cores == 0


def test_a_node_whose_capacities_change_keeps_its_reservations() -> None:
    ledger = Ledger([NODE])
    ledger.reserve(ReplicaId(0), reservation(1.5, 60, 0.7, 30))
    ledger.add(Node("n0", "x", 4, 100, (structs.replace(GPU, memory_bytes=80),)), NodeState.READY)
    (view,) = ledger.views()
    assert (view.free_cores, view.free_memory_bytes, view.devices[0].free_memory_bytes) == (2.5, 40, 50)
    ledger.add(Node("n0", "x", 1, 100), NodeState.READY)
    assert ledger.views()[0].free_cores == -0.5
    ledger.release(ReplicaId(0))
    assert ledger.views()[0] == NodeView(Node("n0", "x", 1, 100), 1.0, 100)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (spec_of(1), ""),
        (spec_of(1, hardware="y"), "no node has hardware 'y'"),
        (spec_of(1, 0.5, accelerator="A100"), "no node of hardware 'x' has a device 'A100'"),
        (spec_of(1, 0.5, accelerator="A100", hardware=""), "no node of hardware '' has a device 'A100'"),
    ],
)
def test_what_no_node_could_ever_hold_is_named(spec: ReplicaSpec, expected: str) -> None:
    assert why_impossible(spec, [NODE]) == expected


def test_growing_needs_room_and_never_shrinks() -> None:
    ledger = Ledger([NODE])
    ledger.reserve(ReplicaId(0), reservation(1.5))
    assert ledger.grow(ReplicaId(0), 1.0)
    assert ledger.views()[0].free_cores == 0.5
    assert ledger.grow(ReplicaId(0), 2.0)
    assert not ledger.grow(ReplicaId(0), 2.5)
    assert ledger.resize(ReplicaId(0), 0.25)
    assert ledger.views()[0].free_cores == 1.75


@given(st.lists(st.tuples(st.integers(0, 5), st.floats(0.01, 2)), max_size=60))
def test_released_reservations_free_exactly_what_they_took(steps: list[tuple[int, float]]) -> None:
    ledger = Ledger([NODE])
    for id, cores in steps:
        replica = ReplicaId(id)
        if replica in ledger.reservations:
            ledger.release(replica)
        else:
            ledger.reserve(replica, reservation(cores))
        held = sum(h.millicores for h in ledger.reservations.values())
        assert held <= 2000
        assert ledger.views()[0].free_cores == (2000 - held) / 1000
    for id in list(ledger.reservations):
        ledger.release(id)
    assert ledger.views()[0].free_cores == 2


PARTLY_FREE = NodeView(NODE, 0.1 + 0.2, 100, (DeviceView(GPU, 0.5, 50, 1),))


@pytest.mark.parametrize(
    ("spec", "memory_bytes", "expected"),
    [
        (spec_of(0.3), 100, True),
        (spec_of(0.31), 0, False),
        (spec_of(0.3), 101, False),
        (spec_of(0.1, hardware="y"), 0, False),
        (spec_of(0.1, 0.5), 0, True),
        (spec_of(0.1, 0.6), 0, False),
        (spec_of(0.1, 0.1, accelerator="tpu"), 0, False),
    ],
)
def test_cores_memory_and_share_must_all_fit(spec: ReplicaSpec, memory_bytes: int, expected: bool) -> None:
    assert bool(sites(spec, Belief(memory_bytes=memory_bytes), [PARTLY_FREE])) is expected


@given(st.lists(st.floats(0.001, 1), max_size=8), st.floats(0.001, 1), st.floats(0, 1))
def test_the_ledger_never_refuses_a_site(taken: list[float], cores: float, share: float) -> None:
    ledger = Ledger([NODE])
    for id, size in enumerate(taken):
        ledger.reserve(ReplicaId(id), reservation(size, 10, 0.1))
    belief, spec = Belief(memory_bytes=30), spec_of(cores, share)
    has_site = bool(sites(spec, belief, ledger.views()))
    assert has_site is ledger.reserve(ReplicaId(99), Reservation.of(spec, belief, "n0", "gpu0"))


def test_the_view_of_a_node_is_kept_until_the_node_changes() -> None:
    ledger = Ledger([NODE, Node("n1", "x", 2, 100)])
    before = ledger.views()
    assert ledger.views() is before
    ledger.reserve(ReplicaId(0), reservation(0.5))
    after = ledger.views()
    assert (after[0].free_cores, after[1] is before[1]) == (1.5, True)
    ledger.set_state("n1", NodeState.LOST)
    assert ledger.views()[0] is after[0]
    assert ledger.views()[1].state is NodeState.LOST


NAMED = [Node(f"n{n}", "x", 2 + n % 2, 100, (GPU,) * (n % 3 == 0), on_demand=n == 4) for n in range(8)]


@given(st.lists(st.tuples(st.sampled_from([None, *range(9)]), st.floats(0.1, 1.0), st.booleans()), max_size=40))
def test_what_fits_in_a_copy_is_what_fits_in_the_ledger(steps: list[tuple[int | None, float, bool]]) -> None:
    """Half of the replicas are there before the copy is made. A named node has the same places as among all."""
    ledger, belief = Ledger(NAMED), Belief(memory_bytes=20, device_memory_bytes=20)
    copy = Ledger.of(ledger.views())
    for number, (node, cores, on_device) in enumerate(steps):
        if number == len(steps) // 2:
            copy = Ledger.of(ledger.views())
        spec = spec_of(round(cores, 1), 0.4 if on_device else None)
        spec = structs.replace(spec, node=None if node is None else f"n{node}")
        first = next(iter(ledger.sites(spec, belief)), None)
        made = ledger.place(ReplicaId(number), spec, belief)
        device = first.device.device.name if first and first.device else ""
        assert (made and (made.node, made.device)) == (first and (first.node.node.name, device))
        if number >= len(steps) // 2:
            assert copy.place(ReplicaId(number), spec, belief) == made
            assert (copy.views(), copy.firsts()) == (ledger.views(), ledger.firsts())


def test_replicas_without_room_are_named_by_position() -> None:
    ledger = Ledger([NODE])
    assert ledger.reserve(ReplicaId(7), reservation(0.5))
    wanted = [(spec_of(cores), Belief(memory_bytes=10)) for cores in (1.0, 1.0, 0.5, 0.1)]
    assert ledger.without_room(wanted) == [1, 3]
    assert ledger.views()[0].free_cores == 0


def test_trying_in_a_copy_changes_nothing_else() -> None:
    ledger = Ledger(NAMED)
    before = ledger.views()
    assert Ledger.of(before).place(ReplicaId(0), spec_of(1), Belief()) is not None
    assert ledger.views() is before
    assert before == Ledger(NAMED).views()


def test_the_first_released_node_that_could_hold_a_replica_is_rented() -> None:
    ledger = Ledger([Node(f"n{n}", "x", cores, 100, on_demand=n > 0) for n, cores in enumerate([9, 1, 4, 4])])
    assert [site.node.node.name for site in ledger.rentable(spec_of(2), Belief())] == ["n2"]
    ledger.set_state("n2", NodeState.ACQUIRING)
    assert [site.node.node.name for site in ledger.rentable(spec_of(2), Belief())] == ["n3"]
    assert not ledger.rentable(structs.replace(spec_of(2), node="n1"), Belief())
    assert not ledger.rentable(spec_of(5), Belief())


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 7), st.floats(0.1, 1.0)), max_size=30), st.booleans())
def test_of_equal_nodes_the_first_stands_for_all(steps: list[tuple[int, int, float]], on_device: bool) -> None:
    """Whatever happened before: each place is as good as one that is shown, and comes after it."""
    ledger, wanted = Ledger(NAMED), spec_of(0.5, 0.4 if on_device else None)
    for number, (id, node, cores) in enumerate(steps):
        replica, at = ReplicaId(id), NAMED[node]
        if replica in ledger.reservations:
            ledger.release(replica)
        elif number % 7 == 0:
            ledger.set_state(at.name, NodeState.LOST if ledger.states[at.name] is NodeState.READY else NodeState.READY)
        else:
            share = round(cores, 1) if at.devices and number % 2 else None
            taken = Reservation.of(spec_of(round(cores, 1), share), Belief(), at.name, "gpu0" if share else None)
            ledger.reserve(replica, taken)
        if number % 3 == 0:
            ledger.views()

    def worth(site: Site) -> tuple[NodeView, DeviceView | None]:
        return replace(site.node, node=structs.replace(site.node.node, name="")), site.device

    firsts: dict[tuple[NodeView, DeviceView | None], str] = {}
    for site in ledger.sites(wanted, Belief()):
        firsts.setdefault(worth(site), site.node.node.name)
    shown = ledger.sites(wanted, Belief(), one_of_equal=True)
    assert [(worth(site), site.node.node.name) for site in shown] == list(firsts.items())
    assert ledger.sites(wanted, Belief()) == sites(wanted, Belief(), [ledger.view(node.name) for node in NAMED])


def test_a_spec_that_names_its_node_has_a_place_only_there() -> None:
    ledger = Ledger(NAMED)
    for one_of_equal in (False, True):
        found = ledger.sites(structs.replace(spec_of(1), node="n5"), Belief(), one_of_equal=one_of_equal)
        assert [site.node.node.name for site in found] == ["n5"]
        assert not ledger.sites(structs.replace(spec_of(1), node="n9"), Belief(), one_of_equal=one_of_equal)
