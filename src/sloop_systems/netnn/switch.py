"""One pipeline of a programmable switch: an instruction set without multiplication, registers, and a layer's programs.

A packet's fields are lanes: one number, or an array whose elements are computed side by side, as an action does in one
stage. To execute many inferences that get the same packets in the same order, a field may have a leading axis of
inferences too (`Pipeline.receive_lanes`). A program is a straight line of instructions, all of the set `OPERATIONS`: no
multiplication, division, floating point or loop. A packet that must be processed again recirculates with another
program: a message that completes windows, and a window that completes a pooling cell.

Registers are arrays with a cell per activation and slot. Each cell stores the epoch in which it was written. A read in
another epoch returns the initial value, so that no cell needs to be cleared.

**What is counted** follows Table P6.1 of the paper, by the convention that gives all its rows. Counted are: the shifts,
additions and subtractions of a product by shifts and adds (14 for eight bits), additions of a dot product and into a
sum, register reads and writes, and the arithmetic of register addresses. Not counted are: comparisons, predicates,
biases, ReLU, requantisation, header fields, look-ups, and the registers for bookkeeping only (epochs, seen messages,
counters).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from sloop_systems.netnn.mapper import Fabric, NoCapacity
from sloop_systems.netnn.network import Ints
from sloop_systems.netnn.packets import Malformed, Packet, message_of, parse
from sloop_systems.netnn.program import LayerProgram, Program, UnitProgram

Multiplier = Literal["shift-add", "lut16", "lut8"]
Fields = dict[str, Any]
PLAIN, COUNTED, PRODUCT, EFFECT = range(4)
Step = tuple[str, Callable[[Fields], Any], int, str]
"""One instruction, prepared: the field it writes, what computes its value, which lanes are counted, and the field whose
lanes are not. `EFFECT`: it writes no field, and returns why the packet is dropped, or None."""

OPERATIONS: Final = (
    *("mov", "add", "sub", "and", "or", "shl", "shr", "sar", "cmp", "tbl"),
    *("reg_read", "reg_write", "mcast", "recirc", "drop"),
)
"""All operations there are."""
LUT_SHIFT: Final = 8
"""`lut8` has products without their lowest eight bits."""
NEVER: Final = 2**30
OPS, PRODUCTS, AGAIN, SENT = "@ops", "@products", "@again", "@sent"
"""What a pass leaves behind: counted operations, products, (program, fields) to recirculate, vectors to send."""


@dataclass(frozen=True, eq=False)
class Instruction:
    """One operation on all lanes of its operands, which are names of fields."""

    operation: str
    to: str = ""
    a: str = ""
    b: str = ""
    when: str = ""
    """A predicate: the lanes in which the operation acts."""
    bit: int = -1
    """The predicate is this bit of the field `when`; a lane where it is 0 becomes 0."""
    detail: Any = None
    """A table, a register, a comparison, the program to recirculate to, or why a packet is dropped."""
    is_counted: bool = False
    idle_lanes: int = 0
    """Per element of `a`, lanes that only copy, such as the address base + 0: they are not counted."""
    is_product: bool = False
    """Whether its lanes are products of an activation and a weight."""


# Registers


@dataclass
class Register:
    """An array of cells for each slot. A cell of another epoch reads as the initial value that the reader gives."""

    name: str
    cells: int
    bits: int
    is_activation: bool
    """Whether Table P6.1 counts it as memory."""
    slots: int
    is_tagged: bool = True
    """Whether its cells have epochs; the one that has each slot's latest epoch does not."""
    values: NDArray[Any] = field(init=False)
    epochs: Ints = field(init=False)

    def __post_init__(self) -> None:
        """Make the cells."""
        self.values = np.zeros((self.slots, self.cells), {8: np.int8, 32: np.int32, 64: np.int64}[self.bits])
        self.epochs = np.full((self.slots, self.cells), -1, np.int64)


# The assembler


