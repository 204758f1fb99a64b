"""Provision: where the missing replicas of a stage start, and from where their weights come. Each class is one policy,
which decides on all of them together."""

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import lru_cache
from heapq import heapify, heappop, heappush
from itertools import count, pairwise
from math import inf
from typing import ClassVar, Final, Literal, NamedTuple

from sloop.core.protocols import AsPlaced
from sloop.core.views import (
    CompletionInput,
    NodeView,
    Provisioning,
    ProvisionInput,
    ReplicaStart,
    Site,
    WeightChain,
    WeightsView,
)
from sloop.options import check_range
from sloop.solvers.flashpoint import (
    PieceCosts,
    PieceDownloads,
    PiecePlan,
    best_plan,
    coarse_fronts,
    expected_requests,
    fewest_pieces,
    filled_pieces,
)
from sloop.solvers.starts import PartsChoice, PlanColumns, choose_parts
from sloop.text import counted, listed
from sloop.units import ROUNDING, to_s
from sloop.vocabulary import LINK_MBPS, STORE, STORE_MBPS, TransferId

__all__ = ["AsPlaced", "CheapestStart", "Flashpoint"]


@dataclass(frozen=True, slots=True)
class Flashpoint:
    """Replicas start on nodes that have the weights; other nodes get them from the nearest source, along chains.

    Source: San Juan, "Flashpoint" (thesis, Waterloo 2023), sections 2.7 to 2.12 and 5.1 of our specification, with its
    corrections. Each technique can be switched off, which gives the systems that the thesis compares with: the
    baseline (`locality` and `multicast` off), and GPU-enabled FaaS and Atoll (`multicast` and `join` off, `source`
    `store`), all without `partition`, which is off unless a system switches it on. Nodes keep the files of models; the
    process that has loaded them, which the thesis keeps too, is that of one replica here. Fails where replicas on the
    accelerators of one node slow each other down: it fills the nodes with the weights first.
    """

    leaves_all: ClassVar[bool] = False
    locality: bool = True
    """Replicas start first on nodes that have the weights, then one on each other node, and weights come from nodes
    that have them; without it, each start is a download from the store, on the node with the fewest replicas."""
    multicast: bool = True
    """The receivers of one source form a chain, in the order of their racks; without it, each has its own transfer."""
    source: Literal["nearest", "store"] = "nearest"
    """Whether weights come from other nodes that have them, or always from the store."""
    join: bool = True
    """Whether a start waits for a transfer to its node that is under way already, instead of ordering its own."""
    partition: bool = False
    """Whether replicas that start together may start as parts of one model. They do if its layers were measured and the
    waiting requests are expected to be answered sooner than by whole models."""
    cuts: Literal["best", "fewest", "filled"] = "best"
    """How models are cut. `best`: so that the waiting requests are answered soonest. `fewest`: as Gillis does, into the
    fewest parts of at most 250 MB. `filled`: as SerFer does, into parts of up to 200 MB. `fewest` and `filled` cut a
    model whenever enough replicas start for all its parts, and ignore cold starts."""
    pieces_max: int = 0
    """The most parts of one model; 0: as many as it has measured layer blocks, at most 64."""
    link_mbps: float = LINK_MBPS
    """The expected rate of a transfer between two nodes, measured between two cloud instances (section 3.3). Used to
    decide whether and where to cut a model."""
    store_mbps: float = STORE_MBPS
    """The expected rate at which the store sends to all nodes together, measured there as well. Used in the same
    way."""

    def __post_init__(self) -> None:
        for key in ("link_mbps", "store_mbps"):
            check_range(key, getattr(self, key), above=0)
        check_range("pieces_max", self.pieces_max, least=0)

    @property
    def keeps(self) -> bool:
        return self.locality

    def provide(self, now_ns: int, given: ProvisionInput) -> Provisioning:
        if self.partition and self.cuts == "best" and _finds_plans(given):
            _plans(_piece_costs(given, self.link_mbps)).fronts(_most_pieces(self.pieces_max, len(given.sites)))
        found = {each.node: each for each in given.weights} if self.locality else {}
        ready = {name for name, each in found.items() if each.has_files}
        coming = {name: each.arriving for name, each in found.items() if self.join and each.arriving is not None}
        chosen = primed_first(given, ready, coming.keys()) if self.locality else least_used_first(given)
        names = {index: _name(given.sites[index]) for index in chosen}
        sources = {} if self.source == "store" or not self.locality else _sources(given)
        there = [index for index in chosen if names[index] in ready]
        elsewhere = [index for index in chosen if names[index] not in ready | coming.keys()]
        groups = [*self._groups(given, there, None), *self._groups(given, elsewhere, len(sources))]
        parts = Counter(index for group in groups for index in group.sites)
        rest: list[int] = []
        for index in chosen:
            if parts[index]:
                parts[index] -= 1
            else:
                rest.append(index)
        making = _Transfers(given, sources)
        starts = self._starts_of_parts(making, groups, names, ready)
        without = [name for index in rest if (name := names[index]) not in ready and name not in coming]
        chains = making.add(self._routes(making, list(dict.fromkeys(without)) if self._shares else without))
        for index in rest:
            name = names[index]
            if name in ready:
                starts.append(ReplicaStart(index))
            elif name in coming:
                starts.append(ReplicaStart(index, joins=coming[name]))
            else:
                starts.append(ReplicaStart(index, chain=chains.of(name, again=self._shares)))
        pipelines = tuple(group.bounds for group in groups)
        return Provisioning(
            tuple(starts), tuple(making.chains), _why(given, starts, making.chains, pipelines), pipelines
        )

    def complete(self, now_ns: int, given: CompletionInput) -> list[tuple[str, tuple[str, ...]]]:
        """The source is the node with the weights that has the fewest transfers to send, on a tie one in the same rack;
        the store if no node has them. One chain brings all layers to all parts, so that the source sends them once and
        not to each part."""
        found = [each for each in given.weights if each.is_source] if self.locality and self.source != "store" else []
        sends = Counter(given.sends)

        def source(racks: Container[str]) -> str:
            best = min(found, key=lambda each: (sends[each.node], each.rack not in racks), default=None)
            if best is None:
                return STORE
            sends[best.node] += 1
            return best.node

        if not self._chains:
            return [(source([given.racks[node]]), (node,)) for node in given.nodes]
        chosen = source(given.racks.values())
        racks = dict(given.racks) | {each.node: each.rack for each in found}
        return [(chosen, in_rack_order(chosen, dict.fromkeys(given.nodes), racks))]

    @property
    def _shares(self) -> bool:
        """Whether one transfer serves all starts of a node."""
        return self.join if self.locality else self.multicast

    @property
    def _chains(self) -> bool:
        """Whether the receivers of one source form a chain."""
        return self.multicast and (self.join or not self.locality)

    def _groups(self, given: ProvisionInput, sites: Sequence[int], sources: int | None) -> "list[_Group]":
        """Pipelines of these sites, in this order, as long as a pipeline is expected to answer the waiting requests
        sooner than whole models.

        Either all sites have the files (None), or all get them from so many `sources` (0: from the store), because a
        pipeline starts only when its slowest part has. Both answer their share of the waiting requests.
        """
        groups: list[_Group] = []
        if not self.partition or not _is_awaited(given) or len(sites) < 2 or given.belief.layer_count < 2:
            return groups
        costs = _piece_costs(given, self.link_mbps)
        left, added = list(sites), len(sites)
        while len(left) > 1:
            starts = self._downloads(given, left, sources)
            cold_s = starts.cold_s(1.0, 1, len(left))
            waiting = expected_requests(given.waiting, given.arrivals_rps, given.served_rps, cold_s)
            own = max(1, round(waiting * added / given.count))
            if self.cuts == "best":
                cuts = _best_cuts(costs, own, len(left), self.pieces_max, starts)
            else:
                cuts = _filled_cuts(costs, given.costs.layer_bytes, self.cuts)
            count = len(cuts) + 1
            if count == 1 or count > len(left):
                break
            whole = len(left) // count * count
            bounds = (0, *cuts, costs.layers)
            groups += [_Group(tuple(left[at : at + count]), bounds) for at in range(0, whole, count)]
            left = left[whole:]
        return groups

    def _downloads(self, given: ProvisionInput, sites: Sequence[int], sources: int | None) -> PieceDownloads:
        """How long starts at these sites are expected to take; see `_groups`."""
        costs, bits = given.costs, given.costs.weights.size_bytes * 8 if sources is not None else 0
        return PieceDownloads(
            process_s=costs.process_s,
            local_s=costs.load_s + costs.send_s,
            download_s=bits / (self.link_mbps * 1e6),
            send_s=bits / ((self.link_mbps if sources else self.store_mbps) * 1e6),
            senders=max(1, sources or 0),
            nodes=len({_name(given.sites[index]) for index in sites}),
            is_chain=self._chains,
            is_shared=self._shares,
        )

    def _starts_of_parts(
        self, making: "_Transfers", groups: "Sequence[_Group]", names: Mapping[int, str], ready: Container[str]
    ) -> list[ReplicaStart]:
        """The starts of the parts of pipelines. A part with the same layers is sent to all its nodes together."""
        receivers: dict[tuple[int, int], list[str]] = {}
        for group in groups:
            for index, layers in zip(group.sites, pairwise(group.bounds), strict=True):
                if names[index] not in ready:
                    receivers.setdefault(layers, []).append(names[index])
        chains = {layers: making.add(self._routes(making, own), layers) for layers, own in receivers.items()}
        return [
            ReplicaStart(
                index, None if names[index] in ready else chains[layers].of(names[index], again=False), pipeline=place
            )
            for place, group in enumerate(groups)
            for index, layers in zip(group.sites, pairwise(group.bounds), strict=True)
        ]

    def _routes(self, making: "_Transfers", receivers: Sequence[str]) -> list[tuple[str, tuple[str, ...]]]:
        """Sources and receivers of the transfers that bring the same layers to these nodes. A node that is named twice
        gets two transfers."""
        racks = making.racks | making.sources
        sources = {name: rack for name, rack in making.sources.items() if name not in receivers}
        parts = divided(receivers, list(sources), making.sends, racks) if sources else {STORE: list(receivers)}
        routes: list[tuple[str, tuple[str, ...]]] = []
        for source, own in parts.items():
            if not self._chains:
                routes += [(source, (name,)) for name in own]
                continue
            left = list(own)
            while left:
                once = list(dict.fromkeys(left))
                routes.append((source, in_rack_order(source, once, racks)))
                for name in once:
                    left.remove(name)
        return routes


