"""BPF programs in the kernel without a compiler or a library: an assembler, maps, and the bpf system call by ctypes.

    code = BpfAssembler()
    code.mov(R0, XDP_PASS)
    code.exit()
    with KernelProgram.load(ProgramKind.XDP, code, "pass") as program:
        link = program.attach_xdp(device)          the program runs as long as the link is open

The assembler has no multiplication, division, modulo or floating point, so no program can do what a switch cannot.
Maps, programs and links are file descriptors without a name in the file system: the kernel removes them as soon as the
process that holds them ends, however it ends. Linux on x86-64 or 64-bit ARM; needs root, or CAP_BPF and
CAP_NET_ADMIN. Errors are MachineError; a refused program's error ends with the last lines of the kernel's verifier.
"""

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import Final, NamedTuple, Self

from sloop.api import MachineError

SYSTEM_CALLS: Final = {"x86_64": 321, "aarch64": 280}
LOG_BYTES: Final = 1 << 20
LOG_LINES: Final = 12
"""Last lines of the verifier's log that an error shows; what was wrong is at its end."""
JUMP_MAX: Final = (1 << 15) - 1
PROGRAM_MAX: Final = 1_000_000
"""Instructions in a program."""
NAME_BYTES: Final = 15

XDP_DROP: Final = 1
XDP_PASS: Final = 2
TC_OK: Final = 0
TC_DROP: Final = 2
BROADCAST: Final = 1 << 3
"""Flag of REDIRECT_MAP: to every device of the map."""


class BpfRegister(IntEnum):
    """A call takes R1..R5 as arguments, returns R0, loses R1..R5 and keeps R6..R9; R10 is the end of the stack."""

    R0 = 0
    R1 = 1
    R2 = 2
    R3 = 3
    R4 = 4
    R5 = 5
    R6 = 6
    R7 = 7
    R8 = 8
    R9 = 9
    R10 = 10


R0, R1, R2, R3, R4, R5, R6, R7, R8, R9, R10 = BpfRegister


class KernelCall(IntEnum):
    """Functions of the kernel that a program may call."""

    MAP_LOOKUP = 1
    KTIME_NS = 5
    SKB_STORE_BYTES = 9
    CLONE_REDIRECT = 13
    REDIRECT = 23
    SKB_LOAD_BYTES = 26
    SKB_CHANGE_TAIL = 38
    REDIRECT_MAP = 51


class ProgramKind(IntEnum):
    """Where a program runs: TC on packets of the network stack, XDP in the driver before it."""

    TC = 3
    XDP = 6


class MapKind(IntEnum):
    """Kinds of maps."""

    HASH = 1
    ARRAY = 2
    DEVICES = 14


class BpfCommand(IntEnum):
    """First argument of the system call."""

    MAP_CREATE = 0
    MAP_LOOKUP = 1
    MAP_UPDATE = 2
    PROGRAM_LOAD = 5
    PROGRAM_RUN = 10
    INFORMATION = 15
    LINK_CREATE = 28
    MEASURE = 32


ATTACH_XDP: Final = 37
ATTACH_TCX_INGRESS: Final = 46
XDP_GENERIC: Final = 1 << 1
XDP_NATIVE: Final = 1 << 2

_CLASSES: Final = ("ld", "ldx", "st", "stx", "alu32", "jmp", "jmp32", "alu64")
_OPERATIONS: Final = {
    "add": 0x00,
    "sub": 0x10,
    "or": 0x40,
    "and": 0x50,
    "lsh": 0x60,
    "rsh": 0x70,
    "neg": 0x80,
    "xor": 0xA0,
    "mov": 0xB0,
    "arsh": 0xC0,
}
_ABSENT: Final = {0x20: "mul", 0x30: "div", 0x90: "mod"}
"""Operations of BPF that the assembler does not have; the disassembler names them."""
_COMPARISONS: Final = {
    "==": 0x10,
    ">": 0x20,
    ">=": 0x30,
    "&": 0x40,
    "!=": 0x50,
    "s>": 0x60,
    "s>=": 0x70,
    "<": 0xA0,
    "<=": 0xB0,
    "s<": 0xC0,
    "s<=": 0xD0,
}
_SIZES: Final = {4: 0x00, 2: 0x08, 1: 0x10, 8: 0x18}
_ATOMIC: Final = 0xC0
_EXCHANGE_IF_EQUAL: Final = 0xF1
_MAP_DESCRIPTOR, _MAP_VALUE = 1, 2


