"""Memory that two processes share: large tensors are laid out in it once instead of going through a socket.

Promises that both ends find a batch's arrays at the same places (`places`), and that memory is taken when it is first
needed and then kept. One side writes, the other reads, and whoever writes knows that what was there has been read.
Must not know frames, models or processes. Linux only: elsewhere there is none, and sockets carry everything.
"""

import mmap
import os
from collections.abc import Iterable, Sequence
from typing import Final, Self

ALIGNMENT: Final = 64
"""A cache line: tensors begin at multiples of it, as vector instructions like it."""
SHARED_BYTES_MIN: Final = 64 * 1024
"""What is smaller goes through the socket with its frame: one system call, where a copy is nothing."""

Buffer = bytes | bytearray | memoryview


class SharedMemory:
    """Anonymous memory behind a file descriptor that can be given to a child process."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._memory = memoryview(bytearray())

    @classmethod
    def make(cls) -> Self | None:
        """New and empty; None where the system has none."""
        if not hasattr(os, "memfd_create"):
            return None
        try:
            return cls(os.memfd_create("sloop"))
        except OSError:
            return None

    def room(self, size: int) -> memoryview:
        """The first `size` bytes, to be written; grows as needed."""
        if size > len(self._memory):
            page = mmap.PAGESIZE
            grown = -(-max(size, 2 * len(self._memory)) // page) * page
            os.ftruncate(self.fd, grown)
            self._memory = memoryview(mmap.mmap(self.fd, grown))
        return self._memory[:size]

    def seen(self, size: int) -> memoryview:
        """The first `size` bytes, to be read. ValueError where the other side has not made as many."""
        if size > len(self._memory):
            there = os.fstat(self.fd).st_size
            if size > there:
                raise ValueError(f"{size} B of shared memory are announced, {there} are there")
            self._memory = memoryview(mmap.mmap(self.fd, there))
        return self._memory[:size]

    def close(self) -> None:
        """Give the descriptor back; the memory goes with the last array in it."""
        os.close(self.fd)


def places(sizes: Iterable[int]) -> tuple[list[int], int]:
    """Where tensors of these sizes begin when they are laid out one after the other, and the bytes they take."""
    starts, end = [], 0
    for size in sizes:
        starts.append(end)
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return starts, end


def lay_out(shared: SharedMemory, tensors: Sequence[Sequence[Buffer]]) -> int:
    """Write tensors, each given as the parts it is joined of, to their places; the bytes they take."""
    starts, total = places(sum(map(len, parts)) for parts in tensors)
    memory = shared.room(total)
    for start, parts in zip(starts, tensors, strict=True):
        at = start
        for part in parts:
            end = at + len(part)
            memory[at:end] = part
            at = end
    return total
