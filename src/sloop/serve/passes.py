"""A batch as forward passes: requests of one shape are joined along their first dimension, and the answer is cut back.

Promises that joining and cutting copy nothing: row-major tensors of equal row shape are joined by laying their bytes
one after the other, and cut by slicing. Requests whose row shapes differ, and all requests to a model with a fixed
first dimension, get passes of their own inside the one batch. Pure functions; must not know sockets or processes.
"""

from collections.abc import Sequence

from msgspec import Struct

from sloop.serve.frames import ProtocolError, Shape, pack_table, unpack_table
from sloop.shared import Buffer
from sloop.tensor import Signature, Tensor


class Joined(Struct, frozen=True, gc=False):
    """A batch ready to be sent: its table and payload, and for each pass which requests it holds with how many rows."""

    table: bytes
    payload: list[list[Buffer]]
    """Per tensor of the table, the parts it is joined of."""
    members: list[list[tuple[int, int]]]
    """Per pass, (index of the request in the batch, its rows)."""

    @property
    def size_bytes(self) -> int:
        """Bytes of its tensors."""
        return sum(len(part) for parts in self.payload for part in parts)


def is_batchable(signature: Signature) -> bool:
    """Whether requests may share a forward pass: the first dimension of every input and output is open."""
    return all(port.shape[:1] == (-1,) for port in (*signature.inputs, *signature.outputs))


def join(requests: Sequence[Sequence[Tensor]], *, batchable: bool) -> Joined:
    """Lay out a batch; each request gives its tensors in the model's input order, with equally many rows in each."""
    if not batchable:
        groups = [[index] for index in range(len(requests))]
    elif _are_alike(requests):
        groups = [list(range(len(requests)))]
    else:
        by_shape: dict[object, list[int]] = {}
        for index, tensors in enumerate(requests):
            key = tuple((tensor.datatype, tensor.shape[1:]) for tensor in tensors)
            by_shape.setdefault(key, []).append(index)
        groups = list(by_shape.values())
    described: list[list[tuple[str, Shape]]] = []
    payload: list[list[Buffer]] = []
    members: list[list[tuple[int, int]]] = []
    for group in groups:
        rows = [_rows(requests[index]) for index in group]
        first = requests[group[0]]
        if len(group) == 1:
            described.append([(tensor.datatype, tensor.shape) for tensor in first])
        else:
            total = sum(rows)
            described.append([(tensor.datatype, (total, *tensor.shape[1:])) for tensor in first])
        payload.extend([requests[index][place].data for index in group] for place in range(len(first)))
        members.append(list(zip(group, rows, strict=True)))
    return Joined(pack_table(described), payload, members)


def cut(joined: Joined, table: bytes, payload: memoryview) -> list[list[Tensor]]:
    """Each request's outputs, in the model's output order, from the answer to `joined`.

    Raises `ProtocolError` for an answer to other passes, `ValueError` for an output without one row per input row.
    """
    passes = unpack_table(table, len(payload))
    if len(passes) != len(joined.members):
        raise ProtocolError(f"an answer has {len(passes)} passes, its batch {len(joined.members)}")
    outputs: list[list[Tensor]] = [[] for members in joined.members for _ in members]
    at = 0
    for pieces, members in zip(passes, joined.members, strict=True):
        for place, piece in enumerate(pieces):
            if len(members) == 1:
                end = at + piece.size_bytes
                outputs[members[0][0]].append(Tensor(piece.datatype, piece.shape, payload[at:end]))
                at = end
                continue
            total = sum(rows for _, rows in members)
            if not piece.shape or piece.shape[0] != total:
                raise ValueError(f"output {place} has the shape {list(piece.shape)} for {total} rows of input")
            row_bytes = piece.size_bytes // total
            for index, rows in members:
                end = at + rows * row_bytes
                outputs[index].append(Tensor(piece.datatype, (rows, *piece.shape[1:]), payload[at:end]))
                at = end
    return outputs


def _are_alike(requests: Sequence[Sequence[Tensor]]) -> bool:
    """Whether all have the same shapes, rows included: what nearly every batch is, found out with little work."""
    return all(
        tensors[place].shape == tensor.shape and tensors[place].datatype == tensor.datatype
        for place, tensor in enumerate(requests[0])
        for tensors in requests
    )


def _rows(tensors: Sequence[Tensor]) -> int:
    return tensors[0].shape[0] if tensors and tensors[0].shape else 1
