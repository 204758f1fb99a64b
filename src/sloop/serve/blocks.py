"""Blocks: the tensors of one request at one point, which are the client's inputs or the outputs of a stage.

A block is written once, by the edge or the worker that has the tensors, and read where they are needed. A small block
is `bytes` and travels within frames, so that small models need no shared memory. A large block is in the arena of the
process that wrote it, and only its address travels. The deciding process passes blocks on, frees them when nobody needs
them, and never reads their tensors.

A block consists of a table, padding, and the tensors, each aligned (`ALIGNMENT`). The table has the datatype, shape and
size in bytes of each tensor; the size of text does not follow from the other two. Tables are cached on both sides,
because most requests to a model have the same table.
"""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from struct import Struct as Layout
from struct import error as LayoutError
from typing import Final

from msgspec import Struct

from sloop.serve.transport import ProtocolError
from sloop.shared_memory import ALIGNMENT, Address, Arena, ArenaReader
from sloop.tensor import ITEM_BYTES, MISSING, Tensor

Block = bytes | Address

INLINE_BYTES_MAX: Final = 8 * 1024
"""Larger blocks go to an arena. Passing 8 KiB through the sockets and the memory of the deciding process takes about as
long as allocating, announcing and freeing a block."""
ARENA_BYTES: Final = 4 << 30
"""Size of an arena: the most bytes of the blocks of one process. It takes only as much memory as its blocks."""
TABLE_BYTES_MAX: Final = 64 * 1024
TABLES_MAX: Final = 1024
"""How many tables are cached, in each direction."""
RANK_MAX: Final = 16

CODES: Final = (*ITEM_BYTES, "BYTES", MISSING.datatype)
"""Datatypes in the order of their codes. All processes of a server run the same version, so the order may change
between versions."""
CODE_OF: Final = {name: code for code, name in enumerate(CODES)}

_HEAD: Final = Layout("<II")
"""Size of the table with its padding, number of tensors."""
_TENSOR: Final = Layout("<BBQ")
_DIMS: Final = tuple(Layout(f"<{rank}Q") for rank in range(RANK_MAX + 1))

Shape = tuple[int, ...]
Kind = tuple[str, Shape, int]
"""Datatype, shape and size in bytes of a tensor."""


class BlockLayout(Struct, frozen=True, gc=False):
    """The table of a block, and where its tensors are."""

    table: bytes
    """Encoded, with the padding that follows it."""
    kinds: tuple[Kind, ...]
    places: tuple[tuple[int, int, bytes], ...]
    """For each tensor its start, its end, and the padding that follows it."""
    parts: tuple[tuple[str, Shape, int, int], ...]
    """For each tensor its datatype, its shape, its start and its end."""
    size: int


_of_kinds: Final[dict[tuple[Kind, ...], BlockLayout]] = {}
_of_table: Final[dict[bytes, BlockLayout]] = {}


def layout_of(kinds: tuple[Kind, ...]) -> BlockLayout:
    """The layout of a block of these tensors. Raises `ProtocolError` if its table exceeds `TABLE_BYTES_MAX`."""
    found = _of_kinds.get(kinds)
    if found is None:
        if len(_of_kinds) >= TABLES_MAX:
            _of_kinds.clear()
        found = _of_kinds[kinds] = _made(kinds)
    return found


def layout_for(tensors: Sequence[Tensor]) -> BlockLayout:
    """See `layout_of`."""
    return layout_of(tuple([(tensor.datatype, tensor.shape, len(tensor.data)) for tensor in tensors]))


