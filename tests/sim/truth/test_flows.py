"""Flows are compared with progressive filling as textbooks have it, in exact fractions."""

from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from math import inf
from random import Random
from typing import Any, NamedTuple, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sloop.app.scenario import TopologyTruth
from sloop.sim.truth.flows import Flow, FlowLink, FlowNetwork, Topology
from sloop.units import FOREVER_NS, NS_PER_S, ms, s
from sloop.vocabulary import STORE, Node

GBIT = 1e9 / 8


def exact(value: Fraction | int) -> float:
    """The same number, which calculates exactly; the network takes any kind of number."""
    return cast(float, Fraction(value))


def nodes(count: int) -> list[Node]:
    return [Node(f"n{index}", "local", 1.0, 1) for index in range(count)]


class Wanted(NamedTuple):
    """A flow of the reference: its links by number, as often as it crosses them, and its own limit."""

    links: Sequence[int]
    limit: Any = inf


def fair_rates(capacities: Sequence[Any], flows: Sequence[Wanted]) -> list[Any]:
    """Max-min fair rates by progressive filling over single flows: all rise together until a link is full or a flow is
    at its limit, and the flows concerned stop."""
    rates: list[Any] = [0] * len(flows)
    rising = set(range(len(flows)))
    while rising:
        steps = [flows[flow].limit - rates[flow] for flow in rising]
        used = [
            sum(flow.links.count(link) * rate for flow, rate in zip(flows, rates, strict=True))
            for link in links(capacities)
        ]
        crossing = [sum(flows[flow].links.count(link) for flow in rising) for link in links(capacities)]
        steps += [(capacities[link] - used[link]) / crossing[link] for link in links(capacities) if crossing[link]]
        step = min(steps)
        full = {
            link
            for link in links(capacities)
            if crossing[link] and used[link] + step * crossing[link] == capacities[link]
        }
        for flow in list(rising):
            rates[flow] += step
            if rates[flow] == flows[flow].limit or full & set(flows[flow].links):
                rising.discard(flow)
    return rates


def links(capacities: Sequence[Any]) -> range:
    return range(len(capacities))


