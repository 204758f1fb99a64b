"""Flows: transfers that share the links of a network max-min fairly, and the topology between nodes and store.

There are no packets. A flow crosses all its links at one rate, which changes only when flows start or end. The rates
are max-min fair: no flow could be faster without slowing down another that is no faster. A chain of receivers is one
flow from its source to its last receiver. If it crosses a link n times, it takes n times its rate there.

Four rules make a change cheap, however many flows there are:

- A link that could carry all its flows at once, each as fast as its other links allow, limits no flow and is ignored.
- Flows that cross the same remaining links have the same rate and form a `FlowGroup`. The group counts the bytes that
  each of its flows has moved. A flow ends when this counter reaches a value that is fixed when the flow joins the
  group. So a new rate changes the group, and none of its flows.
- When flows start or end, only the groups on their links get new rates at first. The other groups keep their rates if
  these are still max-min fair: each group must have a full link on which no flow is faster, or be as fast as its own
  limit. Groups for which this fails get new rates too, and the check is repeated.
- All changes of one instant are settled together.

Numbers may be floats or exact fractions. This module must not know what is transferred, or why.

Sources: Ether (Rausch et al., HotEdge 2020) has the model; progressive filling, Bertsekas and Gallager, Data Networks,
§6.5.2; the leaf and spine topology, Flashpoint specification §2.15 and §3.4.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush
from itertools import count, pairwise
from math import inf
from typing import Final

from sloop.app.scenario import TopologyTruth
from sloop.units import FOREVER_NS, NS_PER_S
from sloop.vocabulary import STORE, Node

EXACT: Final = 1e-12
"""Relative tolerance for "a link is full" and "no flow is faster": some thousand roundings of a float."""
BYTES_PER_S: Final = 1e6 / 8
"""Of one megabit per second."""


class FlowLink:
    """One direction of a link of one network. Its capacity is in bytes per second, of payload."""

    __slots__ = ("capacity", "flows", "groups", "is_shared", "name", "number", "wanted")

    def __init__(self, name: str, capacity: float) -> None:
        self.name = name
        self.capacity = capacity
        self.number = -1
        """Order of first use; makes results independent of the order in memory."""
        self.flows: dict[Flow, int] = {}
        """Each flow, and how often it crosses the link."""
        self.wanted: float = 0
        """The sum of the rates that its flows would have if each were alone."""
        self.is_shared = False
        """Whether it may limit its flows. Only then its `groups` are kept."""
        self.groups: dict[FlowGroup, int] = {}
        """Each group of flows, and how often each of its flows crosses the link."""


class Flow:
    """A transfer of `size` bytes."""

    __slots__ = ("end", "group", "limit", "number", "route", "size")

    def __init__(self, number: int, size: float, route: tuple[tuple[FlowLink, int], ...], limit: float) -> None:
        self.number = number
        self.size = size
        self.route = route
        """Its links, and how often it crosses each."""
        self.limit = limit
        """Its rate in bytes per second if no other flow were there."""
        self.group: FlowGroup | None = None
        """None once it has ended, or was cancelled."""
        self.end: float = 0
        """It ends when its group has moved this many bytes."""


class FlowGroup:
    """Flows with the same limit that cross the same shared links equally often, and therefore have the same rate."""

    __slots__ = ("bottleneck", "due_ns", "ends", "limit", "links", "moved", "number", "rate", "since_ns", "size")

    def __init__(self, number: int, links: tuple[tuple[FlowLink, int], ...], limit: float, now_ns: int) -> None:
        self.number = number
        self.links = links
        self.limit = limit
        self.size = 0
        """Flows."""
        self.rate: float = 0
        """Of each flow, in bytes per second."""
        self.bottleneck: FlowLink | None = None
        """The full link on which no flow is faster; None if the flows are as fast as their limit."""
        self.moved: float = 0
        self.since_ns = now_ns
        """The instant up to which `moved` counts the bytes of a flow that has been in the group from its beginning."""
        self.ends: list[tuple[float, int, Flow]] = []
        """A heap of the flows by `Flow.end`; entries of flows that left are stale."""
        self.due_ns = FOREVER_NS
        """When its next flow ends."""

    def moved_at(self, now_ns: int) -> float:
        """`moved` at an instant at or after the last change of the rate."""
        elapsed_ns = now_ns - self.since_ns
        return self.moved + self.rate * elapsed_ns / NS_PER_S if elapsed_ns else self.moved

    def next_end_ns(self) -> int:
        """When the next flow ends at the present rate, rounded to the nearest nanosecond."""
        ends = self.ends
        while ends and (ends[0][2].group is not self or ends[0][2].end != ends[0][0]):
            heappop(ends)
        if not ends or not self.rate:
            return FOREVER_NS
        left_ns = (ends[0][0] - self.moved) * NS_PER_S / self.rate
        return min(self.since_ns + max(0, int((2 * left_ns + 1) // 2)), FOREVER_NS - 1)


class FlowNetwork:
    """Flows over links. Instants must not decrease from call to call."""

    def __init__(self) -> None:
        self.groups_rated = 0
        """How many rates of groups were computed; the work done."""
        self._numbers = count()
        self._link_numbers = count()
        self._groups: dict[tuple[float, tuple[tuple[int, int], ...]], FlowGroup] = {}
        self._touched: dict[FlowGroup, None] = {}
        """Groups that got or lost flows at the instant `_changed_ns`, whose rates are not yet settled."""
        self._changed_ns = 0
        self._due: list[tuple[int, int, FlowGroup]] = []
        """A heap of the groups by `FlowGroup.due_ns`; entries with another instant are stale."""
        self._immediate: list[Flow] = []
        """Flows without bytes or without any limit: they end at once."""

    @property
    def due_ns(self) -> int:
        """When the next flow ends; `FOREVER_NS` if there is none."""
        if self._immediate:
            return self._changed_ns
        self._settle()
        due = self._due
        while due and due[0][0] != due[0][2].due_ns:
            heappop(due)
        return due[0][0] if due else FOREVER_NS

    def start(self, now_ns: int, route: Sequence[FlowLink], size: float, limit: float = inf) -> Flow:
        """Start to move `size` bytes over all links of `route` together, at most at `limit` bytes per second. A link
        that is in the route n times carries n times the rate."""
        self._begin(now_ns)
        crossed = tuple(Counter(route).items())
        for link, times in crossed:
            if link.number < 0:
                link.number = next(self._link_numbers)
            limit = min(limit, link.capacity / times)
        flow = Flow(next(self._numbers), size, crossed, limit)
        if size <= 0 or limit == inf:
            self._immediate.append(flow)
            return flow
        for link, times in crossed:
            link.flows[flow] = times
            link.wanted += times * limit
        self._join(flow, size)
        for link, _ in crossed:
            if not link.is_shared and link.wanted > link.capacity:
                self._share(link, is_shared=True)
        return flow

    def cancel(self, now_ns: int, flow: Flow) -> None:
        """End a flow before its time. One that has ended stays as it is."""
        self._begin(now_ns)
        if flow in self._immediate:
            self._immediate.remove(flow)
        elif flow.group is not None:
            self._remove(flow)

    def ended(self, now_ns: int) -> list[Flow]:
        """The flows that ended up to now since the last call, in the order in which they were started."""
        self._begin(now_ns)
        found, self._immediate = self._immediate, []
        while self.due_ns <= now_ns:
            group = heappop(self._due)[2]
            group.due_ns, self._touched[group] = -1, None  # else it stays without an entry if it is due again now
            while group.next_end_ns() <= now_ns:
                found.append(heappop(group.ends)[2])
                self._remove(found[-1])
        return sorted(found, key=lambda flow: flow.number)

    def rate(self, flow: Flow) -> float:
        """Bytes per second of a flow that has not ended."""
        self._settle()
        assert flow.group is not None, "the flow has ended"
        return flow.group.rate

    def left(self, now_ns: int, flow: Flow) -> float:
        """The bytes that a flow has still to move; 0 if it has ended or was cancelled."""
        self._begin(now_ns)
        return 0 if flow.group is None else max(0, flow.end - flow.group.moved_at(now_ns))

    def _begin(self, now_ns: int) -> None:
        """Changes from here on are of this instant."""
        if now_ns > self._changed_ns:
            self._settle()
            self._changed_ns = now_ns

    # Groups

    def _join(self, flow: Flow, left: float) -> None:
        """Put a flow with `left` bytes to move into the group of its links and limit."""
        shared = sorted((link.number, times) for link, times in flow.route if link.is_shared)
        key = flow.limit, tuple(shared)
        group = self._groups.get(key)
        if group is None:
            links = tuple((link, times) for link, times in flow.route if link.is_shared)
            group = self._groups[key] = FlowGroup(next(self._numbers), links, flow.limit, self._changed_ns)
            for link, times in links:
                link.groups[group] = times
        flow.group = group
        flow.end = group.moved_at(self._changed_ns) + left
        group.size += 1
        heappush(group.ends, (flow.end, next(self._numbers), flow))
        self._touched[group] = None

    def _leave(self, flow: Flow) -> float:
        """Take a flow out of its group; returns the bytes it has still to move."""
        group = flow.group
        assert group is not None
        group.size -= 1
        flow.group = None
        self._touched[group] = None
        return max(0, flow.end - group.moved_at(self._changed_ns))

    def _remove(self, flow: Flow) -> None:
        self._leave(flow)
        for link, times in flow.route:
            del link.flows[flow]
            link.wanted = link.wanted - times * flow.limit if link.flows else 0
            if link.is_shared and 2 * link.wanted <= link.capacity:  # half, so that it does not change to and fro
                self._share(link, is_shared=False)

    def _share(self, link: FlowLink, *, is_shared: bool) -> None:
        """Regroup the flows of a link that may limit them from now on, or no longer can."""
        left = [(flow, self._leave(flow)) for flow in link.flows]
        link.is_shared = is_shared
        for flow, size in left:
            self._join(flow, size)

    # Rates

    def _settle(self) -> None:
        """Compute the rates after the changes of the instant `_changed_ns`."""
        if not self._touched:
            return
        affected: dict[FlowGroup, None] = {}
        for group in self._touched:
            if group.size:
                affected[group] = None
            else:
                self._dissolve(group)
        for group in self._touched:
            for link, _ in group.links:
                affected.update(dict.fromkeys(link.groups))
        self._touched = {}
        rates = _filled(affected)
        self.groups_rated += len(affected)
        while unfair := _unfair(affected, rates):
            affected.update(unfair)
            rates = _filled(affected)
            self.groups_rated += len(affected)
        for group, (rate, bottleneck) in rates.items():
            self._set_rate(group, rate, bottleneck)

    def _dissolve(self, group: FlowGroup) -> None:
        """Forget a group without flows."""
        group.due_ns = -1
        key = group.limit, tuple(sorted((link.number, times) for link, times in group.links))
        del self._groups[key]
        for link, _ in group.links:
            del link.groups[group]

    def _set_rate(self, group: FlowGroup, rate: float, bottleneck: FlowLink | None) -> None:
        group.bottleneck = bottleneck
        if rate != group.rate:
            group.moved, group.since_ns, group.rate = group.moved_at(self._changed_ns), self._changed_ns, rate
        due_ns = group.next_end_ns()
        if due_ns != group.due_ns:
            group.due_ns = due_ns
            heappush(self._due, (due_ns, group.number, group))


Rates = dict[FlowGroup, tuple[float, FlowLink | None]]
"""The rate and the bottleneck of each group."""


def _filled(groups: Iterable[FlowGroup]) -> Rates:
    """The max-min fair rates of these groups, while all others keep theirs: progressive filling.

    The rates of all groups rise together. At a group's limit, or when a link is full, the groups concerned stop.
    """
    rates: Rates = {}
    rising = set(groups)
    limited = sorted(groups, key=lambda group: (group.limit, group.number), reverse=True)
    free, users = _free(limited)
    shares = [(max(0, free[link]) / users[link], link.number, link) for link in free]
    heapify(shares)
    while True:
        while limited and limited[-1] in rates:
            limited.pop()
        if not limited:
            return rates
        stopping, rate, bottleneck = limited[-1:], limited[-1].limit, None
        if shares and shares[0][0] < rate:
            share, number, link = heappop(shares)
            if not users[link]:
                continue
            current = max(0, free[link]) / users[link]
            if current != share:  # those who stopped since left more than their share
                heappush(shares, (current, number, link))
                continue
            stopping, rate, bottleneck = [group for group in link.groups if group in rising], share, link
        rising.difference_update(stopping)
        for group in stopping:
            rates[group] = rate, bottleneck
            for crossed, times in group.links:
                free[crossed] -= times * group.size * rate
                users[crossed] -= times * group.size


def _free(groups: Sequence[FlowGroup]) -> tuple[dict[FlowLink, float], dict[FlowLink, int]]:
    """For the links of these groups: the capacity that all other groups leave, and the number of flows in these groups,
    counted as often as they cross the link."""
    users: dict[FlowLink, int] = {}
    for group in groups:
        for link, times in group.links:
            users[link] = users.get(link, 0) + times * group.size
    chosen, free = set(groups), dict[FlowLink, float]()
    for link in users:
        free[link] = link.capacity
        for group, times in link.groups.items():
            if group not in chosen:
                free[link] -= times * group.size * group.rate
    return free, users


def _unfair(groups: dict[FlowGroup, None], rates: Rates) -> dict[FlowGroup, None]:
    """The other groups on links where these rates and the kept rates together are not max-min fair."""
    found: dict[FlowGroup, None] = {}
    for link in dict.fromkeys(link for group in groups for link, _ in group.links):
        kept = [group for group in link.groups if group not in rates]
        if not kept:
            continue
        used: float = 0
        for group, times in link.groups.items():
            used += times * group.size * (rates[group][0] if group in rates else group.rate)
        is_full = used >= link.capacity * (1 - EXACT)
        fastest_kept = max(group.rate for group in kept)
        fastest = max([fastest_kept, *(rates[group][0] for group in link.groups if group in rates)])
        slowed = any(
            rates[group][1] is link and rates[group][0] < fastest_kept * (1 - EXACT)
            for group in link.groups
            if group in rates
        )
        loose = any(group.bottleneck is link and (not is_full or group.rate < fastest * (1 - EXACT)) for group in kept)
        if slowed or loose:
            found.update(dict.fromkeys(kept))
    return found


class Topology:
    """The links between nodes and the store: each node at a leaf switch, the leaf switches at a spine without limits,
    and the store beyond the spine. Links have two directions, which do not share their capacity."""

    def __init__(self, options: TopologyTruth, nodes: Iterable[Node]) -> None:
        self._nodes: dict[str, tuple[int, list[FlowLink], list[FlowLink]]] = {}
        """Of each node: its leaf, and its links up and down; no links if they have no limit."""
        self._leaves: list[tuple[list[FlowLink], list[FlowLink]]] = []
        """Of each leaf: its links to and from the spine."""
        self._stores: dict[str, list[FlowLink]] = {}
        """Of each node: the link from the store, which may be one for all."""
        self.node_mbps = options.node_mbps or 0.0
        shared = _link("store", options.store_mbps)
        for index, node in enumerate(nodes):
            leaf = index // (options.nodes_per_leaf or FOREVER_NS)
            if leaf == len(self._leaves):
                name = f"leaf-{leaf}"
                self._leaves.append((_link(f"{name} up", options.leaf_mbps), _link(f"{name} down", options.leaf_mbps)))
            up, down = (_link(f"{node.name} {direction}", options.node_mbps) for direction in ("up", "down"))
            self._nodes[node.name] = leaf, up, down
            own = options.store == "per_node"
            self._stores[node.name] = _link(f"store for {node.name}", options.store_mbps) if own else shared

    def route(self, source: str, target: str) -> list[FlowLink]:
        """The links from a node or the `STORE` to a node. A node reaches itself without a link."""
        if source == target:
            return []
        leaf, _, down = self._nodes[target]
        entering = self._leaves[leaf][1]
        if source == STORE:
            return [*self._stores[target], *entering, *down]
        from_leaf, up, _ = self._nodes[source]
        return [*up, *down] if from_leaf == leaf else [*up, *self._leaves[from_leaf][0], *entering, *down]

    def chain(self, source: str, receivers: Sequence[str]) -> list[FlowLink]:
        """The links of a chain: the source sends to the first receiver, and each of them to the next as it receives.
        A link appears as often as the chain crosses it."""
        steps = pairwise((source, *receivers))
        return [link for sender, receiver in steps for link in self.route(sender, receiver)]


def _link(name: str, mbps: float | None) -> list[FlowLink]:
    """A link, or none if it has no limit."""
    return [] if mbps is None else [FlowLink(name, mbps * BYTES_PER_S)]
