"""Splits, baselines, votes by points, and the model that ships."""

from functools import partial

import numpy as np
import pytest

from sloop.errors import InputError
from sloop_systems.netnn import accuracy
from sloop_systems.netnn.accuracy import (
    ALONE,
    MODELS,
    NETWORKS,
    OTHERS,
    TENTH,
    TREES,
    AccuracyTrial,
    Dataset,
    Protocol,
    baseline_flow,
    baseline_packet,
    dataset,
    flow_accuracy,
    network_accuracy,
    play,
    split,
    together,
)
from sloop_systems.netnn.features import POINTS, FeatureEncoding, Representation
from sloop_systems.netnn.shipped import shipped_model
from sloop_systems.netnn.traffic import Knobs, calls
from sloop_systems.netnn.training import Architecture

QUICK = Architecture(814, (4,), (8,))


@pytest.fixture(scope="module")
def easy() -> Dataset:
    """Calls with tunnels that are easy to tell."""
    return dataset(calls(1, 60, packets=260, knobs=Knobs(delta_len=0.4, delta_iat=0.4, delta_hdr=0.45)))


def test_a_split_by_flows_never_divides_a_flow_and_one_by_packets_does(easy: Dataset) -> None:
    for protocol in Protocol:
        parts = split(easy, protocol, 1)
        assert (parts.train.astype(int) + parts.early + parts.test == 1).all()
        assert abs(parts.test.mean() - 0.2) < 0.03
        shared = set(easy.flow[parts.train]) & set(easy.flow[parts.test])
        assert bool(shared) == (protocol is Protocol.PACKETS)
        assert abs(easy.labels[parts.test].mean() - 0.5) < 0.06


def test_histograms_count_every_packet(easy: Dataset) -> None:
    assert (easy.histograms[:, :1500].sum(axis=1) == 260).all()
    assert (easy.histograms[:, 1500:].sum(axis=1) == 259).all()


def test_baselines_find_what_is_in_lengths_and_gaps(easy: Dataset) -> None:
    pytest.importorskip("sklearn")
    strong, nothing = (dataset(calls(1, 120, packets=70, knobs=Knobs(delta, delta, 0.0))) for delta in (0.6, 0.0))
    assert baseline_flow(easy, 1) >= 0.8
    assert baseline_packet(strong, 1) > 0.6
    assert abs(baseline_packet(nothing, 1) - 0.5) < 0.1
    for baseline in (baseline_flow, baseline_packet):
        assert 0.2 < baseline(nothing, 1, random_buckets=True) < 0.8


def test_the_network_learns_headers_and_votes_help(easy: Dataset) -> None:
    found = network_accuracy(easy, Protocol.FLOWS_MASKED, architecture=QUICK, seed=1, epochs=12, integers=True)
    assert found.packet > 0.8
    assert found.flow >= found.by_points[0]
    assert found.integers is not None
    assert abs(found.integers - found.packet) < 0.06
    assert len(found.by_points) == len(POINTS)


def test_identity_is_masked_unless_the_protocol_shows_it() -> None:
    """Addresses that tell the class are learnt by who may see them."""
    leaky = dataset(calls(2, 240, packets=20, knobs=Knobs(0.0, 0.0, 0.0, subnet_leak=1.0)), histograms=False)
    masked, seen = (
        network_accuracy(leaky, protocol, architecture=QUICK, seed=1, epochs=10).packet
        for protocol in (Protocol.FLOWS_MASKED, Protocol.FLOWS)
    )
    assert seen > 0.9
    assert masked < 0.7


def test_trials_of_all_models_make_one_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is played alone, with as many flows for the test as it says; how well it learns is tested above."""
    pytest.importorskip("sklearn")
    monkeypatch.setattr(accuracy, "network_accuracy", partial(network_accuracy, epochs=3))
    base10 = OTHERS[Representation.BASE10]
    parts = [play(AccuracyTrial(*each, 20, 8, 0.4)) for each in ((TREES, 1), (TREES, 2), (ALONE, 1), (base10, 1))]
    found = together(parts)
    assert (found.tested, found.seeds) == (8, (1, 2))
    assert {name: len(values) for name, values in found.packet.items()} == {TREES: 2, TENTH: 2, ALONE: 1, base10: 1}
    assert set(found.flow) == {TREES, TENTH, base10}
    assert found.packet[TREES] == [part.packet[TREES][0] for part in parts[:2]]
    assert set(MODELS) == {TREES, ALONE, *NETWORKS.values(), *OTHERS.values()}


def test_flow_accuracy_uses_the_first_points_only() -> None:
    logits = np.array([-1, -1, 5, 5, 5, 3])
    flow, labels = np.array([0, 0, 0, 0, 0, 1]), np.ones(6, bool)
    assert flow_accuracy(logits, flow, labels, 1) == 0.5
    assert flow_accuracy(logits, flow, labels, 3) == 0.5
    assert flow_accuracy(logits, flow, labels, 4) == 1.0


def test_no_flows_is_refused() -> None:
    with pytest.raises(InputError, match="no flows"):
        dataset([])


def test_the_model_that_ships_is_the_published_one_and_tells_calls_from_tunnels() -> None:
    model = shipped_model()
    assert model.network.parameters == 114_947
    assert model.card.encoding == FeatureEncoding()
    data = dataset(calls(99, 60, packets=1100), histograms=False)  # another seed than it was trained with
    logits = model.network.run(model.card.encoding.rows(data.points))[:, 0]
    assert flow_accuracy(logits, data.flow, data.labels, len(POINTS)) > 0.8
