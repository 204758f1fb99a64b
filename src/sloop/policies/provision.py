"""Provision: where the missing replicas of a stage start, and from where their weights come. Each class is one policy,
which decides on all of them together."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heapify, heappop, heappush
from math import inf
from typing import ClassVar, Literal, NamedTuple

from sloop.core.protocols import AsPlaced, Provision
from sloop.core.views import CompletionInput, Provisioning, ProvisionInput, ReplicaStart, WeightsView
from sloop.options import NonNegativeInt, PositiveFloat
from sloop.policies import sourcing
from sloop.solvers.cuts import PieceCosts, PieceDownloads, expected_requests
from sloop.solvers.starts import PartsChoice, choose_parts
from sloop.units import to_s
from sloop.vocabulary import LINK_MBPS, STORE, STORE_MBPS, TransferId

__all__ = ["AsPlaced", "CheapestStart"]


@dataclass(frozen=True, slots=True)
class CheapestStart(Provision):
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

    brings_weights: ClassVar[bool] = True
    keeps: ClassVar[bool] = True
    partition: bool = False
    """Whether starts may be parts of one model, if its layers were measured."""
    pieces_max: NonNegativeInt = 0
    """The most parts of one model; 0: as many as it has measured layer blocks, at most 64."""
    spare_workers: NonNegativeInt = 1
    """How many processes without a model are believed to wait on each node. Each further start there also takes the
    time to start a process."""
    link_mbps: PositiveFloat = LINK_MBPS
    """The believed rate at which a node sends, and at which it receives."""
    store_mbps: PositiveFloat = STORE_MBPS
    """The believed rate of the store, to all nodes together or to each, as `store` says."""
    store: Literal["shared", "per_node"] = "shared"
    """Whether all nodes share one link to the store, or each has its own."""

    def provide(self, now_ns: int, given: ProvisionInput) -> Provisioning:
        if self.partition and sourcing.finds_plans(given):
            plans = sourcing.plans_of(sourcing.piece_costs(given, self.link_mbps))
            plans.columns(sourcing.most_pieces(self.pieces_max, len(given.sites)))
        copy = self._copy(given)
        chosen = self._chosen(now_ns, given, copy)
        levels: dict[_StartSource, list[_ChosenStart]] = {}
        for each in chosen:
            if each.origin.joins is None:
                levels.setdefault(each.origin, []).append(each)
        groups = [group for origin, own in levels.items() for group in self._groups(given, copy, origin, own)]
        left = Counter(index for group in groups for index in group.sites)
        making = sourcing.Transfers(given, sourcing.sources_of(given) if copy.sources else {})
        names = {each.site: each.node for each in chosen}
        ready = {each.node for each in chosen if not each.origin.is_copied}
        starts = sourcing.starts_of_parts(making, groups, names, ready)
        whole: list[_ChosenStart] = []
        for each in chosen:
            if left[each.site]:
                left[each.site] -= 1
            else:
                whole.append(each)
        receivers = list(dict.fromkeys(each.node for each in whole if each.origin.is_copied))
        making.sources = dict(copy.sources)
        chains = making.add(sourcing.routes_of(making, receivers, chains=True))
        for each in whole:
            chain = chains.of(each.node, again=True) if each.origin.is_copied else None
            starts.append(ReplicaStart(each.site, chain, each.origin.joins))
        pipelines = tuple(group.bounds for group in groups)
        why = sourcing.why_of(given, starts, making.chains, pipelines)
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
        return sourcing.completing(given, given.weights)

    def _copy(self, given: ProvisionInput) -> "_WeightCopy":
        """From where a new copy of the weights arrives soonest."""
        bits, sends = given.costs.weights.size_bytes * 8, given.sends
        alone_s = bits / (self.link_mbps * 1e6)
        beside = sends.get(STORE, 0) if self.store == "shared" else 0
        store_s = max(alone_s, bits * (1 + beside) / (self.store_mbps * 1e6))
        sources = sourcing.sources_of(given)
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
        tried, found = sourcing.TriedStarts(given), {each.node: each for each in given.weights}
        origins = {name: self._source_for(now_ns, given, found.get(name), copy) for name in tried.nodes}
        ranks = {name: place for place, name in enumerate(sourcing.fresh_in_turn(tried.nodes.values()))}

        def key(name: str, taken: int) -> tuple[float, bool, int, int, str]:
            origin = origins[name]
            ready_s = origin.ready_s + (given.costs.process_s if taken >= self.spare_workers else 0.0)
            if origin.is_copied:
                return ready_s, True, taken, ranks[name], name
            return ready_s, False, -tried.places[name], ranks[name], name

        taken = dict.fromkeys(tried.nodes, 0)
        heap = [key(name, 0) for name in tried.nodes]
        heapify(heap)
        chosen: list[_ChosenStart] = []
        while heap and len(chosen) < given.count:
            ready_s, *_, name = heappop(heap)
            if tried.put(name):
                chosen.append(_ChosenStart(tried.chosen[-1], name, origins[name], ready_s))
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
    ) -> "list[sourcing.PipelineSites]":
        """Pipelines of starts that get their weights in the same way, chosen for their share of the waiting
        requests."""
        if not self.partition or not sourcing.is_awaited(given) or len(starts) < 2 or given.belief.layer_count < 2:
            return []
        costs, copies = sourcing.piece_costs(given, self.link_mbps), origin.is_copied
        has_own_links = not copy.sources and self.store == "per_node"
        downloads = PieceDownloads(
            process_s=0.0 if self.spare_workers else given.costs.process_s,
            local_s=origin.ready_s - copy.seconds if copies else origin.ready_s,
            download_s=given.costs.weights.size_bytes * 8 / (self.link_mbps * 1e6) if copies else 0.0,
            send_s=copy.seconds if copies else 0.0,
            senders=len(starts) if has_own_links else max(1, len(sourcing.sources_of(given)) if copy.sources else 1),
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
        return [sourcing.PipelineSites(tuple(sites[at : at + size]), bounds) for at in range(0, len(sites), size)]


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
    columns = sourcing.plans_of(costs).columns(sourcing.most_pieces(pieces_max, len(times_s)))
    return choose_parts(times_s, columns, downloads, costs.exec_whole_s, requests, pieces_max or costs.layers)
