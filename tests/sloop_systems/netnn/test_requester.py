"""Slots, epochs and time-outs of real packets, on a socket instead of a fabric: no rights needed."""

import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sloop.errors import InputError
from sloop_systems.netnn.emulator import FlowVerdict, InferenceEnding
from sloop_systems.netnn.mapper import Fabric
from sloop_systems.netnn.network import Ints
from sloop_systems.netnn.packets import Packet, PacketKind, ValueEncoding
from sloop_systems.netnn.program import compile_network
from sloop_systems.netnn.requester import ETHERNET, Requester
from tests.sloop_systems.netnn.models import model, rows_of

NETWORK = model(41, [(5, 3, 2)], [13, 7, 6], [5, 8, 8], seed=3)
PROGRAM = compile_network(NETWORK, Fabric(payload_bytes=4))
"""Six logits: four units of two, one in each RESULT packet; those of the last unit pad."""
ROWS = rows_of(NETWORK, 40)
LOGITS = NETWORK.run(ROWS)

Answer = Callable[[int, int], list[bytes]]
"""From inference and row to RESULT packets."""


def results(inference: int, row: int, version: int = 1) -> list[bytes]:
    padded = np.concatenate([LOGITS[row], np.zeros(2, np.int64)])
    found = []
    for number, (start, count) in enumerate(zip(PROGRAM.result_starts, PROGRAM.result_counts, strict=True)):
        source, part = divmod(number, PROGRAM.result_parts)
        values = tuple(padded[start : start + count].tolist())
        packet = Packet(
            version, 4, inference, source, 0, values, part=part, kind=PacketKind.RESULT, encoding=ValueEncoding.INT32
        )
        found.append(packet.build())
    return found


class Answering:
    """A requester whose inferences are answered at once."""

    def __init__(self, answer: Answer) -> None:
        self.here, self.there = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.requester = Requester(PROGRAM, self.begin, [self.here])
        self.answer, self.begun = answer, list[int]()
        self.open_max = 0

    def begin(self, inference: int, row: Ints) -> None:
        self.begun.append(inference)
        self.open_max = max(self.open_max, len(self.requester._begun))
        (place,) = np.flatnonzero((row == ROWS).all(axis=1))[:1].tolist()
        for content in self.answer(inference, place):
            self.there.send(ETHERNET + content)

    def run(self, count: int, **options: float) -> list[FlowVerdict]:
        return self.requester.run(ROWS[:count], **({"timeout_s": 30.0} | options))  # type: ignore[arg-type]


@pytest.fixture
def answering() -> Iterator[Callable[[Answer], Answering]]:
    made: list[Answering] = []

    def make(answer: Answer) -> Answering:
        made.append(Answering(answer))
        return made[-1]

    yield make
    for each in made:
        each.here.close()
        each.there.close()


Make = Callable[[Answer], Answering]


def right(verdicts: list[FlowVerdict]) -> bool:
    return [verdict.logits for verdict in verdicts] == [tuple(logits) for logits in LOGITS[: len(verdicts)].tolist()]


def test_each_inference_has_a_slot_of_its_own_and_the_next_epoch(answering: Make) -> None:
    fabric = answering(results)
    assert right(fabric.run(40))
    assert right(fabric.run(5, at_once=1))
    assert len(set(fabric.begun)) == 45
    assert fabric.open_max <= PROGRAM.slots
    epochs: dict[int, list[int]] = {}
    for inference in fabric.begun:
        epochs.setdefault(PROGRAM.slot(inference), []).append(PROGRAM.epoch(inference))
    assert set(epochs) == set(range(8))
    assert all(found == list(range(1, len(found) + 1)) for found in epochs.values())


def test_duplicates_strangers_and_the_order_of_results_change_nothing(answering: Make) -> None:
    strange = [b"", b"\x4e\x02" + bytes(30), Packet(1, 4, 2**32 - 1, 0, 0, (1,)).build()]

    def answer(inference: int, row: int) -> list[bytes]:
        found = results(inference, row)
        return strange + found[:0:-1] + found[1:2] + [results(2**30, 0)[0]] + found + found

    assert right(answering(answer).run(3, at_once=1))


def test_a_missing_result_aborts_the_inference_and_frees_its_slot(answering: Make) -> None:
    fabric = answering(lambda inference, row: results(inference, row)[row % 2 :])
    verdicts = fabric.run(20, timeout_s=0.05)
    for verdict in verdicts:
        expected = InferenceEnding.ABORTED if verdict.row % 2 else InferenceEnding.VERDICT
        assert verdict.ending is expected, verdict
        assert (verdict.logits is None) == (expected is InferenceEnding.ABORTED)
        assert verdict.end_ns >= verdict.start_ns
    fabric.answer = results
    assert right(fabric.run(40))


def test_results_of_two_versions_are_no_verdict(answering: Make) -> None:
    fabric = answering(lambda inference, row: results(inference, row, 1)[:1] + results(inference, row, 2)[1:])
    (verdict,) = fabric.run(1, timeout_s=0.05)
    assert (verdict.logits, verdict.version, verdict.ending) == (None, None, InferenceEnding.ABORTED)
    fabric.answer = lambda inference, row: results(inference, row, 2)
    assert [verdict.version for verdict in fabric.run(2)] == [2, 2]


def test_late_results_of_an_aborted_inference_are_dropped(answering: Make) -> None:
    late: list[bytes] = []

    def answer(inference: int, row: int) -> list[bytes]:
        sent = [*late, *results(inference, row)] if row else []
        late[:] = results(inference, row)
        return sent

    verdicts = answering(answer).run(2, timeout_s=0.05, at_once=1)
    assert [verdict.ending for verdict in verdicts] == [InferenceEnding.ABORTED, InferenceEnding.VERDICT]
    assert verdicts[1].logits == tuple(LOGITS[1].tolist())


def test_an_error_while_rows_run_leaves_nothing_that_answers_later_rows(answering: Make) -> None:
    late: list[bytes] = []

    def answer(inference: int, row: int) -> list[bytes]:
        if row == 2:
            raise OSError("no buffer space")
        late.extend(results(inference, row))
        return []

    fabric = answering(answer)
    with pytest.raises(OSError, match="no buffer space"):
        fabric.run(3)
    assert not fabric.requester._begun
    fabric.answer = lambda inference, row: [*late, *results(inference, row)]
    assert right(fabric.run(8))
    assert fabric.requester.drops == {"old epoch": 8 * len(late)}


def test_results_that_no_unit_sends_are_counted_and_change_nothing(answering: Make) -> None:
    """A part of a unit that has none would be the number of another unit's message."""

    def forged(inference: int, **fields: Any) -> bytes:
        packet = Packet(1, 4, inference, 0, 0, (77,), kind=PacketKind.RESULT, encoding=ValueEncoding.INT32)
        return replace(packet, **fields).build()

    def answer(inference: int, row: int) -> list[bytes]:
        return [
            forged(inference, part=PROGRAM.result_parts),
            forged(inference, source=200),
            forged(inference, values=(1,) * 60),
            forged(inference, encoding=ValueEncoding.INT16),
            forged(inference, kind=PacketKind.DATA),
            *results(inference, row),
        ]

    fabric = answering(answer)
    assert right(fabric.run(6))
    assert fabric.requester.drops == {"malformed": 30}


def test_a_row_that_does_not_fit_is_refused_and_begins_nothing(answering: Make) -> None:
    fabric = answering(results)
    with pytest.raises(InputError, match="rows have 40 values"):
        fabric.requester.run(ROWS[:, :40], timeout_s=1)
    assert not fabric.begun