class BpfInstruction(NamedTuple):
    """One instruction of eight bytes."""

    opcode: int
    dst: int
    src: int
    offset: int
    immediate: int

    def encode(self) -> bytes:
        """As the kernel reads it."""
        return struct.pack("<BBhi", self.opcode, self.src << 4 | self.dst, self.offset, self.immediate)


class BpfAssembler:
    """Collects instructions. Operations are on 64 bits unless `wide` is false; jumps go to labels."""

    def __init__(self) -> None:
        self._instructions: list[BpfInstruction] = []
        self._labels: dict[str, int] = {}
        self._jumps: dict[int, str] = {}
        self._unique = 0

    def __len__(self) -> int:
        return len(self._instructions)

    def mov(self, dst: BpfRegister, src: BpfRegister | int, *, wide: bool = True) -> None:
        """dst = src."""
        self._arithmetic("mov", dst, src, wide)

    def add(self, dst: BpfRegister, src: BpfRegister | int, *, wide: bool = True) -> None:
        """dst += src."""
        self._arithmetic("add", dst, src, wide)

    def sub(self, dst: BpfRegister, src: BpfRegister | int, *, wide: bool = True) -> None:
        """dst -= src."""
        self._arithmetic("sub", dst, src, wide)

    def bit_and(self, dst: BpfRegister, src: BpfRegister | int, *, wide: bool = True) -> None:
        """dst &= src."""
        self._arithmetic("and", dst, src, wide)

    def bit_or(self, dst: BpfRegister, src: BpfRegister | int, *, wide: bool = True) -> None:
        """dst |= src."""
        self._arithmetic("or", dst, src, wide)

    def xor(self, dst: BpfRegister, src: BpfRegister | int, *, wide: bool = True) -> None:
        """dst ^= src."""
        self._arithmetic("xor", dst, src, wide)

    def shift_left(self, dst: BpfRegister, src: BpfRegister | int, *, wide: bool = True) -> None:
        """dst <<= src."""
        self._arithmetic("lsh", dst, src, wide)

    def shift_right(self, dst: BpfRegister, src: BpfRegister | int, *, wide: bool = True) -> None:
        """dst >>= src, zeros from the left."""
        self._arithmetic("rsh", dst, src, wide)

    def shift_signed(self, dst: BpfRegister, src: BpfRegister | int, *, wide: bool = True) -> None:
        """dst >>= src, copies of the sign from the left."""
        self._arithmetic("arsh", dst, src, wide)

    def negate(self, dst: BpfRegister) -> None:
        """dst = -dst."""
        self._arithmetic("neg", dst, 0, True)

    def from_network_order(self, dst: BpfRegister, bits: int) -> None:
        """Turns a big-endian number of 16, 32 or 64 bits into the machine's order, or back; clears the rest."""
        self._emit(0xDC, dst, 0, 0, bits)

    def constant(self, dst: BpfRegister, value: int) -> None:
        """dst = a value of 64 bits."""
        self._double(dst, 0, value & 0xFFFFFFFF, value >> 32 & 0xFFFFFFFF)

    def load(self, size: int, dst: BpfRegister, base: BpfRegister, offset: int = 0) -> None:
        """dst = the `size` bytes at base + offset; the rest is zero."""
        self._emit(0x61 | _SIZES[size], dst, base, offset, 0)

    def store(self, size: int, base: BpfRegister, offset: int, src: BpfRegister | int) -> None:
        """The `size` bytes at base + offset = src."""
        if isinstance(src, BpfRegister):
            self._emit(0x63 | _SIZES[size], base, src, offset, 0)
        else:
            self._emit(0x62 | _SIZES[size], base, 0, offset, src)

    def exchange_if_equal(self, base: BpfRegister, offset: int, src: BpfRegister) -> None:
        """If the 8 bytes at base + offset equal R0 they become src; R0 = what they were. Atomic."""
        self._emit(0x03 | _SIZES[8] | _ATOMIC, base, src, offset, _EXCHANGE_IF_EQUAL)

    def map_address(self, dst: BpfRegister, table: "KernelMap") -> None:
        """dst = the map, as an argument of a call."""
        self._double(dst, _MAP_DESCRIPTOR, table.descriptor, 0)

    def value_address(self, dst: BpfRegister, table: "KernelMap") -> None:
        """dst = the address of the value of an array of one entry."""
        assert table.entries == 1, f"an array of {table.entries} entries needs a look-up"
        self._double(dst, _MAP_VALUE, table.descriptor, 0)

    def label(self, name: str) -> None:
        """The next instruction's name."""
        assert name not in self._labels, f"label {name!r} is there twice"
        self._labels[name] = len(self._instructions)

    def unique(self, name: str) -> str:
        """A label that no other call returns."""
        self._unique += 1
        return f"{name}.{self._unique}"

    def jump(self, label: str) -> None:
        """Go to a label."""
        self._jumps[len(self._instructions)] = label
        self._emit(0x05, 0, 0, 0, 0)

    def jump_if(
        self, dst: BpfRegister, comparison: str, src: BpfRegister | int, label: str, *, wide: bool = True
    ) -> None:
        """Go to a label if dst compares so with src: == != < <= > >= without sign, s< s<= s> s>= with sign, & if they
        have a bit in common."""
        self._jumps[len(self._instructions)] = label
        opcode = (0x05 if wide else 0x06) | _COMPARISONS[comparison]
        if isinstance(src, BpfRegister):
            self._emit(opcode | 0x08, dst, src, 0, 0)
        else:
            self._emit(opcode, dst, 0, 0, src)

    def call(self, function: KernelCall) -> None:
        """Calls a function of the kernel: R0 = function(R1, R2, R3, R4, R5), and R1..R5 are lost."""
        self._emit(0x85, 0, 0, 0, function)

    def exit(self) -> None:
        """Ends the program; R0 is its result."""
        self._emit(0x95, 0, 0, 0, 0)

    def assemble(self) -> bytes:
        """The program. MachineError if it is longer than the kernel takes."""
        if len(self._instructions) > PROGRAM_MAX:
            raise MachineError(
                f"a program has {len(self._instructions):,} instructions; the kernel takes {PROGRAM_MAX:,}",
                help="use a smaller network, or more switches",
            )
        found = list(self._instructions)
        for place, label in self._jumps.items():
            distance = self._labels[label] - place - 1
            if abs(distance) > JUMP_MAX:
                raise MachineError(
                    f"a jump to {label!r} spans {abs(distance):,} instructions; BPF has {JUMP_MAX:,}",
                    help="use a smaller network, or more switches",
                )
            found[place] = found[place]._replace(offset=distance)
        return b"".join(instruction.encode() for instruction in found)

    def _arithmetic(self, operation: str, dst: BpfRegister, src: BpfRegister | int, wide: bool) -> None:
        opcode = (0x07 if wide else 0x04) | _OPERATIONS[operation]
        if isinstance(src, BpfRegister):
            self._emit(opcode | 0x08, dst, src, 0, 0)
        else:
            self._emit(opcode, dst, 0, 0, src)

    def _double(self, dst: BpfRegister, kind: int, low: int, high: int) -> None:
        self._emit(0x18, dst, kind, 0, _signed(low))
        self._emit(0x00, 0, 0, 0, _signed(high))

    def _emit(self, opcode: int, dst: int, src: int, offset: int, immediate: int) -> None:
        assert -(1 << 31) <= immediate < 1 << 31, f"the immediate {immediate} has more than 32 bits"
        assert -(1 << 15) <= offset < 1 << 15, f"the offset {offset} has more than 16 bits"
        self._instructions.append(BpfInstruction(opcode, dst, src, offset, immediate))


