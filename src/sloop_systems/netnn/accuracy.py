"""The accuracy of detection: data sets, the three ways to split them into training and test part, published baselines.

A split by packets puts packets of one flow into both parts. A model that sees addresses can then recognise the flow
instead of its behaviour. So there are three cases (`Protocol`), to be reported side by side: `PACKETS` with
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

from sloop.api import InputError
from sloop_systems.netnn.features import (
    GAP_MAX,
    KEY_BYTES,
    POINTS,
    FeatureEncoding,
    PointArrays,
    Representation,
    Rows,
    vote,
)
from sloop_systems.netnn.traffic import TrafficFlow, calls
from sloop_systems.netnn.training import FLOW_MODEL, PACKET_MODEL, Architecture, LabelledRows, TrainingSchedule, fit

LENGTH_BUCKETS: Final = 1500
"""One for each byte."""
GAP_BUCKETS: Final = 3000
GAP_BUCKET_US: Final = 20_000
"""60 s in 3000 buckets. The publication says 12 ms as well, which does not fit."""
RANDOM_SHARE: Final = 0.10
TEST_SHARE: Final = 0.2
EARLY_SHARE: Final = 0.1
"""Of what is not for the test."""

Infer = Callable[[Rows], NDArray[Any]]


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
        parts.append([keys, heads, flow.lengths[at], gaps[at], least[at], np.maximum.accumulate(gaps)[at]])
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


def split(data: Dataset, protocol: Protocol, seed: int, tested: float = TEST_SHARE) -> Split:
    """20 % (`tested`) for the test; the rest for training, of which a tenth decides when to end.

    By flows, or by packets. Each part has the same share of malicious flows (of points, if split by packets).
    """
    random = RandomState(seed)
    if protocol is Protocol.PACKETS:
        drawn = _ranks(random, data.labels)
    else:
        drawn = _ranks(random, data.flow_labels())[data.flow]
    early = tested + EARLY_SHARE * (1 - tested)
    return Split(drawn >= early, (drawn >= tested) & (drawn < early), drawn < tested)


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
    tested: float = TEST_SHARE,
) -> Accuracy:
    """Train the network on the split's training part and try it on the test part. With `integers`, then train it with
    rounding and try what a switch computes, too."""
    encoding = encoding or FeatureEncoding(identity=protocol is not Protocol.FLOWS_MASKED)
    rows, parts = encoding.rows(data.points).astype(np.uint8), split(data, protocol, seed, tested)
    made = fit(
        architecture,
        LabelledRows(rows[parts.train], data.labels[parts.train]),
        LabelledRows(rows[parts.early], data.labels[parts.early]),
        seed=seed,
        schedule=TrainingSchedule(epochs, 5 if integers else 0),
        inputs=encoding.range,
    )
    given, labels, flow = rows[parts.test], data.labels[parts.test], data.flow[parts.test]
    logits = _batched(lambda part: made.floats.run(part, encoding.range), given)
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
    """Gradient-boosted trees, on one thread: several that share a core with other processes wait for each other, a
    hundred times as long as they compute. InputError if scikit-learn is not installed."""
    try:
        from sklearn.ensemble import HistGradientBoostingClassifier  # type: ignore[import-untyped]  # noqa: PLC0415
        from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]  # noqa: PLC0415
    except ImportError:
        raise InputError("the baselines need scikit-learn", help="pip install scikit-learn") from None
    settings = {"max_iter": 100, "max_depth": 6, "learning_rate": 0.3, "l2_regularization": 1.0, "min_samples_leaf": 4}
    model = HistGradientBoostingClassifier(**settings, early_stopping=False, random_state=seed)
    with threadpool_limits(1):
        model.fit(rows, labels)

    def predict(given: NDArray[Any]) -> NDArray[np.bool_]:
        with threadpool_limits(1):
            return np.asarray(model.predict(given), bool)

    return predict


def baseline_packet(data: Dataset, seed: int = 0, *, random_buckets: bool = False, tested: float = TEST_SHARE) -> float:
    """Trees on the length of a packet and the gap before it, flows split; or on a random tenth of the buckets that
    these two fall into."""
    parts = split(data, Protocol.FLOWS, seed, tested)
    features = np.stack([data.points.lengths, data.points.gaps_us], axis=1)
    if random_buckets:
        chosen = RandomState(seed).random_sample(LENGTH_BUCKETS + GAP_BUCKETS) < RANDOM_SHARE
        length = np.clip(data.points.lengths, 1, LENGTH_BUCKETS) - 1
        gap = LENGTH_BUCKETS + np.minimum(data.points.gaps_us // GAP_BUCKET_US, GAP_BUCKETS - 1)
        features = np.stack([np.where(chosen[length], length, -1), np.where(chosen[gap], gap, -1)], axis=1)
    predict = _trees(features[parts.train | parts.early], data.labels[parts.train | parts.early], seed)
    return float((predict(features[parts.test]) == data.labels[parts.test]).mean())


def baseline_flow(data: Dataset, seed: int = 0, *, random_buckets: bool = False, tested: float = TEST_SHARE) -> float:
    """Trees on histograms of a flow's lengths and gaps, all of its packets; or on a random tenth of the buckets."""
    parts = split(data, Protocol.FLOWS, seed, tested)
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


