"""The accuracy of detection: data sets, the three ways to split them into training and test part, published baselines.

A split by packets puts packets of one flow into both parts. A model that sees addresses can then recognise the flow
instead of its behaviour. So there are three cases (`Protocol`), and `compare` reports them side by side: `PACKETS` with
addresses (as published), `FLOWS` with addresses, and `FLOWS_MASKED` without.

On synthetic traffic, accuracies depend on the parameters of the generator. Only the order of the models means anything.

The baselines are decision trees on lengths and gaps, as published (NetBeacon's features with XGBoost), here with
scikit-learn's histogram gradient boosting in XGBoost's default setting (100 trees, depth 6, rate 0.3), and the same
trees on a random tenth of the buckets.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

import numpy as np
from numpy.random import RandomState
from numpy.typing import NDArray

from sloop.errors import InputError
from sloop.innet.detection import GAP_MAX, KEY_BYTES, POINTS, FeatureEncoding, PointArrays, Representation, Rows, vote
from sloop.innet.traffic import Knobs, TrafficFlow, calls
from sloop.innet.training import FLOW_MODEL, PACKET_MODEL, Architecture, LabelledRows, TrainingSchedule, fit

LENGTH_BUCKETS: Final = 1500
"""One for each byte."""
GAP_BUCKETS: Final = 3000
GAP_BUCKET_US: Final = 20_000
"""60 s in 3000 buckets. The publication says 12 ms as well, which does not fit."""
RANDOM_SHARE: Final = 0.10

Infer = Callable[[Rows], NDArray[Any]]
Report = Callable[[int, str], None]


# Data sets.


@dataclass(frozen=True, slots=True)
class Dataset:
    """The inference points of many flows, ordered by flow. Histograms are of whole flows."""

    points: PointArrays
    flow: Rows
    """Which flow each point is of."""
    labels: NDArray[np.bool_]
    """Of each point: whether its flow is malicious."""
    classes: tuple[str, ...]
    """Of each flow."""
    histograms: NDArray[np.int32]
    """Flows × (buckets of lengths, buckets of gaps)."""

    def flow_labels(self) -> NDArray[np.bool_]:
        """Whether each flow is malicious."""
        first = np.unique(self.flow, return_index=True)[1]
        return self.labels[first]


def dataset(flows: Iterable[TrafficFlow], *, histograms: bool = True) -> Dataset:
    """The points that the first switch would see of these flows, if its table had room for all."""
    parts: list[list[NDArray[Any]]] = []
    owners: list[Rows] = []
    labels: list[NDArray[np.bool_]] = []
    classes: list[str] = []
    counted: list[NDArray[np.int32]] = []
    for number, flow in enumerate(flows):
        at = np.array([point - 1 for point in POINTS if point <= len(flow)])
        gaps = np.minimum(np.diff(flow.times_us, prepend=flow.times_us[:1]), GAP_MAX)
        least = np.minimum.accumulate(np.where(np.arange(len(gaps)) == 0, GAP_MAX, gaps))
        least[0] = 0
        heads = flow.heads[at]
        keys = np.zeros((len(at), KEY_BYTES), np.uint8)
        for to, source, size in ((0, 12, 4), (4, 20, 2), (6, 16, 4), (10, 22, 2), (12, 9, 1)):
            keys[:, to : to + size] = heads[:, source : source + size]
        ports = np.full(len(at), 20)
        parts.append(
            [keys, heads, ports, flow.lengths[at], gaps[at], least[at], np.maximum.accumulate(gaps)[at], at + 1]
        )
        owners.append(np.full(len(at), number))
        labels.append(np.full(len(at), flow.malicious))
        classes.append(flow.label)
        if histograms:
            counted.append(_histogram(flow.lengths, gaps[1:]))
    if not parts:
        raise InputError("there are no flows", help="give more flows")
    points = PointArrays(*(np.concatenate(each) for each in zip(*parts, strict=True)))
    found = np.stack(counted) if counted else np.zeros((len(classes), 0), np.int32)
    return Dataset(points, np.concatenate(owners), np.concatenate(labels), tuple(classes), found)


def _histogram(lengths: Rows, gaps_us: Rows) -> NDArray[np.int32]:
    by_length = np.bincount(np.clip(lengths, 1, LENGTH_BUCKETS) - 1, minlength=LENGTH_BUCKETS)
    by_gap = np.bincount(np.minimum(gaps_us // GAP_BUCKET_US, GAP_BUCKETS - 1), minlength=GAP_BUCKETS)
    return np.concatenate([by_length, by_gap]).astype(np.int32)


class Protocol(StrEnum):
    """How rows are split, and whether the network sees who sent them."""

    PACKETS = "packets split, identity seen"
    FLOWS = "flows split, identity seen"
    FLOWS_MASKED = "flows split, identity masked"


@dataclass(frozen=True, slots=True)
class Split:
    """Which points are for training, for early stopping, and for the reported accuracy."""

    train: NDArray[np.bool_]
    early: NDArray[np.bool_]
    test: NDArray[np.bool_]


def split(data: Dataset, protocol: Protocol, seed: int) -> Split:
    """80 % for training, of which a tenth decides when to end, and 20 % for the test; by flows, or by packets.

    Each part has the same share of malicious flows (of points, if split by packets).
    """
    random = RandomState(seed)
    if protocol is Protocol.PACKETS:
        drawn = _ranks(random, data.labels)
    else:
        drawn = _ranks(random, data.flow_labels())[data.flow]
    return Split(drawn >= 0.28, (drawn >= 0.2) & (drawn < 0.28), drawn < 0.2)


def _ranks(random: RandomState, labels: NDArray[np.bool_]) -> NDArray[np.float64]:
    """A random order of each class as numbers from 0 to below 1."""
    found = np.zeros(len(labels))
    for label in (False, True):
        mine = np.flatnonzero(labels == label)
        found[mine] = random.permutation(len(mine)) / max(1, len(mine))
    return found


# Results.


@dataclass(frozen=True, slots=True)
class Accuracy:
    """The shares of the test part that are classified correctly."""

    packet: float
    """Of single inference points."""
    flow: float
    """Of flows, with the votes of all points."""
    by_points: tuple[float, ...] = ()
    """Of flows with the votes of their first 1, 2, … points."""
    integers: float | None = None
    """As `packet`, for the integers that a switch computes; None where only floats were asked for."""
    integers_flow: float | None = None


def flow_accuracy(logits: NDArray[Any], flow: Rows, labels: NDArray[np.bool_], points: int) -> float:
    """The share of flows whose first `points` logits vote for the right class."""
    right: list[bool] = []
    for number in np.unique(flow):
        mine = flow == number
        right.append(vote([float(logit) for logit in logits[mine][:points]]) == bool(labels[mine][0]))
    return float(np.mean(right))


def network_accuracy(
    data: Dataset,
    protocol: Protocol,
    *,
    architecture: Architecture = FLOW_MODEL,
    encoding: FeatureEncoding | None = None,
    seed: int = 0,
    epochs: int = 30,
    integers: bool = False,
    report: Report | None = None,
) -> Accuracy:
    """Train the network on the split's training part and try it on the test part. With `integers`, train it with
    rounding as well and try what a switch computes; the other accuracies are then of rounded weights."""
    encoding = encoding or FeatureEncoding(identity=protocol is not Protocol.FLOWS_MASKED)
    rows, parts = encoding.from_arrays(data.points).astype(np.uint8), split(data, protocol, seed)
    made = fit(
        architecture,
        LabelledRows(rows[parts.train], data.labels[parts.train]),
        LabelledRows(rows[parts.early], data.labels[parts.early]),
        seed=seed,
        schedule=TrainingSchedule(epochs, 5 if integers else 0),
        inputs=encoding.range,
        progress=report,
    )
    given, labels, flow = rows[parts.test], data.labels[parts.test], data.flow[parts.test]
    logits = _batched(lambda part: made.network.run(part, encoding.range), given)
    by_points = tuple(flow_accuracy(logits, flow, labels, count) for count in range(1, len(POINTS) + 1))
    rounded = rounded_flow = None
    if integers:
        found = _batched(made.integers().run, given.astype(np.int64))
        rounded = float(((found >= 0) == labels).mean())
        rounded_flow = flow_accuracy(found, flow, labels, len(POINTS))
    return Accuracy(float(((logits >= 0) == labels).mean()), by_points[-1], by_points, rounded, rounded_flow)


def _batched(infer: Infer, rows: NDArray[Any]) -> NDArray[Any]:
    return np.concatenate([infer(rows[at : at + 256])[:, 0] for at in range(0, len(rows), 256)])


# The baselines.


def _trees(rows: NDArray[Any], labels: NDArray[np.bool_], seed: int) -> Callable[[NDArray[Any]], NDArray[np.bool_]]:
    """Gradient-boosted trees. InputError if scikit-learn is not installed."""
    try:
        from sklearn.ensemble import HistGradientBoostingClassifier  # type: ignore[import-untyped]  # noqa: PLC0415
    except ImportError:
        raise InputError("the baselines need scikit-learn", help="pip install 'sloop-serve[innet]'") from None
    settings = {"max_iter": 100, "max_depth": 6, "learning_rate": 0.3, "l2_regularization": 1.0, "min_samples_leaf": 4}
    model = HistGradientBoostingClassifier(**settings, early_stopping=False, random_state=seed).fit(rows, labels)
    return lambda given: np.asarray(model.predict(given), bool)


def baseline_packet(data: Dataset, seed: int = 0, *, random_buckets: bool = False) -> float:
    """Trees on the length of a packet and the gap before it, flows split; or on a random tenth of the buckets that
    these two fall into."""
    parts = split(data, Protocol.FLOWS, seed)
    features = np.stack([data.points.lengths, data.points.gaps_us], axis=1)
    if random_buckets:
        chosen = RandomState(seed).random_sample(LENGTH_BUCKETS + GAP_BUCKETS) < RANDOM_SHARE
        length = np.clip(data.points.lengths, 1, LENGTH_BUCKETS) - 1
        gap = LENGTH_BUCKETS + np.minimum(data.points.gaps_us // GAP_BUCKET_US, GAP_BUCKETS - 1)
        features = np.stack([np.where(chosen[length], length, -1), np.where(chosen[gap], gap, -1)], axis=1)
    predict = _trees(features[parts.train | parts.early], data.labels[parts.train | parts.early], seed)
    return float((predict(features[parts.test]) == data.labels[parts.test]).mean())


def baseline_flow(data: Dataset, seed: int = 0, *, random_buckets: bool = False) -> float:
    """Trees on histograms of a flow's lengths and gaps, all of its packets; or on a random tenth of the buckets."""
    parts = split(data, Protocol.FLOWS, seed)
    test = np.unique(data.flow[parts.test])
    train = np.setdiff1d(np.arange(len(data.classes)), test)
    features = data.histograms
    if random_buckets:
        count = round(RANDOM_SHARE * features.shape[1])
        features = features[:, RandomState(seed).permutation(features.shape[1])[:count]]
    features = features[:, (features[train] != features[train[:1]]).any(axis=0)]  # what never differs teaches nothing
    labels = data.flow_labels()
    if not features.shape[1]:
        return float(max(labels[test].mean(), 1 - labels[test].mean()))
    predict = _trees(features[train], labels[train], seed)
    return float((predict(features[test]) == labels[test]).mean())