@dataclass
class ProgramBuilder:
    """Builds a straight-line program: each method adds instructions and returns the name of the field they write."""

    multiplier: Multiplier
    is_signed: bool = True
    """Whether activations are int8, for look-ups; otherwise they are unsigned bytes."""
    instructions: list[Instruction] = field(default_factory=list)
    constants: Fields = field(default_factory=dict)

    def constant(self, value: int | NDArray[Any]) -> str:
        """A field that has this value in every packet."""
        name = f"#{len(self.constants)}"
        self.constants[name] = value if isinstance(value, int) else np.asarray(value, np.int32)
        return name

    def put(self, operation: str, a: str = "", b: str = "", *, to: str = "", **others: Any) -> str:  # noqa: ANN401
        """Add one instruction."""
        to = to or f"t{len(self.instructions)}"
        self.instructions.append(Instruction(operation, to, a, b, **others))
        return to

    def add_lanes(self, base: str, lanes: int) -> str:
        """Addresses base, base + 1 … base + lanes - 1, for each element of `base`."""
        return self.put("add", base, self.constant(np.arange(lanes)), detail="lanes", idle_lanes=1, is_counted=True)

    def multiply(self, x: str, factor: int | NDArray[Any] | str, *, is_product: bool = False) -> str:
        """x times a constant, or times a field of int8. Signed, by two's complement: the term of the highest bit is
        subtracted."""
        if self.multiplier != "shift-add":
            if is_product:
                return self._look_up(x, factor if isinstance(factor, str) else self.constant(factor))
            if isinstance(factor, int):
                return self._multiply_by(x, factor)
        if isinstance(factor, str):
            bits, weights = 8, factor
        else:
            bits = max(8, int(np.max(factor)).bit_length() + 1, int(-np.min(factor)).bit_length() + 1)
            weights = self.constant(factor)
        terms = [
            self.put("mov", x, when=weights, bit=0, is_product=is_product),
            *(self.put("shl", x, self.constant(bit), when=weights, bit=bit, is_counted=True) for bit in range(1, bits)),
        ]
        *others, before_last, last = terms
        others.append(self.put("sub", before_last, last, is_counted=True))
        while len(others) > 1:
            pairs = [
                self.put("add", one, other, is_counted=True)
                for one, other in zip(others[::2], others[1::2], strict=False)
            ]
            others = pairs + others[2 * len(pairs) :]
        return others[0]

    def _multiply_by(self, x: str, factor: int) -> str:
        """x times a constant that is not negative: one shift for each of its bits, without the convention's other
        operations."""
        terms = [
            self.put("shl", x, self.constant(bit), is_counted=True)
            for bit in range(factor.bit_length())
            if factor >> bit & 1
        ]
        while len(terms) > 1:
            terms[:2] = [self.put("add", *terms[:2], is_counted=True)]
        return terms[0]

    def _look_up(self, x: str, weights: str) -> str:
        """A product from the table of all products of two bytes."""
        if self.multiplier == "lut16":
            return self.put("tbl", x, weights, detail=products16(is_signed=self.is_signed), is_product=True)
        found = self.put("tbl", x, weights, detail=products8(), is_product=True)
        return self.put("shl", found, self.constant(LUT_SHIFT))

    def sum_lanes(self, products: str, lanes: int) -> str:
        """The sum over the last axis, pairwise: ceil(log2(lanes)) stages."""
        while lanes > 1:
            products = self.put("add", products, detail="pairs", is_counted=True)
            lanes = (lanes + 1) // 2
        return self.put("mov", products, detail="first lane")

    def largest(self, a: str, b: str) -> str:
        """The larger of two fields."""
        return self.put("mov", a, b, when=self.put("cmp", a, b, detail="ge"))

    def smallest(self, a: str, b: str) -> str:
        """The smaller of two fields."""
        return self.put("mov", b, a, when=self.put("cmp", a, b, detail="ge"))

    def requantise(self, sums: str, shift: int) -> str:
        """ReLU, rounding, shift, and the limit of seven bits."""
        positive = self.largest(sums, self.constant(0))
        if shift:
            rounded = self.put("add", positive, self.constant(1 << (shift - 1)))
            positive = self.put("sar", rounded, self.constant(shift))
        return self.smallest(positive, self.constant(127))

    def count_up(self, register: Register, cell: str) -> str:
        """Add 1 to cells of a register that keeps order, and return the new values."""
        found = self.put("add", self.put("reg_read", cell, detail=register), self.constant(1))
        self.put("reg_write", cell, found, detail=register)
        return found

    def program(self) -> "SwitchProgram":
        """The finished program."""
        return SwitchProgram(tuple(self.instructions), dict(self.constants))


@cache
def products16(*, is_signed: bool = True) -> NDArray[np.int16]:
    """All products of a byte and an int8, indexed by the bytes of both: 65,536 entries of two bytes, which the control
    plane writes. The first byte is an int8 if `is_signed`, else unsigned."""
    unsigned = np.arange(256, dtype=np.uint8)
    signed = unsigned.view(np.int8).astype(np.int16)
    return np.multiply.outer(signed if is_signed else unsigned.astype(np.int16), signed).ravel()


