"""A fabric of emulated switches: slots, epochs, admission, changes of weights under load, and lost packets.

Each pipeline executes its instructions (`netnn.switch`) on packets as bytes. Packets take time: a unit computes
`products_per_pass` products per pass and takes packets one after another; links and passes have latencies; faults lose,
repeat and delay copies. The seed determines the run. An inference gives the network's answer, bit for bit, or none: if
one of its packets is lost, it ends at its time-out without an answer.

An inference needs a slot. The number of the inference is epoch · slots + slot. Each new inference in a slot has the
next epoch, so that every unit can drop packets of an earlier one. An inference ends with its last RESULT packet, or at
its time-out.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from random import Random
from typing import Annotated, Any, Final

import numpy as np
from numpy.typing import ArrayLike

from sloop.api import InputError, NonNegativeFloat, Range, check_range, check_ranges, listed
from sloop.api.experiments import stream
from sloop_systems.netnn.mapper import LINKS, NoCapacity
from sloop_systems.netnn.network import Ints
from sloop_systems.netnn.packets import Malformed, Packet, PacketKind, ValueEncoding, packets_of, parse, result_of
from sloop_systems.netnn.program import Program
from sloop_systems.netnn.switch import Emission, Multiplier, Pipeline, UnitCounts

LANES_MAX: Final = 256
"""Inferences that `run_in_lanes` executes together: registers of the flow model take 70 MB for them."""
TIMEOUT_NS: Final = 1_000_000
"""Of one inference, at least."""
TIMEOUT_LATENCIES: Final = 4
"""Of one inference, in modelled latencies: slots slow each other down."""


@dataclass(frozen=True, kw_only=True)
class Faults:
    """What happens to copies of packets on their links."""

    loss: Annotated[float, Range(least=0, most=1)] = 0.0
    """The share that is lost."""
    duplicates: Annotated[float, Range(least=0, most=1)] = 0.0
    """The share that arrives twice."""
    jitter_ns: NonNegativeFloat = 0.0
    """The longest additional delay; a delay as long as an inference makes the order random."""
    lost: frozenset[tuple[int, int]] = frozenset()
    """Single copies that are lost: (row, number of the copy within its inference, in order of sending)."""

    def __post_init__(self) -> None:
        """InputError if a share is outside 0 to 1."""
        check_ranges(self)


class InferenceEnding(StrEnum):
    """How an inference ended."""

    VERDICT = "verdict"
    ABORTED = "aborted"
    NO_SLOT = "no slot"


@dataclass(frozen=True)
class FlowVerdict:
    """The result of one row."""

    row: int
    ending: InferenceEnding
    logits: tuple[int, ...] | None
    """None without a verdict."""
    version: int | None
    """Of the weights that computed it."""
    start_ns: float
    """When it got its slot, on the emulator's clock; when it came, if it got none."""
    end_ns: float


@dataclass
class LayerCounts:
    """What the units of one layer counted together, in the columns of Table P6.1."""

    name: str
    packets: int
    """Copies received."""
    operations_max: int
    """Of the packet with the most."""
    operations: int
    passes: int
    sent: int
    memory_cells: int
    """Of one unit, for one slot."""
    drops: dict[str, int] = field(default_factory=dict)


@dataclass
class FabricCounts:
    """What happened in a run."""

    layers: tuple[LayerCounts, ...] = ()
    copies: int = 0
    """Copies sent, with those to the sink."""
    lost: int = 0
    duplicated: int = 0
    unroutable: int = 0
    """Packets with a label for which no switch has a route."""
    endings: dict[InferenceEnding, int] = field(default_factory=dict)
    sink_drops: dict[str, int] = field(default_factory=dict)


@dataclass
class _Open:
    """An inference that has a slot."""

    row: int
    inference: int
    version: int
    start_ns: float
    logits: Ints
    missing: set[int]
    """RESULT messages that have not arrived."""
    copies: int = 0


