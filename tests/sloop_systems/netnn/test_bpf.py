"""The assembler writes what the kernel reads, has nothing that a switch lacks, and refusals say why."""

import ctypes
import errno
import os
import platform
import subprocess
import sys
from collections.abc import Iterator

import pytest

from sloop.errors import MachineError
from sloop_systems.netnn import bpf
from sloop_systems.netnn.bpf import (
    R0,
    R1,
    R2,
    R3,
    R10,
    XDP_PASS,
    BpfAssembler,
    KernelCall,
    KernelMap,
    KernelProgram,
    MapKind,
    ProgramKind,
    arithmetic_beyond_switches,
    measuring,
    operation,
)
from sloop_systems.netnn.bpf import instructions as decode
from sloop_systems.netnn.xdp import why_no_xdp
from tests.sloop_systems.netnn.kernel import loaded_programs, translated


@pytest.fixture(autouse=True)
def _kernel_runs_programs(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("needs_hosts") and (reason := why_no_xdp()):
        pytest.skip(reason)


@pytest.fixture
def counter() -> Iterator[KernelMap]:
    with KernelMap(MapKind.ARRAY, "counter", value_bytes=8, entries=1) as table:
        yield table


def ending(code: BpfAssembler) -> BpfAssembler:
    code.exit()
    return code


def test_instructions_are_encoded_as_the_kernel_reads_them() -> None:
    code = BpfAssembler()
    code.mov(R0, -1)
    code.add(R0, R3)
    code.load(4, R1, R2, 8)
    code.store(2, R10, -4, R1)
    code.jump_if(R0, "s<", 7, "end", wide=False)
    code.negate(R0)
    code.label("end")
    code.exit()
    assert code.assemble().hex(" ", 8) == (
        "b7000000ffffffff 0f30000000000000 6121080000000000 6b1afcff00000000 "
        "c600010007000000 8700000000000000 9500000000000000"
    )


def test_an_address_takes_two_instructions_and_is_read_as_one() -> None:
    code = BpfAssembler()
    code.constant(R1, 0x1122334455667788)
    code.exit()
    assert len(code) == 3
    assert [operation(each).split(" ")[0] for each in decode(code.assemble())] == ["ld", "jmp"]


def test_no_method_multiplies_divides_or_takes_a_remainder() -> None:
    codes = {0x24, 0x27, 0x2C, 0x2F, 0x34, 0x37, 0x3C, 0x3F, 0x94, 0x97, 0x9C, 0x9F}
    for opcode in codes:
        encoded = bpf.BpfInstruction(opcode, 1, 2, 0, 3).encode()
        assert arithmetic_beyond_switches(encoded), f"{opcode:#x} is not found"
    code = BpfAssembler()
    names = [name for name in dir(code) if not name.startswith("_")]
    for name in ("add", "sub", "bit_and", "bit_or", "xor", "shift_left", "shift_right", "shift_signed", "mov"):
        getattr(code, name)(R1, R2)
        getattr(code, name)(R1, 3, wide=False)
    assert not arithmetic_beyond_switches(code.assemble())
    assert not {"mul", "multiply", "div", "divide", "mod", "modulo"} & set(names)


def test_a_jump_that_is_too_long_is_refused() -> None:
    code = BpfAssembler()
    code.jump("end")
    for _ in range(1 << 15):
        code.mov(R0, 0)
    code.label("end")
    code.exit()
    with pytest.raises(MachineError, match=r"a jump to 'end' spans 32,768 instructions"):
        code.assemble()


def test_without_the_system_call_the_error_names_the_emulator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "sparc64")
    with pytest.raises(MachineError, match=r"(?s)no bpf system call on \w+ sparc64.*use the emulator"):
        KernelMap(MapKind.ARRAY, "none", value_bytes=8, entries=1)


