"""The code of one unit, compiled to BPF: an XDP program that stores, computes and answers.

Comparisons of activations have no branches: each branch would double the states that the kernel's verifier follows.
"""

from collections.abc import Callable, Sequence
from functools import partial

from sloop_systems.netnn.bpf import (
    BROADCAST,
    R0,
    R1,
    R2,
    R3,
    R4,
    R5,
    R6,
    R7,
    R8,
    R9,
    R10,
    XDP_DROP,
    XDP_PASS,
    BpfAssembler,
    BpfRegister,
    KernelCall,
    KernelMap,
)
from sloop_systems.netnn.network import WEIGHT_MAX
from sloop_systems.netnn.packets import ETHERTYPE, MAGIC
from sloop_systems.netnn.xdp_layout import (
    AT_ARRIVED_COUNT,
    AT_BANK,
    AT_BANK_BIAS,
    AT_BANK_ROUNDING,
    AT_BANK_SHIFT,
    AT_BANK_VALID,
    AT_BANK_VERSION,
    AT_CLEARED,
    AT_COUNT,
    AT_COUNTERS,
    AT_DUPLICATION,
    AT_EPOCH,
    AT_INFERENCE,
    AT_KIND,
    AT_LABEL,
    AT_LOCK,
    AT_LOSE,
    AT_LOSS,
    AT_MAGIC,
    AT_PART,
    AT_POOL,
    AT_POSITION,
    AT_PUSHED,
    AT_RANDOM,
    AT_SENT,
    AT_SLOT_VERSION,
    AT_SOURCE,
    AT_STARTED,
    AT_TYPE,
    AT_VERSION,
    BANKS,
    COUNTERS,
    DATA_INT8,
    DIGIT_BITS,
    DIGITS,
    ETHERNET_BYTES,
    GROUP,
    PAYLOAD,
    RESULT_INT32,
    SPINS,
    UnitLayout,
    UnitMaps,
    payload_room,
)

_PACKET, _STATE, _SLOT_KEY, _KEY, _ENTRY, _BANK, _TABLE, _PLACE, _WINDOW, _POSITION, _MORE = range(-8, -96, -8)
"""Where the code of a unit keeps values on its stack."""