@dataclass(frozen=True, slots=True)
class _Group:
    """A pipeline: the site of each part, and its bounds."""

    sites: tuple[int, ...]
    bounds: tuple[int, ...]


class _Transfers:
    """The transfers of one decision, and how many each source sends with them."""

    def __init__(self, given: ProvisionInput, sources: Mapping[str, str]) -> None:
        self.sources = dict(sources)
        """Nodes with the weights, each with its rack."""
        self.racks = _racks(given)
        """By node with room, its rack."""
        self.sends = Counter(given.sends)
        self.chains: list[WeightChain] = []

    def add(
        self, routes: Iterable[tuple[str, tuple[str, ...]]], layers: tuple[int, int] | None = None
    ) -> "_ChainsOfNodes":
        """Order transfers; returns the transfers by receiving node."""
        made = _ChainsOfNodes()
        for source, receivers in routes:
            for name in receivers:
                made.places.setdefault(name, []).append(len(self.chains))
            self.chains.append(WeightChain(source, receivers, layers))
            self.sends[source] += 1
        return made


class _ChainsOfNodes:
    """By node, the transfers that bring the weights there."""

    def __init__(self) -> None:
        self.places: dict[str, list[int]] = {}

    def of(self, name: str, *, again: bool) -> int:
        """The transfer for a start on this node. Unless `again`, no other start gets the same one."""
        own = self.places[name]
        return own[0] if again else own.pop(0)