class Emulator:
    """A program on emulated switches. `run` executes rows; `submit`, `swap` and `inject` schedule single events, and
    `drain` lets everything happen."""

    def __init__(
        self,
        program: Program,
        *,
        seed: int = 0,
        faults: Faults | None = None,
        timeout_ns: float | None = None,
        multiplier: Multiplier = "lut16",
        waiting_max: int | None = None,
    ) -> None:
        """`waiting_max` rows may wait for a slot, any number if None; more end as `InferenceEnding.NO_SLOT`.
        `timeout_ns`: default 1 ms, and at least 4 modelled latencies."""
        if timeout_ns is None:
            timeout_ns = max(TIMEOUT_NS, TIMEOUT_LATENCIES * program.time.latency_ns)
        check_range("timeout_ns", timeout_ns, above=0)
        self.program = program
        self.faults = faults or Faults()
        self.timeout_ns = timeout_ns
        self.waiting_max = waiting_max
        self.now_ns = 0.0
        self.counts = FabricCounts()
        self.verdicts: list[FlowVerdict | None] = []
        self.pipelines = tuple(
            tuple(Pipeline(program, layer.label, unit.unit, multiplier) for unit in layer.units)
            for layer in program.layers
        )
        self._draw = stream(seed, "innet/faults")
        self._programs = {program.version: program}
        self._taken = {program.version}  # with those of swaps that are still to come
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._scheduled = 0
        self._free_ns: dict[tuple[int, int], float] = {}
        self._free_slots = deque(range(program.slots))
        self._epochs = [0] * program.slots
        self._open: dict[int, _Open] = {}
        self._waiting: deque[tuple[int, Ints]] = deque()

    # What users order

    def run(self, rows: ArrayLike, *, interval_ns: float = 0.0) -> tuple[list[FlowVerdict], FabricCounts]:
        """Execute rows that arrive every `interval_ns`; returns their verdicts in order, and the counts. InputError for
        a row that does not fit."""
        first = len(self.verdicts)
        for place, row in enumerate(self.program.check_rows(rows)):
            self.submit(row, self.now_ns + place * interval_ns)
        return self.drain()[first:], self.counts

    def submit(self, row: ArrayLike, at_ns: float | None = None) -> int:
        """Schedule a row at `at_ns`, now if None; returns its number. InputError if it does not fit."""
        (checked,) = self.program.check_rows(row)
        self.verdicts.append(None)
        self._at(self.now_ns if at_ns is None else at_ns, self._admit, len(self.verdicts) - 1, checked)
        return len(self.verdicts) - 1

    def swap(self, program: Program, at_ns: float | None = None) -> None:
        """Change the weights at `at_ns`, now if None, while inferences run. First all units get the new weights, then
        the feature extractor stamps new inferences with their version. Old weights are removed when no inference uses
        them. InputError if the program has another geometry or a version that is in use; `NoCapacity` if leaves have no
        room for both."""
        if _geometry(program) != _geometry(self.program):
            raise InputError(
                "the new program has other layers, fabric or inputs than the running one",
                where=f"version {program.version}",
                help="only weights, biases and shifts can be swapped; start another emulator",
            )
        for placement, layer in zip(program.placements, program.layers, strict=True):
            twice = placement.memory_bytes + sum(unit.weights.size + len(unit.bias) for unit in layer.units)
            room = program.fabric.memory_bytes * len(placement.leaves)
            if twice > room:
                raise NoCapacity(
                    f"with old and new weights it needs {twice:,} bytes, and its leaves have {room:,}",
                    where=f"layer {layer.name!r}",
                    help="drain the fabric and start another one with the new weights",
                )
        if program.version in self._taken:
            raise InputError(
                f"version {program.version} of the weights is in use",
                where="swap",
                help=f"give another than {listed([str(version) for version in sorted(self._taken)])}",
            )
        self._taken.add(program.version)
        self._at(self.now_ns if at_ns is None else at_ns, self._swap, program)

    def inject(self, content: bytes, unit: int, at_ns: float | None = None) -> None:
        """Send foreign bytes (those after an Ethernet header) to a unit of the layer that their label names."""
        self._at(self.now_ns if at_ns is None else at_ns, self._route, content, unit)

    def drain(self) -> list[FlowVerdict]:
        """Execute all scheduled events; returns the verdicts of all rows so far."""
        while self._events:
            self.now_ns, _, function, arguments = heapq.heappop(self._events)
            function(*arguments)
        assert not self._open
        assert not self._waiting
        self.counts.layers = tuple(self._layer_counts(label) for label in range(len(self.pipelines)))
        return [verdict for verdict in self.verdicts if verdict is not None]

    @property
    def versions(self) -> tuple[int, ...]:
        """The versions of weights that the switches have."""
        return tuple(self._programs)

    # The feature extractor

    def _admit(self, row: int, values: Ints) -> None:
        """A row comes: it gets a slot, waits for one, or is turned away."""
        if not self._free_slots:
            if self.waiting_max is not None and len(self._waiting) >= self.waiting_max:
                self._end(row, InferenceEnding.NO_SLOT, None, None, self.now_ns)
            else:
                self._waiting.append((row, values))
            return
        slot = self._free_slots.popleft()
        program = self.program
        inference = self._epochs[slot] << program.slot_bits | slot
        self._epochs[slot] = (self._epochs[slot] + 1) & ((1 << (32 - program.slot_bits)) - 1)
        begun = self._open[inference] = _Open(
            row=row,
            inference=inference,
            version=program.version,
            start_ns=self.now_ns,
            logits=np.zeros(int((program.result_starts + program.result_counts).max()), np.int64),
            missing=set(range(len(program.result_starts))),
        )
        self._at(self.now_ns + self.timeout_ns, self._abort, inference)
        packets = packets_of(program, values, inference)
        for packet, ready_ns in zip(packets, self._generation(len(packets)), strict=True):
            self._send(packet.build(), 0, ready_ns, begun)

    def _generation(self, packets: int) -> list[float]:
        """When the feature extractor has made each packet of an inference: by clones that double each pass, or by one
        packet that recirculates. It makes those of one inference after the other."""
        fabric = self.program.fabric
        cycle_ns = 1e9 / fabric.packets_per_s
        begin = max(self.now_ns, self._free_ns.get((-1, 0), 0.0))
        self._free_ns[-1, 0] = begin + packets * cycle_ns
        if fabric.clones_windows:
            first = begin + math.ceil(math.log2(packets)) * fabric.pass_ns
            return [first + (place + 1) * cycle_ns for place in range(packets)]
        return [begin + (place + 1) * fabric.pass_ns for place in range(packets)]

    def _abort(self, inference: int) -> None:
        """The time-out of an inference: it ends without a verdict, if it has not ended."""
        begun = self._open.get(inference)
        if begun is not None:
            self._close(begun, InferenceEnding.ABORTED, None)

    def _close(self, begun: _Open, ending: InferenceEnding, logits: tuple[int, ...] | None) -> None:
        """An inference ends: its slot is free for the next row."""
        del self._open[begun.inference]
        self._end(begun.row, ending, logits, begun.version if logits else None, begun.start_ns)
        self._free_slots.append(self.program.slot(begun.inference))
        self._retire()
        if self._waiting:
            self._admit(*self._waiting.popleft())

    def _end(
        self, row: int, ending: InferenceEnding, logits: tuple[int, ...] | None, version: int | None, start_ns: float
    ) -> None:
        self.verdicts[row] = FlowVerdict(row, ending, logits, version, start_ns, self.now_ns)
        self.counts.endings[ending] = self.counts.endings.get(ending, 0) + 1

    # Versions of the weights

    def _swap(self, program: Program) -> None:
        for pipeline in self._all_pipelines():
            pipeline.install(program)
        self._programs[program.version] = program
        self.program = program
        self._retire()

    def _retire(self) -> None:
        """Remove weights that no inference uses and no new one will."""
        used = {begun.version for begun in self._open.values()} | {self.program.version}
        for version in [version for version in self._programs if version not in used]:
            del self._programs[version]
            self._taken.remove(version)
            for pipeline in self._all_pipelines():
                pipeline.remove(version)

    def _all_pipelines(self) -> list[Pipeline]:
        return [pipeline for layer in self.pipelines for pipeline in layer]

    # Packets

    def _at(self, at_ns: float, function: Callable[..., None], *arguments: Any) -> None:  # noqa: ANN401
        """Call a function at an instant; those of the same instant in the order in which they were scheduled."""
        self._scheduled += 1
        heapq.heappush(self._events, (at_ns, self._scheduled, function, arguments))

    def _send(self, content: bytes, label: int, ready_ns: float, begun: _Open | None) -> None:
        """Multicast a packet to all units of a layer, or to the sink after the last."""
        for unit in range(len(self.pipelines[label]) if label < len(self.pipelines) else 1):
            self.counts.copies += 1
            number = (begun.row, begun.copies) if begun is not None else None
            if begun is not None:
                begun.copies += 1
            faults = self.faults
            if number in faults.lost or (faults.loss and self._draw.random() < faults.loss):
                self.counts.lost += 1
                continue
            is_repeated = bool(faults.duplicates) and self._draw.random() < faults.duplicates
            self.counts.duplicated += is_repeated
            for _ in range(1 + is_repeated):
                delay = self._draw.random() * faults.jitter_ns if faults.jitter_ns else 0.0
                fabric = self.program.fabric
                self._at(ready_ns + LINKS[fabric.routing] * fabric.link_ns + delay, self._route, content, unit)

    def _route(self, content: bytes, unit: int) -> None:
        """A packet arrives: its label says at which layer. Bytes without a label go to nobody."""
        label = content[4] if len(content) > 4 else len(self.pipelines) + 1
        if label == len(self.pipelines):
            self._collect(content)
        elif label < len(self.pipelines) and unit < len(self.pipelines[label]):
            self._process(label, unit, content)
        else:
            self.counts.unroutable += 1

    def _process(self, label: int, unit: int, content: bytes) -> None:
        """A unit takes a packet when it has done those before, and sends what it has finished."""
        fabric = self.program.fabric
        emissions, products = self.pipelines[label][unit].receive(content)
        passes = max(1, -(-products // fabric.products_per_pass))
        begin = max(self.now_ns, self._free_ns.get((label, unit), 0.0))
        self._free_ns[label, unit] = begin + passes * 1e9 / fabric.packets_per_s
        ready_ns = begin + -(-passes // fabric.clones) * fabric.pass_ns
        for emission in emissions:
            begun = self._open.get(emission.inference)
            for packet in emitted(self._programs[emission.version], label, unit, emission):
                self._send(packet.build(), label + 1, ready_ns, begun)

    def _collect(self, content: bytes) -> None:
        """The sink takes a RESULT packet; the last one of an inference gives its verdict."""
        try:
            packet = parse(content)
            message = result_of(packet, self.program)
        except Malformed:
            self._drop("malformed")
            return
        begun = self._open.get(packet.inference)
        if begun is None:
            self._drop("old epoch")
        elif packet.version != begun.version:
            self._drop("unknown version")
        elif message not in begun.missing:
            self._drop("duplicate")
        else:
            begun.missing.remove(message)
            start = int(self.program.result_starts[message])
            begun.logits[start : start + len(packet.values)] = packet.values
            if not begun.missing:
                self._close(begun, InferenceEnding.VERDICT, tuple(begun.logits[: self.program.classes].tolist()))

    def _drop(self, reason: str) -> None:
        self.counts.sink_drops[reason] = self.counts.sink_drops.get(reason, 0) + 1

    def _layer_counts(self, label: int) -> LayerCounts:
        return layer_counts(self.program.layers[label].name, self.pipelines[label])


def emitted(program: Program, label: int, unit: int, emission: Emission) -> list[Packet]:
    """The packets in which a unit sends an output position: to the next layer, or its logits to the sink."""
    is_last = label == len(program.layers) - 1
    parts = program.result_parts if is_last else program.layers[label + 1].parts
    width = max(1, program.fabric.payload_bytes // 4) if is_last else program.fabric.payload_bytes
    return [
        Packet(
            version=emission.version,
            label=label + 1,
            inference=emission.inference,
            source=unit,
            position=emission.position,
            values=emission.values[part * width : (part + 1) * width],
            part=part,
            kind=PacketKind.RESULT if is_last else PacketKind.DATA,
            encoding=ValueEncoding.INT32 if is_last else ValueEncoding.INT8,
        )
        for part in range(parts)
    ]


def layer_counts(name: str, pipelines: Sequence[Pipeline]) -> LayerCounts:
    """The counts of a layer's units together."""
    counts: list[UnitCounts] = [pipeline.counts for pipeline in pipelines]
    drops: dict[str, int] = {}
    for each in counts:
        for reason, dropped in each.drops.items():
            drops[reason] = drops.get(reason, 0) + dropped
    return LayerCounts(
        name=name,
        packets=sum(each.packets for each in counts),
        operations_max=max(each.operations_max for each in counts),
        operations=sum(each.operations for each in counts),
        passes=sum(each.passes for each in counts),
        sent=sum(each.sent for each in counts),
        memory_cells=pipelines[0].memory_cells,
        drops=drops,
    )


def _shuffled(
    arriving: Sequence[tuple[Packet, Ints]], draw: Random | None, duplicates: float
) -> list[tuple[Packet, Ints]]:
    """Packets as one unit gets them: in order, or in a random one with some of them twice."""
    found = list(arriving)
    if draw is not None:
        found += [each for each in arriving if draw.random() < duplicates]
        draw.shuffle(found)
    return found


def _geometry(program: Program) -> tuple[Any, ...]:
    """What two programs must have in common so that one can replace the other under load."""
    layers = [
        (layer.kind, layer.messages, layer.neurons, len(layer.units), layer.windows.tobytes(), layer.cell_windows)
        for layer in program.layers
    ]
    return program.fabric, program.inputs, program.input_count, program.classes, program.gather.tobytes(), *layers


def run_in_lanes(
    program: Program,
    rows: ArrayLike,
    *,
    seed: int | None = None,
    duplicates: float = 0.0,
    multiplier: Multiplier = "lut16",
) -> tuple[Ints, tuple[LayerCounts, ...]]:
    """Logits of many rows. Each instruction is executed for all rows at once, some hundred times as fast as one by one.

    All inferences get the same packets in the same order: that of sending, or with a `seed` a random one, in which the
    share `duplicates` comes twice. Each row has a slot of its own, whatever the program's fabric has. Counts are those
    of all inferences together; `operations_max` is of one packet of all of them.
    """
    checked = program.check_rows(rows)
    slots = 1 << (min(LANES_MAX, max(1, len(checked))) - 1).bit_length()
    wide = replace(program, fabric=replace(program.fabric, slots=slots))
    draw = stream(seed, "innet/lanes") if seed is not None else None
    pipelines = tuple(
        tuple(Pipeline(wide, layer.label, unit.unit, multiplier) for unit in layer.units) for layer in wide.layers
    )
    logits = np.zeros((len(checked), program.classes), np.int64)
    for start in range(0, len(checked), slots):  # each chunk has the next epoch
        chunk = checked[start : start + slots]
        values = wide.messages_of(chunk)
        arriving: list[tuple[Packet, Ints]] = [
            (packet, values[:, place, : len(packet.values)])
            for place, packet in enumerate(packets_of(wide, chunk[0], 0))
        ]
        inferences = np.arange(start, start + len(chunk), dtype=np.int64)
        for units in pipelines:
            arriving = _in_lanes(wide, units, inferences, arriving, draw, duplicates)
        found = np.concatenate([given for _, given in arriving], axis=1)
        logits[start : start + len(chunk)] = found[:, : program.classes]
    counts = tuple(layer_counts(layer.name, units) for layer, units in zip(wide.layers, pipelines, strict=True))
    return logits, counts


def _in_lanes(
    program: Program,
    pipelines: Sequence[Pipeline],
    inferences: Ints,
    arriving: Sequence[tuple[Packet, Ints]],
    draw: Random | None,
    duplicates: float,
) -> list[tuple[Packet, Ints]]:
    """The packets that the units of one layer send, in order, each with a row of values for each inference."""
    sent: list[tuple[Packet, Ints]] = []
    for unit, pipeline in enumerate(pipelines):
        for packet, given in _shuffled(arriving, draw, duplicates):
            for vectors, position in pipeline.receive_lanes(packet, inferences, given):
                emission = Emission(0, program.version, position, tuple(vectors[0].tolist()))
                at = 0
                for made in emitted(program, pipeline.layer.label, unit, emission):
                    sent.append((made, vectors[:, at : at + len(made.values)]))
                    at += len(made.values)
    return sorted(sent, key=lambda each: (each[0].position, each[0].source, each[0].part))