@cache
def products8() -> NDArray[np.int8]:
    """All products without their lowest eight bits: 65,536 entries of a byte. Sums of them are not exact."""
    return (products16() >> LUT_SHIFT).astype(np.int8)


@dataclass(frozen=True, eq=False)
class SwitchProgram:
    """Instructions, and fields with the same value in every packet."""

    instructions: tuple[Instruction, ...]
    constants: Mapping[str, Any]
    steps: tuple[Step, ...] = field(init=False)

    def __post_init__(self) -> None:
        """Prepare the interpreter."""
        steps = tuple(_STEPS[each.operation](each, self.constants) for each in self.instructions)
        object.__setattr__(self, "steps", steps)

    def run(self, fields: Mapping[str, Any]) -> tuple[Fields, str | None]:
        """One pass of a packet: its fields afterwards, and why it was dropped, if it was."""
        found: Fields = {**self.constants, OPS: 0, PRODUCTS: 0, AGAIN: [], SENT: [], **fields}
        counted = 0
        for to, compute, kind, idle in self.steps:
            if kind == PLAIN:
                found[to] = compute(found)
            elif kind == COUNTED:
                value = found[to] = compute(found)
                counted += _lanes(value) - (_lanes(found[idle]) if idle else 0)
            elif kind == PRODUCT:
                value = found[to] = compute(found)
                found[PRODUCTS] += _lanes(value)
            else:
                reason = compute(found)
                if reason is not None:
                    return found, reason
        found[OPS] += counted
        return found, None

    def depth(self) -> int:
        """The number of stages, if all that does not depend on each other runs side by side."""
        ready: dict[str, int] = {}
        for each in self.instructions:
            operands = (each.a, each.b, each.when)
            ready[each.to] = 1 + max((ready.get(name, 0) for name in operands), default=0)
        return max(ready.values(), default=0)


# The interpreter: each function makes the step of one instruction. No step multiplies.


def _lanes(value: Any) -> int:  # noqa: ANN401
    return 1 if type(value) is int else value.size  # np.size is six times as slow


def _beside(value: Any, place: Any) -> Any:  # noqa: ANN401
    """A number of each inference, such as its slot, in the shape that fits an array of places."""
    return value if type(value) is int else value.reshape(-1, *(1 for _ in np.shape(place)))


def _holds(predicate: Any) -> bool:  # noqa: ANN401
    """A predicate that must be the same for all inferences that are executed together."""
    if type(predicate) is bool:
        return predicate
    found = bool(predicate.flat[0])
    assert (predicate == found).all(), "inferences in lanes got different packets"
    return found


def _counted(instruction: Instruction, compute: Callable[[Fields], Any]) -> Step:
    """A step that writes what `compute` returns."""
    kind = PRODUCT if instruction.is_product else COUNTED if instruction.is_counted else PLAIN
    return instruction.to, compute, kind, instruction.a if instruction.idle_lanes else ""


def _effect(act: Callable[[Fields], str | None]) -> Step:
    """A step that acts on registers or the packet."""
    return "", act, EFFECT, ""


def _predicated(instruction: Instruction, constants: Mapping[str, Any], shift: int) -> Callable[[Fields], Any]:
    """`a << shift` in the lanes where a bit of the predicate is 1, else 0."""
    a, when, bit = instruction.a, instruction.when, instruction.bit
    if when in constants:  # the mask of a constant is part of the table entry
        mask = -(constants[when] >> bit & 1)
        return lambda fields: (fields[a] << shift) & mask
    return lambda fields: (fields[a] << shift) & -(fields[when] >> bit & 1)


def _mov(instruction: Instruction, constants: Mapping[str, Any]) -> Step:
    a, b, when = instruction.a, instruction.b, instruction.when
    if instruction.bit >= 0:
        return _counted(instruction, _predicated(instruction, constants, 0))
    if instruction.detail == "first lane":
        return _counted(instruction, lambda fields: fields[a][..., 0])
    if instruction.detail == "beside the neurons":
        return _counted(instruction, lambda fields: fields[a][..., None, :])
    if instruction.detail == "flat":
        return _counted(instruction, lambda fields: fields[a].reshape(*fields[a].shape[:-2], -1))
    if when:
        return _counted(instruction, lambda fields: np.where(fields[when], fields[a], fields[b]))
    return _counted(instruction, lambda fields: fields[a])