# Pipelines

PIECE_BYTES_MAX = 250e6
"""The most that a function of AWS Lambda may load, which bounds the pieces of Gillis and SerFer."""


def _sources(given: ProvisionInput) -> dict[str, str]:
    """The nodes that can send the weights, with their racks."""
    return {each.node: each.rack for each in given.weights if each.is_source}


def _piece_costs(given: ProvisionInput, link_mbps: float) -> PieceCosts:
    """What the layers of the model cost. Their shares of the cold start are in proportion to their bytes. Durations are
    not corrected: a correction changes often, and each change would need new plans."""
    cores = given.spec.slot.cores
    blocks = given.belief.blocks(cores, cores, corrected=False)
    assert blocks is not None, f"the layers of {given.spec.variant} were not measured"
    byte_s, whole_bytes = 8 / (link_mbps * 1e6), blocks.size_whole_bytes
    return PieceCosts(
        tuple(size_bytes / whole_bytes for size_bytes in blocks.size_bytes),
        tuple(each / 1e3 for each in blocks.body_ms[:, 1].tolist()),
        tuple(each * byte_s for each in blocks.crossing_bytes[1:-1]),
    )


def _is_awaited(given: ProvisionInput) -> bool:
    """Whether requests wait for these starts, or come."""
    return given.waiting > 0 or given.arrivals_rps > 0


