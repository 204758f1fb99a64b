"""Runs rows on a fabric of real packets: assigns slots, reads verdicts from RESULT packets, and applies time-outs.

It does in real time what the emulator does on its virtual clock. An inference gets a free slot with the slot's next
epoch. It ends with its last RESULT packet, or at its time-out without a verdict. The fabric gives the function that
begins one.
"""

import contextlib
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import ArrayLike

from sloop_systems.netnn.emulator import FlowVerdict, InferenceEnding
from sloop_systems.netnn.network import Ints
from sloop_systems.netnn.packets import ETHERTYPE, Malformed, parse, result_of
from sloop_systems.netnn.program import Program

ETHERNET: Final = b"\xff" * 6 + b"\x02\0\0\0\0\1" + ETHERTYPE.to_bytes(2)
"""Header of all packets: to everybody, from an address that belongs to nobody."""
FRAME_MAX: Final = 2048
WAKE_MS: Final = 200
"""It looks this often whether it is to stop."""


@dataclass
class _Begun:
    row: int
    generation: int
    begin_ns: int
    logits: Ints
    missing: set[int]
    version: int | None = None


@dataclass(eq=False)
class Requester:
    """The inferences of one fabric. One thread runs rows at a time."""

    program: Program
    begin: Callable[[int, Ints], None]
    """Sends what begins an inference: its number and its row."""
    results: Sequence[socket.socket]
    """Where RESULT packets arrive."""
    cpu: int | None = None
    """On which the inferences run; None for any."""
    generation: int = 0
    """How often the weights have been swapped; an inference has that in which it began."""
    settled: threading.Condition = field(default_factory=threading.Condition)
    """Guards inferences and generation; notified when an inference ends."""

    def __post_init__(self) -> None:
        """No inference yet; all slots are free."""
        self._epochs = [0] * self.program.slots
        self._free: deque[int] = deque()
        self._begun: dict[int, _Begun] = {}
        self._verdicts: list[FlowVerdict | None] = []
        self._running = threading.Lock()
        self._cancelled = False
        self.drops: dict[str, int] = {}
        """RESULT packets that were not used, by reason, as `FabricCounts.sink_drops`."""

    def run(self, rows: ArrayLike, *, timeout_s: float, at_once: int = 0) -> list[FlowVerdict]:
        """A verdict for each row, in order. At most `at_once` inferences run at the same time, by default one in each
        slot, and never more; the others wait. InputError if a row does not fit the network."""
        checked = self.program.check_rows(np.asarray(rows))
        slots = min(at_once or self.program.slots, self.program.slots)
        with self._running, ThreadPoolExecutor(1) as threads:
            self._cancelled = False
            running = threads.submit(self._run, checked, int(timeout_s * 1e9), slots)
            try:
                return running.result()
            except BaseException:  # Ctrl-C does not wait for the other rows
                self._cancelled = True
                raise

    def all_of_this_generation(self) -> bool:
        """Whether no inference began before the last swap."""
        return all(each.generation == self.generation for each in self._begun.values())

    def _run(self, rows: Ints, timeout_ns: int, slots: int) -> list[FlowVerdict]:
        """In a thread of its own, which alone is bound to the CPU."""
        if self.cpu is not None:
            with contextlib.suppress(OSError):  # the CPU may have gone
                os.sched_setaffinity(0, {self.cpu})
        self._verdicts = [None] * len(rows)
        self._free = deque(range(slots))
        poll = select.poll()
        for end in self.results:
            poll.register(end, select.POLLIN)
        try:
            self._answer(rows, timeout_ns, poll)
        except BaseException:  # nothing of these rows may answer a later one
            self._abort(0)
            raise
        return [each for each in self._verdicts if each is not None]

    def _answer(self, rows: Ints, timeout_ns: int, poll: select.poll) -> None:
        waiting = deque(range(len(rows)))
        while waiting or self._begun:
            if self._cancelled:
                self._abort(0)
                break
            while waiting and self._free:
                row = waiting.popleft()
                self._begin(row, rows[row])
            if not self._receive():
                oldest_ns = min(each.begin_ns for each in self._begun.values())
                left_ns = oldest_ns + timeout_ns - time.monotonic_ns()
                if left_ns <= 0 or not poll.poll(min(left_ns / 1e6 + 1, WAKE_MS)):
                    self._abort(timeout_ns)

    def _begin(self, row: int, values: Ints) -> None:
        program, slot = self.program, self._free.popleft()
        self._epochs[slot] = (self._epochs[slot] + 1) % (1 << (32 - program.slot_bits))
        inference = self._epochs[slot] << program.slot_bits | slot
        logits = np.zeros(int((program.result_starts + program.result_counts).max()), np.int64)
        with self.settled:
            self._begun[inference] = _Begun(
                row, self.generation, time.monotonic_ns(), logits, set(range(len(program.result_starts)))
            )
            self.begin(inference, values)

    def _receive(self) -> bool:
        """Takes the RESULT packets that have arrived; returns whether there were any."""
        found = False
        for end in self.results:
            with contextlib.suppress(BlockingIOError):
                while True:
                    frame = end.recv(FRAME_MAX, socket.MSG_DONTWAIT)
                    found = True
                    self._take(frame[len(ETHERNET) :])
        return found

    def _take(self, content: bytes) -> None:
        """One RESULT packet. Those of no inference that is open are dropped, and so are duplicates."""
        program = self.program
        try:
            packet = parse(content)
            number = result_of(packet, program)
        except Malformed:
            self._drop("malformed")
            return
        begun = self._begun.get(packet.inference)
        if begun is None:
            self._drop("old epoch")
            return
        if begun.version not in {None, packet.version}:
            self._drop("unknown version")
            return
        if number not in begun.missing:
            self._drop("duplicate")
            return
        start = int(program.result_starts[number])
        begun.logits[start : start + len(packet.values)] = packet.values
        begun.version = packet.version
        begun.missing.remove(number)
        if not begun.missing:
            logits = tuple(begun.logits[: program.classes].tolist())
            self._end(packet.inference, InferenceEnding.VERDICT, logits, begun.version)

    def _drop(self, reason: str) -> None:
        self.drops[reason] = self.drops.get(reason, 0) + 1

    def _abort(self, timeout_ns: int) -> None:
        now_ns = time.monotonic_ns()
        for inference in [key for key, each in self._begun.items() if now_ns - each.begin_ns >= timeout_ns]:
            self._end(inference, InferenceEnding.ABORTED, None, None)

    def _end(
        self, inference: int, ending: InferenceEnding, logits: tuple[int, ...] | None, version: int | None
    ) -> None:
        with self.settled:
            begun = self._begun.pop(inference)
            self.settled.notify_all()
        self._verdicts[begun.row] = FlowVerdict(begun.row, ending, logits, version, begun.begin_ns, time.monotonic_ns())
        self._free.append(self.program.slot(inference))
