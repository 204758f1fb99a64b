"""Runs a `Program` in the Linux kernel: one network namespace for each switch, veth devices for its links.

    with XdpFabric(compile_network(network)) as fabric:
        verdicts = fabric.run(rows)

The feature extractor is a program of the network stack (tc) that turns one packet of features into the messages of its
inference; each unit is an XDP program that answers with packets to all units of the next layer. Slots, epochs, sums
and weights are kept in BPF maps. The answers equal `Network.run` bit for bit, in any order of packets and with
duplicates. An inference that loses a packet ends at its time-out without a verdict. Nothing is left when the process
ends, however it ends: namespaces, programs and links have no names, and no other process holds them. Linux only; needs
root, or CAP_BPF, CAP_NET_ADMIN and CAP_SYS_ADMIN.

All programs run on the CPU of the sending thread: the kernel runs the program for a packet where the packet was sent.
"""

import contextlib
import functools
import os
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self

import numpy as np
from numpy.typing import ArrayLike

from sloop.api import InputError, MachineError
from sloop.api.models import usable_cpus
from sloop_systems.netnn.bpf import (
    R0,
    XDP_PASS,
    BpfAssembler,
    Descriptor,
    KernelMap,
    KernelProgram,
    MapKind,
    ProgramKind,
    arithmetic_beyond_switches,
)
from sloop_systems.netnn.emulator import FlowVerdict
from sloop_systems.netnn.namespaces import CableEnd, FabricCables, Namespace, UnitCables
from sloop_systems.netnn.network import Ints
from sloop_systems.netnn.packets import HEADER, MAGIC
from sloop_systems.netnn.program import Program
from sloop_systems.netnn.requester import ETHERNET, Requester
from sloop_systems.netnn.xdp_code import UnitCode
from sloop_systems.netnn.xdp_features import FeatureCode, broadcast
from sloop_systems.netnn.xdp_layout import (
    AT_COUNTERS,
    AT_MESSAGES_SENT,
    AT_QUEUE,
    AT_REFUSED,
    BANKS,
    COUNTERS,
    ETHERNET_BYTES,
    FAULT_BYTES,
    LABEL_FEATURES,
    PAYLOAD,
    REGISTER_BYTES,
    FeatureLayout,
    FeatureMaps,
    UnitLayout,
    UnitMaps,
    payload_room,
    power_of_two,
)

TIMEOUT_S: Final = 1.0
"""After which an inference without a verdict is aborted. Packets need milliseconds; other programs may have the CPU."""
RECEIVE_BYTES: Final = 1 << 24
MTU_FEATURES: Final = 65_000
"""Of the cable on which rows come: one packet each."""


@dataclass(eq=False)
class _Unit:
    layout: UnitLayout
    number: int
    node: UnitCables
    maps: UnitMaps | None = None
    itself: tuple[CableEnd, CableEnd] | None = None

    @property
    def name(self) -> str:
        return f"{self.layout.layer.name}.{self.number}"