def _finds_plans(given: ProvisionInput) -> bool:
    """Whether a model can be cut and nobody waits for it, so that there is time to look for plans."""
    return not _is_awaited(given) and given.belief.layer_count > 1


def _most_pieces(pieces_max: int, places: int) -> int:
    """The most pieces that so many places can hold."""
    return max(1, min(places, pieces_max or places))


class _PiecePlans:
    """The plans of one model, as far as they have been asked for.

    With 64 layers, it takes 0.1 s to find those of up to 4 pieces, 0.5 s for 8 and 5 s for 64. So policies ask for them
    with the starts for which nobody waits, for as many pieces as the nodes can hold. A server plans the first starts
    before it serves (`sloop.systems.setup`), unless there are none, or the version is deployed later.
    """

    def __init__(self, costs: PieceCosts) -> None:
        self._costs, self._most = costs, 0
        self._fronts: list[list[PiecePlan]] = []
        self._columns: PlanColumns | None = None

    def fronts(self, most: int) -> list[list[PiecePlan]]:
        """The plans of at least up to `most` pieces, by their number of pieces from 1."""
        if self._most < min(most, self._costs.layers):
            # In powers of two, so that they are found anew only a few times.
            self._most = min(1 << (most - 1).bit_length(), self._costs.layers)
            self._fronts, self._columns = coarse_fronts(self._costs, self._most), None
        return self._fronts

    def columns(self, most: int) -> PlanColumns:
        """The same as columns."""
        fronts = self.fronts(most)
        if self._columns is None:
            self._columns = PlanColumns.of(fronts)
        return self._columns


@lru_cache(maxsize=256)
def _plans(costs: PieceCosts) -> _PiecePlans:
    return _PiecePlans(costs)


@lru_cache(maxsize=4096)
def _best_cuts(
    costs: PieceCosts, requests: int, devices: int, pieces_max: int, starts: PieceDownloads
) -> tuple[int, ...]:
    """Where to cut the model if `requests` wait and `devices` are added; empty if whole models are as good."""
    fronts = _plans(costs).fronts(_most_pieces(pieces_max, devices))
    found = best_plan(fronts, requests, devices, pieces_max=pieces_max or None, starts=starts)
    return found.cuts if found is not None else ()


@lru_cache(maxsize=32)
def _filled_cuts(costs: PieceCosts, layer_bytes: tuple[int, ...], how: Literal["fewest", "filled"]) -> tuple[int, ...]:
    """Where the planners with which the thesis compares cut the model (section 5.1)."""
    if how == "fewest":
        return fewest_pieces(layer_bytes, costs.transfer_s, PIECE_BYTES_MAX)
    return filled_pieces(layer_bytes, PIECE_BYTES_MAX)


# Places


class _SiteRoom:
    """What is left of the sites while replicas are put there."""

    def __init__(self, given: ProvisionInput) -> None:
        self._given = given
        self._nodes: dict[str, list[float]] = {}
        self._devices: dict[int, tuple[float, int, int]] = {}
        """By site, the share, memory and clients that are left of its device, once a replica was put there."""
        self.sites: dict[str, list[int]] = {}
        """By node, in the order in which nodes were declared."""
        last, own = None, list[int]()
        for index, site in enumerate(given.sites):
            if site.node is not last:
                last = site.node
                own = self.sites.setdefault(last.node.name, [])
                self._nodes[last.node.name] = [last.free_cores, last.free_memory_bytes]
            own.append(index)

    def view(self, name: str) -> NodeView:
        """A node as it was before any replica was put there."""
        return self._given.sites[self.sites[name][0]].node

    def take(self, name: str) -> int | None:
        """Put one replica on a node, on the first device with room; returns the site, or None if there is no room."""
        given, node = self._given, self._nodes[name]
        slot = given.spec.slot
        if slot.cores > node[0] + ROUNDING or given.memory_bytes > node[1]:
            return None
        for index in self.sites[name]:
            device = given.sites[index].device
            if device is not None:
                share, memory_bytes, clients = self._devices.get(
                    index, (device.free_share, device.free_memory_bytes, device.free_clients)
                )
                if slot.share > share + ROUNDING or given.device_memory_bytes > memory_bytes or clients < 1:
                    continue
                self._devices[index] = share - slot.share, memory_bytes - given.device_memory_bytes, clients - 1
            node[0] -= slot.cores
            node[1] -= given.memory_bytes
            return index
        return None

    def fill(self, names: Iterable[str], chosen: list[int]) -> None:
        """Put replicas on one node after the other, until there are enough."""
        for name in names:
            while len(chosen) < self._given.count and (index := self.take(name)) is not None:
                chosen.append(index)

    def spread(self, names: Iterable[str], chosen: list[int]) -> None:
        """Put one replica on each node, then a second one on each, until there are enough or there is no room."""
        left = list(names)
        while left and len(chosen) < self._given.count:
            stay: list[str] = []
            for name in left:
                if len(chosen) == self._given.count:
                    break
                index = self.take(name)
                if index is not None:
                    chosen.append(index)
                    stay.append(name)
            left = stay


