"""Memory that two processes share: a large tensor is written into it once instead of being copied through a socket.

Both processes compute the same `offsets` for a batch's tensors; memory is allocated when first needed and then kept.
One side writes, the other reads; the writer must wait until the reader is done with the previous contents. The memory
is an anonymous file (memfd), not `multiprocessing.shared_memory`, whose named segments stay behind when a process is
killed. Linux only: elsewhere all tensors go through sockets. Must not depend on frames, models or processes.
"""

import mmap
import os
from collections.abc import Iterable, Sequence
from typing import Final, Self

ALIGNMENT: Final = 64
"""Tensors begin at multiples of a cache line, so that vector instructions read them aligned."""
SHARED_BYTES_MIN: Final = 64 * 1024
"""Smaller tensors go through the socket with their frame: copying them costs less than managing a second buffer."""

Buffer = bytes | bytearray | memoryview


class SharedMemory:
    """Anonymous memory behind a file descriptor that a child process can inherit."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._memory = memoryview(bytearray())

    @classmethod
    def make(cls) -> Self | None:
        """New, empty shared memory; None where the operating system has no memfd."""
        if not hasattr(os, "memfd_create"):
            return None
        try:
            return cls(os.memfd_create("sloop"))
        except OSError:
            return None

    def writable(self, size: int) -> memoryview:
        """The first `size` bytes, for writing. Grows the memory if needed, at least to double its size."""
        if size > len(self._memory):
            page = mmap.PAGESIZE
            grown = -(-max(size, 2 * len(self._memory)) // page) * page
            os.ftruncate(self.fd, grown)
            self._memory = memoryview(mmap.mmap(self.fd, grown))
        return self._memory[:size]

    def readable(self, size: int) -> memoryview:
        """The first `size` bytes, for reading. ValueError if the memory is smaller."""
        if size > len(self._memory):
            actual = os.fstat(self.fd).st_size
            if size > actual:
                raise ValueError(f"{size} bytes of shared memory are announced, but there are only {actual}")
            self._memory = memoryview(mmap.mmap(self.fd, actual))
        return self._memory[:size]

    def close(self) -> None:
        """Close the descriptor; the memory is freed when no array uses it any more."""
        os.close(self.fd)


def offsets(sizes: Iterable[int]) -> tuple[list[int], int]:
    """The start of each tensor, for tensors of these sizes in bytes written one after the other, and the total size in
    bytes."""
    starts, end = [], 0
    for size in sizes:
        starts.append(end)
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return starts, end


def write_tensors(shared: SharedMemory, tensors: Sequence[Sequence[Buffer]]) -> int:
    """Write tensors, each given in one or more pieces, to their offsets; returns the total size in bytes."""
    starts, total = offsets(sum(map(len, pieces)) for pieces in tensors)
    memory = shared.writable(total)
    for start, pieces in zip(starts, tensors, strict=True):
        at = start
        for piece in pieces:
            end = at + len(piece)
            memory[at:end] = piece
            at = end
    return total
