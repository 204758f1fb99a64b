"""Memory that two processes share: a large tensor is written into it once instead of being copied through a socket.

Both ends find a batch's tensors at the same `offsets`; memory is allocated when it is first needed and then kept. One
side writes, the other reads; the writer must know that the reader is done with the last contents. An anonymous file
(memfd) instead of `multiprocessing.shared_memory`, whose named segments stay behind when a process is killed. Linux
only: elsewhere there is none, and sockets carry everything. Must not know frames, models or processes.
"""

import mmap
import os
from collections.abc import Iterable, Sequence
from typing import Final, Self

ALIGNMENT: Final = 64
"""Tensors begin at multiples of a cache line, so that vector instructions read them aligned."""
SHARED_BYTES_MIN: Final = 64 * 1024
"""Smaller tensors go through the socket with their frame: there, a copy costs less than a second buffer's
bookkeeping."""

Buffer = bytes | bytearray | memoryview


class SharedMemory:
    """Anonymous memory behind a file descriptor that a child process can inherit."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._memory = memoryview(bytearray())

    @classmethod
    def make(cls) -> Self | None:
        """New and empty; None where the operating system has no memfd."""
        if not hasattr(os, "memfd_create"):
            return None
        try:
            return cls(os.memfd_create("sloop"))
        except OSError:
            return None

    def writable(self, size: int) -> memoryview:
        """The first `size` bytes, to write to. Grows as needed, at least to double its size."""
        if size > len(self._memory):
            page = mmap.PAGESIZE
            grown = -(-max(size, 2 * len(self._memory)) // page) * page
            os.ftruncate(self.fd, grown)
            self._memory = memoryview(mmap.mmap(self.fd, grown))
        return self._memory[:size]

    def readable(self, size: int) -> memoryview:
        """The first `size` bytes, to read from. ValueError where the other side has written fewer."""
        if size > len(self._memory):
            actual = os.fstat(self.fd).st_size
            if size > actual:
                raise ValueError(f"{size} bytes of shared memory are announced, but there are only {actual}")
            self._memory = memoryview(mmap.mmap(self.fd, actual))
        return self._memory[:size]

    def close(self) -> None:
        """Close the descriptor; the memory is freed with the last array in it."""
        os.close(self.fd)


def offsets(sizes: Iterable[int]) -> tuple[list[int], int]:
    """Where tensors of these sizes in bytes begin when they are written one after the other, and the bytes they
    take."""
    starts, end = [], 0
    for size in sizes:
        starts.append(end)
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return starts, end


def write_tensors(shared: SharedMemory, tensors: Sequence[Sequence[Buffer]]) -> int:
    """Write tensors, each given as the pieces to join, to their offsets; returns the bytes they take."""
    starts, total = offsets(sum(map(len, pieces)) for pieces in tensors)
    memory = shared.writable(total)
    for start, pieces in zip(starts, tensors, strict=True):
        at = start
        for piece in pieces:
            end = at + len(piece)
            memory[at:end] = piece
            at = end
    return total