def _add(instruction: Instruction, constants: Mapping[str, Any]) -> Step:
    a, b = instruction.a, instruction.b
    if instruction.detail == "lanes":
        offsets = constants[b]

        def addresses(fields: Fields) -> Any:  # noqa: ANN401
            base = fields[a]
            return base + offsets if isinstance(base, int) else base[..., None] + offsets

        return _counted(instruction, addresses)
    if instruction.detail == "pairs":
        return _pairs(instruction)
    return _counted(instruction, lambda fields: fields[a] + fields[b])


def _pairs(instruction: Instruction) -> Step:
    """One stage of a tree of additions: the first half of the lanes plus the last; a lane in the middle stays."""
    to, a = instruction.to, instruction.a

    def step(fields: Fields) -> None:
        found = fields[a]
        lanes = found.shape[-1]
        half = lanes >> 1
        sums = found[..., : lanes - half].copy()
        sums[..., :half] += found[..., lanes - half :]
        fields[to] = sums
        fields[OPS] += sums[..., :half].size

    return _effect(step)


def _sub(instruction: Instruction, _: Mapping[str, Any]) -> Step:
    a, b = instruction.a, instruction.b
    return _counted(instruction, lambda fields: fields[a] - fields[b])


def _and(instruction: Instruction, _: Mapping[str, Any]) -> Step:
    a, b = instruction.a, instruction.b
    return _counted(instruction, lambda fields: fields[a] & fields[b])


def _or(instruction: Instruction, _: Mapping[str, Any]) -> Step:
    a, b = instruction.a, instruction.b
    return _counted(instruction, lambda fields: fields[a] | fields[b])


def _shl(instruction: Instruction, constants: Mapping[str, Any]) -> Step:
    a, b = instruction.a, instruction.b
    if instruction.bit >= 0:
        return _counted(instruction, _predicated(instruction, constants, constants[b]))
    return _counted(instruction, lambda fields: fields[a] << fields[b])


def _shr(instruction: Instruction, _: Mapping[str, Any]) -> Step:
    """A shift to the right of fields that are never negative, which is that of two's complement too."""
    a, b = instruction.a, instruction.b
    return _counted(instruction, lambda fields: fields[a] >> fields[b])


def _cmp(instruction: Instruction, _: Mapping[str, Any]) -> Step:
    a, b = instruction.a, instruction.b
    if instruction.detail == "ge":
        return _counted(instruction, lambda fields: fields[a] >= fields[b])
    return _counted(instruction, lambda fields: fields[a] == fields[b])


def _tbl(instruction: Instruction, _: Mapping[str, Any]) -> Step:
    """A look-up; with two operands the key is the lowest byte of both, side by side."""
    a, b, table = instruction.a, instruction.b, instruction.detail
    if b:
        wide = table.astype(np.int32)
        return _counted(instruction, lambda fields: wide[(fields[a] & 255) << 8 | (fields[b] & 255)])
    if isinstance(table, np.ndarray) and table.dtype != np.int32:

        def widened(fields: Fields) -> Any:  # noqa: ANN401
            return table[fields[a]].astype(np.int32)

        return _counted(instruction, widened)
    return _counted(instruction, lambda fields: table[fields[a]])


def _reg_read(instruction: Instruction, _: Mapping[str, Any]) -> Step:
    """Cells of this slot: their value if they were written in this epoch, else the initial value `b`, or 0."""
    a, b, register = instruction.a, instruction.b, instruction.detail
    values, epochs, is_tagged = register.values, register.epochs, register.is_tagged

    def read(fields: Fields) -> Any:  # noqa: ANN401
        slot, place, epoch = fields["slot"], fields[a], fields["epoch"]
        initial = fields[b] if b else 0
        if type(slot) is int and type(place) is int:
            return int(values[slot, place]) if not is_tagged or epochs[slot, place] == epoch else initial
        slot, epoch = _beside(slot, place), _beside(epoch, place)
        found = values[slot, place]
        found = found.astype(np.int32) if found.dtype == np.int8 else found
        return np.where(epochs[slot, place] == epoch, found, initial) if is_tagged else found

    return _counted(instruction, read)


def _reg_write(instruction: Instruction, _: Mapping[str, Any]) -> Step:
    a, b, register, is_counted = instruction.a, instruction.b, instruction.detail, instruction.is_counted
    values, epochs = register.values, register.epochs

    def write(fields: Fields) -> None:
        slot, place, value = fields["slot"], fields[a], fields[b]
        at = _beside(slot, place), place
        values[at] = value
        epochs[at] = _beside(fields["epoch"], place)
        if is_counted:
            fields[OPS] += _lanes(value)

    return _effect(write)