class XdpFabric:
    """A compiled network in the kernel, for the duration of a `with` block."""

    def __init__(self, program: Program, *, faults: bool = False, cpu: int | None = None) -> None:
        """`faults`: units can lose and duplicate packets, for tests. `cpu`: on which it runs; default the last one of
        this process. NoCapacity if the program does not fit into the kernel's limits."""
        self._program, self._with_faults = program, faults
        self._cpu = usable_cpus()[-1] if cpu is None else cpu
        self._layouts = [UnitLayout(program, layer) for layer in program.layers]
        for layout in self._layouts:
            layout.check()
        self._feature_layout = FeatureLayout(program)
        if program.input_count > MTU_FEATURES - PAYLOAD:
            raise InputError(
                f"a row has {program.input_count:,} inputs; one packet carries {MTU_FEATURES - PAYLOAD:,}",
                help="use a smaller input, or the emulator",
            )
        self._units: list[list[_Unit]] = []
        self._programs: list[KernelProgram] = []
        self._versions: list[int | None] = [program.version, None]
        """Of each bank."""
        self._swapping = threading.Lock()
        self._resources: contextlib.ExitStack | None = None

    def __enter__(self) -> Self:
        """Builds it. MachineError without the rights."""
        with contextlib.ExitStack() as opening:
            self._build(opening)
            self._resources = opening.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Removes it from the kernel. A second call does nothing."""
        if self._resources is not None:
            self._resources.close()
            self._resources = None
        self._units, self._programs = [], []

    def run(self, rows: ArrayLike, *, timeout_s: float = TIMEOUT_S, at_once: int = 0) -> list[FlowVerdict]:
        """A verdict for each row, in order, with instants of the machine's monotonic clock. At most `at_once`
        inferences run at the same time, by default one in each slot, and never more; the others wait. InputError if a
        row does not fit."""
        if self._resources is None:
            raise MachineError("the fabric is not open", help="use it in a `with` block")
        return self._requester.run(rows, timeout_s=timeout_s, at_once=at_once)

    def swap(self, program: Program) -> None:
        """Replaces the weights under load: inferences that have begun end with the weights with which they began.

        It first waits for inferences that began before the last swap. InputError if the program has another form, or
        the number of a version that is in use."""
        self._check_form(program)
        with self._swapping:
            if program.version in self._versions:
                raise InputError(
                    f"version {program.version} of the weights is in use", help="give the new weights another version"
                )
            requester = self._requester
            with requester.settled:
                requester.settled.wait_for(requester.all_of_this_generation)
            bank = (requester.generation + 1) % BANKS
            self._versions[bank] = program.version
            for units, layer in zip(self._units, program.layers, strict=True):
                for unit, weights in zip(units, layer.units, strict=True):
                    _write_bank(unit, UnitLayout(program, layer), bank, weights, program.version)
            with requester.settled:
                self._feature_maps.version.write(0, struct.pack("<I", program.version))
                requester.generation += 1

    def set_order(self, order: Sequence[int] | None) -> None:
        """Sets the order in which the feature extractor sends the messages of an inference, possibly some of them
        twice. None: ascending. InputError if there are more than twice as many as messages."""
        chosen = range(self._program.layers[0].messages) if order is None else order
        if len(chosen) > self._feature_layout.order_max:
            raise InputError(
                f"an order of {len(chosen):,} messages; at most {self._feature_layout.order_max:,}", help="repeat fewer"
            )
        self._feature_maps.order.write(0, self._feature_layout.order_table(chosen))

    def lose(self, layer: int, unit: int, packet: int) -> None:
        """One unit loses one packet: number `packet` of those that it receives from now on, from 0."""
        chosen = self._units[layer][unit]
        received = self._counters_of(chosen)["packets"]
        self._write_faults(chosen, 0.0, 0.0, 1, lose=received + packet + 1)

    def send(self, layer: int, unit: int, packets: Sequence[bytes]) -> None:
        """Sends packets to a unit on its first cable, as a switch before it would: for tests."""
        source = self._units[layer][unit].node.sources[0]
        room = payload_room(self._program) + PAYLOAD - ETHERNET_BYTES
        with contextlib.closing(source.namespace.packet_socket(source)) as end:
            for content in packets:
                end.send(ETHERNET + content.ljust(room, b"\0"))

    def counters(self) -> dict[str, dict[str, int]]:
        """What each unit and the feature extractor have counted, by name."""
        found = {unit.name: self._counters_of(unit) for units in self._units for unit in units}
        registers = self._feature_maps.registers.read(0)
        found["features"] = {
            "refused": struct.unpack_from("<Q", registers, AT_REFUSED)[0],
            "sent": struct.unpack_from("<Q", registers, AT_MESSAGES_SENT)[0],
        }
        return found

    def programs(self) -> dict[str, KernelProgram]:
        """The programs in the kernel, by name."""
        return {each.name: each for each in self._programs}

    def _build(self, opening: contextlib.ExitStack) -> None:
        sizes = [(layout.layer.name, len(layout.layer.units)) for layout in self._layouts]
        wiring = FabricCables(opening, sizes, mtu=MTU_FEATURES)
        self._units = [
            [_Unit(layout, number, node) for number, node in enumerate(nodes)]
            for layout, nodes in zip(self._layouts, wiring.layers, strict=True)
        ]
        self._pass_all(opening, wiring.host, wiring.verdicts)
        for layer, layout in zip(self._units, self._layouts, strict=True):
            self._build_layer(opening, layer, layout)
        self._build_features(opening, wiring.features, wiring.features_in, wiring.features_out)
        self._rows = opening.enter_context(contextlib.closing(wiring.host.packet_socket(wiring.rows)))
        results = [
            opening.enter_context(contextlib.closing(wiring.host.packet_socket(end, receive_bytes=RECEIVE_BYTES)))
            for end in wiring.verdicts
        ]
        self._requester = Requester(self._program, self._begin, results, self._cpu)

    def _pass_all(self, opening: contextlib.ExitStack, namespace: Namespace, ports: Sequence[CableEnd]) -> None:
        """Lets devices poll for packets. Without, those of the host would lose what XDP redirects to them, and a packet
        that comes back to the feature extractor would do so before any unit gets its turn."""
        code = BpfAssembler()
        code.mov(R0, XDP_PASS)
        code.exit()
        self._attach(opening, ProgramKind.XDP, code, f"pass.{namespace.name}", namespace, ports)

    def _build_layer(self, opening: contextlib.ExitStack, units: Sequence[_Unit], layout: UnitLayout) -> None:
        def table(name: str, content: bytes) -> KernelMap:
            made = opening.enter_context(KernelMap(MapKind.ARRAY, name, value_bytes=len(content), entries=1))
            made.write(0, content)
            return made

        messages, outs = table("messages", layout.message_table()), table("outs", layout.out_table())
        windows = table("windows", layout.window_table()) if layout.layer.kind == "rows" else None
        for unit in units:
            if layout.recirculates or self._with_faults:
                unit.itself = unit.node.namespace.connect(unit.node.namespace, ("itself", "again"))
            unit.maps = UnitMaps(
                registers=_array(opening, "registers", REGISTER_BYTES),
                banks=_array(opening, "banks", BANKS << layout.bank_bits),
                faults=_array(opening, "faults", FAULT_BYTES) if self._with_faults else None,
                state=_array(opening, "state", layout.state_bytes, self._program.slots),
                weights=_array(opening, "weights", layout.block_bytes, BANKS * layout.blocks),
                messages=messages,
                windows=windows,
                outs=outs,
                ports=self._ports(opening, unit.node.outputs),
                ports_and_self=self._ports(opening, [*unit.node.outputs, unit.itself[0]]) if unit.itself else None,
            )
            _write_bank(unit, layout, 0, layout.layer.units[unit.number], self._program.version)
            if self._with_faults:
                self._write_faults(unit, 0.0, 0.0, 1, lose=-1)
            code = UnitCode(layout, unit.number, unit.maps).build()
            name = f"{layout.layer.label}.{unit.number}"
            inputs = [*unit.node.inputs, *(unit.itself[1:] if unit.itself else ())]
            self._attach(opening, ProgramKind.XDP, code, name, unit.node.namespace, inputs)

    def _ports(self, opening: contextlib.ExitStack, ports: Sequence[CableEnd]) -> KernelMap:
        """The devices to which a program sends copies, all of one namespace."""
        table = opening.enter_context(KernelMap(MapKind.DEVICES, "ports", value_bytes=4, entries=len(ports)))

        def fill() -> None:
            for place, port in enumerate(ports):
                table.write(place, struct.pack("<I", port.device))

        ports[0].namespace.within(fill)
        return table

    def _build_features(
        self, opening: contextlib.ExitStack, namespace: Namespace, rows: CableEnd, units: Sequence[CableEnd]
    ) -> None:
        layout = self._feature_layout
        gather = layout.gather_table()
        self._feature_maps = FeatureMaps(
            registers=_array(opening, "registers", power_of_two(AT_QUEUE + 4 * layout.queue)),
            version=_array(opening, "version", 8),
            state=_array(opening, "state", layout.state_bytes, self._program.slots),
            gather=_array(opening, "gather", len(gather)),
            order=_array(opening, "order", 4 + 4 * layout.order_max),
        )
        self._feature_maps.gather.write(0, gather)
        self._feature_maps.version.write(0, struct.pack("<I", self._program.version))
        self.set_order(None)
        itself, again = namespace.connect(namespace, ("itself", "again"))
        copy, copied = namespace.connect(namespace, ("copy", "copied"))
        self._pass_all(opening, namespace, [again])
        code = broadcast(self._ports(opening, units))
        self._attach(opening, ProgramKind.XDP, code, "copies", namespace, [copied])
        code = FeatureCode(layout, self._feature_maps, copy.device, itself.device).build()
        self._attach(opening, ProgramKind.TC, code, "features", namespace, [rows, again])

    def _attach(
        self,
        opening: contextlib.ExitStack,
        kind: ProgramKind,
        code: BpfAssembler,
        name: str,
        namespace: Namespace,
        ports: Sequence[CableEnd],
    ) -> None:
        assert not arithmetic_beyond_switches(code.assemble()), f"{name} multiplies"
        program = opening.enter_context(KernelProgram.load(kind, code, f"sl{os.getpid()}.{name}"))
        self._programs.append(program)

        def attached() -> list[Descriptor]:
            attach = program.attach_tc if kind is ProgramKind.TC else program.attach_xdp
            return [opening.enter_context(attach(port.device)) for port in ports]

        namespace.within(attached)

    def _write_faults(self, unit: _Unit, loss: float, duplication: float, seed: int, *, lose: int) -> None:
        if unit.maps is None or unit.maps.faults is None:
            raise InputError("the fabric was made without faults", help="give `faults=True`")
        chances = (min(int(share * 2**32), 2**32 - 1) for share in (loss, duplication))
        random_state = seed * 0x9E3779B97F4A7C15 % 2**64 or 1
        unit.maps.faults.write(0, struct.pack("<QIIq", random_state, *chances, lose))

    def _counters_of(self, unit: _Unit) -> dict[str, int]:
        assert unit.maps is not None
        values = struct.unpack_from(f"<{len(COUNTERS)}Q", unit.maps.registers.read(0), AT_COUNTERS)
        return dict(zip(COUNTERS, values, strict=True))

    def _check_form(self, program: Program) -> None:
        """InputError unless two programs differ in weights, biases and shifts only."""

        def form(one: Program) -> list[object]:
            found: list[object] = [one.inputs, one.classes, one.slots, one.fabric.payload_bytes, one.gather.tolist()]
            for layer in one.layers:
                found += [layer.kind, layer.neurons, len(layer.units), layer.cell_windows, layer.positions]
                found += [layer.starts.tolist(), layer.counts.tolist(), layer.windows.tolist()]
            return found

        if form(program) != form(self._program):
            raise InputError(
                "the new program differs in more than its weights", help="build another fabric for another network"
            )

    def _begin(self, inference: int, row: Ints) -> None:
        """Sends the packet of features that begins an inference."""
        header = HEADER.pack(MAGIC, 0, LABEL_FEATURES, 0, inference, 0, 0, 0, 0, 0)
        frame = ETHERNET + header + row.astype(np.uint8).tobytes() + bytes(payload_room(self._program))
        try:
            self._rows.send(frame)
        except OSError as error:
            what = f"cannot send a row of features into the fabric: {error.strerror}"
            raise MachineError(what, help="try again; the machine may be short of memory for packets") from error


def _array(opening: contextlib.ExitStack, name: str, value_bytes: int, entries: int = 1) -> KernelMap:
    return opening.enter_context(KernelMap(MapKind.ARRAY, name, value_bytes=value_bytes, entries=entries))


def _write_bank(unit: _Unit, layout: UnitLayout, bank: int, weights: object, version: int) -> None:
    """Writes one version of a unit's weights, and only then marks the bank as valid."""
    assert unit.maps is not None
    size = 1 << layout.bank_bits
    banks = bytearray(unit.maps.banks.read(0))
    banks[bank * size : (bank + 1) * size] = bytes(size)
    unit.maps.banks.write(0, bytes(banks))
    for block, content in enumerate(layout.weight_blocks(weights)):  # type: ignore[arg-type]
        unit.maps.weights.write(BANKS * block + bank, content)
    registers = layout.bank(weights, version, layout.layer.shift)  # type: ignore[arg-type]
    banks[bank * size : bank * size + len(registers)] = registers
    unit.maps.banks.write(0, bytes(banks))


@functools.cache
def why_no_xdp() -> str:
    """Why this machine cannot run programs in the kernel; empty if it can. It tries once all that a fabric needs."""
    code = BpfAssembler()
    code.mov(R0, XDP_PASS)
    code.exit()
    try:
        with (
            Namespace("try") as namespace,
            KernelProgram.load(ProgramKind.XDP, code, "try") as driver,
            KernelProgram.load(ProgramKind.TC, code, "try") as stack,
            KernelMap(MapKind.DEVICES, "try", value_bytes=4, entries=1),
        ):
            end, _ = namespace.connect(namespace, ("one", "two"))
            namespace.within(lambda: driver.attach_xdp(end.device)).close()
            namespace.within(lambda: stack.attach_tc(end.device)).close()
    except (MachineError, OSError) as error:
        return str(error).splitlines()[0]
    return ""