def primed_first(given: ProvisionInput, ready: AbstractSet[str], coming: AbstractSet[str]) -> list[int]:
    """Sites by the two stages of Flashpoint (section 2.8).

    First, replicas fill the nodes that have the weights, then those where they arrive, of both the nodes with the most
    room first. Then each other node gets one replica, so that many nodes will have the weights: the least used first,
    racks in turn. Then each gets a second one, and so on.
    """
    room, chosen = _SiteRoom(given), list[int]()
    primed = [name for name in room.sites if name in ready | coming]
    room.fill(sorted(primed, key=lambda name: (name not in ready, -len(room.sites[name]))), chosen)
    room.spread(fresh_in_turn(room.view(name) for name in room.sites if name not in ready | coming), chosen)
    return chosen


def fresh_in_turn(views: Iterable[NodeView]) -> list[str]:
    """The names of these nodes: the least used first, racks in turn."""
    fresh: dict[tuple[float, str], list[str]] = {}
    for view in views:
        fresh.setdefault((_used(view), view.node.rack), []).append(view.node.name)
    rounds = {name: (used, place) for (used, _), own in fresh.items() for place, name in enumerate(own)}
    return sorted(rounds, key=rounds.__getitem__)


def least_used_first(given: ProvisionInput) -> list[int]:
    """Each replica on the node that is least used, counting the replicas that were chosen before it."""
    room, chosen = _SiteRoom(given), list[int]()
    used = {_name(site): _used(site.node) for site in given.sites}
    order = {name: place for place, name in enumerate(room.sites)}
    left = set(room.sites)
    while left and len(chosen) < given.count:
        name = min(left, key=lambda name: (used[name], order[name]))
        index = room.take(name)
        if index is None:
            left.discard(name)
            continue
        used[name] += _step(given.sites[index], given)
        chosen.append(index)
    return chosen


def _used(view: NodeView) -> float:
    """The fraction of a node that is in use: of its devices, or of its cores if it has none."""
    if view.devices:
        return 1.0 - sum([each.free_share for each in view.devices]) / len(view.devices)
    return 1.0 - view.free_cores / view.node.cores if view.node.cores else 1.0


def _step(site: Site, given: ProvisionInput) -> float:
    """By how much one more replica raises that fraction."""
    devices, slot = site.node.devices, given.spec.slot
    return slot.share / len(devices) if devices else slot.cores / max(ROUNDING, site.node.node.cores)


def _name(site: Site) -> str:
    return site.node.node.name


def _racks(given: ProvisionInput) -> dict[str, str]:
    return {site.node.node.name: site.node.node.rack for site in given.sites}


# Sources