@dataclass(frozen=True, slots=True)
class AccuracyTrial:
    """One model, trained and tried on the flows of one seed."""

    model: str
    """One of `MODELS`."""
    seed: int
    flows: int
    packets: int
    """Of each flow."""
    tested: float = TEST_SHARE
    """The share of the flows that are only tried."""


@dataclass(slots=True)
class AccuracyComparison:
    """Accuracies by name of the model, one for each seed; for the network by protocol and representation too."""

    tested: int
    """Flows that are tried for each seed."""
    seeds: tuple[int, ...]
    packet: dict[str, list[float]] = field(default_factory=dict)
    flow: dict[str, list[float]] = field(default_factory=dict)
    by_points: list[tuple[float, ...]] = field(default_factory=list)
    """Of the network, flows split and identity masked, for each seed."""

    def add(self, name: str, packet: float | None, flow: float | None) -> None:
        """One seed's accuracies of a model."""
        for table, value in ((self.packet, packet), (self.flow, flow)):
            if value is not None:
                table.setdefault(name, []).append(value)


BYTE_MODEL: Final = Architecture(89, (32, 64), (50, 100))
BASE10_MODEL: Final = Architecture(16, (32, 64), (50, 100), pool=2, same=True)
"""16 inputs are too few for two convolutions without padding and pools of 5."""
TREES: Final = "trees"
TENTH: Final = "trees, random tenth"
ALONE: Final = "network of packets"
INTEGERS: Final = "network, integers"
NETWORKS: Final = {protocol: f"network, {protocol.value}" for protocol in Protocol}
OTHERS: Final = {Representation.BYTE: "network, byte", Representation.BASE10: "network, base10"}
MODELS: Final = (NETWORKS[Protocol.FLOWS_MASKED], *list(NETWORKS.values())[:2], TREES, ALONE, *OTHERS.values())
"""What is compared, those that take longest first. The first gives `INTEGERS` too, and `TREES` gives `TENTH` too."""


def play(trial: AccuracyTrial) -> AccuracyComparison:
    """The accuracies of one trial, as a comparison of one seed; each trial depends on nothing else."""
    data = dataset(calls(trial.seed, trial.flows, packets=trial.packets))
    seed, tested = trial.seed, trial.tested
    found = AccuracyComparison(round(tested * trial.flows), (seed,))
    if trial.model == TREES:
        for name, random in ((TREES, False), (TENTH, True)):
            packet = baseline_packet(data, seed, random_buckets=random, tested=tested)
            found.add(name, packet, baseline_flow(data, seed, random_buckets=random, tested=tested))
        return found
    protocol = next((each for each, name in NETWORKS.items() if name == trial.model), Protocol.FLOWS_MASKED)
    shape, encoding = FLOW_MODEL, FeatureEncoding(identity=protocol is not Protocol.FLOWS_MASKED)
    if trial.model == ALONE:
        shape, encoding = PACKET_MODEL, FeatureEncoding(flow_features=False)
    for representation, name in OTHERS.items():
        if trial.model == name:
            shape = BYTE_MODEL if representation is Representation.BYTE else BASE10_MODEL
            encoding = FeatureEncoding(representation)
    integers = trial.model == MODELS[0]
    made = network_accuracy(
        data, protocol, architecture=shape, encoding=encoding, seed=seed, integers=integers, tested=tested
    )
    found.add(trial.model, made.packet, None if trial.model == ALONE else made.flow)
    if integers:
        found.by_points.append(made.by_points)
        found.add(INTEGERS, made.integers, made.integers_flow)
    return found


def together(parts: Sequence[AccuracyComparison]) -> AccuracyComparison:
    """Trials of all models and seeds as one comparison; each model's accuracies in the order of the parts."""
    found = AccuracyComparison(parts[0].tested, tuple(dict.fromkeys(seed for part in parts for seed in part.seeds)))
    for part in parts:
        for name in {**part.packet, **part.flow}:
            for values, of in ((part.packet, found.packet), (part.flow, found.flow)):
                if name in values:
                    of.setdefault(name, []).extend(values[name])
        found.by_points += part.by_points
    return found