class UnitCode:
    """The code of one unit: an XDP program for every packet that it receives."""

    def __init__(self, layout: UnitLayout, unit: int, maps: UnitMaps) -> None:
        """With a map of faults, the code loses and duplicates packets as that says, for tests."""
        self._layout, self._layer, self._unit, self._maps = layout, layout.layer, unit, maps
        self._frame = PAYLOAD + payload_room(layout.program)

    def build(self) -> BpfAssembler:
        """The program."""
        code = self.code = BpfAssembler()
        self._parse()
        self._identify()
        self._check_values()
        lock(self.code, self._maps.registers, R9, "contended")
        self._count("packets")
        self._lose()
        self._open_slot()
        self._mark_arrived()
        {"windows": self._window_in_packet, "rows": self._store_row, "dense": self._add_message}[self._layer.kind]()
        code.label("emit")
        self._emit()
        if self._maps.ports_and_self is not None:
            self._come_back()
        self._endings()
        return code

    def _parse(self) -> None:
        """R6 = the packet. What is not ours passes; what is too short or wrong is counted and dropped."""
        code = self.code
        code.load(4, R6, R1, 0)
        code.load(4, R2, R1, 4)
        code.mov(R3, R6)
        code.add(R3, ETHERNET_BYTES)
        code.jump_if(R3, ">", R2, "foreign")
        code.load(2, R3, R6, AT_TYPE)
        code.jump_if(R3, "!=", swapped(ETHERTYPE), "foreign")
        code.mov(R3, R6)
        code.add(R3, self._frame)
        code.jump_if(R3, ">", R2, "malformed")
        code.load(2, R3, R6, AT_MAGIC)
        code.jump_if(R3, "!=", swapped(MAGIC), "malformed")
        code.store(8, R10, _PACKET, R6)
        code.load(1, R3, R6, AT_LABEL)
        if self._maps.ports_and_self is not None:
            code.jump_if(R3, "==", self._layer.label + 1, "again")
        code.jump_if(R3, "!=", self._layer.label, "malformed")
        code.load(1, R3, R6, AT_KIND)
        code.jump_if(R3, "!=", DATA_INT8, "malformed")

    def _identify(self) -> None:
        """Stores the message's key and its entry in the table."""
        code, layout = self.code, self._layout
        for field, size, limit, shift, register in (
            (AT_POSITION, 2, layout.positions_in, layout.source_bits + layout.part_bits, R3),
            (AT_SOURCE, 1, self._layer.sources, layout.part_bits, R4),
            (AT_PART, 2, self._layer.parts, 0, R5),
        ):
            code.load(size, register, R6, field)
            if size == 2:
                code.from_network_order(register, 16)
            code.jump_if(register, ">=", limit, "malformed")
            code.shift_left(register, shift)
        code.add(R3, R4)
        code.add(R3, R5)
        code.store(8, R10, _KEY, R3)
        code.value_address(R4, self._maps.messages)
        code.shift_left(R3, layout.message_bits)
        code.add(R4, R3)
        code.store(8, R10, _ENTRY, R4)
        code.load(2, R3, R4, 4)
        code.load(1, R2, R6, AT_COUNT)
        code.jump_if(R3, "!=", R2, "malformed")
        if self._layer.kind == "windows":
            code.load(4, R4, R4, 0)
            code.load(2, R3, R6, AT_POOL)
            code.from_network_order(R3, 16)
            code.jump_if(R3, "!=", R4, "malformed")

    def _check_values(self) -> None:
        """Drops values that no switch of this program sends. R2 = the number of values, one of few."""
        code, inputs = self.code, self._layout.program.inputs
        low, high = (inputs.low, inputs.high) if self._layer.label == 0 else (0, WEIGHT_MAX)
        for count in sorted(set(map(int, self._layer.counts))):
            following = code.unique("values")
            code.jump_if(R2, "!=", count, following)
            if low == 0 and not high & (high + 1):  # the bits above must be 0
                _collect(code, R3, R4, R6, PAYLOAD, count)
                code.constant(R4, int.from_bytes(bytes([0xFF & ~high]) * 8))
                code.jump_if(R3, "&", R4, "malformed")
            else:
                for place in range(count):
                    code.load(1, R3, R6, PAYLOAD + place)
                    code.shift_left(R3, 56)
                    code.shift_signed(R3, 56)
                    code.jump_if(R3, "s<", low, "malformed")
                    code.jump_if(R3, "s>", high, "malformed")
            code.label(following)

    def _lose(self) -> None:
        """Loses the packet that the map of faults names, and others by chance. R9 = the registers."""
        code = self.code
        if self._maps.faults is None:
            return
        code.load(8, R3, R9, AT_COUNTERS)
        code.value_address(R9, self._maps.faults)
        code.load(8, R4, R9, AT_LOSE)
        code.jump_if(R3, "==", R4, "lost")
        self._draw(AT_LOSS, "lost")

    def _draw(self, threshold: int, label: str) -> None:
        """Goes to a label with a chance. R9 = the faults."""
        code = self.code
        code.load(8, R3, R9, AT_RANDOM)
        for shift, direction in ((13, code.shift_left), (7, code.shift_right), (17, code.shift_left)):  # xorshift
            code.mov(R4, R3)
            direction(R4, shift)
            code.xor(R3, R4)
        code.store(8, R9, AT_RANDOM, R3)
        code.shift_right(R3, 32)
        code.load(4, R4, R9, threshold)
        code.jump_if(R3, "<", R4, label)

    def _count(self, name: str) -> None:
        """One more in a counter. R9 = the registers."""
        offset = AT_COUNTERS + 8 * COUNTERS.index(name)
        self.code.load(8, R3, R9, offset)
        self.code.add(R3, 1)
        self.code.store(8, R9, offset, R3)

    def _find_slot(self) -> None:
        """R7 = the state of the packet's slot, R8 = its epoch."""
        code, program = self.code, self._layout.program
        code.load(4, R8, R6, AT_INFERENCE)
        code.from_network_order(R8, 32)
        code.mov(R3, R8)
        code.bit_and(R3, program.slots - 1)
        code.store(4, R10, _SLOT_KEY, R3)
        self._look_up(self._maps.state)
        code.mov(R7, R0)
        code.store(8, R10, _STATE, R7)
        code.shift_right(R8, program.slot_bits)

    def _look_up(self, table: KernelMap) -> None:
        """R0 = the value whose key is at _SLOT_KEY."""
        code = self.code
        code.mov(R2, R10)
        code.add(R2, _SLOT_KEY)
        code.map_address(R1, table)
        code.call(KernelCall.MAP_LOOKUP)
        code.jump_if(R0, "==", 0, "drop")

    def _open_slot(self) -> None:
        """State of an older epoch counts as zero, packets of an older one are dropped, and so are those of weights that
        the unit does not have or of others than the inference began with. Stores the bank's registers."""
        code = self.code
        self._find_slot()
        code.load(4, R3, R7, AT_STARTED)
        code.jump_if(R3, "==", 0, "new")
        code.load(4, R4, R7, AT_EPOCH)
        code.mov(R5, R8)
        code.sub(R5, R4)
        code.shift_left(R5, 32 + self._layout.program.slot_bits)  # the epoch's highest bit is the sign
        code.jump_if(R5, "==", 0, "current")
        code.jump_if(R5, "s<", 0, "stale")
        code.label("new")
        self._choose_bank()
        self._begin_epoch()
        code.label("current")
        code.load(2, R3, R6, AT_VERSION)
        code.from_network_order(R3, 16)
        code.load(4, R4, R7, AT_SLOT_VERSION)
        code.jump_if(R3, "!=", R4, "unversioned")
        self._find_bank()
        code.load(4, R3, R9, AT_BANK_VERSION)
        code.jump_if(R3, "!=", R4, "unversioned")

    def _choose_bank(self) -> None:
        """Stores the packet's version and its bank in the slot."""
        code, size = self.code, 1 << self._layout.bank_bits
        code.load(2, R5, R6, AT_VERSION)
        code.from_network_order(R5, 16)
        code.value_address(R9, self._maps.banks)
        for bank in range(BANKS):
            following = code.unique("bank")
            for offset, expected in ((AT_BANK_VALID, 1), (AT_BANK_VERSION, R5)):
                code.load(4, R3, R9, bank * size + offset)
                code.jump_if(R3, "!=", expected, following)
            code.mov(R3, bank)
            code.jump("chosen")
            code.label(following)
        code.jump("unversioned")
        code.label("chosen")
        code.store(4, R7, AT_BANK, R3)
        code.store(4, R7, AT_SLOT_VERSION, R5)

    def _begin_epoch(self) -> None:
        code, layout = self.code, self._layout
        code.store(4, R7, AT_EPOCH, R8)
        code.store(4, R7, AT_STARTED, 1)
        for offset in (AT_ARRIVED_COUNT, AT_PUSHED, AT_SENT):
            code.store(4, R7, offset, 0)
        _clear(code, R7, R3, R4, AT_CLEARED, (layout.at_log - AT_CLEARED) // 8)
        if self._layer.kind == "dense":
            self._find_bank()
            code.mov(R5, R7)
            code.add(R5, layout.at_sums)
            for pair in range(layout.pairs):
                code.load(8, R3, R9, AT_BANK_BIAS + 8 * pair)
                code.store(8, R5, 8 * pair, R3)

    def _find_bank(self) -> None:
        """R9 = the slot's bank, also stored. R7 = the slot."""
        code = self.code
        code.load(4, R3, R7, AT_BANK)
        code.bit_and(R3, BANKS - 1)
        code.shift_left(R3, self._layout.bank_bits)
        code.value_address(R9, self._maps.banks)
        code.add(R9, R3)
        code.store(8, R10, _BANK, R9)

    def _mark_arrived(self) -> None:
        """Drops a message that has arrived before. Stores the address of its weights."""
        code, layout = self.code, self._layout
        code.load(8, R3, R10, _KEY)
        code.mov(R4, R7)
        code.add(R4, R3)
        code.load(1, R5, R4, AT_CLEARED)
        code.jump_if(R5, "!=", 0, "duplicate")
        code.store(1, R4, AT_CLEARED, 1)
        code.load(4, R5, R7, AT_BANK)
        code.bit_and(R5, BANKS - 1)
        if layout.blocks > 1:
            code.shift_left(R3, 1)
            code.add(R5, R3)
        code.store(4, R10, _SLOT_KEY, R5)
        self._look_up(self._maps.weights)
        code.store(8, R10, _TABLE, R0)
        code.load(8, R7, R10, _STATE)

    def _window_in_packet(self) -> None:
        """A window with its inputs is computed at once."""
        code = self.code
        code.load(8, R3, R10, _ENTRY)
        code.load(4, R3, R3, 0)
        code.jump_if(R3, ">=", self._layer.positions, "drop")
        code.store(8, R10, _POSITION, R3)
        self._compute_window([self._from_packet], self._layout.taps)
        self._finish_window("emit")

    def _from_packet(self) -> None:
        """R4 = the values of the packet."""
        self.code.load(8, R4, R10, _PACKET)
        self.code.add(R4, PAYLOAD)

    def _store_row(self) -> None:
        """Stores a message in the layer's input, and computes each window that needed only this one still."""
        code, layout = self.code, self._layout
        code.load(8, R6, R10, _PACKET)
        code.load(8, R5, R10, _ENTRY)
        code.load(4, R3, R5, 0)
        code.load(2, R4, R5, 4)
        code.mov(R8, R7)
        code.add(R8, layout.at_cells)
        for count in sorted(set(map(int, self._layer.counts))):
            following = code.unique("count")
            code.jump_if(R4, "!=", count, following)
            code.jump_if(R3, ">", self._layer.cells - count, "drop")
            code.add(R8, R3)
            _copy(code, R8, 0, R6, PAYLOAD, count, R5)
            code.jump("stored")
            code.label(following)
        code.jump("drop")
        code.label("stored")
        code.mov(R3, 0)
        code.store(8, R10, _PLACE, R3)
        code.label("window")
        self._next_window()
        self._compute_window([self._from_cells(run) for run in range(layout.runs)], layout.run)
        self._finish_window("windowed")
        code.label("windowed")
        code.load(8, R3, R10, _PLACE)
        code.add(R3, 1)
        code.store(8, R10, _PLACE, R3)
        code.jump_if(R3, "<", layout.windows_max, "window")

    def _next_window(self) -> None:
        """Counts the message in its next window; goes on only if all of the window's messages have arrived."""
        code, layout = self.code, self._layout
        code.load(8, R7, R10, _STATE)
        code.load(8, R3, R10, _PLACE)
        code.load(8, R4, R10, _ENTRY)
        code.load(2, R5, R4, 6)
        code.jump_if(R3, ">=", R5, "emit")
        code.shift_left(R3, 1)
        code.add(R4, R3)
        code.load(2, R3, R4, 8)
        code.jump_if(R3, ">=", len(self._layer.windows), "drop")
        code.value_address(R4, self._maps.windows)  # type: ignore[arg-type]
        code.mov(R5, R3)
        code.shift_left(R5, layout.window_bits)
        code.add(R4, R5)
        code.store(8, R10, _WINDOW, R4)
        code.shift_left(R3, 1)
        code.mov(R5, R7)
        code.add(R5, layout.at_needs)
        code.add(R5, R3)
        code.load(2, R3, R5, 0)
        code.add(R3, 1)
        code.store(2, R5, 0, R3)
        code.load(2, R5, R4, 0)
        code.jump_if(R3, "!=", R5, "windowed")
        code.load(2, R3, R4, 2)
        code.jump_if(R3, ">=", self._layer.positions, "drop")
        code.store(8, R10, _POSITION, R3)

    def _from_cells(self, run: int) -> Callable[[], None]:
        """R4 = the cells of a run of the window."""

        def address() -> None:
            code = self.code
            code.load(8, R4, R10, _WINDOW)
            code.load(4, R9, R4, 4 + 4 * run)
            code.jump_if(R9, ">", self._layer.cells, "drop")
            code.load(8, R4, R10, _STATE)
            code.add(R4, self._layout.at_cells)
            code.add(R4, R9)

        return address

    def _compute_window(self, runs: Sequence[Callable[[], None]], length: int) -> None:
        """Sums, ReLU and requantisation of a window, and the maximum with what its output position has."""
        code, layout = self.code, self._layout
        for group in range(0, layout.pairs, GROUP):
            sums = self._products(group, runs, length)
            self._load_requantisation()
            code.load(8, R7, R10, _STATE)
            code.add(R7, layout.at_out)
            code.load(8, R9, R10, _POSITION)
            code.shift_left(R9, layout.out_bits)
            code.add(R7, R9)
            code.load(8, R8, R10, _BANK)
            for pair, total in enumerate(sums, group):
                code.load(8, R9, R8, AT_BANK_BIAS + 8 * pair)
                code.add(total, R9)
            for pair, total in enumerate(sums, group):
                self._halves(total, R8)
                for neuron, value in ((2 * pair, R8), (2 * pair + 1, total)):
                    if neuron < self._layer.neurons:
                        self._requantise(value, R9)
                        self._keep_larger(value, neuron)
        code.load(8, R7, R10, _STATE)

    def _products(self, group: int, runs: Sequence[Callable[[], None]], length: int) -> list[BpfRegister]:
        """The sums of products of a group of pairs, in registers; R4..R9 are lost."""
        code, layout = self.code, self._layout
        sums = [R0, R1, R2, R3][: min(GROUP, layout.pairs - group)]
        for total in sums:
            code.mov(total, 0)
        for digit in reversed(range(layout.digits)):
            if digit < layout.digits - 1:
                for total in sums:
                    code.shift_left(total, DIGIT_BITS)
            code.load(8, R5, R10, _TABLE)
            code.add(R5, 8 * group)
            for address in runs:
                address()
                _repeat(code, R6, length, partial(self._tap, digit, sums), self._advance)
        return sums

    def _tap(self, digit: int, sums: Sequence[BpfRegister], tap: int) -> None:
        """Adds one digit of one activation, times the weights of all pairs of the group."""
        code, layout = self.code, self._layout
        code.load(1, R8, R4, tap)
        if layout.is_signed:
            code.xor(R8, 0x80)
        if digit:
            code.shift_right(R8, DIGIT_BITS)
        else:
            code.bit_and(R8, DIGITS - 1)
        code.shift_left(R8, layout.row_bits)
        code.add(R8, R5)
        for place, total in enumerate(sums):
            code.load(8, R9, R8, 8 * place)
            code.add(total, R9)
        code.add(R5, DIGITS << layout.row_bits)

    def _advance(self, taps: int) -> None:
        self.code.add(R4, taps)

    def _load_requantisation(self) -> None:
        """R4 = the shift, R5 = the rounding."""
        code = self.code
        code.load(8, R8, R10, _BANK)
        code.load(4, R4, R8, AT_BANK_SHIFT)
        code.load(4, R5, R8, AT_BANK_ROUNDING)

    def _halves(self, total: BpfRegister, low: BpfRegister) -> None:
        """The two sums of a pair, with their signs: the first to `low`, the second stays in `total`."""
        code = self.code
        code.mov(low, total)
        code.shift_left(low, 32)
        code.shift_signed(low, 32)
        code.sub(total, low)
        code.shift_signed(total, 32)

    def _requantise(self, value: BpfRegister, spare: BpfRegister) -> None:
        """value = min(127, (max(0, value) + R5) >> R4), without a branch."""
        code = self.code
        _keep_if_positive(code, value, spare)
        code.add(value, R5)
        code.shift_right(value, R4)
        code.negate(value)
        code.add(value, WEIGHT_MAX)
        _keep_if_positive(code, value, spare)
        code.negate(value)
        code.add(value, WEIGHT_MAX)

    def _keep_larger(self, value: BpfRegister, neuron: int) -> None:
        """The larger of value and what the output at R7 has; R6 and R9 are lost."""
        code = self.code
        code.load(1, R9, R7, neuron)
        code.sub(value, R9)
        _keep_if_positive(code, value, R6)
        code.add(R9, value)
        code.store(1, R7, neuron, R9)

    def _finish_window(self, label: str) -> None:
        """When all windows of the output position are done, its messages are ready to be sent."""
        code, layout = self.code, self._layout
        code.load(8, R3, R10, _POSITION)
        code.mov(R4, R7)
        code.add(R4, layout.at_done)
        code.mov(R5, R3)
        code.shift_left(R5, 1)
        code.add(R4, R5)
        code.load(2, R5, R4, 0)
        code.add(R5, 1)
        code.store(2, R4, 0, R5)
        code.jump_if(R5, "!=", self._layer.cell_windows, label)
        self._push(R3)

    def _push(self, position: BpfRegister) -> None:
        """Adds the messages of an output position to the log of those that are ready. R7 = the slot."""
        code, layout = self.code, self._layout
        code.shift_left(position, layout.out_part_bits)
        for part in range(layout.parts_out):
            code.load(4, R5, R7, AT_PUSHED)
            code.jump_if(R5, ">=", layout.outgoing, "drop")
            code.mov(R4, R5)
            code.shift_left(R4, 2)
            code.add(R4, R7)
            code.add(R4, layout.at_log)
            code.store(4, R4, 0, position)
            code.add(R5, 1)
            code.store(4, R7, AT_PUSHED, R5)
            if part < layout.parts_out - 1:
                code.add(position, 1)

    def _add_message(self) -> None:
        """Adds a message's products to the sums; after the last message, the outputs."""
        code, layout = self.code, self._layout
        for group in range(0, layout.pairs, GROUP):
            sums = self._products(group, [self._from_packet], layout.taps)
            code.load(8, R7, R10, _STATE)
            code.add(R7, layout.at_sums)
            for pair, total in enumerate(sums, group):
                code.load(8, R8, R7, 8 * pair)
                code.add(total, R8)
                code.store(8, R7, 8 * pair, total)
        code.load(8, R7, R10, _STATE)
        code.load(4, R3, R7, AT_ARRIVED_COUNT)
        code.add(R3, 1)
        code.store(4, R7, AT_ARRIVED_COUNT, R3)
        code.jump_if(R3, "!=", self._layer.messages, "drop")
        self._load_requantisation()
        code.mov(R6, R7)
        code.add(R6, layout.at_sums)
        code.add(R7, layout.at_out)
        for pair in range(layout.pairs):
            code.load(8, R0, R6, 8 * pair)
            self._halves(R0, R8)
            for neuron, value in ((2 * pair, R8), (2 * pair + 1, R0)):
                if neuron < self._layer.neurons:
                    if not self._layer.is_last:
                        self._requantise(value, R9)
                    else:
                        code.from_network_order(value, 32)
                    code.store(layout.value_bytes, R7, layout.value_bytes * neuron, value)
        code.load(8, R7, R10, _STATE)
        code.mov(R3, 0)
        self._push(R3)

    def _emit(self) -> None:
        """Rewrites the packet as the next message that is ready and sends copies to all units of the next layer; if
        more are ready, one to itself as well. R7 = the slot."""
        code, layout = self.code, self._layout
        code.load(4, R3, R7, AT_SENT)
        code.load(4, R4, R7, AT_PUSHED)
        code.jump_if(R3, ">=", R4, "drop")
        code.jump_if(R3, ">=", layout.outgoing, "drop")
        code.mov(R5, R3)
        code.shift_left(R5, 2)
        code.add(R5, R7)
        code.add(R5, layout.at_log)
        code.load(4, R8, R5, 0)
        code.jump_if(R8, ">=", layout.layer.positions << layout.out_part_bits, "drop")
        self._advance_log()
        code.value_address(R5, self._maps.outs)
        code.shift_left(R8, 4)
        code.add(R5, R8)
        code.load(8, R6, R10, _PACKET)
        code.store(1, R6, AT_LABEL, self._layer.label + 1)
        code.store(1, R6, AT_KIND, RESULT_INT32 if self._layer.is_last else DATA_INT8)
        code.store(1, R6, AT_SOURCE, self._unit)
        for offset, size, field in ((4, 1, AT_COUNT), (6, 2, AT_POSITION), (8, 2, AT_POOL), (10, 2, AT_PART)):
            code.load(size, R3, R5, offset)
            code.store(size, R6, field, R3)
        code.load(4, R3, R5, 0)
        code.jump_if(R3, ">", (self._layer.positions << layout.out_bits) - layout.part_bytes, "drop")
        code.add(R7, R3)
        code.add(R7, layout.at_out)
        _copy(code, R6, PAYLOAD, R7, 0, layout.part_bytes, R3)
        self._unlock(counted="sent")
        if self._maps.ports_and_self is not None:
            code.load(8, R3, R10, _MORE)
            code.jump_if(R3, "!=", 0, "more")
        self._send(self._maps.ports)
        if self._maps.ports_and_self is not None:
            code.label("more")
            self._send(self._maps.ports_and_self)

    def _advance_log(self) -> None:
        """Takes the message at R3 from the log of length R4, and stores whether more follow. With faults, a duplicate:
        the message stays."""
        code = self.code
        if self._maps.faults is not None:
            code.mov(R5, R3)
            code.mov(R1, R4)
            code.value_address(R9, self._maps.faults)
            self._draw(AT_DUPLICATION, "repeat")
            code.add(R5, 1)
            code.label("repeat")
            code.mov(R3, R5)
            code.mov(R4, R1)
        else:
            code.add(R3, 1)
        code.store(4, R7, AT_SENT, R3)
        code.mov(R5, 0)
        last = code.unique("last")
        code.jump_if(R3, ">=", R4, last)
        code.mov(R5, 1)
        code.label(last)
        code.store(8, R10, _MORE, R5)

    def _send(self, ports: KernelMap) -> None:
        code = self.code
        code.map_address(R1, ports)
        code.mov(R2, 0)
        code.mov(R3, BROADCAST)
        code.call(KernelCall.REDIRECT_MAP)
        code.exit()

    def _come_back(self) -> None:
        """A packet that the unit sent to itself: the next message of its slot, if that is still of its epoch."""
        code = self.code
        code.label("again")
        lock(self.code, self._maps.registers, R9, "contended")
        self._count("packets")
        self._find_slot()
        code.load(4, R3, R7, AT_STARTED)
        code.jump_if(R3, "==", 0, "drop")
        code.load(4, R3, R7, AT_EPOCH)
        code.jump_if(R3, "!=", R8, "stale")
        code.load(2, R3, R6, AT_VERSION)
        code.from_network_order(R3, 16)
        code.load(4, R4, R7, AT_SLOT_VERSION)
        code.jump_if(R3, "!=", R4, "unversioned")
        code.jump("emit")

    def _unlock(self, *, counted: str = "") -> None:
        code = self.code
        code.value_address(R9, self._maps.registers)
        if counted:
            self._count(counted)
        code.mov(R0, 1)
        code.mov(R2, 0)
        code.exchange_if_equal(R9, AT_LOCK, R2)

    def _endings(self) -> None:
        code = self.code
        counted = [("stale", "stale"), ("duplicate", "duplicates"), ("unversioned", "unversioned")]
        for label, counter in counted + ([("lost", "lost")] if self._maps.faults is not None else []):
            code.label(label)
            code.value_address(R9, self._maps.registers)
            self._count(counter)
            code.jump("drop")
        code.label("drop")
        self._unlock()
        code.mov(R0, XDP_DROP)
        code.exit()
        for label in ("malformed", "contended"):
            code.label(label)
            code.value_address(R9, self._maps.registers)
            self._count(label)
            code.mov(R0, XDP_DROP)
            code.exit()
        code.label("foreign")
        code.mov(R0, XDP_PASS)
        code.exit()


def lock(code: BpfAssembler, registers: KernelMap, at: BpfRegister, contended: str) -> None:
    """Load the address of the registers into `at`, and lock them: one packet at a time on all processors. If the lock
    is not free after a short wait, jump to `contended`, which drops the packet: a lost packet gives no verdict, never a
    wrong one."""
    code.value_address(at, registers)
    again, got = code.unique("spin"), code.unique("locked")
    code.mov(R1, 0)
    code.label(again)
    code.mov(R0, 0)
    code.mov(R2, 1)
    code.exchange_if_equal(at, AT_LOCK, R2)
    code.jump_if(R0, "==", 0, got)
    code.add(R1, 1)
    code.jump_if(R1, "<", SPINS, again)
    code.jump(contended)
    code.label(got)
    code.mov(R1, 0)


def swapped(value: int) -> int:
    """A big-endian number of 16 bits as a little-endian machine loads it."""
    return value >> 8 | (value & 0xFF) << 8


def _keep_if_positive(code: BpfAssembler, value: BpfRegister, spare: BpfRegister) -> None:
    """value = max(0, value), without a branch."""
    code.mov(spare, value)
    code.shift_signed(spare, 63)
    code.xor(spare, -1)
    code.bit_and(value, spare)


def _collect(
    code: BpfAssembler, total: BpfRegister, spare: BpfRegister, base: BpfRegister, offset: int, count: int
) -> None:
    """total = the bits that any of so many bytes has, somewhere in eight."""
    code.mov(total, 0)
    done = 0
    for size in (8, 4, 2, 1):
        while count - done >= size:
            code.load(size, spare, base, offset + done)
            code.bit_or(total, spare)
            done += size


def _copy(
    code: BpfAssembler,
    to: BpfRegister,
    to_offset: int,
    source: BpfRegister,
    source_offset: int,
    count: int,
    spare: BpfRegister,
) -> None:
    """Copies so many bytes. Byte by byte where eight are not left: neither side need be aligned."""
    done = 0
    for size in (8, 4, 2, 1):
        while count - done >= size:
            code.load(size, spare, source, source_offset + done)
            code.store(size, to, to_offset + done, spare)
            done += size


def _repeat(
    code: BpfAssembler,
    counter: BpfRegister,
    count: int,
    body: Callable[[int], None],
    advance: Callable[[int], None],
    unrolled: int = 8,
) -> None:
    """`body` for 0..count-1, eight in a turn of a loop; `advance` moves the addresses by a turn."""
    turns, rest = divmod(count, unrolled)
    if turns > 1:
        label = code.unique("turn")
        code.mov(counter, turns)
        code.label(label)
        for place in range(unrolled):
            body(place)
        advance(unrolled)
        code.sub(counter, 1)
        code.jump_if(counter, "!=", 0, label)
    else:
        rest = count
    for place in range(rest):
        body(place)


def _clear(
    code: BpfAssembler, base: BpfRegister, address: BpfRegister, counter: BpfRegister, offset: int, words: int
) -> None:
    """Sets so many words of eight bytes to zero."""
    code.mov(address, base)
    code.add(address, offset)
    _repeat(
        code,
        counter,
        words,
        lambda place: code.store(8, address, 8 * place, 0),
        lambda turn: code.add(address, 8 * turn),
        unrolled=64,
    )
