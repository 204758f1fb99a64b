"""Maps layers to leaf switches and neurons to pipelines, and computes the memory and time that this takes.

A group is a layer with weights and the layers without weights that follow it (ReLU, pooling, flatten). Each group has
leaf switches of its own, as many as its memory needs. Spines and upper tiers have no layers, so that all copies of a
multicast cross equally many links. The first leaf extracts features. The neurons of a layer are split evenly over the
pipelines of its leaves; these pipelines exchange no packets with each other.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Final, Literal

import numpy as np

from sloop.api import InputError, PositiveFloat, PositiveInt, Range, check_ranges, listed
from sloop_systems.netnn.network import Layer, Network, Shape

Routing = Literal["two-tier", "three-tier"]
LINKS: Final = {"two-tier": 2, "three-tier": 4}
"""Links that a packet crosses from one leaf to the next."""


class NoCapacity(InputError):
    """A network does not fit onto a fabric; the message names the layer, what it needs, and what there is."""


@dataclass(frozen=True, kw_only=True)
class Fabric:
    """Programmable switches in a Clos network, and their speed. The defaults are those of a Tofino 2 in the papers, or
    our own where the papers give none."""

    leaves: Annotated[int, Range(least=1, most=4096)] = 8
    pipelines: Annotated[int, Range(least=1, most=64)] = 4
    units: Annotated[int, Range(least=1, most=64)] = 4
    """Pipelines over which a layer is split: 4, or 16 where a layer has four switches. More than the pipelines of one
    switch are those of several whole ones."""
    memory_bytes: PositiveInt = 200_000_000
    """Weights and activations that one leaf can hold."""
    routing: Routing = "two-tier"
    payload_bytes: Annotated[int, Range(least=1, most=255)] = 64
    """Activations, one byte each, in one packet."""
    slots: Annotated[int, Range(least=1, most=2**16)] = 8
    """Inferences at the same time; a power of two."""
    products_per_pass: PositiveInt = 5
    """Products that are computed for a packet in one pass through a pipeline; a packet with more recirculates."""
    stages: PositiveInt = 20
    """Of a pipeline."""
    alus: PositiveInt = 64
    """Of a stage: operations that it does side by side."""
    packets_per_s: PositiveFloat = 1.5e9
    """Of one pipeline."""
    pass_ns: PositiveFloat = 400.0
    """One pass through a pipeline."""
    link_ns: PositiveFloat = 500.0
    """One link and the switch between."""
    clones: Annotated[int, Range(least=1, most=4096)] = 1
    """Copies of a packet that share its products."""
    clones_windows: bool = True
    """Whether the feature extractor makes windows by clones that double each pass; else one packet recirculates."""
    sends_windows: bool = True
    """Whether the first convolution receives whole windows if they fit into a packet, as in NetNN, or always the input
    in segments of `payload_bytes`, as in the paper before it."""

    def __post_init__(self) -> None:
        """InputError if a number is out of range."""
        check_ranges(self)
        if self.slots & (self.slots - 1):
            raise InputError(f"slots is {self.slots}", where="fabric", help="give a power of two")
        if self.units > self.pipelines and self.units % self.pipelines:
            raise InputError(
                f"units is {self.units}, and a switch has {self.pipelines} pipelines",
                where="fabric",
                help=f"give at most {self.pipelines}, or a multiple of it",
            )
        if self.routing not in LINKS:
            raise InputError(f"unknown routing {self.routing!r}", where="fabric", help=f"give {listed([*LINKS], 'or')}")


@dataclass(frozen=True)
class LayerPlacement:
    """Where a layer is. `leaves` are numbered from 0; the feature extractor has leaf 0."""

    name: str
    leaves: tuple[int, ...]
    units: tuple[tuple[int, int], ...]
    """Leaf and pipeline of each unit."""
    neurons_per_unit: int
    """With padding: the last units may compute neurons of weight 0."""
    memory_bytes: int
    """Weights, biases and the outputs after pooling, one byte each."""


def memory_bytes(layer: Layer, shape: Shape) -> int:
    """Weights, biases and outputs after pooling, a byte each, as the paper counts them."""
    return int(layer.weights.size + layer.bias.size + np.prod(layer.output_shape(shape)))


def split(neurons: int, units: int) -> tuple[int, tuple[tuple[int, int], ...]]:
    """Neurons per unit with padding, and for each unit its first neuron and the one after its last."""
    base = -(-neurons // units)
    bounds = [min(neurons, unit * base) for unit in range(units + 1)]
    return base, tuple(pairwise(bounds))


def place(network: Network, fabric: Fabric) -> tuple[LayerPlacement, ...]:
    """Layers on leaves, in order, from leaf 1. NoCapacity if a layer or the network does not fit."""
    placements, leaf = [], 1
    for at, (layer, shape) in enumerate(zip(network.layers, network.shapes, strict=False)):
        needed = memory_bytes(layer, shape)
        is_last = at == len(network.layers) - 1
        count, units = _split_over_leaves(layer, needed, fabric, is_single=is_last and layer.neurons == 1)
        leaves = tuple(range(leaf, leaf + count))
        leaf += count
        ports = tuple((leaves[unit * count // units], unit % fabric.pipelines) for unit in range(units))
        placements.append(LayerPlacement(layer.name, leaves, ports, split(layer.neurons, units)[0], needed))
    if leaf > fabric.leaves:
        first = next(each for each in placements if each.leaves[-1] >= fabric.leaves)
        raise NoCapacity(
            f"the network needs {leaf} leaves, the fabric has {fabric.leaves} (one for features, then "
            f"{listed([f'{len(each.leaves)} for {each.name}' for each in placements])})",
            where=f"layer {first.name!r}",
            help="use a fabric with more leaves, or a smaller network",
        )
    return tuple(placements)


def _split_over_leaves(layer: Layer, needed: int, fabric: Fabric, *, is_single: bool) -> tuple[int, int]:
    """The leaves and units of a layer. Units have equally many neurons, but for the last: so the fullest leaf may have
    more than its part, and decides. NoCapacity if even one neuron on each unit is too much."""
    units = 1 if is_single else min(fabric.pipelines, fabric.units)
    count = 1 if is_single else max(-(-needed // fabric.memory_bytes), -(-fabric.units // fabric.pipelines))
    while True:
        each, _ = split(layer.neurons, count * units)
        fullest = min(layer.neurons, each * units)
        if fullest * needed <= fabric.memory_bytes * layer.neurons:
            return count, count * units
        if each == 1:
            raise NoCapacity(
                f"it needs {needed:,} bytes, and a leaf has {fabric.memory_bytes:,}; its {layer.neurons} neurons on "
                f"{units} units of each leaf are too few to split it so often",
                where=f"layer {layer.name!r}",
                help="use a smaller layer, or switches with more memory",
            )
        count += 1


# Routes through the Clos


@dataclass(frozen=True, order=True)
class FabricPort:
    """A pipeline of a switch, on one of the tiers 1 (leaves) to 3; switches and pipelines are numbered from 0."""

    tier: int
    switch: int
    pipeline: int


def wired(port: FabricPort, tier: int) -> FabricPort:
    """The port of an adjacent tier at the other end of a port's link: lower switch i, pipeline j, and upper switch j,
    pipeline i. A pipeline above the first tier has a link upwards and one downwards."""
    return FabricPort(tier, port.pipeline, port.switch)


def routes(routing: Routing, width: int, leaf: int, pipeline: int, target: int) -> tuple[tuple[FabricPort, ...], ...]:
    """The ports that the copies of a packet pass from a leaf's pipeline to all pipelines of the leaf `target`, one
    copy for each, over equally many links.

    With two tiers, the packet was processed in ingress, so the leaf's traffic manager can send a copy out of each
    pipeline. With three tiers, it was processed in egress too, so it can leave only by its own pipeline. Its copies
    separate on the second tier, and all take the detour over the third, even the copy that is already at the right
    place.
    """
    found = []
    for copy in range(width):
        if routing == "two-tier":
            out = FabricPort(1, leaf, copy)
            upper = wired(out, 2)
            crossing: tuple[FabricPort, ...] = (out, upper, FabricPort(2, upper.switch, target))
        else:
            up = wired(FabricPort(1, leaf, pipeline), 2)
            parted = FabricPort(2, up.switch, copy)
            top = wired(parted, 3)
            turned = FabricPort(3, top.switch, copy)
            down = wired(turned, 2)
            crossing = (
                FabricPort(1, leaf, pipeline),
                up,
                parted,
                top,
                turned,
                down,
                FabricPort(2, down.switch, target),
            )
        found.append((*crossing, wired(crossing[-1], 1)))
    return tuple(found)


# Latency and throughput


@dataclass(frozen=True)
class LayerTime:
    """What one unit of a layer does for one inference, packets in order."""

    name: str
    packets: int
    work_ns: float
    """Traversals of all its packets at the pipeline's rate: it bounds the throughput."""
    chain_ns: float
    """The packet with the most traversals, one after the other: it bounds the latency."""

    @property
    def unit_ns(self) -> float:
        """The longer of the two."""
        return max(self.work_ns, self.chain_ns)