def _made(kinds: tuple[Kind, ...]) -> BlockLayout:
    entries = [
        _TENSOR.pack(CODE_OF[name], len(shape), size) + _DIMS[len(shape)].pack(*shape) for name, shape, size in kinds
    ]
    bare = _HEAD.size + sum(map(len, entries))
    at = -(-bare // ALIGNMENT) * ALIGNMENT
    if at > TABLE_BYTES_MAX:
        raise ProtocolError(f"the shapes of {len(kinds)} tensors take {at} B, more than {TABLE_BYTES_MAX}")
    table = b"".join((_HEAD.pack(at, len(kinds)), *entries, bytes(at - bare)))
    places: list[tuple[int, int, bytes]] = []
    for place, (_, _, size) in enumerate(kinds):
        padding = 0 if place == len(kinds) - 1 else -size % ALIGNMENT
        places.append((at, at + size, bytes(padding)))
        at += size + padding
    parts = [(name, shape, start, end) for (name, shape, _), (start, end, _) in zip(kinds, places, strict=True)]
    return BlockLayout(table, kinds, tuple(places), tuple(parts), at)


def read_layout(memory: bytes | memoryview) -> BlockLayout:
    """The layout of a block. Raises `ProtocolError` if its table is malformed or its tensors exceed its memory."""
    size = int.from_bytes(memory[:4], "little")
    table = memory[:size]
    if type(table) is not bytes:
        table = bytes(table)
    found = _of_table.get(table)
    if found is None:
        if len(_of_table) >= TABLES_MAX:
            _of_table.clear()
        found = _of_table[table] = _parsed(table)
    if found.size > len(memory):
        raise ProtocolError(f"a block of {len(memory)} B has tensors of {found.size} B")
    return found


def _parsed(table: bytes) -> BlockLayout:
    kinds: list[Kind] = []
    try:
        size, count = _HEAD.unpack_from(table)
        at = _HEAD.size
        for _ in range(count):
            code, rank, size_bytes = _TENSOR.unpack_from(table, at)
            shape = _DIMS[rank].unpack_from(table, at + _TENSOR.size)
            at += _TENSOR.size + _DIMS[rank].size
            kinds.append((CODES[code], shape, size_bytes))
    except (LayoutError, IndexError) as error:
        raise ProtocolError(f"a table of {len(table)} B is malformed: {error}") from error
    for datatype, shape, size_bytes in kinds:
        if datatype in ITEM_BYTES and size_bytes != prod(shape) * ITEM_BYTES[datatype]:
            raise ProtocolError(f"a table has {size_bytes} B for {datatype}{list(shape)}")
    found = _made(tuple(kinds))
    if found.table != table:
        raise ProtocolError(f"a table of {len(table)} B announces {size} B for {count} tensors")
    return found


def write_block(tensors: Sequence[Tensor], arena: Arena | None) -> Block:
    """Write tensors, in the arena if they are large. Without an arena, every block is `bytes`.

    Raises `ArenaFull`, and `ProtocolError` for tensors that a table cannot describe.
    """
    layout = layout_for(tensors)
    if arena is None or layout.size <= INLINE_BYTES_MAX:
        if len(tensors) == 1:
            return layout.table + tensors[0].data
        return b"".join(block_parts(tensors))
    block, memory = arena.allocate(layout.size)
    memory[: len(layout.table)] = layout.table
    for tensor, (start, end, _) in zip(tensors, layout.places, strict=True):
        memory[start:end] = tensor.data
    return block


def block_parts(tensors: Sequence[Tensor]) -> list[bytes | bytearray | memoryview]:
    """A block of tensors, without copying them. Raises `ProtocolError` likewise."""
    layout = layout_for(tensors)
    parts: list[bytes | bytearray | memoryview] = [layout.table]
    for tensor, (_, _, padding) in zip(tensors, layout.places, strict=True):
        parts += (tensor.data, padding)
    return parts


def tensors_in(memory: bytes | memoryview) -> list[Tensor]:
    """The tensors of a block, as views of its memory, or copied if it is small. Raises `ProtocolError` for a malformed
    block."""
    layout = read_layout(memory)
    view = memory if type(memory) is bytes and len(memory) <= INLINE_BYTES_MAX else memoryview(memory)
    return [Tensor(datatype, shape, view[start:end]) for datatype, shape, start, end in layout.parts]


class FarBlocks:
    """The blocks in use of a process on another machine, as the deciding process knows them. That process has the
    number `holder`. `on_free` tells it that it may use the memory of a block again."""

    def __init__(self, holder: int, on_free: Callable[[Address], None]) -> None:
        self._holder, self._on_free = holder, on_free
        self._places: set[tuple[int, int]] = set()
        """Arena and offset of each."""

    def hold(self, block: Address) -> None:
        """Note that a block is in use. Raises `ProtocolError` if it cannot be a block of this process, or is in use
        already."""
        place = block.arena, block.offset
        if block.holder != self._holder:
            raise ProtocolError(f"{block} is in no arena of the process that names it")
        if place in self._places:
            raise ProtocolError(f"{block} is in use already")
        if not (block.offset >= 0 and 0 < block.size <= ARENA_BYTES - block.offset):
            raise ProtocolError(f"{block} is in no arena")
        self._places.add(place)

    def free(self, block: Address) -> None:
        """Note that a block is no longer in use, and tell its owner."""
        self._places.discard((block.arena, block.offset))
        self._on_free(block)


class BlockReader:
    """Reads blocks. For those in arenas, `holders` has the process ids of the processes of this machine that hold them,
    by number (`sloop.shared_memory.Arenas`)."""

    def __init__(self, holders: Mapping[int, int]) -> None:
        self._arenas = ArenaReader(holders)

    def tensors(self, block: Block) -> list[Tensor]:
        """The tensors of a block. Raises `ProtocolError` if there is no such block, or if it is malformed."""
        return tensors_in(self.memory(block))

    def memory(self, block: Block) -> bytes | memoryview:
        """The bytes of a block."""
        if type(block) is bytes:
            return block
        try:
            return self._arenas.read(block)  # type: ignore[arg-type]  # an address
        except ValueError as error:
            raise ProtocolError(str(error)) from error