class Reference:
    """A network whose rates are all computed anew at each change."""

    def __init__(self, capacities: Sequence[Any]) -> None:
        self.capacities = capacities
        self.flows: dict[int, tuple[Wanted, Any]] = {}
        self.rates: dict[int, Any] = {}
        self.now_ns = 0

    def advance(self, now_ns: int) -> None:
        for id, (wanted, left) in self.flows.items():
            self.flows[id] = wanted, left - self.rates[id] * (now_ns - self.now_ns) / NS_PER_S
        self.now_ns = now_ns

    def change(self) -> None:
        found = fair_rates(self.capacities, [wanted for wanted, _ in self.flows.values()])
        self.rates = dict(zip(self.flows, found, strict=True))

    def due_ns(self, id: int) -> int:
        left_ns = self.flows[id][1] * NS_PER_S / self.rates[id]
        return self.now_ns + max(0, int((2 * left_ns + 1) // 2))

    @property
    def next_ns(self) -> int:
        return min(map(self.due_ns, self.flows), default=FOREVER_NS)


class Script(NamedTuple):
    """Capacities in bytes per second; flows that start, each with its instant, size, links and limit; and instants at
    which a flow is cancelled."""

    capacities: list[int]
    starts: list[tuple[int, int, list[int], int]]
    cancels: dict[int, int]


@st.composite
def scripts(draw: st.DrawFn) -> Script:
    capacities = draw(st.lists(st.integers(1, 60), min_size=1, max_size=6))
    link = st.integers(0, len(capacities) - 1)
    start = st.tuples(
        st.integers(0, 12), st.integers(1, 200), st.lists(link, max_size=5), st.sampled_from((1, 7, 40, 1000))
    )
    starts = sorted(draw(st.lists(start, min_size=1, max_size=10)))
    cancels = draw(st.dictionaries(st.integers(0, len(starts) - 1), st.integers(0, 20), max_size=3))
    return Script(capacities, starts, cancels)


@settings(max_examples=200, deadline=None)
@given(scripts())
def test_rates_and_ends_are_exactly_those_of_progressive_filling_over_all_flows(script: Script) -> None:
    network, reference = FlowNetwork(), Reference([Fraction(capacity) for capacity in script.capacities])
    made = [FlowLink(str(number), exact(capacity)) for number, capacity in enumerate(script.capacities)]
    flows: dict[int, Flow] = {}
    instants = sorted({s(at) for at, *_ in script.starts} | {s(at) for at in script.cancels.values()} | {s(10_000)})
    for now_ns in instants:
        while (due_ns := reference.next_ns) <= now_ns:
            assert network.due_ns == due_ns
            reference.advance(due_ns)
            over = [id for id in reference.flows if reference.due_ns(id) <= due_ns]
            assert network.ended(due_ns) == [flows[id] for id in over]
            for id in over:
                del reference.flows[id]
            reference.change()
        assert network.due_ns == due_ns
        reference.advance(now_ns)
        for id, (at_s, size, crossed, limit) in enumerate(script.starts):
            if s(at_s) == now_ns:
                flows[id] = network.start(now_ns, [made[link] for link in crossed], exact(size), exact(limit))
                reference.flows[id] = Wanted(crossed, Fraction(limit)), Fraction(size)
        for id, at_s in script.cancels.items():
            if s(at_s) == now_ns and id in flows:
                network.cancel(now_ns, flows[id])
                reference.flows.pop(id, None)
        reference.change()
        assert {id: network.rate(flows[id]) for id in reference.flows} == reference.rates
        assert {id: network.left(now_ns, flows[id]) for id in reference.flows} == {
            id: left for id, (_, left) in reference.flows.items()
        }
    assert not reference.flows
    assert network.due_ns == FOREVER_NS


@pytest.mark.parametrize("seed", range(3))
def test_in_floats_no_link_carries_too_much_and_no_rate_can_be_raised(seed: int) -> None:
    """A leaf and spine with 40 nodes, where routes overlap in every way, while flows come and go."""
    random = Random(seed)
    topology = Topology(TopologyTruth(2203.0, node_mbps=7506.89, nodes_per_leaf=5, leaf_mbps=15_000.0), nodes(40))
    names = [node.name for node in nodes(40)]
    network, running = FlowNetwork(), dict[Flow, list[FlowLink]]()
    for step in range(100):
        now_ns = ms(40 * step)
        for flow in network.ended(now_ns):
            del running[flow]
        sender, *receivers = random.sample(names, random.randint(2, 4))
        route = topology.chain(random.choice((STORE, sender)), receivers)
        running[network.start(now_ns, route, random.uniform(1e6, 1e9), random.choice((inf, 2e8)))] = route
        if random.random() < 0.2:
            leaving = random.choice(list(running))
            network.cancel(now_ns, leaving)
            del running[leaving]
        carried: Counter[FlowLink] = Counter()
        fastest: dict[FlowLink, float] = {}
        for flow, route in running.items():
            rate = network.rate(flow)
            for link in route:
                carried[link] += rate  # type: ignore[assignment]  # counts of bytes per second
                fastest[link] = max(fastest.get(link, 0.0), rate)
        assert all(carried[link] <= link.capacity * (1 + 1e-9) for link in carried)
        for flow, route in running.items():
            rate = network.rate(flow)
            assert rate >= flow.limit * (1 - 1e-9) or any(
                carried[link] >= link.capacity * (1 - 1e-9) and rate >= fastest[link] * (1 - 1e-9) for link in route
            )


# Flows


@given(st.integers(0, 1_000_000))
def test_all_flows_end_also_those_that_begin_and_end_within_nanoseconds(seed: int) -> None:
    """What the last of them lack is less than a link carries in a nanosecond, so that several ends fall together."""
    random = Random(seed)
    network = FlowNetwork()
    links = [FlowLink(str(number), random.choice((1e9, 4e9, 1e10)) / random.choice((1, 3, 8))) for number in range(3)]
    starts = [(random.randint(0, 3), random.choice((1 << 28, 1 << 30))) for _ in range(random.randint(2, 12))]
    begun, ended = 0, 0
    for at_ns in range(4):
        ended += len(network.ended(at_ns))
        for size in [size for start_ns, size in starts if start_ns == at_ns]:
            network.start(at_ns, random.sample(links, random.randint(1, 3)), size)
            begun += 1
    while network.due_ns < FOREVER_NS:
        ended += len(network.ended(network.due_ns))
    assert ended == begun == len(starts)


def test_a_flow_alone_is_as_fast_as_its_slowest_link_and_its_own_limit() -> None:
    network, fast, slow = FlowNetwork(), FlowLink("fast", 100.0), FlowLink("slow", 40.0)
    first = network.start(0, [fast, slow], 80.0)
    assert (network.rate(first), network.due_ns) == (40.0, s(2))
    second = network.start(s(1), [fast], 10.0, limit=5.0)
    assert (network.rate(second), network.left(s(1), first)) == (5.0, 40.0)
    assert network.ended(s(2)) == [first]
    assert network.ended(s(3)) == [second]
    assert network.due_ns == FOREVER_NS


def test_what_moves_nothing_or_crosses_nothing_is_over_at_once() -> None:
    network, link = FlowNetwork(), FlowLink("link", 1.0)
    empty, free = network.start(s(1), [link], 0.0), network.start(s(1), [], 1e12)
    limited = network.start(s(1), [], 10.0, limit=5.0)
    gone = network.start(s(1), [], 1.0)
    network.cancel(s(1), gone)
    assert network.due_ns == s(1)
    assert network.ended(s(1)) == [empty, free]
    assert network.due_ns == s(3)
    assert network.ended(s(3)) == [limited]


def test_flows_share_a_link_and_those_that_stay_get_what_others_leave() -> None:
    network, link = FlowNetwork(), FlowLink("link", 30.0)
    first, second, third = (network.start(0, [link], size) for size in (10.0, 20.0, 90.0))
    assert network.rate(first) == network.rate(third) == 10.0
    assert network.ended(s(1)) == [first]
    assert network.rate(second) == 15.0
    network.cancel(s(1), second)
    network.cancel(s(1), first)  # it has ended
    assert (network.rate(third), network.left(s(1), third)) == (30.0, 80.0)
    assert network.left(s(1), second) == 0


def test_a_change_that_is_settled_later_counts_from_its_own_instant() -> None:
    network, link = FlowNetwork(), FlowLink("link", 10.0)
    first = network.start(0, [link], 100.0)
    network.start(s(2), [link], 100.0)
    assert network.left(s(4), first) == 70.0


def test_a_chain_is_one_flow_that_takes_its_rate_on_a_link_each_time_it_crosses_it() -> None:
    network, link, other = FlowNetwork(), FlowLink("twice", 90.0), FlowLink("once", 90.0)
    chain, plain = network.start(0, [link, other, link], 1e3), network.start(0, [link], 1e3)
    assert network.rate(chain) == network.rate(plain) == 30.0


# The topology


def rates(routes: Sequence[Sequence[FlowLink]]) -> list[float]:
    network = FlowNetwork()
    flows = [network.start(0, route, 1e9) for route in routes]
    return [network.rate(flow) for flow in flows]


LEAF_AND_SPINE = TopologyTruth(2203.0, node_mbps=50_000.0, nodes_per_leaf=20, leaf_mbps=100_000.0)


def test_unicasts_from_a_node_share_its_link_and_a_chain_runs_at_full_rate() -> None:
    topology, targets = Topology(LEAF_AND_SPINE, nodes(40)), ["n1", "n2", "n3", "n4"]
    assert rates([topology.route("n0", target) for target in targets]) == [12.5 * GBIT] * 4
    assert rates([Topology(LEAF_AND_SPINE, nodes(40)).chain("n0", targets)]) == [50 * GBIT]


def test_flows_between_leaves_share_the_uplink() -> None:
    topology = Topology(LEAF_AND_SPINE, nodes(40))
    routes = [topology.route(f"n{index}", f"n{20 + index}") for index in range(4)]
    assert rates(routes) == [25 * GBIT] * 4


def test_a_chain_in_the_order_of_the_leaves_crosses_an_uplink_once() -> None:
    scattered, ordered = ["n20", "n1", "n21", "n2", "n22"], ["n1", "n2", "n20", "n21", "n22"]
    assert rates([Topology(LEAF_AND_SPINE, nodes(40)).chain("n0", scattered)]) == [pytest.approx(100 / 3 * GBIT)]
    assert rates([Topology(LEAF_AND_SPINE, nodes(40)).chain("n0", ordered)]) == [50 * GBIT]


def test_the_link_from_the_store_is_one_for_all_or_each_node_has_its_own() -> None:
    shared, own = (Topology(TopologyTruth(800.0, store), nodes(4)) for store in ("shared", "per_node"))
    assert rates([shared.route(STORE, name) for name in ("n0", "n1")]) == [5e7, 5e7]
    assert rates([own.route(STORE, name) for name in ("n0", "n1", "n1")]) == [1e8, 5e7, 5e7]
    assert own.route("n2", "n2") == own.route("n0", "n3") == []


# The work that it takes


def test_staggered_downloads_over_one_link_take_constant_work_each() -> None:
    """1,600 nodes share the store's link; every download changes the rates of all others."""
    topology = Topology(LEAF_AND_SPINE, nodes(1_600))
    network = FlowNetwork()
    for index in range(1_600):
        network.start(ms(index), topology.route(STORE, f"n{index}"), 1e9)
        assert network.due_ns < FOREVER_NS
    while network.due_ns < FOREVER_NS:
        network.ended(network.due_ns)
    assert network.groups_rated <= 4 * 1_600 * 80, "at most one group for each of the 80 leaves"


def test_a_change_gives_new_rates_only_to_flows_that_it_concerns() -> None:
    """Pairs of nodes below 80 leaves: each change concerns the pairs of two leaves, not all."""
    topology = Topology(LEAF_AND_SPINE, nodes(1_600))
    network = FlowNetwork()
    for start in range(0, 1_600, 40):  # two leaves with each other
        for index in range(20):
            network.start(0, topology.route(f"n{start + index}", f"n{start + 20 + index}"), 1e9)
    assert network.due_ns < FOREVER_NS
    before = network.groups_rated
    flow = network.start(ms(1), topology.route("n0", "n20"), 1e9)
    assert network.rate(flow) > 0
    assert network.groups_rated - before <= 21
