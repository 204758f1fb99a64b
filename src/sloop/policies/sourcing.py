"""What provision policies share: the room of sites, sources and chains of transfers, cuts of models, and reasons."""

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count, pairwise

from msgspec import structs

from sloop.core.ledger import Ledger
from sloop.core.views import (
    CompletionInput,
    NodeView,
    ProvisionInput,
    ReplicaStart,
    Site,
    WeightChain,
    WeightsView,
)
from sloop.solvers.cuts import PieceCosts, PiecePlan, coarse_fronts
from sloop.solvers.starts import PlanColumns
from sloop.text import counted, listed
from sloop.vocabulary import STORE, LayerSet, ReplicaId

# Places


class TriedStarts:
    """Starts that are put on nodes in a copy of the ledger, one after another."""

    def __init__(self, given: ProvisionInput) -> None:
        self._given = given
        self._indexes: dict[tuple[str, str], int] = {}
        """The site of each node and device."""
        self.nodes: dict[str, NodeView] = {}
        """Those with a site, as they were before any start, in the order in which they were declared."""
        self.places: dict[str, int] = {}
        """By node, how many sites it has."""
        for index, site in enumerate(given.sites):
            name = site.node.node.name
            self._indexes[name, site.device.device.name if site.device else ""] = index
            self.nodes[name] = site.node
            self.places[name] = self.places.get(name, 0) + 1
        self._ledger = Ledger.of(self.nodes.values())
        self.chosen: list[int] = []
        """The sites of the starts."""

    def put(self, name: str) -> bool:
        """Put one more start on a node, on the first device with room; returns whether it has room."""
        given = self._given
        made = self._ledger.place(ReplicaId(len(self.chosen)), structs.replace(given.spec, node=name), given.belief)
        index = None if made is None else self._indexes.get((name, made.device))
        if index is None:
            return False
        self.chosen.append(index)
        return True

    def fill(self, names: Iterable[str]) -> None:
        """Put starts on one node after the other, until there are enough."""
        for name in names:
            while len(self.chosen) < self._given.count and self.put(name):
                pass

    def spread(self, names: Iterable[str]) -> None:
        """Put one start on each node, then a second one on each, until there are enough or there is no room."""
        left = list(names)
        while left and len(self.chosen) < self._given.count:
            left = [name for name in left if len(self.chosen) < self._given.count and self.put(name)]


def fresh_in_turn(views: Iterable[NodeView]) -> list[str]:
    """The names of these nodes: the least used first, racks in turn."""
    fresh: dict[tuple[float, str], list[str]] = {}
    for view in views:
        fresh.setdefault((used_part(view), view.node.rack), []).append(view.node.name)
    rounds = {name: (used, place) for (used, _), own in fresh.items() for place, name in enumerate(own)}
    return sorted(rounds, key=rounds.__getitem__)


def used_part(view: NodeView) -> float:
    """The fraction of a node that is in use: of its devices, or of its cores if it has none."""
    if view.devices:
        return 1.0 - sum([each.free_share for each in view.devices]) / len(view.devices)
    return 1.0 - view.free_cores / view.node.cores if view.node.cores else 1.0


def node_of(site: Site) -> str:
    return site.node.node.name


def _racks(given: ProvisionInput) -> dict[str, str]:
    return {site.node.node.name: site.node.node.rack for site in given.sites}


# Cuts


def sources_of(given: ProvisionInput) -> dict[str, str]:
    """The nodes that can send the weights, with their racks."""
    return {each.node: each.rack for each in given.weights if each.is_source}


def piece_costs(given: ProvisionInput, link_mbps: float) -> PieceCosts:
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


def is_awaited(given: ProvisionInput) -> bool:
    """Whether requests wait for these starts, or come."""
    return given.waiting > 0 or given.arrivals_rps > 0


def finds_plans(given: ProvisionInput) -> bool:
    """Whether a model can be cut and nobody waits for it, so that there is time to look for plans."""
    return not is_awaited(given) and given.belief.layer_count > 1


def most_pieces(pieces_max: int, places: int) -> int:
    """The most pieces that so many places can hold."""
    return max(1, min(places, pieces_max or places))


class PiecePlans:
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
def plans_of(costs: PieceCosts) -> PiecePlans:
    return PiecePlans(costs)


# Transfers


@dataclass(frozen=True, slots=True)
class PipelineSites:
    """A pipeline: the site of each part, and its bounds."""

    sites: tuple[int, ...]
    bounds: tuple[int, ...]


