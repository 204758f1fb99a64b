"""Flashpoint's provision policy. Sections and numbers are those of its specification."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from sloop.core.views import (
    CompletionInput,
    NodeView,
    ProvisionInput,
    Site,
    StartCosts,
    WeightChain,
    WeightsView,
)
from sloop.options import OutOfRange, check_ranges
from sloop.profile.estimate import Estimate
from sloop.vocabulary import STORE, LayerSet, ModelWeights, Node, ReplicaSpec, Slot
from sloop_systems.flashpoint.policy import Flashpoint
from tests.policies.starts import BELIEF, PARTS, cluster, comes, given_of, has, in_parts, node_view, places

BASELINE = Flashpoint(locality=False, multicast=False)
LOCALITY = Flashpoint(multicast=False)
ALL = Flashpoint()
PARTED = replace(ALL, partition=True)


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
    for memory_bytes, expected in ((10, 2), (1, 3)):
        belief = Estimate(structs.replace(BELIEF.profile, memory_bytes=memory_bytes), variant="t5")
        asked = given_of([], 9, sites=[Site(view)], spec=spec, belief=belief)
        assert len(policy.provide(0, asked).starts) == expected


def test_the_reason_names_places_and_sources() -> None:
    nodes = [node_view(name, [True]) for name in ("a", "b", "c", "d")]
    asked = given_of(nodes, 5, [has("a"), comes("b", 1)])
    assert ALL.provide(0, asked).why == (
        "4 replicas of t5, for 1 more there is no room; weights are on a; weights are on their way to b; "
        "a sends them to c → d"
    )


# Parts of one model (sections 2.4 to 2.7)


def test_replicas_that_start_together_start_as_parts_of_one_model() -> None:
    assert in_parts(ALL, 4).pipelines == (), "off, unless a system switches it on"
    found = in_parts(PARTED, 4)
    assert found.pipelines == ((0, 1, 2, 3, 4),)
    assert [start.pipeline for start in found.starts] == [0, 0, 0, 0]
    assert [chain.layers for chain in found.chains] == [LayerSet(place, place + 1) for place in range(4)]
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
    assert [(chain.layers, len(chain.receivers)) for chain in found.chains] == [
        (LayerSet(0, 2), 4),
        (LayerSet(2, 4), 4),
    ]
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


@pytest.mark.parametrize(("key", "value"), [("link_mbps", 0.0), ("store_mbps", -1.0), ("pieces_max", -1)])
def test_rates_that_no_link_has_are_refused(key: str, value: float) -> None:
    with pytest.raises(OutOfRange, match=key):
        check_ranges(Flashpoint(**{key: value}))  # type: ignore[arg-type]
