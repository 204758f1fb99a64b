"""Memory that processes share: a large tensor is written into it once instead of being copied through sockets.

`SharedMemory` belongs to two processes, of which one writes and the other reads. An `Arena` is written by one process
and read by many: the writer allocates and frees blocks, whose `Address` is all that others need. All of it is anonymous
files (memfd), not `multiprocessing.shared_memory`, whose named segments stay behind when a process is killed. Must not
depend on frames, models or processes.
"""

import contextlib
import fcntl
import mmap
import os
import secrets
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, Self

from msgspec import Struct

ALIGNMENT: Final = 64
"""Tensors begin at multiples of a cache line, so that vector instructions read them aligned."""
SHARED_BYTES_MIN: Final = 64 * 1024
"""Smaller tensors go through the socket with their frame: copying them costs less than managing a second buffer."""

Buffer = bytes | bytearray | memoryview


class SharedMemory:
    """Anonymous memory behind a file descriptor that a child process can inherit. Both sides compute the same
    `offsets`; memory is allocated when first needed and then kept. The writer must wait until the reader is done with
    it."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._memory = memoryview(bytearray())

    @classmethod
    def make(cls) -> Self | None:
        """New, empty shared memory; None if the operating system refuses it: too many files, or a sandbox."""
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


# Arenas

PAGE: Final = mmap.PAGESIZE
KEPT_BYTES_MAX: Final = 32 << 20
"""Freed memory that an arena keeps for its next blocks. The kernel must clear memory that was given back before it is
used again, which takes as long as writing it."""
ARENAS_READ_MAX: Final = 256
"""Arenas that a reader keeps open; those of processes that have ended are among them."""
_FD_BITS: Final = 20
_SERIAL_BITS: Final = 28
_HOLDER_SHIFT: Final = _FD_BITS + _SERIAL_BITS


class Address(Struct, frozen=True, array_like=True, gc=False):
    """A block of bytes in an arena."""

    arena: int
    offset: int
    size: int

    @property
    def holder(self) -> int:
        """Who holds the arena; see `Arenas`."""
        return self.arena >> _HOLDER_SHIFT

    def held_by(self, holder: int) -> "Address":
        """The same block, if the process that holds its arena is called `holder`."""
        return Address(_numbered(self.arena, holder), self.offset, self.size)


class ArenaFull(Exception):
    """An arena has no room for a block."""


class FreeRanges:
    """The free ranges of an arena: the smallest that is large enough is used, and neighbours are joined."""

    def __init__(self, size: int) -> None:
        self._starts = [0]
        self._sizes = {0: size}
        """By start."""
        self._by_size = [(size, 0)]

    def take(self, size: int) -> int | None:
        """The start of a range of this size, which is no longer free. None if there is none."""
        place = bisect_left(self._by_size, (size, 0))
        if place == len(self._by_size):
            return None
        found, start = self._by_size.pop(place)
        at = bisect_left(self._starts, start)
        del self._sizes[start]
        if found > size:
            self._starts[at] = start + size
            self._sizes[start + size] = found - size
            insort(self._by_size, (found - size, start + size))
        else:
            del self._starts[at]
        return start

    def give(self, start: int, size: int) -> None:
        """Free a range that was taken."""
        at = bisect_left(self._starts, start)
        if at < len(self._starts) and self._starts[at] == start + size:
            size += self._remove(at)
        if at and self._starts[at - 1] + self._sizes[self._starts[at - 1]] == start:
            start = self._starts[at - 1]
            size += self._remove(at - 1)
            at -= 1
        self._starts.insert(at, start)
        self._sizes[start] = size
        insort(self._by_size, (size, start))

    def _remove(self, at: int) -> int:
        start = self._starts.pop(at)
        size = self._sizes.pop(start)
        del self._by_size[bisect_left(self._by_size, (size, start))]
        return size


class Arena:
    """The writer's view of an arena. Blocks are whole pages, so that freed memory can be given back to the machine.

    At most `KEPT_BYTES_MAX` of freed memory is kept, by size: most blocks of a model have the same.
    """

    def __init__(self, number: int, fd: int) -> None:
        size = os.fstat(fd).st_size
        self.number, self.size = number, size
        self.held_bytes = 0
        """Of all blocks."""
        self.allocated_bytes = 0
        """Of all blocks there ever were."""
        self._map = mmap.mmap(fd, size)
        self._memory = memoryview(self._map)
        self._free = FreeRanges(size)
        self._held: dict[int, int] = {}
        """The size of each block in whole pages, by its offset."""
        self._kept: dict[int, list[int]] = {}
        """Offsets of freed blocks that still have memory, by size."""
        self._kept_bytes = 0

    def allocate(self, size: int) -> tuple[Address, memoryview]:
        """A block, and its memory to write. Raises `ArenaFull`."""
        pages = -(-size // PAGE) * PAGE
        kept = self._kept.get(pages)
        if kept:
            offset = kept.pop()
            self._kept_bytes -= pages
        else:
            offset = self._take(pages)
        self._held[offset] = pages
        self.held_bytes += pages
        self.allocated_bytes += pages
        return Address(self.number, offset, size), self._memory[offset : offset + size]

    def free(self, block: Address) -> None:
        """Free a block. KeyError if there is none at its address."""
        size = self._held.pop(block.offset)
        self.held_bytes -= size
        if self._kept_bytes + size > KEPT_BYTES_MAX and not self._kept.get(size):
            self.trim()  # what is kept has other sizes than what is used now
        if self._kept_bytes + size > KEPT_BYTES_MAX:
            self._give_back(block.offset, size)
        else:
            self._kept.setdefault(size, []).append(block.offset)
            self._kept_bytes += size

    def trim(self) -> None:
        """Give all freed memory back to the machine."""
        for size, offsets in self._kept.items():
            for offset in offsets:
                self._give_back(offset, size)
        self._kept.clear()
        self._kept_bytes = 0

    def _take(self, size: int) -> int:
        offset = self._free.take(size)
        if offset is None and self._kept_bytes:
            self.trim()
            offset = self._free.take(size)
        if offset is None:
            raise ArenaFull(f"{size} B do not fit: {self.held_bytes} B of {self.size} are used")
        return offset

    def _give_back(self, offset: int, size: int) -> None:
        self._map.madvise(mmap.MADV_REMOVE, offset, size)
        self._free.give(offset, size)


class HeldArena:
    """An arena as the deciding process holds it: its file, and how many of its blocks are in use.

    `on_free` tells the writer that a block is free; None if the writer has ended, whose blocks remain readable.
    """

    def __init__(self, number: int, fd: int, on_free: Callable[[Address], None]) -> None:
        self.number, self.fd = number, fd
        self.on_free: Callable[[Address], None] | None = on_free
        self.blocks = 0


class Arenas:
    """All arenas of a server, in the process that decides which blocks are free.

    A reader opens an arena through `/proc/PID/fd` of this process when it first needs it, rather than receiving its
    descriptor in a message: nobody must know who reads what, sockets stay plain, and the file can be opened for reading
    only. An arena's number contains its descriptor, a serial number because descriptors are used again, and the number
    of the process that holds it among those of the deployment: 0 for the deciding process, which frees the blocks of
    all, others for the agents of nodes.
    """

    def __init__(self, holder: int = 0) -> None:
        self._held: dict[int, HeldArena] = {}
        # A reader must not take an arena for one of a former server, or of another process that had this number.
        self._holder, self._serial = holder, secrets.randbits(_SERIAL_BITS - 1)
        self._others: dict[int, Callable[[Address], None]] = {}
        """By holder, what frees blocks of arenas that another process holds."""

    def add_holder(self, holder: int, free: Callable[[Address], None]) -> None:
        """Free blocks of this holder, an agent, by telling it."""
        self._others[holder] = free

    def remove_holder(self, holder: int) -> None:
        """A holder has gone, and its blocks with it."""
        self._others.pop(holder, None)

    def make(self, size: int, on_free: Callable[[Address], None]) -> HeldArena:
        """A new arena of at most `size` bytes, which takes no memory before it is written. OSError if there are too
        many open files."""
        self._serial += 1
        fd = os.memfd_create(_name(self._serial), os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, -(-size // PAGE) * PAGE)
        # A reader would be killed if memory that it has mapped went away.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        made = HeldArena(self._holder << _HOLDER_SHIFT | self._serial << _FD_BITS | fd, fd, on_free)
        self._held[made.number] = made
        return made

    def hold(self, block: Address) -> None:
        """A block is in use."""
        self._held[block.arena].blocks += 1

    def free(self, block: Address) -> None:
        """A block is no longer in use."""
        if block.holder != self._holder:
            free = self._others.get(block.holder)
            if free is not None:
                free(block)
            return
        arena = self._held[block.arena]
        arena.blocks -= 1
        if arena.on_free is not None:
            arena.on_free(block)
        elif not arena.blocks:
            self._close(arena)

    def abandon(self, arena: HeldArena) -> None:
        """The writer of an arena has ended; it is closed when its last block is free."""
        arena.on_free = None
        if not arena.blocks and arena.number in self._held:
            self._close(arena)

    def close(self) -> None:
        """Close all arenas, whether blocks of them are in use or not."""
        for arena in list(self._held.values()):
            self._close(arena)

    def __len__(self) -> int:
        return len(self._held)

    def _close(self, arena: HeldArena) -> None:
        """Give back its memory, which readers may still have mapped."""
        del self._held[arena.number]
        size = os.fstat(arena.fd).st_size
        with contextlib.suppress(OSError), mmap.mmap(arena.fd, size) as memory:
            memory.madvise(mmap.MADV_REMOVE)
        os.close(arena.fd)


class ArenaReader:
    """Reads the blocks of all arenas that processes of this machine hold: `holders` has their process ids by number."""

    def __init__(self, holders: Mapping[int, int]) -> None:
        self._holders = holders
        self._open: dict[int, memoryview] = {}

    def set_holders(self, holders: Mapping[int, int]) -> None:
        """Other processes hold arenas from now on."""
        self._holders = holders

    def read(self, block: Address) -> memoryview:
        """The bytes of a block. Raises `ValueError` if there is no such block."""
        memory = self._open.get(block.arena)
        if memory is None:
            memory = self._map(block.arena)
        end = block.offset + block.size
        if not 0 <= block.offset <= end <= len(memory):
            raise ValueError(f"an arena of {len(memory)} B has no block of {block.size} B at {block.offset}")
        return memory[block.offset : end]

    def _map(self, number: int) -> memoryview:
        holder = number >> _HOLDER_SHIFT
        pid = self._holders.get(holder)
        if pid is None:
            raise ValueError(f"arena {number:#x} is held by process {holder}, which is not on this machine")
        fd = _opened(number, pid)
        try:
            memory = memoryview(mmap.mmap(fd, os.fstat(fd).st_size, prot=mmap.PROT_READ))
        finally:
            os.close(fd)
        for other in [other for other in self._open if not self._is_there(other)]:
            del self._open[other]  # nobody else would give back its memory
        while len(self._open) >= ARENAS_READ_MAX:
            del self._open[next(iter(self._open))]
        self._open[number] = memory
        return memory

    def _is_there(self, number: int) -> bool:
        """Whether the arena has not been closed, and the process that holds it has not ended."""
        pid = self._holders.get(number >> _HOLDER_SHIFT)
        try:
            return pid is not None and os.readlink(_path(number, pid)).partition(" ")[0] == _link(number)
        except OSError:
            return False


class RelayedArenas:
    """Arenas of other processes of this machine, which this process opens so that its children find them with it: a
    child knows its process id from the start, those of others come and go. It is called `holder`."""

    def __init__(self, holder: int) -> None:
        self._holder = holder
        self._pids: dict[int, int] = {}
        self._opened: dict[int, tuple[int, int]] = {}
        """By the number of an arena, the one that it has here, and its descriptor."""

    def set_holders(self, pids: Mapping[int, int]) -> None:
        """Which processes hold arenas, by number; those whose memory this process may not read are left out."""
        self._pids = readable(pids)
        for number in [number for number in self._opened if number >> _HOLDER_SHIFT not in self._pids]:
            os.close(self._opened.pop(number)[1])

    def relay(self, block: Address) -> Address | None:
        """The block as children find it; None if its arena is not that of one of these processes."""
        found = self._opened.get(block.arena)
        if found is None:
            pid = self._pids.get(block.holder)
            if pid is None:
                return None
            try:
                fd = _opened(block.arena, pid)
            except ValueError:
                return None
            own = _numbered(block.arena, self._holder) & -(1 << _FD_BITS) | fd
            found = self._opened[block.arena] = own, fd
        return Address(found[0], block.offset, block.size)

    def close(self) -> None:
        """Close all; what children have mapped stays."""
        self.set_holders({})


def readable(pids: Mapping[int, int]) -> dict[int, int]:
    """Those of these processes whose memory this one may open; it may not if they belong to another user."""
    return {number: pid for number, pid in pids.items() if os.access(f"/proc/{pid}/fd", os.R_OK | os.X_OK)}


def _opened(number: int, pid: int) -> int:
    """A descriptor, for reading, of an arena that a process holds. Raises `ValueError` if it holds no such arena."""
    try:
        fd = os.open(_path(number, pid), os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise ValueError(f"arena {_serial(number)} cannot be opened: {error.strerror}") from error
    if os.readlink(f"/proc/self/fd/{fd}").partition(" ")[0] != _link(number):
        os.close(fd)
        raise ValueError(f"arena {_serial(number)} is closed")
    return fd


def _path(number: int, pid: int) -> str:
    """Where a process has an arena open, if it holds it."""
    return f"/proc/{pid}/fd/{number & (1 << _FD_BITS) - 1}"


def _link(number: int) -> str:
    """What `_path` then refers to."""
    return f"/memfd:{_name(_serial(number))}"


def _serial(number: int) -> int:
    return (number & (1 << _HOLDER_SHIFT) - 1) >> _FD_BITS


def _numbered(number: int, holder: int) -> int:
    """The number of an arena, with another holder."""
    return holder << _HOLDER_SHIFT | number & (1 << _HOLDER_SHIFT) - 1


def _name(serial: int) -> str:
    return f"sloop-{serial}"