class Transfers:
    """The transfers of one decision, and how many each source sends with them."""

    def __init__(self, given: ProvisionInput, sources: Mapping[str, str]) -> None:
        self.sources = dict(sources)
        """Nodes with the weights, each with its rack."""
        self.racks = _racks(given)
        """By node with room, its rack."""
        self.sends = Counter(given.sends)
        self.chains: list[WeightChain] = []

    def add(self, routes: Iterable[tuple[str, tuple[str, ...]]], layers: LayerSet | None = None) -> "ChainsOfNodes":
        """Order transfers; returns the transfers by receiving node."""
        made = ChainsOfNodes()
        for source, receivers in routes:
            for name in receivers:
                made.places.setdefault(name, []).append(len(self.chains))
            self.chains.append(WeightChain(source, receivers, layers))
            self.sends[source] += 1
        return made


class ChainsOfNodes:
    """By node, the transfers that bring the weights there."""

    def __init__(self) -> None:
        self.places: dict[str, list[int]] = {}

    def of(self, name: str, *, again: bool) -> int:
        """The transfer for a start on this node. Unless `again`, no other start gets the same one."""
        own = self.places[name]
        return own[0] if again else own.pop(0)


def routes_of(making: Transfers, receivers: Sequence[str], *, chains: bool) -> list[tuple[str, tuple[str, ...]]]:
    """Sources and receivers of the transfers that bring the same layers to these nodes: `chains`, or a transfer to each
    receiver. A node that is named twice gets two transfers."""
    racks = making.racks | making.sources
    sources = {name: rack for name, rack in making.sources.items() if name not in receivers}
    parts = divided(receivers, list(sources), making.sends, racks) if sources else {STORE: list(receivers)}
    routes: list[tuple[str, tuple[str, ...]]] = []
    for source, own in parts.items():
        if not chains:
            routes += [(source, (name,)) for name in own]
            continue
        left = list(own)
        while left:
            once = list(dict.fromkeys(left))
            routes.append((source, in_rack_order(source, once, racks)))
            for name in once:
                left.remove(name)
    return routes


def starts_of_parts(
    making: Transfers,
    groups: Sequence[PipelineSites],
    names: Mapping[int, str],
    ready: Container[str],
    *,
    chains: bool = True,
) -> list[ReplicaStart]:
    """The starts of the parts of pipelines; `names` has the node of each site, and those `ready` have the weights. A
    part with the same layers is sent to all its nodes together."""
    receivers: dict[tuple[int, int], list[str]] = {}
    for group in groups:
        for index, layers in zip(group.sites, pairwise(group.bounds), strict=True):
            if names[index] not in ready:
                receivers.setdefault(layers, []).append(names[index])
    sent = {
        layers: making.add(routes_of(making, own, chains=chains), LayerSet(*layers))
        for layers, own in receivers.items()
    }
    return [
        ReplicaStart(
            index, None if names[index] in ready else sent[layers].of(names[index], again=False), pipeline=place
        )
        for place, group in enumerate(groups)
        for index, layers in zip(group.sites, pairwise(group.bounds), strict=True)
    ]


def completing(
    given: CompletionInput, weights: Sequence[WeightsView], *, chains: bool = True
) -> list[tuple[str, tuple[str, ...]]]:
    """The transfers that bring the other layers to parts, from the nodes of `weights` or from the store.

    The source is the node with the weights that has the fewest transfers to send, on a tie one in the same rack; the
    store if no node has them. One chain brings all layers to all parts, so that the source sends them once and not to
    each part.
    """
    found = [each for each in weights if each.is_source]
    sends = Counter(given.sends)

    def source(racks: Container[str]) -> str:
        best = min(found, key=lambda each: (sends[each.node], each.rack not in racks), default=None)
        if best is None:
            return STORE
        sends[best.node] += 1
        return best.node

    if not chains:
        return [(source([given.racks[node]]), (node,)) for node in given.nodes]
    chosen = source(given.racks.values())
    racks = dict(given.racks) | {each.node: each.rack for each in found}
    return [(chosen, in_rack_order(chosen, dict.fromkeys(given.nodes), racks))]


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


def why_of(
    given: ProvisionInput,
    starts: Sequence[ReplicaStart],
    chains: Sequence[WeightChain],
    pipelines: Sequence[tuple[int, ...]] = (),
) -> str:
    """The starts and transfers as one line of text, for the log."""
    own = [each for each in starts if each.chain is None and each.joins is None]
    there = dict.fromkeys(node_of(given.sites[each.site]) for each in own)
    joining = dict.fromkeys(node_of(given.sites[each.site]) for each in starts if each.joins is not None)
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
        what = "them" if chain.layers is None else f"layers {chain.layers.first} to {chain.layers.end - 1}"
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
