"""Provision policies of the platform, and what provision policies share."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from sloop.core.views import CompletionInput, Provisioning, ProvisionInput, Site, StartCosts, WeightChain, WeightsView
from sloop.options import OutOfRange, check_ranges
from sloop.policies.provision import CheapestStart
from sloop.policies.sourcing import divided, in_rack_order, plans_of
from sloop.solvers.cuts import PieceCosts, PiecePlan, coarse_fronts
from sloop.units import s
from sloop.vocabulary import STORE, LayerSet, ModelWeights, Slot
from tests.policies.starts import (
    BELIEF,
    NAMES,
    PARTS,
    SPEC,
    cluster,
    comes,
    given_of,
    has,
    in_parts,
    layered,
    node_view,
    places,
)


def test_a_chain_serves_the_rack_of_its_source_first() -> None:
    """Section 2.15: a chain 0 → 20 → 1 → 21 → 2 → 22 over two racks would cross the link between them three times."""
    racks = {"n0": "a", "n20": "b", "n1": "a", "n21": "b", "n2": "a", "n22": "b"}
    assert in_rack_order("n0", ["n20", "n1", "n21", "n2", "n22"], racks) == ("n1", "n2", "n20", "n21", "n22")
    assert in_rack_order(STORE, ["n20", "n1", "n21"], racks) == ("n20", "n21", "n1")


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
    asked = structs.replace(asked, sends={"busy": 3, "busier": 4})
    assert OURS.provide(0, asked).chains[0].source == STORE, "49 s from a node"
    asked = structs.replace(asked, sends={"busy": 3, "busier": 4, STORE: 1})
    assert OURS.provide(0, asked).chains[0].source == "busy", "83 s from a store that sends already"
    assert replace(OURS, store="per_node").provide(0, asked).chains[0].source == STORE, "over a link of its own"
    quick = replace(OURS, store_mbps=16_000.0)
    assert quick.provide(0, structs.replace(asked, sends={})).chains[0].source == "busy", "a node receives no faster"


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
    asked = structs.replace(asked, sites=asked.sites[:8], count=count, sends=sends, costs=HEAVY)
    found = OURS.provide(s(5), asked)
    assert len(found.starts) == min(count, len(asked.sites))
    assert sum(ready_s(asked, found, s(5))) == pytest.approx(least_sum_s(asked, s(5)))


def test_starts_of_one_kind_may_be_parts() -> None:
    parted = replace(OURS, partition=True)
    found = in_parts(parted, 4)
    assert found.pipelines == ((0, 1, 2, 3, 4),)
    assert [chain.layers for chain in found.chains] == [LayerSet(place, place + 1) for place in range(4)]
    assert in_parts(OURS, 4).pipelines == ()
    assert in_parts(parted, 1).pipelines == ()
    alone = in_parts(parted, 4, belief=BELIEF)
    assert alone.pipelines == (), "its layers were not measured"


def test_parts_and_whole_replicas_may_share_a_site() -> None:
    """A node is one site for all starts on its cores: of the two on `n0` one is a part."""
    nodes = [node_view(name, [], cores=2.0) for name in ("n0", "n1")]
    options = {"costs": PARTS, "belief": layered(1, 1, 1, 1), "waiting": 1, "sites": [Site(node) for node in nodes]}
    asked = given_of(nodes, 3, **options, spec=structs.replace(SPEC, slot=Slot(1.0, "gpu")))  # type: ignore[arg-type]
    found = replace(OURS, partition=True).provide(0, asked)
    assert [(start.site, start.pipeline) for start in found.starts] == [(1, 0), (0, 0), (0, None)]


def test_the_other_layers_come_along_one_chain_from_the_node_that_sends_least() -> None:
    views = [WeightsView(f"n{number}", f"r{number}", True, None, 1, number < 3) for number in range(4)]
    parts = CompletionInput(("n8", "n9", "n7", "n9"), {"n8": "r1", "n9": "r2", "n7": "r1"}, tuple(views), {"n2": 1})
    assert OURS.complete(0, parts) == [("n1", ("n8", "n7", "n9"))], "it serves a rack after the other"
    assert OURS.complete(0, CompletionInput(("n9",), {"n9": "r2"}, tuple(views[3:]), {})) == [(STORE, ("n9",))]


@pytest.fixture
def solved(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """For how many pieces at most plans were looked for."""
    found: list[int] = []

    def counted(costs: PieceCosts, pieces_max: int) -> list[list[PiecePlan]]:
        found.append(pieces_max)
        return coarse_fronts(costs, pieces_max)

    monkeypatch.setattr("sloop.policies.sourcing.coarse_fronts", counted)
    plans_of.cache_clear()
    return found


def test_plans_of_parts_are_found_with_the_first_starts(solved: list[int]) -> None:
    """A server makes its first plan before it serves, and must not wait for these plans in a burst."""
    policy, layers = replace(OURS, partition=True), 9
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


def test_plans_are_found_for_as_many_parts_as_the_nodes_can_hold(solved: list[int]) -> None:
    """A version that is deployed starts while requests are served, and plans of many parts take seconds."""

    def start(count: int, layers: int, *, places: int, **others: object) -> None:
        options = {"costs": PARTS, "belief": layered(*[1.0] * layers)} | others
        nodes = [node_view(f"n{place}", [True]) for place in range(places)]
        replace(OURS, partition=True).provide(0, given_of(nodes, count, **options))  # type: ignore[arg-type]

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
        check_ranges(CheapestStart(store_mbps=0.0))
    with pytest.raises(OutOfRange, match="spare_workers"):
        check_ranges(CheapestStart(spare_workers=-1))


@pytest.mark.parametrize(
    ("key", "value"),
    [("link_mbps", 0.0), ("link_mbps", math.nan), ("store_mbps", math.inf), ("store_mbps", -1.0), ("pieces_max", -1)],
)
def test_rates_that_no_link_has_are_refused(key: str, value: float) -> None:
    with pytest.raises(OutOfRange, match=key):
        check_ranges(CheapestStart(**{key: value}))  # type: ignore[arg-type]
