"""Provision policies. Sections and numbers are those of the Flashpoint specification."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from sloop.core.views import (
    CompletionInput,
    DeviceView,
    NodeView,
    Provisioning,
    ProvisionInput,
    Site,
    StartCosts,
    WeightChain,
    WeightsView,
)
from sloop.options import OutOfRange
from sloop.policies.provision import CheapestStart, Flashpoint, _plans, divided, in_rack_order
from sloop.profile.estimate import Estimate
from sloop.profile.profile import LayerBlock, LayerProfile, ParametricLatency, Profile, Quadratic
from sloop.solvers.flashpoint import PieceCosts, PiecePlan, coarse_fronts
from sloop.units import s
from sloop.vocabulary import STORE, Device, ModelWeights, Node, ReplicaSpec, Slot, TransferId

COSTS = StartCosts(ModelWeights("t5", 10))
SPEC = ReplicaSpec("only", "t5", Slot(1.0, "gpu", "A10"))
BELIEF = Estimate(Profile(latency_ms=Quadratic(0.0, 100.0, 0.0), max_batch=1, max_cores=1), variant="t5")
BASELINE = Flashpoint(locality=False, multicast=False)
LOCALITY = Flashpoint(multicast=False)
ALL = Flashpoint()
PARTED = replace(ALL, partition=True)


def node_view(name: str, free: Sequence[bool], rack: str = "", cores: float = 32.0) -> NodeView:
    """A node with a device for each of `free`, which says whether nobody uses it."""
    devices = tuple(Device(f"d{number}", "A10", 24) for number in range(len(free)))
    views = tuple(
        DeviceView(device, float(is_free), 24 * is_free, int(is_free))
        for device, is_free in zip(devices, free, strict=True)
    )
    return NodeView(Node(name, "gpu", 32.0, 200, devices, rack=rack), cores, 200, views)


def given_of(
    nodes: Sequence[NodeView], count: int, weights: Sequence[WeightsView] = (), **others: object
) -> ProvisionInput:
    sites = [Site(node, device) for node in nodes for device in node.devices if device.free_share]
    made = ProvisionInput(
        stage="only",
        spec=SPEC,
        count=count,
        sites=sites,
        memory_bytes=0,
        device_memory_bytes=12,
        costs=COSTS,
        belief=BELIEF,
        weights=weights,
        sends={},
        waiting=0,
        arrivals_rps=1.0,
        served_rps=0.0,
    )
    return replace(made, **others)  # type: ignore[arg-type]


def has(name: str, rack: str = "") -> WeightsView:
    return WeightsView(name, rack, has_files=True, arriving=None, replicas=1, is_source=True)


def comes(name: str, transfer: int) -> WeightsView:
    return WeightsView(name, "", False, TransferId(transfer), replicas=1, is_source=False)


def places(found: Provisioning, asked: ProvisionInput) -> list[str]:
    """The node of each start."""
    return [asked.sites[start.site].node.node.name for start in found.starts]


FREE = [True] * 8


def test_the_baseline_downloads_once_for_each_replica_on_the_least_used_nodes() -> None:
    """Section 5.1, and number 9: a burst of eight on one node is eight downloads."""
    asked = given_of([node_view("n0", FREE)], 8, [has("n0")])
    found = BASELINE.provide(0, asked)
    assert found.chains == (WeightChain(STORE, ("n0",)),) * 8
    assert [start.chain for start in found.starts] == list(range(8))
    asked = given_of([node_view("n0", [True, True, False, False]), node_view("n1", [True] * 4)], 4)
    assert places(BASELINE.provide(0, asked), asked) == ["n1", "n1", "n0", "n1"]


def test_a_burst_on_one_node_is_one_download() -> None:
    """Number 9."""
    asked = given_of([node_view("n0", FREE)], 8)
    found = ALL.provide(0, asked)
    assert found.chains == (WeightChain(STORE, ("n0",)),)
    assert {start.chain for start in found.starts} == {0}
    asked = given_of([node_view("n0", FREE)], 8, [comes("n0", 5)])
    found = ALL.provide(0, asked)
    assert not found.chains
    assert {start.joins for start in found.starts} == {5}
    found = replace(ALL, join=False).provide(0, asked)
    assert len(found.chains) == 8, "each for itself"


def test_multicast_alone_is_one_stream_from_the_store() -> None:
    nodes = [node_view(f"n{number}", [True], rack=f"r{number % 2}") for number in range(4)]
    found = Flashpoint(locality=False).provide(0, given_of(nodes, 4))
    assert found.chains == (WeightChain(STORE, ("n0", "n2", "n1", "n3")),)


def test_files_come_before_transfers_under_way_and_those_before_downloads() -> None:
    nodes = [node_view(name, [True, True]) for name in ("fresh", "coming", "files")]
    asked = given_of(nodes, 5, [comes("coming", 3), has("files")])
    found = LOCALITY.provide(0, asked)
    assert places(found, asked) == ["files", "files", "coming", "coming", "fresh"]
    assert [(start.chain, start.joins) for start in found.starts] == [(None, None)] * 2 + [(None, 3)] * 2 + [(0, None)]
    assert found.chains == (WeightChain("files", ("fresh",)),)


def test_gpu_enabled_faas_takes_what_it_lacks_from_the_store() -> None:
    faas = Flashpoint(multicast=False, join=False, source="store")
    asked = given_of([node_view("has", [True]), node_view("lacks", [True, True])], 3, [has("has")])
    found = faas.provide(0, asked)
    assert places(found, asked) == ["has", "lacks", "lacks"]
    assert found.chains == (WeightChain(STORE, ("lacks",)),) * 2
    assert [start.chain for start in found.starts] == [None, 0, 1]


def test_fresh_nodes_are_taken_from_the_racks_in_turn_the_least_used_first() -> None:
    nodes = [node_view("busy", [True, False], rack="a")]
    nodes += [node_view(f"{rack}{number}", [True, True], rack=rack) for rack in "ab" for number in range(2)]
    asked = given_of(nodes, 5)
    assert places(ALL.provide(0, asked), asked) == ["a0", "b0", "a1", "b1", "busy"]


def test_a_chain_serves_the_rack_of_its_source_first() -> None:
    """Section 2.15: a chain 0 → 20 → 1 → 21 → 2 → 22 over two racks would cross the link between them three times."""
    racks = {"n0": "a", "n20": "b", "n1": "a", "n21": "b", "n2": "a", "n22": "b"}
    assert in_rack_order("n0", ["n20", "n1", "n21", "n2", "n22"], racks) == ("n1", "n2", "n20", "n21", "n22")
    assert in_rack_order(STORE, ["n20", "n1", "n21"], racks) == ("n20", "n21", "n1")


NAMES = [f"n{number}" for number in range(12)]


@given(
    st.lists(st.sampled_from(NAMES), unique=True, max_size=8),
    st.lists(st.sampled_from([f"s{number}" for number in range(5)]), unique=True, min_size=1),
    st.dictionaries(st.sampled_from(NAMES), st.sampled_from("abc")),
    st.dictionaries(st.sampled_from([f"s{number}" for number in range(5)]), st.integers(0, 3)),
)
def test_receivers_are_divided_evenly(
    receivers: Sequence[str], senders: Sequence[str], racks: Mapping[str, str], sends: Mapping[str, int]
) -> None:
    """Number 8: sizes differ by at most one; nobody is left out."""
    parts = divided(receivers, senders, sends, dict(racks) | dict.fromkeys(senders, "a"))
    sizes = [len(own) for own in parts.values()]
    assert sorted(name for own in parts.values() for name in own) == sorted(receivers)
    assert not sizes or max(sizes) - min(sizes) <= 1
    assert len(parts) == min(len(senders), len(receivers))
    idle = [sends.get(name, 0) for name in senders if name not in parts]
    assert not idle or not parts or min(idle) >= max(sends.get(name, 0) for name in parts), "the least busy send"


def test_receivers_are_served_within_their_rack_if_that_is_even() -> None:
    racks = {"a0": "a", "a1": "a", "b0": "b", "b1": "b", "sa": "a", "sb": "b"}
    assert divided(["a0", "b0", "a1", "b1"], ["sb", "sa"], {}, racks) == {"sb": ["b0", "b1"], "sa": ["a0", "a1"]}
    assert divided(["a0", "a1"], ["sb", "sa"], {}, racks) == {"sa": ["a0"], "sb": ["a1"]}


@st.composite
def cluster(draw: st.DrawFn) -> ProvisionInput:
    nodes = [
        node_view(name, draw(st.lists(st.booleans(), min_size=1, max_size=4)), draw(st.sampled_from(["", "r0", "r1"])))
        for name in NAMES[: draw(st.integers(1, 6))]
    ]
    states = st.sampled_from(["none", "files", "coming"])
    weights: list[WeightsView] = []
    for each in nodes:
        state, name = draw(states), each.node.name
        if state == "coming":
            weights.append(comes(name, len(weights)))
        elif state != "none":
            weights.append(has(name, each.node.rack))
    return given_of(nodes, draw(st.integers(1, 20)), weights)


@given(cluster(), st.booleans(), st.booleans(), st.sampled_from(["nearest", "store"]))
def test_places_and_sources(asked: ProvisionInput, multicast: bool, join: bool, source: str) -> None:
    """Numbers 7 and 8: at most as many starts as asked for, no device twice, all room is used; every start has weights
    or waits for a transfer to its node; the store sends only if no node has them."""
    policy = Flashpoint(multicast=multicast, join=join, source=source)  # type: ignore[arg-type]
    found = policy.provide(0, asked)
    assert len(found.starts) == min(asked.count, len(asked.sites))
    assert max(Counter(start.site for start in found.starts).values(), default=0) <= 1
    weights = {each.node: each for each in asked.weights}
    for start, name in zip(found.starts, places(found, asked), strict=True):
        if start.chain is not None:
            assert name in found.chains[start.chain].receivers
        elif start.joins is not None:
            assert weights[name].arriving == start.joins
        else:
            assert weights[name].has_files
    holders = {name for name, each in weights.items() if each.is_source}
    for chain in found.chains:
        assert chain.source in holders if holders and source == "nearest" else chain.source == STORE
        assert chain.source not in chain.receivers
        assert multicast or len(chain.receivers) == 1
    received = Counter(name for chain in found.chains for name in chain.receivers)
    assert not join or max(received.values(), default=0) <= 1
    assert received.keys() <= set(places(found, asked))


@given(cluster())
def test_nodes_that_have_the_weights_are_used_up_before_fresh_ones_and_those_one_by_one(asked: ProvisionInput) -> None:
    """Number 7."""
    found = ALL.provide(0, asked)
    used, room = Counter(places(found, asked)), Counter(site.node.node.name for site in asked.sites)
    primed = {each.node for each in asked.weights} & room.keys()
    fresh = room.keys() - primed
    if any(used[name] for name in fresh):
        assert all(used[name] == room[name] for name in primed)
    most = max((used[name] for name in fresh), default=0)
    assert all(used[name] >= min(most - 1, room[name]) for name in fresh), "one on each before a second on any"


@pytest.mark.parametrize("policy", [BASELINE, ALL, Flashpoint(locality=False)])
def test_a_node_without_devices_takes_as_many_as_its_cores_and_memory_hold(policy: Flashpoint) -> None:
    view = NodeView(Node("cpu", "cpu", 4.0, 100), 3.5, 25)
    spec = ReplicaSpec("only", "t5", Slot(1.0, "cpu"))
    asked = replace(given_of([], 9), sites=[Site(view)], spec=spec, memory_bytes=10)
    assert len(policy.provide(0, asked).starts) == 2
    assert len(policy.provide(0, replace(asked, memory_bytes=1)).starts) == 3


def test_the_reason_names_places_and_sources() -> None:
    nodes = [node_view(name, [True]) for name in ("a", "b", "c", "d")]
    asked = given_of(nodes, 5, [has("a"), comes("b", 1)])
    assert ALL.provide(0, asked).why == (
        "4 replicas of t5, for 1 more there is no room; weights are on a; weights are on their way to b; "
        "a sends them to c → d"
    )


# Parts of one model (sections 2.4 to 2.7)


def layered(*load_ms: float) -> Estimate:
    """A model of equal layers of 100 ms, whose bytes are all that matters for a start."""
    blocks = tuple(
        LayerBlock(
            end=f"layer{number}",
            operators="MatMul",
            layers=1,
            param_bytes=100,
            output_bytes=1,
            crossing_bytes=1,
            load_ms=each,
            latency_ms=ParametricLatency(0.0, 100.0, 0.0, 0.0, 1.0),
        )
        for number, each in enumerate(load_ms)
    )
    layers = LayerProfile(
        blocks=blocks,
        load_ms=sum(load_ms),
        latency_ms=blocks[0].latency_ms,
        input_bytes=1,
        move_ms_per_mb=0.0,
        difference=0.0,
    )
    return Estimate(Profile(latency_ms=Quadratic(0.0, 400.0, 0.0), max_batch=1, max_cores=1, layers=layers))


PARTS = StartCosts(ModelWeights("t5", 400_000_000), load_s=20.0, send_s=4.0, layer_bytes=(100,) * 4)


def in_parts(policy: Flashpoint, count: int, *, waiting: int = 1, **others: object) -> Provisioning:
    """Eight nodes with two accelerators each."""
    nodes = [node_view(f"n{number}", [True, True], rack=f"r{number % 2}") for number in range(8)]
    options = {"costs": PARTS, "belief": layered(1, 1, 1, 1), "waiting": waiting} | others
    return policy.provide(0, given_of(nodes, count, **options))  # type: ignore[arg-type]


def test_replicas_that_start_together_start_as_parts_of_one_model() -> None:
    assert in_parts(ALL, 4).pipelines == (), "off, unless a system switches it on"
    found = in_parts(PARTED, 4)
    assert found.pipelines == ((0, 1, 2, 3, 4),)
    assert [start.pipeline for start in found.starts] == [0, 0, 0, 0]
    assert [chain.layers for chain in found.chains] == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert all(chain.source == STORE for chain in found.chains)
    assert found.why.startswith("4 replicas of t5; 1 pipeline of 4 parts, cut before layer 1, 2 and 3")


def test_a_long_queue_makes_fewer_parts_and_one_start_is_whole() -> None:
    assert in_parts(PARTED, 1).pipelines == ()
    assert in_parts(PARTED, 4, arrivals_rps=0.0, waiting=0).pipelines == (), "nobody waits for them"
    assert in_parts(PARTED, 4, arrivals_rps=0.0, waiting=1).pipelines
    assert in_parts(PARTED, 4, belief=BELIEF).pipelines == (), "its layers were not measured"
    capped = in_parts(replace(PARTED, pieces_max=2), 5)
    assert capped.pipelines == ((0, 2, 4), (0, 2, 4))
    assert sum(start.pipeline is None for start in capped.starts) == 1, "the fifth one is a whole replica"


def test_a_part_is_sent_along_a_chain_to_all_pipelines() -> None:
    found = in_parts(replace(PARTED, pieces_max=2), 8)
    assert [(chain.layers, len(chain.receivers)) for chain in found.chains] == [((0, 2), 4), ((2, 4), 4)]
    holders = [WeightsView(f"h{number}", "r0", True, None, 1, True) for number in range(2)]
    held = in_parts(replace(PARTED, pieces_max=2), 8, weights=holders)
    assert sorted({chain.source for chain in held.chains}) == ["h0", "h1"]
    apart = in_parts(replace(BASELINE, pieces_max=2, partition=True), 4)
    assert [chain.receivers for chain in apart.chains] == [("n0",), ("n2",), ("n1",), ("n3",)], "a download for each"


def test_what_starts_at_once_is_no_part_of_what_does_not() -> None:
    """A pipeline is as slow as its slowest part: replicas on a node that has the files wait for no others."""
    there = [WeightsView("n3", "r1", True, None, 1, True)]
    found = in_parts(replace(PARTED, pieces_max=4), 4, weights=there)
    assert found.pipelines == ((0, 2, 4), (0, 2, 4))
    assert [start.chain is None for start in found.starts] == [True, True, False, False]
    alone = in_parts(replace(PARTED, pieces_max=4), 3, weights=there)
    assert [start.pipeline for start in alone.starts] == [0, 0, None]


def test_parts_are_only_where_they_are_expected_to_answer_sooner() -> None:
    """Loading and sending take 24 s, the model 400 ms, and so does each boundary on this slow link."""
    slow = replace(PARTED, link_mbps=2e-5)
    there = [WeightsView("n3", "r1", True, None, 1, True)]
    assert in_parts(slow, 2, weights=there, waiting=1).pipelines == ((0, 2, 4),), "12 s and a boundary, not 24 s"
    assert in_parts(slow, 2, weights=there, waiting=100).pipelines == (), "a boundary is as slow as the whole model"
    free = structs.replace(PARTS, load_s=0.0, send_s=0.0)
    assert in_parts(PARTED, 4, costs=free).pipelines == (), "the store sends all layers once either way"
    assert in_parts(replace(PARTED, multicast=False, locality=False), 4, costs=free).pipelines, "one copy, not four"


def test_planners_that_ignore_cold_starts_cut_what_is_large() -> None:
    costs = structs.replace(PARTS, weights=ModelWeights("t5", 800_000_000), layer_bytes=(200_000_000,) * 4)
    gillis, serfer = (replace(BASELINE, partition=True, cuts=cuts) for cuts in ("fewest", "filled"))
    assert in_parts(gillis, 4, costs=costs, waiting=3000).pipelines == ((0, 1, 2, 3, 4),)
    assert in_parts(serfer, 9, costs=costs, waiting=3000).pipelines == ((0, 1, 2, 3, 4),) * 2
    assert in_parts(gillis, 3, costs=costs).pipelines == (), "fewer accelerators than parts"
    assert in_parts(gillis, 5, waiting=3000).pipelines == (), "it is not too large"


@given(st.data())
def test_parts_are_never_expected_to_be_later_than_whole_models(data: st.DataObject) -> None:
    """Whatever has the weights, and however many wait: a pipeline starts only if the mean answer is sooner."""
    costs = StartCosts(
        ModelWeights("t5", data.draw(st.integers(1, 10**10))),
        load_s=data.draw(st.floats(0, 30)),
        send_s=data.draw(st.floats(0, 5)),
        layer_bytes=(100,) * 4,
    )
    policy = replace(PARTED, multicast=data.draw(st.booleans()), locality=data.draw(st.booleans()))
    count, waiting = data.draw(st.integers(1, 8)), data.draw(st.integers(0, 300))
    found = in_parts(policy, count, costs=costs, waiting=waiting)
    assert len(found.starts) == count
    if not found.pipelines:
        return
    parts = len(found.pipelines[0]) - 1
    groups = count // parts
    assert all(bounds == found.pipelines[0] for bounds in found.pipelines[:groups])
    bits = costs.weights.size_bytes * 8 / (policy.store_mbps * 1e6)
    own_s = costs.load_s + costs.send_s

    def mean_s(cold_s: float, station_s: float, request_s: float, pipelines: int) -> float:
        before = [(place + pipelines - 1) // pipelines - 1 for place in range(1, x + 1)]
        return cold_s + request_s + station_s * sum(before) / x

    x = max(1, waiting)
    layers = max(end - first for first, end in pairwise(found.pipelines[0]))
    chained = policy.multicast
    whole_s = mean_s(own_s + bits * (1 if chained else count), 0.4, 0.4, count)
    cut_s = mean_s(own_s * layers / 4 + bits * (1 if chained else groups), 0.1 * layers, 0.4, groups)
    assert cut_s < whole_s + 1e-6


def test_parts_come_where_the_weights_are_first() -> None:
    nodes = [WeightsView(name, "r1", True, None, 1, True) for name in ("n3", "n5")]
    found = in_parts(replace(PARTED, pieces_max=2), 4, weights=nodes)
    assert [start.chain for start in found.starts] == [None] * 4, "two on each of these nodes"
    assert [start.pipeline for start in found.starts] == [0, 0, 1, 1]
    later = in_parts(replace(PARTED, pieces_max=2), 6, weights=nodes)
    assert [start.chain is None for start in later.starts] == [True] * 4 + [False] * 2, (
        "a group is as slow as its slowest"
    )


def test_the_other_layers_come_from_the_node_that_sends_least() -> None:
    views = [WeightsView(f"n{number}", f"r{number}", True, None, 1, number < 3) for number in range(4)]
    asked = CompletionInput(("n9",), {"n9": "r2"}, tuple(views), {"n0": 1})
    assert ALL.complete(0, asked) == [("n2", ("n9",))], "in its rack"
    assert replace(ALL, source="store").complete(0, asked) == [(STORE, ("n9",))]
    assert BASELINE.complete(0, asked) == [(STORE, ("n9",))]
    assert ALL.complete(0, CompletionInput(("n9",), {"n9": "r2"}, tuple(views[3:]), {})) == [(STORE, ("n9",))]
    parts = CompletionInput(("n8", "n9", "n7", "n9"), {"n8": "r1", "n9": "r2", "n7": "r1"}, tuple(views), {"n2": 1})
    assert ALL.complete(0, parts) == [("n1", ("n8", "n7", "n9"))], "one chain, which serves a rack after the other"
    assert LOCALITY.complete(0, parts) == [("n1", ("n8",)), ("n0", ("n9",)), ("n1", ("n7",)), ("n2", ("n9",))]


# Ours


OURS = CheapestStart()
HEAVY = StartCosts(ModelWeights("t5", 11_408_000_000), process_s=3.0, load_s=14.138, send_s=1.206)
"""T5-3B: 12.157 s from another node, 41.427 s from the store, and a worker process that takes long to start."""


def coming_since(name: str, transfer: int, since_s: float) -> WeightsView:
    return replace_view(comes(name, transfer), arriving_since_ns=s(since_s))


def replace_view(view: WeightsView, **changes: object) -> WeightsView:
    return structs.replace(view, **changes)


def test_each_start_is_made_in_the_way_that_serves_soonest() -> None:
    nodes = [node_view(name, [True, True]) for name in ("fresh", "files", "early", "late")]
    weights = [has("files"), coming_since("early", 3, 0), coming_since("late", 4, 10)]
    asked = given_of(nodes, 8, weights, costs=HEAVY)
    found = OURS.provide(s(10), asked)
    # In files: 15.3 s, and 18.3 s with a new process. Early: 2.2 s more, late and fresh: 12.2 s.
    assert places(found, asked) == ["files", "early", "files", "early", "late", "fresh", "late", "fresh"]
    assert [start.joins for start in found.starts if start.joins is not None] == [3, 3, 4, 4]
    assert found.chains == (WeightChain("files", ("fresh",)),)
    assert found.why.endswith("expected to serve in 15.3 s to 30.5 s")


def test_the_first_start_is_expected_when_it_serves() -> None:
    nodes = [node_view(name, [True, True]) for name in ("fresh", "files")]
    weights = [has("files")]
    assert OURS.expected_s(0, given_of(nodes, 2, weights, costs=HEAVY)) == pytest.approx(15.344)
    assert OURS.expected_s(0, given_of(nodes[:1], 1, costs=HEAVY)) == pytest.approx(41.427 + 15.344, abs=1e-3)
    whole = StartCosts(ModelWeights("t5", 0), process_s=8.0)
    assert OURS.expected_s(0, given_of(nodes, 1, costs=whole)) == 8.0, "not known which part a spare worker saves"


def test_a_copy_comes_from_the_store_where_that_is_quicker() -> None:
    nodes, holders = [node_view("n0", [True])], [has("busy"), has("busier")]
    asked = given_of(nodes, 1, holders, costs=HEAVY, sends={"busy": 2, "busier": 4})
    assert OURS.provide(0, asked).chains[0].source == "busy", "36 s, and 41 s from the store"
    asked = replace(asked, sends={"busy": 3, "busier": 4})
    assert OURS.provide(0, asked).chains[0].source == STORE, "49 s from a node"
    asked = replace(asked, sends={"busy": 3, "busier": 4, STORE: 1})
    assert OURS.provide(0, asked).chains[0].source == "busy", "83 s from a store that sends already"
    assert replace(OURS, store="per_node").provide(0, asked).chains[0].source == STORE, "over a link of its own"
    quick = replace(OURS, store_mbps=16_000.0)
    assert quick.provide(0, replace(asked, sends={})).chains[0].source == "busy", "a node receives no faster"


def test_fresh_nodes_get_one_start_each_before_a_second_one() -> None:
    nodes = [node_view(f"n{number}", [True] * 4) for number in range(3)]
    asked = given_of(nodes, 5, costs=StartCosts(ModelWeights("t5", 10**9), load_s=1.0))
    assert Counter(places(OURS.provide(0, asked), asked)) == {"n0": 2, "n1": 2, "n2": 1}
    assert OURS.provide(0, asked).chains == (WeightChain(STORE, ("n0", "n1", "n2")),)


def ready_s(asked: ProvisionInput, found: Provisioning, now_ns: int) -> list[float]:
    """What the starts of an answer take, by the same prices: computed from the answer alone."""
    weights, taken, times = {each.node: each for each in asked.weights}, Counter[str](), []
    costs, bits = asked.costs, asked.costs.weights.size_bytes * 8
    for start, name in zip(found.starts, places(found, asked), strict=True):
        own_s = costs.send_s + (costs.process_s if taken[name] else 0.0)
        taken[name] += 1
        view = weights.get(name)
        if start.chain is not None:
            source = found.chains[start.chain].source
            rate = 2203e6 if source == STORE else 7506.89e6
            own_s += costs.load_s + bits * (1 + asked.sends.get(source, 0)) / rate
        elif start.joins is not None:
            assert view is not None
            alone_s = copy_alone_s(asked)
            own_s += costs.load_s + max(0.0, alone_s - (now_ns - view.arriving_since_ns) / 1e9)
        else:
            own_s += costs.load_s
        times.append(own_s)
    return sorted(times)


def copy_alone_s(asked: ProvisionInput) -> float:
    bits, holders = asked.costs.weights.size_bytes * 8, [each.node for each in asked.weights if each.is_source]
    node_s = min((bits * (1 + asked.sends.get(name, 0)) / 7506.89e6 for name in holders), default=math.inf)
    store_s = bits * (1 + asked.sends.get(STORE, 0)) / 2203e6
    return bits / 2203e6 if store_s < node_s else bits / 7506.89e6


def least_sum_s(asked: ProvisionInput, now_ns: int) -> float:
    """The least over all ways to choose sites and sources."""
    weights, costs = {each.node: each for each in asked.weights}, asked.costs
    bits, holders = costs.weights.size_bytes * 8, [each.node for each in asked.weights if each.is_source]
    copies_s = [bits * (1 + asked.sends.get(STORE, 0)) / 2203e6]
    copies_s += [bits * (1 + asked.sends.get(name, 0)) / 7506.89e6 for name in holders]
    names = [site.node.node.name for site in asked.sites]
    best = math.inf
    for chosen in combinations(range(len(names)), min(asked.count, len(names))):
        for copy_s in copies_s:
            taken, total_s = Counter[str](), 0.0
            for name in (names[index] for index in chosen):
                view = weights.get(name)
                total_s += costs.send_s + (costs.process_s if taken[name] else 0.0)
                taken[name] += 1
                if view is None or not (view.has_files or view.arriving is not None):
                    total_s += costs.load_s + copy_s
                elif view.arriving is not None:
                    left_s = copy_alone_s(asked) - (now_ns - view.arriving_since_ns) / 1e9
                    total_s += costs.load_s + max(0.0, left_s)
                else:
                    total_s += costs.load_s
            best = min(best, total_s)
    return best


@given(cluster(), st.integers(1, 6), st.dictionaries(st.sampled_from([*NAMES[:6], STORE]), st.integers(0, 5)))
@settings(max_examples=60)
def test_no_other_sites_and_sources_would_serve_sooner(
    asked: ProvisionInput, count: int, sends: Mapping[str, int]
) -> None:
    """Against all combinations."""
    asked = replace(asked, sites=asked.sites[:8], count=count, sends=sends, costs=HEAVY)
    found = OURS.provide(s(5), asked)
    assert len(found.starts) == min(count, len(asked.sites))
    assert sum(ready_s(asked, found, s(5))) == pytest.approx(least_sum_s(asked, s(5)))


def test_starts_of_one_kind_may_be_parts() -> None:
    parted = replace(OURS, partition=True)
    found = in_parts(parted, 4)  # type: ignore[arg-type]
    assert found.pipelines == ((0, 1, 2, 3, 4),)
    assert [chain.layers for chain in found.chains] == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert in_parts(OURS, 4).pipelines == ()  # type: ignore[arg-type]
    assert in_parts(parted, 1).pipelines == ()  # type: ignore[arg-type]
    alone = in_parts(parted, 4, belief=BELIEF)  # type: ignore[arg-type]
    assert alone.pipelines == (), "its layers were not measured"


@pytest.fixture
def solved(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """For how many pieces at most plans were looked for."""
    found: list[int] = []

    def counted(costs: PieceCosts, pieces_max: int) -> list[list[PiecePlan]]:
        found.append(pieces_max)
        return coarse_fronts(costs, pieces_max)

    monkeypatch.setattr("sloop.policies.provision.coarse_fronts", counted)
    _plans.cache_clear()
    return found


@pytest.mark.parametrize(("policy", "layers"), [(PARTED, 7), (replace(OURS, partition=True), 9)])
def test_plans_of_parts_are_found_with_the_first_starts(policy: Flashpoint, layers: int, solved: list[int]) -> None:
    """A server makes its first plan before it serves, and must not wait for these plans in a burst."""
    belief = layered(*range(1, layers + 1))
    in_parts(replace(policy, partition=False), 4, belief=belief, arrivals_rps=0.0)
    in_parts(policy, 1, belief=BELIEF, arrivals_rps=0.0)
    assert solved == [], "no parts follow"
    in_parts(policy, 1, belief=belief, arrivals_rps=0.0, waiting=0)
    assert solved == [layers]
    for count in (2, 4, 16):
        belief.apply(1.0 + count / 100, 0.0)
        assert in_parts(policy, count, belief=belief).pipelines
    assert solved == [layers]


@pytest.mark.parametrize("policy", [PARTED, replace(OURS, partition=True)])
def test_plans_are_found_for_as_many_parts_as_the_nodes_can_hold(policy: Flashpoint, solved: list[int]) -> None:
    """A version that is deployed starts while requests are served, and plans of many parts take seconds."""

    def start(count: int, layers: int, *, places: int, **others: object) -> None:
        options = {"costs": PARTS, "belief": layered(*[1.0] * layers)} | others
        nodes = [node_view(f"n{place}", [True]) for place in range(places)]
        policy.provide(0, given_of(nodes, count, **options))  # type: ignore[arg-type]

    several = range(20, 60)
    for layers in several:
        start(1, layers, places=1, arrivals_rps=0.0, waiting=0)
    assert solved == [1] * 40
    for count in (2, 2, 3, 4):
        start(count, 59, places=4, waiting=1)
    assert solved[40:] == [2, 4]
    for layers in several:
        start(1, layers, places=1, waiting=1)
    assert len(solved) == 42, "the plans of forty models are kept"


def test_out_of_range() -> None:
    with pytest.raises(OutOfRange, match="store_mbps"):
        CheapestStart(store_mbps=0.0)
    with pytest.raises(OutOfRange, match="spare_workers"):
        CheapestStart(spare_workers=-1)


@pytest.mark.parametrize("policy", [Flashpoint, CheapestStart])
@pytest.mark.parametrize(
    ("key", "value"),
    [("link_mbps", 0.0), ("link_mbps", math.nan), ("store_mbps", math.inf), ("store_mbps", -1.0), ("pieces_max", -1)],
)
def test_rates_that_no_link_has_are_refused(policy: type, key: str, value: float) -> None:
    with pytest.raises(OutOfRange, match=key):
        policy(**{key: value})