@pytest.mark.needs_hosts
def test_a_map_is_read_as_it_was_written() -> None:
    with KernelMap(MapKind.ARRAY, "four", value_bytes=12, entries=4) as table:
        table.write(3, b"abc")
        assert table.read(3) == b"abc" + bytes(9)
        assert table.read(0) == bytes(12)
        with pytest.raises(MachineError, match=r"cannot read key 4 of the map 'four'"):
            table.read(4)


@pytest.mark.needs_hosts
def test_a_program_runs_and_shares_a_map_with_this_process(counter: KernelMap) -> None:
    code = BpfAssembler()
    code.value_address(R1, counter)
    code.load(8, R2, R1)
    code.add(R2, 5)
    code.store(8, R1, 0, R2)
    code.mov(R0, XDP_PASS)
    with KernelProgram.load(ProgramKind.XDP, ending(code), "adds") as program:
        with measuring():
            assert program.run(bytes(range(64))).result == XDP_PASS
        assert program.measured().runs == 1
        assert program.measured().run_ns > 0
        assert program.measured().verified == 6
        assert program.run(bytes(64), repeat=3).packet == bytes(64)
        assert int.from_bytes(counter.read(0), "little") == 20


@pytest.mark.needs_hosts
def test_an_exchange_happens_only_if_the_value_is_expected(counter: KernelMap) -> None:
    code = BpfAssembler()
    code.value_address(R1, counter)
    code.mov(R0, 0)
    code.mov(R2, 9)
    code.exchange_if_equal(R1, 0, R2)
    with KernelProgram.load(ProgramKind.XDP, ending(code), "locks") as program:
        assert [program.run(bytes(64)).result for _ in range(2)] == [0, 9]
    assert [operation(each) for each in decode(code.assemble())][-2] == "atomic 0xf1"


@pytest.mark.needs_hosts
def test_look_ups_in_maps_whose_values_are_powers_of_two_are_translated_without_multiplication() -> None:
    with KernelMap(MapKind.ARRAY, "wide", value_bytes=64, entries=4) as table:
        code = BpfAssembler()
        code.store(4, R10, -4, 2)
        code.mov(R2, R10)
        code.add(R2, -4)
        code.map_address(R1, table)
        code.call(KernelCall.MAP_LOOKUP)
        code.jump_if(R0, "==", 0, "end")
        code.load(4, R0, R0)
        code.label("end")
        with KernelProgram.load(ProgramKind.XDP, ending(code), "looks") as program:
            table.write(2, b"\7")
            assert program.run(bytes(64)).result == 7
            assert not arithmetic_beyond_switches(translated(program))
            assert len(translated(program)) > len(program.code)


@pytest.mark.needs_hosts
def test_a_refusal_ends_with_the_last_lines_of_the_verifier() -> None:
    code = BpfAssembler()
    code.mov(R0, R3)
    with pytest.raises(MachineError, match=r"(?s)cannot load the program 'bad'.*verifier says.*R3 !read_ok.*help: "):
        KernelProgram.load(ProgramKind.XDP, ending(code), "bad")


@pytest.mark.needs_hosts
def test_programs_end_with_the_process_that_loaded_them() -> None:
    name = f"end{os.getpid()}"
    source = f"""
import sys
from sloop_systems.netnn.bpf import R0, BpfAssembler, KernelProgram, ProgramKind
code = BpfAssembler()
code.mov(R0, 1)
code.exit()
program = KernelProgram.load(ProgramKind.XDP, code, {name!r})
print("ready", flush=True)
sys.stdin.read()
"""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", source], **pipes) as process:  # type: ignore[call-overload]
        assert process.stdout.readline() == b"ready\n"
        assert name in loaded_programs().values()
        process.kill()
    assert name not in loaded_programs().values()


def test_an_ordinary_user_learns_which_rights_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        ctypes.set_errno(errno.EPERM)
        return -1

    monkeypatch.setattr(bpf._libc, "syscall", refuse)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    with pytest.raises(MachineError, match=r"(?s)Operation not permitted.*needs root, or CAP_BPF and CAP_NET_ADMIN"):
        KernelProgram.load(ProgramKind.XDP, ending(BpfAssembler()), "denied")