@dataclass(frozen=True)
class FabricTime:
    """The modelled latency and throughput of a program on its fabric: our own figures, not those of the papers."""

    features_ns: float
    layers: tuple[LayerTime, ...]
    links_ns: float
    slots: int

    @property
    def latency_ns(self) -> float:
        """One inference alone."""
        return self.features_ns + sum(layer.unit_ns for layer in self.layers) + self.links_ns

    @property
    def bottleneck(self) -> LayerTime:
        """The layer with the most work."""
        return max(self.layers, key=lambda layer: layer.work_ns)

    @property
    def rate_rps(self) -> float:
        """Inferences per second that the slots and the bottleneck allow."""
        return min(self.slots * 1e9 / self.latency_ns, 1e9 / self.bottleneck.work_ns)

    @property
    def slots_to_saturate(self) -> int:
        """How many inferences at the same time keep the bottleneck busy."""
        return math.ceil(self.latency_ns / self.bottleneck.work_ns)

    @property
    def shares(self) -> int:
        """How many slots can be in use without slowing each other down: each then takes the constant `latency_ns`."""
        return max(1, min(self.slots, math.floor(self.latency_ns / self.bottleneck.work_ns)))


def time_of(fabric: Fabric, messages: Sequence[tuple[str, Sequence[int]]]) -> FabricTime:
    """The time of an inference. `messages` has each layer's name and, for one unit, the products of each packet."""
    cycle_ns = 1e9 / fabric.packets_per_s
    layers = []
    for name, products in messages:
        passes = [max(1, -(-each // fabric.products_per_pass)) for each in products]
        chain_ns = -(-max(passes) // fabric.clones) * fabric.pass_ns
        layers.append(LayerTime(name, len(passes), sum(passes) * cycle_ns, chain_ns))
    first = len(messages[0][1])
    by_clones = math.ceil(math.log2(first)) * fabric.pass_ns + first * cycle_ns
    features_ns = by_clones if fabric.clones_windows else first * fabric.pass_ns
    links_ns = len(layers) * LINKS[fabric.routing] * fabric.link_ns
    return FabricTime(features_ns, tuple(layers), links_ns, fabric.slots)
