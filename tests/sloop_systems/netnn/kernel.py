"""What the kernel has of programs, as tests see it."""

import ctypes
import errno
import struct
from typing import Final

from sloop_systems.netnn import bpf
from sloop_systems.netnn.bpf import BpfCommand, Descriptor, KernelProgram

PROGRAM_NEXT_ID: Final = 11
PROGRAM_BY_ID: Final = 13
"""Further commands of the system call."""


def translated(program: KernelProgram) -> bytes:
    """The program as the kernel rewrites it before compiling: calls have become instructions."""
    size = struct.unpack_from("<I", bpf._information(program.descriptor), 20)[0]
    code = ctypes.create_string_buffer(size)
    wanted = ctypes.create_string_buffer(bpf.INFORMATION_BYTES)
    struct.pack_into("<I", wanted, 20, size)
    struct.pack_into("<Q", wanted, 32, ctypes.addressof(code))
    attributes = struct.pack("<IIQ", program.descriptor, len(wanted), ctypes.addressof(wanted))
    bpf._system_call(BpfCommand.INFORMATION, attributes, "read the program")
    return code.raw


def loaded_programs() -> dict[int, str]:
    """Number and name of every program in the kernel, of any process."""
    names: dict[int, str] = {}
    last = 0
    while True:
        attributes = bytearray(struct.pack("<III", last, 0, 0))
        try:
            bpf._system_call(PROGRAM_NEXT_ID, attributes, "list programs")
        except bpf._Refused as refused:
            if refused.code == errno.ENOENT:
                return names
            raise
        last = struct.unpack_from("<I", attributes, 4)[0]
        try:
            descriptor = bpf._system_call(PROGRAM_BY_ID, struct.pack("<III", last, 0, 0), f"open program {last}")
        except bpf._Refused:  # it has ended meanwhile
            continue
        with Descriptor(descriptor):
            names[last] = bpf._information(descriptor)[64:80].split(b"\0")[0].decode()