def _signed(value: int) -> int:
    return value - (1 << 32) if value >> 31 else value


def instructions(code: bytes) -> Iterator[BpfInstruction]:
    """The instructions of a program, without the second halves of double instructions."""
    double = False
    for opcode, registers, offset, immediate in struct.iter_unpack("<BBhi", code):
        if not double:
            yield BpfInstruction(opcode, registers & 15, registers >> 4, offset, immediate)
        double = opcode == 0x18 and not double


def operation(instruction: BpfInstruction) -> str:
    """Its class and operation, such as `alu64 add`, `jmp call`, `ldx 4`; `mul`, `div` and `mod` are named as well."""
    kind = _CLASSES[instruction.opcode & 7]
    if kind in {"alu32", "alu64"}:
        code = instruction.opcode & 0xF0
        names = {value: name for name, value in _OPERATIONS.items()} | _ABSENT | {0xD0: "end"}
        return f"{kind} {names[code]}"
    if kind in {"jmp", "jmp32"}:
        code = instruction.opcode & 0xF0
        names = {value: name for name, value in _COMPARISONS.items()} | {0x00: "ja", 0x80: "call", 0x90: "exit"}
        return f"{kind} {names[code]}"
    if kind == "stx" and instruction.opcode & 0xE0 == _ATOMIC:
        return f"atomic {instruction.immediate:#x}"
    sizes = {value: size for size, value in _SIZES.items()}
    return f"{kind} {sizes[instruction.opcode & 0x18]}"


def arithmetic_beyond_switches(code: bytes) -> list[str]:
    """The instructions of a program that a switch does not have: multiplication, division, modulo. BPF has no float."""
    return [operation(each) for each in instructions(code) if operation(each).split()[-1] in _ABSENT.values()]