# All side by side.


@dataclass(slots=True)
class AccuracyComparison:
    """Accuracies by name of the model; for the network by protocol and representation too. Means over seeds."""

    flows: int
    seeds: tuple[int, ...]
    packet: dict[str, list[float]] = field(default_factory=dict)
    flow: dict[str, list[float]] = field(default_factory=dict)
    by_points: list[tuple[float, ...]] = field(default_factory=list)

    def add(self, name: str, packet: float | None, flow: float | None) -> None:
        """One seed's accuracies of a model."""
        for table, value in ((self.packet, packet), (self.flow, flow)):
            if value is not None:
                table.setdefault(name, []).append(value)


BYTE_MODEL: Final = Architecture(89, (32, 64), (50, 100))
BASE10_MODEL: Final = Architecture(16, (32, 64), (50, 100), pool=2, same=True)
"""16 inputs are too few for two convolutions without padding and pools of 5."""


def compare(
    *,
    flows: int = 200,
    packets: int = 1100,
    seeds: Sequence[int] = (1, 2, 3),
    knobs: Knobs | None = None,
    report: Callable[[str], None] | None = None,
) -> AccuracyComparison:
    """Accuracies of network and baselines on `traffic.calls`, for each seed, with all protocols and representations."""
    say = report or (lambda line: None)
    found = AccuracyComparison(flows, tuple(seeds))
    for seed in seeds:
        data = dataset(calls(seed, flows, packets=packets, knobs=knobs))
        for random in (False, True):
            name = "trees, random tenth" if random else "trees"
            found.add(
                name,
                baseline_packet(data, seed, random_buckets=random),
                baseline_flow(data, seed, random_buckets=random),
            )
        say(f"seed {seed}: trees")
        for protocol in Protocol:
            made = network_accuracy(data, protocol, seed=seed)
            found.add(f"network, {protocol.value}", made.packet, made.flow)
            if protocol is Protocol.FLOWS_MASKED:
                found.by_points.append(made.by_points)
                rounded = network_accuracy(data, protocol, seed=seed, integers=True)
                found.add("network, integers", rounded.integers, rounded.integers_flow)
            say(f"seed {seed}: network, {protocol.value}")
        alone = network_accuracy(
            data,
            Protocol.FLOWS_MASKED,
            architecture=PACKET_MODEL,
            encoding=FeatureEncoding(flow_features=False),
            seed=seed,
        )
        found.add("network of packets", alone.packet, None)
        for representation, shape in ((Representation.BYTE, BYTE_MODEL), (Representation.BASE10, BASE10_MODEL)):
            other = network_accuracy(
                data, Protocol.FLOWS_MASKED, architecture=shape, encoding=FeatureEncoding(representation), seed=seed
            )
            found.add(f"network, {representation.value}", other.packet, other.flow)
            say(f"seed {seed}: network, {representation.value}")
    return found