def _mcast(instruction: Instruction, _: Mapping[str, Any]) -> Step:
    a, b = instruction.a, instruction.b

    def step(fields: Fields) -> None:
        fields[SENT].append((fields[a], fields[b]))

    return _effect(step)


def _recirc(instruction: Instruction, _: Mapping[str, Any]) -> Step:
    """Recirculate with another program, once for each lane in which the predicate holds."""
    a, b, when, program = instruction.a, instruction.b, instruction.when, instruction.detail

    def step(fields: Fields) -> None:
        holds, value = fields[when], fields[a]
        carried = {"slot": fields["slot"], "epoch": fields["epoch"]}
        if type(value) is int:
            if _holds(holds):
                fields[AGAIN].append((program, carried | {a: value} | ({b: fields[b]} if b else {})))
            return
        for lane, number in enumerate(value.tolist()):
            if _holds(holds[..., lane]):
                fields[AGAIN].append((program, carried | {a: number}))

    return _effect(step)


def _drop(instruction: Instruction, _: Mapping[str, Any]) -> Step:
    when, reason = instruction.when, instruction.detail
    return _effect(lambda fields: reason if _holds(fields[when]) else None)


_STEPS: Final[Mapping[str, Callable[[Instruction, Mapping[str, Any]], Step]]] = {
    "mov": _mov,
    "add": _add,
    "sub": _sub,
    "and": _and,
    "or": _or,
    "shl": _shl,
    "shr": _shr,
    "sar": _shr,
    "cmp": _cmp,
    "tbl": _tbl,
    "reg_read": _reg_read,
    "reg_write": _reg_write,
    "mcast": _mcast,
    "recirc": _recirc,
    "drop": _drop,
}


# A layer's programs