_libc: Final = ctypes.CDLL(None, use_errno=True)


def _system_call(command: int, attributes: bytes | bytearray, what: str, fix: str = "") -> int:
    """The result of bpf(2). A failure is a MachineError that says what could not be done."""
    number = SYSTEM_CALLS.get(platform.machine())
    if number is None or not hasattr(_libc, "syscall"):
        raise MachineError(
            f"cannot {what}: no bpf system call on {platform.system()} {platform.machine()}", help="use the emulator"
        )
    buffer = (ctypes.c_char * len(attributes)).from_buffer_copy(attributes)
    result = int(_libc.syscall(number, command, buffer, len(attributes)))
    if result < 0:
        code = ctypes.get_errno()
        raise _Refused(code, f"cannot {what}: {os.strerror(code)}", fix or _fix(code))
    attributes_out = bytes(buffer)
    if isinstance(attributes, bytearray):
        attributes[:] = attributes_out
    return result


class _Refused(MachineError):
    def __init__(self, code: int, what: str, fix: str) -> None:
        super().__init__(what, help=fix)
        self.code = code


def _fix(code: int) -> str:
    if code == errno.EPERM:
        return "needs root, or CAP_BPF and CAP_NET_ADMIN; without them use the emulator"
    if code == errno.ENOSYS:
        return "this kernel has no BPF; use the emulator"
    if code in {errno.ENOMEM, errno.E2BIG}:
        return "use a smaller network or fewer slots"
    return "needs Linux 6.6 or newer; elsewhere use the emulator"


def _address(buffer: "ctypes.Array[ctypes.c_char]") -> int:
    return ctypes.addressof(buffer)


def _name(text: str) -> bytes:
    return text.encode()[:NAME_BYTES]


class Descriptor:
    """A file descriptor of the kernel's, closed at the end of a `with` block."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Releases it. A second call does nothing."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


class KernelMap(Descriptor):
    """Memory that programs and this process share: a fixed number of entries, each a key and a value."""

    def __init__(self, kind: MapKind, name: str, *, key_bytes: int = 4, value_bytes: int, entries: int) -> None:
        """MachineError if the kernel refuses it."""
        self.name, self.key_bytes, self.value_bytes, self.entries = name, key_bytes, value_bytes, entries
        attributes = struct.pack("<7I16s", kind, key_bytes, value_bytes, entries, 0, 0, 0, _name(name))
        size = f"{entries:,} × {value_bytes:,} B"
        super().__init__(_system_call(BpfCommand.MAP_CREATE, attributes, f"make the map {name!r} of {size}"))

    def read(self, key: int) -> bytes:
        """The value of a key. MachineError if there is none."""
        value = ctypes.create_string_buffer(self.value_bytes)
        self._access(BpfCommand.MAP_LOOKUP, key, value, "read")
        return value.raw

    def write(self, key: int, value: bytes) -> None:
        """Sets the value of a key, filled up with zeros. MachineError if it does not fit."""
        assert len(value) <= self.value_bytes, f"{self.name}: a value of {len(value)} B, not {self.value_bytes}"
        self._access(BpfCommand.MAP_UPDATE, key, ctypes.create_string_buffer(value, self.value_bytes), "write")

    def _access(self, command: BpfCommand, key: int, value: "ctypes.Array[ctypes.c_char]", verb: str) -> None:
        buffer = ctypes.create_string_buffer(key.to_bytes(self.key_bytes, "little"), self.key_bytes)
        attributes = struct.pack("<IIQQQ", self.descriptor, 0, _address(buffer), _address(value), 0)
        _system_call(command, attributes, f"{verb} key {key} of the map {self.name!r}")


class ProgramRun(NamedTuple):
    """One run of a program on a packet that this process gave."""

    result: int
    packet: bytes
    run_ns: int
    """Mean over all repetitions."""


class ProgramTimes(NamedTuple):
    """What the kernel has measured of a program's cost."""

    run_ns: int
    runs: int
    verified: int
    """Instructions that the verifier followed, those of loops and branches once for each turn."""


