"""Messages of protobuf by tables, so that no generated code is needed, and the fields of an encoded message."""

import mmap
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto

Fields = Sequence[tuple[str, str, int]]
"""Of a message: name, type and number of each field. A type in capitals is another message of the table, "[]" repeats,
"{}" maps from strings."""

_SCALARS: Final = {
    "bool": FieldDescriptorProto.TYPE_BOOL,
    "string": FieldDescriptorProto.TYPE_STRING,
    "bytes": FieldDescriptorProto.TYPE_BYTES,
    "int32": FieldDescriptorProto.TYPE_INT32,
    "int64": FieldDescriptorProto.TYPE_INT64,
    "uint32": FieldDescriptorProto.TYPE_UINT32,
    "uint64": FieldDescriptorProto.TYPE_UINT64,
    "float": FieldDescriptorProto.TYPE_FLOAT,
    "double": FieldDescriptorProto.TYPE_DOUBLE,
}
VARINT_BITS_MAX: Final = 70
"""A number in a message has at most ten bytes of seven bits."""


def described(
    name: str, package: str, messages: Mapping[str, Fields], *, syntax: str, one_of: Mapping[str, str] = {}
) -> FileDescriptorProto:
    """The file `name` with these messages, by name; `Outer.Inner` is one inside another. In those of `one_of`, all
    fields are alternatives of each other, under the name given there."""
    file = FileDescriptorProto(name=name, package=package, syntax=syntax)
    known: dict[str, DescriptorProto] = {}
    for path in sorted(messages):  # an outer message sorts before those inside it
        outer, _, inner = path.rpartition(".")
        known[path] = (known[outer].nested_type if outer else file.message_type).add(name=inner)
    for path, fields in messages.items():
        if path in one_of:
            known[path].oneof_decl.add(name=one_of[path])
        for field in fields:
            _add_field(known[path], f".{package}", path, *field, is_alternative=path in one_of)
    return file


def _add_field(
    message: DescriptorProto,
    package: str,
    path: str,
    name: str,
    kind: str,
    number: int,
    *,
    is_alternative: bool = False,
) -> None:
    base = kind.removesuffix("[]").removesuffix("{}")
    field = message.field.add(name=name, number=number)
    field.label = FieldDescriptorProto.LABEL_OPTIONAL if kind == base else FieldDescriptorProto.LABEL_REPEATED
    if is_alternative:
        field.oneof_index = 0
    if kind.endswith("{}"):
        entry_name = "".join(part.capitalize() for part in name.split("_")) + "Entry"
        entry = message.nested_type.add(name=entry_name)
        entry.options.map_entry = True
        _add_field(entry, package, "", "key", "string", 1)
        _add_field(entry, package, "", "value", base, 2)
        field.type, field.type_name = FieldDescriptorProto.TYPE_MESSAGE, f"{package}.{path}.{entry_name}"
    elif base in _SCALARS:
        field.type = _SCALARS[base]
    else:
        field.type, field.type_name = FieldDescriptorProto.TYPE_MESSAGE, f"{package}.{base}"


def fields_in(message: bytes | mmap.mmap, at: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """The tag of each field of a message, where it begins, where its value does, and where both end. ValueError for
    what is no whole message; what is in the fields is not read."""
    while at < end:
        begin = at
        tag, at = _varint(message, at, end)
        kind, start = tag & 7, at
        if kind == 0:
            at = _varint(message, at, end)[1]
        elif kind == 2:
            size, start = _varint(message, at, end)
            at = start + size
        elif kind in (1, 5):
            at += 8 if kind == 1 else 4
        else:
            raise ValueError(f"a field of wire type {kind}")
        if at > end:
            raise ValueError("it ends within a field")
        yield tag, begin, start, at


def _varint(data: bytes | mmap.mmap, at: int, end: int) -> tuple[int, int]:
    """The number that begins here, and where what follows begins."""
    value = shift = 0
    while at < end and shift < VARINT_BITS_MAX:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:  # the highest bit says that more follow
            return value, at
        shift += 7
    raise ValueError("it ends within a field")