class UnitAssembler:
    """Writes the programs of one pipeline for one version of the weights."""

    def __init__(
        self,
        program: Program,
        layer: LayerProgram,
        unit: UnitProgram,
        registers: Mapping[str, Register],
        how: Multiplier,
    ) -> None:
        self.program = program
        self.layer = layer
        self.unit = unit
        self.registers = registers
        self.how = how

    def programs(self) -> dict[str, SwitchProgram]:
        """The program for each packet, `enter`, and those to which it recirculates."""
        if self.layer.kind == "windows":
            return {"enter": self._window(), "emit": self._emit_cell()}
        if self.layer.kind == "rows":
            return {"enter": self._store(), "compute": self._compute(), "emit": self._emit_cell()}
        return {"enter": self._add_products(), "emit": self._emit_sums()}

    def _begin(self) -> ProgramBuilder:
        """Slot and epoch from the inference; drop packets of an older epoch, and messages that arrived before."""
        made, constant = ProgramBuilder(self.how), ProgramBuilder.constant
        slot_bits = self.program.slot_bits
        made.put("and", "inference", constant(made, self.program.slots - 1), to="slot")
        made.put("shr", "inference", constant(made, slot_bits), to="epoch")
        mask = constant(made, (1 << (32 - slot_bits)) - 1)
        latest = self.registers["latest"]
        zero = constant(made, 0)
        newest = made.put("reg_read", zero, detail=latest)
        distance = made.put("and", made.put("sub", "epoch", newest), mask)
        is_old = made.put("cmp", distance, constant(made, 1 << (31 - slot_bits)), detail="ge")
        made.put("drop", when=is_old, detail="old epoch")
        made.put("reg_write", zero, "epoch", detail=latest)
        seen = self.registers["seen"]
        is_seen = made.put("cmp", made.put("reg_read", "message", detail=seen), constant(made, 1), detail="eq")
        made.put("drop", when=is_seen, detail="duplicate")
        made.put("reg_write", "message", constant(made, 1), detail=seen)
        return made

    def _products(self, made: ProgramBuilder, values: str, weights: NDArray[Any] | str, lanes: int) -> str:
        """Sums over the weights of each neuron."""
        factor = weights if isinstance(weights, str) else weights.astype(np.int32)
        beside = made.put("mov", values, detail="beside the neurons")
        return made.sum_lanes(made.multiply(beside, factor, is_product=True), lanes)

    def _window(self) -> SwitchProgram:
        """A window arrives with its values."""
        made = self._begin()
        sums = self._products(made, "values", self.unit.weights, self.unit.weights.shape[1])
        base = made.multiply("cell", self.layer.neurons)
        return self._pool(made, sums, base)

    def _store(self) -> SwitchProgram:
        """A part of the input arrives: store it, and recirculate for each window that is complete now."""
        made = self._begin()
        layer = self.layer
        if layer.label == 0:
            base = made.multiply("position", layer.width)
        else:
            base = made.put(
                "add", made.multiply("position", layer.channels), made.multiply("source", layer.width), is_counted=True
            )
        if layer.parts > 1:
            base = made.put("add", base, made.multiply("part", self.program.fabric.payload_bytes), is_counted=True)
        made.put("mov", base, to="base")
        longest = int(layer.counts.max())
        # A last part is shorter: the addresses of its missing values are cut by the table of its message.
        offsets = [np.arange(count, dtype=np.int32) for count in range(longest + 1)]
        lanes = made.put("tbl", made.put("tbl", "message", detail=layer.counts.tolist()), detail=offsets)
        address = made.put("add", "base", lanes, is_counted=True, idle_lanes=1)
        made.put("reg_write", address, "values", detail=self.registers["rows"], is_counted=True)
        needed = max([1, *(len(windows) for windows in layer.completes)])
        windows = np.full((layer.messages, needed), len(layer.windows), np.int32)
        for message, completed in enumerate(layer.completes):
            windows[message, : len(completed)] = completed
        expected = np.array([*(len(each) for each in layer.needs), NEVER], np.int32)
        made.put("tbl", "message", detail=windows, to="window")
        arrived = made.count_up(self.registers["arrived"], "window")
        ready = made.put("cmp", arrived, made.put("tbl", "window", detail=expected), detail="eq")
        made.put("recirc", "window", when=ready, detail="compute")
        return made.program()

    def _compute(self) -> SwitchProgram:
        """A window is complete: read its inputs and compute it."""
        made, layer = ProgramBuilder(self.how), self.layer
        channels = layer.channels
        taps = layer.windows.shape[1] // channels
        positions = layer.windows[:, ::channels]
        # A position of padding is the one after the last, which is never written and so reads 0.
        positions = np.where(positions < 0, layer.cells, positions) // channels
        if np.array_equal(positions, positions[:, :1] + np.arange(taps)):
            first = made.put("tbl", "window", detail=positions[:, 0].tolist())
            rows = made.add_lanes(first, taps)
        else:
            rows = made.put("tbl", "window", detail=positions.astype(np.int32))
        address = made.add_lanes(made.multiply(rows, channels), channels)
        values = made.put("reg_read", address, detail=self.registers["rows"], is_counted=True)
        flat = made.put("mov", values, detail="flat")
        sums = self._products(made, flat, self.unit.weights, taps * channels)
        cells = np.arange(len(layer.windows)) // layer.cell_windows
        made.put("tbl", "window", detail=cells.tolist(), to="cell")
        base = made.put("tbl", "cell", detail=(np.arange(layer.positions) * layer.neurons).tolist())
        return self._pool(made, sums, base)

    def _pool(self, made: ProgramBuilder, sums: str, base: str) -> SwitchProgram:
        """Requantise a window's sums, keep the largest of each filter, and recirculate if the cell is complete."""
        layer, pool = self.layer, self.registers["pool"]
        biased = made.put("add", sums, made.constant(self.unit.bias))
        found = made.requantise(biased, layer.shift)
        made.put("mov", base, to="base")
        address = made.add_lanes("base", layer.neurons)
        before = made.put("reg_read", address, detail=pool, is_counted=True)
        made.put("reg_write", address, made.largest(before, found), detail=pool, is_counted=True)
        done = made.count_up(self.registers["done"], "cell")
        is_done = made.put("cmp", done, made.constant(layer.cell_windows), detail="eq")
        made.put("recirc", "base", "cell", when=is_done, detail="emit")
        return made.program()

    def _emit_cell(self) -> SwitchProgram:
        """A pooling cell is complete: send it."""
        made = ProgramBuilder(self.how)
        address = made.add_lanes("base", self.layer.neurons)
        found = made.put("reg_read", address, detail=self.registers["pool"], is_counted=True)
        made.put("mcast", found, "cell")
        return made.program()

    def _add_products(self) -> SwitchProgram:
        """A message to a dense layer: add its products to the sums, which begin with the biases."""
        made, layer = self._begin(), self.layer
        weights = [
            self.unit.weights[:, start : start + count].astype(np.int32)
            for start, count in zip(layer.starts, layer.counts, strict=True)
        ]
        factor = made.put("tbl", "message", detail=weights)
        # A shorter last part has fewer lanes; a tree of as many stages leaves the sum of those in its first lane.
        sums = self._products(made, "values", factor, int(layer.counts.max()))
        places = made.constant(np.arange(layer.neurons))
        total = self.registers["sums"]
        before = made.put("reg_read", places, made.constant(self.unit.bias), detail=total, is_counted=True)
        after = made.put("add", before, sums, is_counted=True)
        made.put("reg_write", places, after, detail=total, is_counted=True)
        made.put("mov", made.constant(0), to="cell")
        arrived = made.count_up(self.registers["done"], "cell")
        is_done = made.put("cmp", arrived, made.constant(layer.messages), detail="eq")
        made.put("recirc", "cell", when=is_done, detail="emit")
        return made.program()

    def _emit_sums(self) -> SwitchProgram:
        """All messages of a dense layer have arrived: send its activations, or its sums if it is the last."""
        made, layer = ProgramBuilder(self.how), self.layer
        places = made.constant(np.arange(layer.neurons))
        found = made.put("reg_read", places, detail=self.registers["sums"], is_counted=True)
        made.put("mcast", found if layer.is_last else made.requantise(found, layer.shift), "cell")
        return made.program()