class KernelProgram(Descriptor):
    """A program that the kernel has verified and loaded."""

    def __init__(self, descriptor: int, kind: ProgramKind, name: str, code: bytes) -> None:
        super().__init__(descriptor)
        self.kind, self.name, self.code = kind, name, code

    @classmethod
    def load(cls, kind: ProgramKind, code: BpfAssembler, name: str) -> Self:
        """Loads a program. MachineError with the last lines of the verifier if the kernel refuses it."""
        binary = code.assemble()
        what = f"load the program {name!r} of {len(code):,} instructions"
        try:
            # No log at first: that of a long program does not fit into any buffer, which is an error of its own.
            return cls(_load(kind, binary, name, what), kind, name, binary)
        except _Refused as refused:
            if refused.code in {errno.EPERM, errno.ENOSYS}:
                raise
            log = ctypes.create_string_buffer(LOG_BYTES)
            try:
                descriptor = _load(kind, binary, name, what, log)
            except _Refused:
                raise _refusal(refused, log.value) from None
            return cls(descriptor, kind, name, binary)  # the kernel lacked memory for a moment

    def attach_xdp(self, device: int, *, native: bool = True) -> Descriptor:
        """Runs it on what a device receives, in the driver or (`native` false) in the stack; the device's number is
        that of this thread's network namespace. The caller closes the link, which ends it. MachineError if refused."""
        return self._attach(device, ATTACH_XDP, XDP_NATIVE if native else XDP_GENERIC)

    def attach_tc(self, device: int) -> Descriptor:
        """Runs it on what the stack receives from a device, as `attach_xdp`."""
        return self._attach(device, ATTACH_TCX_INGRESS, 0)

    def run(self, packet: bytes, *, repeat: int = 1) -> ProgramRun:
        """Runs it on a packet here, without a device: for tests and measurements."""
        given = ctypes.create_string_buffer(packet, len(packet))
        room = ctypes.create_string_buffer(len(packet) + 4096)
        addresses = (_address(given), _address(room))
        attributes = bytearray(
            struct.pack("<IIIIQQIIIIQQ", self.descriptor, 0, len(packet), len(room), *addresses, repeat, 0, 0, 0, 0, 0)
        )
        _system_call(BpfCommand.PROGRAM_RUN, attributes, f"run the program {self.name!r}")
        _, result, _, length, _, _, _, run_ns = struct.unpack_from("<IIIIQQII", attributes)
        return ProgramRun(result, room.raw[:length], run_ns)

    def measured(self) -> ProgramTimes:
        """How often and how long it ran while the kernel measured (`measuring`), and how much the verifier checked."""
        return ProgramTimes(*struct.unpack_from("<QQ8xI", _information(self.descriptor), 192))

    def _attach(self, device: int, where: int, flags: int) -> Descriptor:
        attributes = struct.pack("<4IIIQ", self.descriptor, device, where, flags, 0, 0, 0)
        return Descriptor(
            _system_call(BpfCommand.LINK_CREATE, attributes, f"attach the program {self.name!r} to device {device}")
        )


def _load(
    kind: ProgramKind, code: bytes, name: str, what: str, log: "ctypes.Array[ctypes.c_char] | None" = None
) -> int:
    binary = ctypes.create_string_buffer(code, len(code))
    license_text = ctypes.create_string_buffer(b"GPL")
    level, size, address = (1, len(log), _address(log)) if log is not None else (0, 0, 0)
    expected = ATTACH_XDP if kind is ProgramKind.XDP else 0
    attributes = struct.pack(
        "<IIQQIIQII16sII",
        *(kind, len(code) // 8, _address(binary), _address(license_text), level, size, address),
        *(0, 0, _name(name), 0, expected),
    )
    return _system_call(BpfCommand.PROGRAM_LOAD, attributes, what)


def _refusal(refused: _Refused, log: bytes) -> MachineError:
    lines = [line for line in log.decode(errors="replace").splitlines() if line.strip()][-LOG_LINES:]
    if not lines:
        return refused
    last_lines = "\n".join(f"    {line}" for line in lines)
    fix = "use a smaller network, or more switches" if "too large" in last_lines or "too many" in last_lines else ""
    return MachineError(
        f"{refused.what}; the kernel's verifier says:\n{last_lines}",
        help=fix or "an error of the compiler in sloop: report it with these lines; meanwhile use the emulator",
    )


INFORMATION_BYTES: Final = 224


def _information(descriptor: int) -> bytes:
    """The kernel's `struct bpf_prog_info`."""
    room = ctypes.create_string_buffer(INFORMATION_BYTES)
    attributes = struct.pack("<IIQ", descriptor, INFORMATION_BYTES, _address(room))
    _system_call(BpfCommand.INFORMATION, attributes, "read what the kernel knows of a program")
    return room.raw


def measuring() -> Descriptor:
    """Has the kernel measure all programs until it is closed, at some 50 ns for each run. MachineError if refused."""
    return Descriptor(_system_call(BpfCommand.MEASURE, struct.pack("<I", 0), "measure programs"))