def divided(
    receivers: Sequence[str], senders: Sequence[str], sends: Mapping[str, int], racks: Mapping[str, str]
) -> dict[str, list[str]]:
    """The receivers of each sender, divided as evenly as possible: the numbers differ by at most one (section 2.9).
    Senders with the fewest transfers come first, then those with the most receivers in their rack. Each sender prefers
    receivers of its own rack."""
    beside = {name: sum(racks.get(each, "") == racks[name] != "" for each in receivers) for name in senders}
    order = {name: place for place, name in enumerate(senders)}
    chosen = sorted(senders, key=lambda name: (sends.get(name, 0), -beside[name], order[name]))[: len(receivers)]
    left = list(receivers)
    parts: dict[str, list[str]] = {}
    quotas = {name: (len(receivers) + len(chosen) - 1 - place) // len(chosen) for place, name in enumerate(chosen)}
    for name in chosen:
        own = [each for each in left if racks.get(each, "") == racks[name] != ""][: quotas[name]]
        parts[name] = own
        for each in own:
            left.remove(each)
    for name, own in parts.items():
        missing = quotas[name] - len(own)
        own.extend(left[:missing])
        del left[:missing]
    return parts


def in_rack_order(source: str, receivers: Iterable[str], racks: Mapping[str, str]) -> tuple[str, ...]:
    """The receivers in an order in which the chain crosses the links between racks least often (section 2.15): the rack
    of the source first, then one rack after the other."""
    numbers = count(1)
    places: dict[str, int] = {racks[source]: 0} if source in racks else {}
    for name in receivers:
        rack = racks.get(name, "")
        if rack not in places:
            places[rack] = next(numbers)
    return tuple(sorted(receivers, key=lambda name: places[racks.get(name, "")]))


# Reasons


def _why(
    given: ProvisionInput,
    starts: Sequence[ReplicaStart],
    chains: Sequence[WeightChain],
    pipelines: Sequence[tuple[int, ...]] = (),
) -> str:
    """The starts and transfers as one line of text, for the log."""
    there = dict.fromkeys(_name(given.sites[each.site]) for each in starts if each.chain is None and each.joins is None)
    joining = dict.fromkeys(_name(given.sites[each.site]) for each in starts if each.joins is not None)
    parts = [f"{counted(len(starts), 'replica')} of {given.spec.variant}"]
    if len(starts) < given.count:
        parts[0] += f", for {given.count - len(starts)} more there is no room"
    for bounds, number in Counter(pipelines).items():
        cuts = listed([str(cut) for cut in bounds[1:-1]])
        parts.append(f"{counted(number, 'pipeline')} of {len(bounds) - 1} parts, cut before layer {cuts}")
    if there:
        parts.append(f"weights are on {_some(there)}")
    if joining:
        parts.append(f"weights are on their way to {_some(joining)}")
    for chain in chains[:MENTIONED_MAX]:
        source = chain.source or "the store"
        what = "them" if chain.layers is None else f"layers {chain.layers[0]} to {chain.layers[1] - 1}"
        parts.append(f"{source} sends {what} to {' → '.join(chain.receivers[:MENTIONED_MAX])}{_more(chain.receivers)}")
    if len(chains) > MENTIONED_MAX:
        parts.append(f"{len(chains) - MENTIONED_MAX} more transfers")
    return "; ".join(parts)


MENTIONED_MAX = 8
"""How many nodes or transfers a reason names."""


def _some(names: Iterable[str]) -> str:
    found = list(names)
    return listed(found[:MENTIONED_MAX]) + _more(found)


def _more(names: Sequence[str]) -> str:
    return f" and {len(names) - MENTIONED_MAX} more" if len(names) > MENTIONED_MAX else ""


# The planner of sloop


@dataclass(frozen=True, slots=True)
class CheapestStart:
    """Replicas start where they are predicted to be ready soonest.

    For each node it predicts how long a start there takes, with or without a spare worker. The weights come from files
    of the node, from a transfer to the node that is under way, or from a new transfer: along a chain from the nodes
    that send least, or from the store, whichever is quicker. The policy makes the soonest starts; of equally good
    starts with a new transfer, it makes one on each node first. Starts that get their weights in the same way become
    parts of one model if this is predicted to answer the waiting requests sooner, in the mean (`sloop.solvers.starts`).

    The scaling policy decides whether a burst gets shadows (`bodies`). Fails if the bandwidths
    differ from the believed ones, and where replicas on the accelerators of one node slow each other down: it fills the
    nodes with the weights first.
    """

    leaves_all: ClassVar[bool] = False
    keeps: ClassVar[bool] = True
    partition: bool = False
    """Whether starts may be parts of one model, if its layers were measured."""
    pieces_max: int = 0
    """The most parts of one model; 0: as many as it has measured layer blocks, at most 64."""
    spare_workers: int = 1
    """How many processes without a model are believed to wait on each node. Each further start there also takes the
    time to start a process."""
    link_mbps: float = LINK_MBPS
    """The believed rate at which a node sends, and at which it receives."""
    store_mbps: float = STORE_MBPS
    """The believed rate of the store, to all nodes together or to each, as `store` says."""
    store: Literal["shared", "per_node"] = "shared"
    """Whether all nodes share one link to the store, or each has its own."""

    def __post_init__(self) -> None:
        for key in ("link_mbps", "store_mbps"):
            check_range(key, getattr(self, key), above=0)
        for key in ("pieces_max", "spare_workers"):
            check_range(key, getattr(self, key), least=0)

    def provide(self, now_ns: int, given: ProvisionInput) -> Provisioning:
        if self.partition and _finds_plans(given):
            _plans(_piece_costs(given, self.link_mbps)).columns(_most_pieces(self.pieces_max, len(given.sites)))
        copy = self._copy(given)
        chosen = self._chosen(now_ns, given, copy)
        levels: dict[_StartSource, list[_ChosenStart]] = {}
        for each in chosen:
            if each.origin.joins is None:
                levels.setdefault(each.origin, []).append(each)
        groups = [group for origin, own in levels.items() for group in self._groups(given, copy, origin, own)]
        left = Counter(index for group in groups for index in group.sites)
        making = _Transfers(given, _sources(given) if copy.sources else {})
        names = {each.site: each.node for each in chosen}
        ready = {each.node for each in chosen if not each.origin.is_copied}
        starts = ALL_TECHNIQUES._starts_of_parts(making, groups, names, ready)
        whole: list[_ChosenStart] = []
        for each in chosen:
            if left[each.site]:
                left[each.site] -= 1
            else:
                whole.append(each)
        receivers = list(dict.fromkeys(each.node for each in whole if each.origin.is_copied))
        making.sources = dict(copy.sources)
        chains = making.add(ALL_TECHNIQUES._routes(making, receivers))
        for each in whole:
            chain = chains.of(each.node, again=True) if each.origin.is_copied else None
            starts.append(ReplicaStart(each.site, chain, each.origin.joins))
        pipelines = tuple(group.bounds for group in groups)
        why = _why(given, starts, making.chains, pipelines)
        if whole:
            first_s, last_s = min(each.ready_s for each in whole), max(each.ready_s for each in whole)
            why += f"; expected to serve in {first_s:.3g} s" + (f" to {last_s:.3g} s" if last_s > first_s else "")
        return Provisioning(tuple(starts), tuple(making.chains), why, pipelines)

    def expected_s(self, now_ns: int, given: ProvisionInput) -> float:
        """In how many seconds the first of these starts would be ready as a whole replica. If the profile has only the
        sum of a start's steps, all of it counts, because how much a spare worker saves is unknown."""
        costs = given.costs
        whole_s = 0.0 if costs.load_s or costs.send_s or costs.first_batch_s else costs.process_s
        return whole_s + min(each.ready_s for each in self._chosen(now_ns, given, self._copy(given)))

    def complete(self, now_ns: int, given: CompletionInput) -> list[tuple[str, tuple[str, ...]]]:
        """The same as `Flashpoint.complete` with all techniques."""
        return ALL_TECHNIQUES.complete(now_ns, given)

    def _copy(self, given: ProvisionInput) -> "_WeightCopy":
        """From where a new copy of the weights arrives soonest."""
        bits, sends = given.costs.weights.size_bytes * 8, given.sends
        alone_s = bits / (self.link_mbps * 1e6)
        beside = sends.get(STORE, 0) if self.store == "shared" else 0
        store_s = max(alone_s, bits * (1 + beside) / (self.store_mbps * 1e6))
        sources = _sources(given)
        fewest = min((sends.get(name, 0) for name in sources), default=0)
        node_s = alone_s * (1 + fewest) if sources else inf
        if store_s < node_s:
            return _WeightCopy(store_s, bits / (self.store_mbps * 1e6), {})
        return _WeightCopy(
            node_s, alone_s, {name: rack for name, rack in sources.items() if sends.get(name, 0) == fewest}
        )

    def _chosen(self, now_ns: int, given: ProvisionInput, copy: "_WeightCopy") -> "list[_ChosenStart]":
        """The starts that are ready soonest, in this order. Of equally good starts, those on the nodes with the most
        room come first; if they need a new copy, one on each node comes first, then a second one on each."""
        room, found = _SiteRoom(given), {each.node: each for each in given.weights}
        origins = {name: self._source_for(now_ns, given, found.get(name), copy) for name in room.sites}
        ranks = {name: place for place, name in enumerate(fresh_in_turn(map(room.view, room.sites)))}

        def key(name: str, taken: int) -> tuple[float, bool, int, int, str]:
            origin = origins[name]
            ready_s = origin.ready_s + (given.costs.process_s if taken >= self.spare_workers else 0.0)
            if origin.is_copied:
                return ready_s, True, taken, ranks[name], name
            return ready_s, False, -len(room.sites[name]), ranks[name], name

        taken = dict.fromkeys(room.sites, 0)
        heap = [key(name, 0) for name in room.sites]
        heapify(heap)
        chosen: list[_ChosenStart] = []
        while heap and len(chosen) < given.count:
            ready_s, *_, name = heappop(heap)
            index = room.take(name)
            if index is not None:
                chosen.append(_ChosenStart(index, name, origins[name], ready_s))
                taken[name] += 1
                heappush(heap, key(name, taken[name]))
        return chosen

    def _source_for(
        self, now_ns: int, given: ProvisionInput, there: WeightsView | None, copy: "_WeightCopy"
    ) -> "_StartSource":
        """How a start on a node gets its weights, and how long it takes if a spare worker waits there."""
        costs = given.costs
        local_s = costs.load_s + costs.send_s + costs.first_batch_s
        if there is not None and there.has_files:
            return _StartSource(local_s)
        if there is not None and there.arriving is not None:
            left_s = max(0.0, copy.alone_s - to_s(now_ns - there.arriving_since_ns))
            return _StartSource(left_s + local_s, joins=there.arriving)
        return _StartSource(copy.seconds + local_s, is_copied=True)

    def _groups(
        self, given: ProvisionInput, copy: "_WeightCopy", origin: "_StartSource", starts: "Sequence[_ChosenStart]"
    ) -> "list[_Group]":
        """Pipelines of starts that get their weights in the same way, chosen for their share of the waiting
        requests."""
        if not self.partition or not _is_awaited(given) or len(starts) < 2 or given.belief.layer_count < 2:
            return []
        costs, copies = _piece_costs(given, self.link_mbps), origin.is_copied
        has_own_links = not copy.sources and self.store == "per_node"
        downloads = PieceDownloads(
            process_s=0.0 if self.spare_workers else given.costs.process_s,
            local_s=origin.ready_s - copy.seconds if copies else origin.ready_s,
            download_s=given.costs.weights.size_bytes * 8 / (self.link_mbps * 1e6) if copies else 0.0,
            send_s=copy.seconds if copies else 0.0,
            senders=len(starts) if has_own_links else max(1, len(_sources(given)) if copy.sources else 1),
            nodes=len({each.node for each in starts}),
            is_chain=True,
            is_shared=True,
        )
        cold_s = downloads.cold_s(1.0, 1, len(starts))
        requests = expected_requests(given.waiting, given.arrivals_rps, given.served_rps, cold_s)
        own = max(1, round(requests * len(starts) / given.count))
        times_s = tuple(each.ready_s for each in starts)
        choice = _parts(costs, times_s, downloads, own, self.pieces_max)
        if not choice.pipelines:
            return []
        bounds = (0, *choice.cuts, costs.layers)
        size = len(bounds) - 1
        sites = [each.site for each in starts[len(starts) - size * choice.pipelines :]]
        return [_Group(tuple(sites[at : at + size]), bounds) for at in range(0, len(sites), size)]


ALL_TECHNIQUES: Final = Flashpoint()
"""`CheapestStart` takes its chains and its transfers of parts from this policy."""


class _WeightCopy(NamedTuple):
    """A new copy of the weights."""

    seconds: float
    """How long the transfer takes while its source also sends what it sends already."""
    alone_s: float
    """How long it takes if the source sends nothing else."""
    sources: dict[str, str]
    """The nodes that can send it equally fast, with their racks; empty: the store sends it."""


class _StartSource(NamedTuple):
    """How a start on a node gets its weights."""

    ready_s: float
    """How long it takes until it is ready, with a spare worker."""
    joins: TransferId | None = None
    """The transfer under way that it waits for."""
    is_copied: bool = False
    """Whether it needs a new copy."""


class _ChosenStart(NamedTuple):
    """A start that was chosen, and in how many seconds it is ready."""

    site: int
    node: str
    origin: _StartSource
    ready_s: float


@lru_cache(maxsize=1024)
def _parts(
    costs: PieceCosts,
    times_s: tuple[float, ...],
    downloads: PieceDownloads,
    requests: int,
    pieces_max: int,
) -> PartsChoice:
    """How many of the starts are made as parts, and with which cuts; see `choose_parts`."""
    columns = _plans(costs).columns(_most_pieces(pieces_max, len(times_s)))
    return choose_parts(times_s, columns, downloads, costs.exec_whole_s, requests, pieces_max or costs.layers)