def registers_of(layer: LayerProgram, slots: int) -> dict[str, Register]:
    """The registers of a unit: activations, and those that keep order."""

    def order(name: str, cells: int) -> Register:
        return Register(name, cells, 32, is_activation=False, slots=slots)

    latest = Register("latest", 1, 64, is_activation=False, slots=slots, is_tagged=False)
    found = [latest, order("seen", layer.messages)]
    if layer.kind == "dense":
        found += [Register("sums", layer.neurons, 32, is_activation=True, slots=slots), order("done", 1)]
    else:
        pool = Register("pool", layer.positions * layer.neurons, 8, is_activation=True, slots=slots)
        found += [pool, order("done", layer.positions)]
    if layer.kind == "rows":
        padding = layer.channels if layer.windows.min() < 0 else 0
        found.append(Register("rows", layer.cells + padding, 8, is_activation=True, slots=slots))
        found.append(order("arrived", len(layer.windows) + 1))
    return {register.name: register for register in found}


def check_budget(fabric: Fabric, multiplier: Multiplier) -> None:
    """NoCapacity if a pass cannot compute the products that the fabric says: more lanes than a stage has ALUs, or
    more stages for products and their sum than there are."""
    lanes = fabric.products_per_pass * (8 if multiplier == "shift-add" else 1)
    if lanes > fabric.alus:
        raise NoCapacity(
            f"{fabric.products_per_pass} products in one pass take {lanes} operations side by side; a stage has "
            f"{fabric.alus} ALUs",
            where=f"fabric, multiplying by {multiplier}",
            help=f"set products_per_pass to at most {fabric.alus * fabric.products_per_pass // lanes}",
        )
    stages = depth_of_product(multiplier) + (fabric.products_per_pass - 1).bit_length() + 1  # and into the sum
    if stages > fabric.stages:
        raise NoCapacity(
            f"{fabric.products_per_pass} products and their sum take {stages} stages; a pipeline has {fabric.stages}",
            where=f"fabric, multiplying by {multiplier}",
            help="use a pipeline with more stages, or another multiplier",
        )


# The pipeline


@dataclass(slots=True)
class UnitCounts:
    """What one pipeline has counted."""

    packets: int = 0
    """Packets received, dropped ones with them."""
    operations: int = 0
    """By the convention of Table P6.1."""
    operations_max: int = 0
    """Of the packet with the most."""
    products: int = 0
    passes: int = 0
    """Traversals of the pipeline, recirculations with them."""
    sent: int = 0
    """Packets sent, before they are copied."""
    drops: dict[str, int] = field(default_factory=dict)
    """Dropped packets by reason: malformed, unknown version, old epoch, duplicate."""


@dataclass(frozen=True, slots=True)
class Emission:
    """An output position that a unit has finished."""

    inference: int
    version: int
    position: int
    values: tuple[int, ...]


class Pipeline:
    """One pipeline of a switch, which computes some neurons of a layer."""

    def __init__(self, program: Program, label: int, unit: int, multiplier: Multiplier = "lut16") -> None:
        self.layer = program.layers[label]
        self.unit = self.layer.units[unit]
        self.multiplier = multiplier
        check_budget(program.fabric, multiplier)
        self.registers = registers_of(self.layer, program.slots)
        self.counts = UnitCounts()
        self._programs: dict[int, tuple[Program, dict[str, SwitchProgram]]] = {}
        self.install(program)

    def install(self, program: Program) -> None:
        """Add the weights of another version."""
        layer = program.layers[self.layer.label]
        assembler = UnitAssembler(program, layer, layer.units[self.unit.unit], self.registers, self.multiplier)
        self._programs[program.version] = program, assembler.programs()

    def remove(self, version: int) -> None:
        """Remove the weights of a version that no inference uses any more."""
        del self._programs[version]

    @property
    def versions(self) -> tuple[int, ...]:
        """The versions of the weights that it has."""
        return tuple(self._programs)

    @property
    def programs(self) -> tuple[SwitchProgram, ...]:
        """The programs of all versions."""
        return tuple(each for _, programs in self._programs.values() for each in programs.values())

    @property
    def memory_cells(self) -> int:
        """Cells of activations for one slot, as Table P6.1 counts memory."""
        return sum(register.cells for register in self.registers.values() if register.is_activation)

    def receive(self, content: bytes) -> tuple[list[Emission], int]:
        """Take a packet, the bytes after its Ethernet header: what it makes the unit send, and its products.

        A packet that does not fit is dropped and counted, with its reason.
        """
        self.counts.packets += 1
        try:
            packet = _parsed(content)
            if packet.version not in self._programs:
                return self._drop("unknown version")
            program, programs = self._programs[packet.version]
            if packet.label != self.layer.label or packet.kind:
                return self._drop("unknown label")
            message = message_of(packet, program.layers[self.layer.label], program)
        except Malformed:
            return self._drop("malformed")
        given = _fields_of(packet, message)
        sent, products, reason = self._execute(program, programs, given)
        if reason is not None:
            return self._drop(reason)
        return [Emission(packet.inference, packet.version, cell, tuple(v.tolist())) for v, cell in sent], products

    def receive_lanes(self, packet: Packet, inferences: Ints, values: NDArray[Any]) -> list[tuple[NDArray[Any], int]]:
        """Take the same packet of several inferences, each with its values: what it makes the unit send, vectors with
        a row for each inference and their output positions. Operations are counted for all of them together."""
        self.counts.packets += len(inferences)
        program, programs = self._programs[packet.version]
        message = message_of(packet, program.layers[self.layer.label], program)
        given = _fields_of(packet, message) | {"inference": inferences, "values": values.astype(np.int32)}
        sent, _, reason = self._execute(program, programs, given)
        if reason is not None:
            self._drop(reason)
        return sent

    def _execute(
        self, program: Program, programs: Mapping[str, SwitchProgram], given: Fields
    ) -> tuple[list[tuple[NDArray[Any], int]], int, str | None]:
        """All passes of a packet: what is sent, the products, and why it was dropped, if it was."""
        fields, reason = programs["enter"].run(given)
        if reason is not None:
            return [], 0, reason
        operations, products = fields[OPS], fields[PRODUCTS]
        again, sent = fields[AGAIN], []
        while again:
            name, carried = again.pop(0)
            fields, _ = programs[name].run(carried)
            operations += fields[OPS]
            products += fields[PRODUCTS]
            again += fields[AGAIN]
            sent += fields[SENT]
        counts = self.counts
        counts.operations += operations
        counts.operations_max = max(counts.operations_max, operations)
        counts.products += products
        counts.passes += max(1, -(-products // program.fabric.products_per_pass))
        counts.sent += len(sent)
        return sent, products, None

    def _drop(self, reason: str) -> tuple[list[Emission], int]:
        self.counts.drops[reason] = self.counts.drops.get(reason, 0) + 1
        self.counts.passes += 1
        return [], 0


_parsed = lru_cache(maxsize=256)(parse)
"""Every unit of a layer gets the same bytes."""


def _fields_of(packet: Packet, message: int) -> Fields:
    """What the parser finds in a packet."""
    return {
        "inference": packet.inference,
        "message": message,
        "position": packet.position,
        "source": packet.source,
        "part": packet.part,
        "cell": packet.cell,
        "values": np.array(packet.values, np.int32),
    }


def depth_of_product(multiplier: Multiplier) -> int:
    """The stages that one product of two bytes takes."""
    made = ProgramBuilder(multiplier)
    made.multiply("x", "w", is_product=True)
    return made.program().depth()


def multiplied(x: Sequence[int], w: Sequence[int], multiplier: Multiplier, *, is_signed: bool = True) -> Ints:
    """Products of pairs, computed by the instructions; x is int8, or unsigned bytes."""
    made = ProgramBuilder(multiplier, is_signed)
    to = made.multiply("x", "w", is_product=True)
    fields, _ = made.program().run({"x": np.array(x, np.int32), "w": np.array(w, np.int32)})
    return np.asarray(fields[to], np.int64)
