"""Bodies and shadows: a *body* is a worker whose model is cut into blocks; its *shadow* is a worker that holds some of
these blocks and computes some rows of the body's batches.

A body loads every block of its model (`CutRuntime`) and runs them one after the other, so it need not load anything
when a shadow is attached. For each contiguous run of blocks that the shadow holds, the body sends the last rows of a
batch to it, computes the other rows meanwhile, and joins the results. The rows are in shared memory, one region for
each direction; messages over a socket between both (`SOCK_SEQPACKET`) say where. The profile decides which batches are
shared, and how many of their rows (`sloop.profile.blocks.shared_rows`).

No answer depends on the shadow: if it dies, hangs, or sends a wrong answer, the body computes these rows itself and
uses the shadow no longer (`PartnerLost`). It never reads that shadow's memory again.

Source: AsyFunc (submission to SoCC'23), our specification, sections 2.9 to 2.11: the pair communicates directly,
without a coordinator.
"""

import contextlib
import secrets
import select
import socket
import struct
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from msgspec import Struct

from sloop.profile.model import THREAD_COUNTS, Places, zeros
from sloop.profile.pairs import runs_of
from sloop.profile.warming import batch_maker
from sloop.serve.blocks import block_parts, tensors_in
from sloop.serve.messages import CutBlock, PairSetup, Reached, ShadowSetup, Threads, decoder, encode
from sloop.serve.runtimes import NOTHING_KNOWN, Array, Expected, FileRuntime, warm_batches
from sloop.serve.transport import ProcessChannel, ProtocolError, records_in
from sloop.shared_memory import SharedMemory, write_tensors
from sloop.tensor import Port, Signature, Tensor, array_of, elements_of
from sloop.user_code import failure_of
from sloop.vocabulary import WorkerId

MEET_S_MAX: Final = 2.0
"""How long body and shadow wait for each other when they connect."""
MESSAGE_BYTES_MAX: Final = 1 << 16
_PEER: Final = struct.Struct("3i")
"""`struct ucred`: process, user, group."""


class PartnerLost(Exception):
    """The shadow cannot be used any longer; the text says why."""


class SharedRows(Struct, frozen=True, array_like=True):
    """Rows for blocks `first` to `last`, or the results; `error` if they failed."""

    first: int
    last: int
    names: list[str]
    """Of the tensors in shared memory, which are a block (`sloop.serve.blocks`)."""
    size: int
    """Of that block, in bytes."""
    error: str = ""


class RowExchange:
    """One side of the connection between body and shadow: writes into its own memory, reads the other's."""

    def __init__(self, sock: socket.socket, own: SharedMemory, other: SharedMemory) -> None:
        self.sock = sock
        self._own, self._other = own, other
        self._decode = decoder(SharedRows).decode

    @classmethod
    def meet(cls, sock: socket.socket, process: int) -> "RowExchange":
        """Exchange memory over a connected socket. PartnerLost if the other side is another process than this one, or
        says nothing."""
        own = SharedMemory.make()
        if own is None:
            raise PartnerLost("the operating system has refused memory that processes share (memfd)")
        try:
            peer, _, _ = _PEER.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
            if peer != process:
                raise PartnerLost(f"process {peer} has connected, not process {process}")
            sock.settimeout(MEET_S_MAX)
            socket.send_fds(sock, [b"m"], [own.fd])
            _, fds, _, _ = socket.recv_fds(sock, 1, 1)
            if len(fds) != 1:
                raise PartnerLost("it closed the connection")
        except (OSError, PartnerLost) as error:
            own.close()
            raise error if isinstance(error, PartnerLost) else PartnerLost(str(error)) from error
        return cls(sock, own, SharedMemory(fds[0]))

    def send(self, first: int, last: int, arrays: Mapping[str, tuple[str, Array]]) -> None:
        """Write tensors, given with their datatypes by name, and tell the other side. PartnerLost if it is gone."""
        tensors = [Tensor(datatype, array.shape, elements_of(array)) for datatype, array in arrays.values()]
        try:
            size = write_tensors(self._own, [block_parts(tensors)])
            self.sock.send(encode(SharedRows(first, last, list(arrays), size)))
        except OSError as error:
            raise PartnerLost(f"rows cannot be sent: {error.strerror or error}") from error

    def send_error(self, first: int, last: int, error: str) -> None:
        """Say that rows failed."""
        with contextlib.suppress(OSError):
            self.sock.send(encode(SharedRows(first, last, [], 0, error[:1024])))

    def receive(self, until_s: float) -> tuple[SharedRows, dict[str, Array]]:
        """The next message, and its tensors as views of the other's memory. PartnerLost if there is none until then
        (`time.monotonic`), or it cannot be read."""
        self.sock.settimeout(max(1e-4, until_s - time.monotonic()))
        try:
            data = self.sock.recv(MESSAGE_BYTES_MAX)
            if not data:
                raise PartnerLost("it has ended")
            rows: SharedRows = self._decode(data)
            tensors = tensors_in(self._other.readable(rows.size)) if rows.size else []
            named = zip(rows.names, tensors, strict=True)
            arrays = {name: array_of(each.datatype, each.shape, each.data) for name, each in named}
        except TimeoutError:
            raise PartnerLost("it did not answer in time") from None
        except (OSError, ValueError, KeyError, msgspec.MsgspecError, ProtocolError) as error:
            raise PartnerLost(f"its answer cannot be read: {error}") from error
        return rows, arrays

    def close(self) -> None:
        """End the connection, which the other side notices."""
        self.sock.close()
        self._own.close()
        self._other.close()


class BlockSequence:
    """Some blocks of a model, each a file with sessions of its own."""

    def __init__(self, blocks: Mapping[int, CutBlock]) -> None:
        self.blocks = dict(blocks)
        self._runtimes = {place: _few(FileRuntime(block.file)) for place, block in blocks.items()}

    def find(self, files: Mapping[int, str]) -> None:
        """Note that blocks that have yet to be loaded are in these files."""
        self._runtimes |= {place: _few(FileRuntime(file)) for place, file in files.items()}

    def load(self, threads: int, places: Iterable[int] | None = None) -> bool:
        """Open sessions for `threads` threads, of all blocks or of those at these places. Returns False if all were
        open already."""
        wanted = self._runtimes if places is None else places
        return sum([self._runtimes[place].load(threads) for place in wanted]) > 0

    def inputs(self, first: int, last: int) -> dict[str, Port]:
        """What the blocks from `first` to `last` read of what was computed before them."""
        made: set[str] = set()
        found: dict[str, Port] = {}
        for place in range(first, last + 1):
            found.update({port.name: port for port in self.blocks[place].inputs if port.name not in made})
            made.update(port.name for port in self.blocks[place].outputs)
        return found

    def outputs(self, first: int, last: int) -> dict[str, Port]:
        """What is read later of what these blocks compute."""
        made = {port.name: port for place in range(first, last + 1) for port in self.blocks[place].outputs}
        return {name: made[name] for name in self.blocks[last].crossing if name in made}

    def note_warm(self, threads: int, places: Iterable[int] | None = None) -> None:
        """Sessions for this number of threads have been run."""
        for place in self._runtimes if places is None else places:
            self._runtimes[place].note_warm(threads)

    def run(
        self, first: int, last: int, known: Mapping[str, Array], threads: int, *, is_warming: bool = False
    ) -> dict[str, Array]:
        """Run blocks on tensors by name; of these and their results, those that cross the end of the last block."""
        tensors = dict(known)
        for place in range(first, last + 1):
            block = self.blocks[place]
            session, _ = self._runtimes[place].session(threads, is_warming=is_warming)
            made = session.run({port.name: tensors[port.name] for port in block.inputs})
            tensors.update(zip((port.name for port in session.signature.outputs), made, strict=True))
            tensors = {name: tensors[name] for name in block.crossing if name in tensors}
        return tensors


def _few(block: FileRuntime) -> FileRuntime:
    """A block with sessions for as many numbers of threads as a large model: together they are one."""
    block.thread_counts = THREAD_COUNTS[0]
    return block


def has_rows(port: Port) -> bool:
    """Whether a tensor between blocks has a row for each row of the batch; others are the same for all rows."""
    return port.shape[:1] == (-1,)


class Partner:
    """A shadow as its body sees it."""

    def __init__(self, setup: PairSetup, exchange: RowExchange) -> None:
        self.number, self._exchange = setup.shadow, exchange
        self.learn(setup)

    @classmethod
    def connect(cls, setup: PairSetup) -> "Partner":
        """Connect with a shadow that waits. PartnerLost if it does not."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            sock.settimeout(MEET_S_MAX)
            sock.connect(setup.address)
            return cls(setup, RowExchange.meet(sock, setup.process))
        except OSError as error:
            sock.close()
            raise PartnerLost(f"it cannot be reached: {error.strerror or error}") from error
        except PartnerLost:
            sock.close()
            raise

    def learn(self, setup: PairSetup) -> None:
        """Share batches in this way from now on."""
        self._setup = setup
        self.runs = runs_of(setup.blocks)

    def rows_of(self, batch: int) -> int:
        """How many rows of a batch it computes; 0 where the body alone is faster."""
        return self._setup.rows[batch] if batch < len(self._setup.rows) else 0

    def send(self, batch: int, first: int, last: int, arrays: Mapping[str, tuple[str, Array]]) -> float:
        """Send rows; returns the time by which the results must have arrived (`time.monotonic`)."""
        until_s = time.monotonic() + self._setup.patience_ms[batch] / 1e3
        self._exchange.send(first, last, arrays)
        return until_s

    def receive(self, first: int, last: int, until_s: float) -> dict[str, Array]:
        """The results, in memory that the next rows overwrite. PartnerLost if none or others have arrived."""
        rows, arrays = self._exchange.receive(until_s)
        if rows.error:
            raise PartnerLost(rows.error)
        if (rows.first, rows.last) != (first, last):
            what = f"it answered for blocks {rows.first} to {rows.last} instead of {first} to {last}"
            raise PartnerLost(what)
        return arrays

    def close(self) -> None:
        """Use it no longer."""
        self._exchange.close()


class CutRuntime:
    """A model in blocks (`Runtime`), which may have a shadow. `lost` says why the last shadow was given up."""

    def __init__(self, blocks: Sequence[CutBlock], signature: Signature, expected: Expected = NOTHING_KNOWN) -> None:
        self._chain = BlockSequence(dict(enumerate(blocks)))
        self._signature, self._last, self._expected = signature, len(blocks) - 1, expected
        self.partner: Partner | None = None
        self.lost: tuple[WorkerId, str] | None = None
        """The number of a shadow that was given up since somebody looked, and why."""

    @property
    def thread_counts(self) -> int:
        """See `Runtime`."""
        return THREAD_COUNTS[0]

    def load(self, threads: int) -> bool:
        """See `Runtime`."""
        return self._chain.load(threads)

    def warm(self, threads: int) -> None:
        """See `Runtime`."""
        batches, shapes = self._expected.batches, self._expected.shapes
        run = partial(self._chain.run, 0, self._last, threads=threads, is_warming=True)
        made = batch_maker(self._signature, shapes)
        if made is not None:
            run(made(batches[0]))
            warm_batches(run, made, batches, Path(self._chain.blocks[0].file))
        self._chain.note_warm(threads)

    def detach(self) -> None:
        """Use the shadow no longer."""
        if self.partner is not None:
            self.partner.close()
            self.partner = None

    def give_back(self) -> None:
        """Does nothing: sizes between blocks are unknown."""

    def prune(self, outputs: Places) -> None:
        """Does nothing: all blocks are loaded for all outputs."""

    def run(self, inputs: Sequence[Array], threads: int, outputs: Places = ()) -> tuple[Sequence[Array], int]:
        """See `Runtime`."""
        known = {port.name: array for port, array in zip(self._signature.inputs, inputs, strict=True)}
        batch = len(inputs[0]) if inputs and inputs[0].ndim else 1
        at = 0
        if self.partner is not None and self.partner.rows_of(batch):
            for first, last in self.partner.runs:
                if at < first:
                    known = self._chain.run(at, first - 1, known, threads)
                known = self._shared(batch, first, last, known, threads)
                at = last + 1
        if at <= self._last:
            known = self._chain.run(at, self._last, known, threads)
        return [known[port.name] for port in self._signature.outputs], threads

    def _shared(self, batch: int, first: int, last: int, known: dict[str, Array], threads: int) -> dict[str, Array]:
        """Run blocks on all rows; the shadow computes the last ones if it can."""
        ports, partner = self._chain.inputs(first, last), self.partner
        own = batch - (partner.rows_of(batch) if partner is not None else 0)

        def rows_of(rows: slice) -> dict[str, Array]:
            return {name: known[name][rows] if has_rows(port) else known[name] for name, port in ports.items()}

        if partner is None:  # lost in an earlier run of this batch
            return self._chain.run(first, last, known, threads)
        theirs: dict[str, Array] | None = None
        made: list[dict[str, Array]] = []
        until_s = 0.0
        try:
            sent = rows_of(slice(own, None))
            until_s = partner.send(batch, first, last, {name: (ports[name].datatype, sent[name]) for name in sent})
        except PartnerLost as error:
            self._give_up(str(error))
        try:
            if own:
                made.append(self._chain.run(first, last, rows_of(slice(own)), threads))
        finally:  # also if the model raises: the shadow's answer must not be taken for that of the next batch
            if self.partner is not None:
                try:
                    theirs = self._checked(partner.receive(first, last, until_s), first, last, batch - own)
                except PartnerLost as error:
                    self._give_up(str(error))
        made.append(self._chain.run(first, last, rows_of(slice(own, None)), threads) if theirs is None else theirs)
        joined = {
            name: np.concatenate([each[name] for each in made]) if has_rows(port) else made[0][name].copy()
            for name, port in self._chain.outputs(first, last).items()
        }
        passing = self._chain.blocks[last].crossing
        return {name: joined[name] if name in joined else known[name] for name in passing}

    def _checked(self, arrays: dict[str, Array], first: int, last: int, rows: int) -> dict[str, Array]:
        """The results of a shadow. PartnerLost if they do not have the names and shapes that these blocks give for this
        many rows."""
        for name, port in self._chain.outputs(first, last).items():
            found = arrays.get(name)
            if found is None or found.ndim != len(port.shape) or (has_rows(port) and len(found) != rows):
                shape = "nothing" if found is None else f"the shape {list(found.shape)}"
                raise PartnerLost(f"it answered {shape} as {name!r} of {rows} rows")
        return arrays

    def _give_up(self, why: str) -> None:
        if self.partner is not None:
            self.lost = self.partner.number, why
            self.detach()


# The shadow


class ShadowWorker:
    """Holds blocks, and computes rows of its body's batches for them."""

    def __init__(self, channel: ProcessChannel, setup: ShadowSetup) -> None:
        self._channel, self._setup = channel, setup
        self._chain = BlockSequence(setup.blocks)
        self._duty = 1.0
        """The share of time in which this process may compute, if the machine cannot enforce it."""

    def serve(self) -> None:
        """Load the blocks, wait for the body, and compute its rows; returns when the server stops this worker, or the
        body has ended or given it up."""
        self._chain.load(self._setup.threads)
        self._warm()
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
            address = b"\0sloop-" + secrets.token_hex(16).encode()
            listening.bind(address)
            listening.listen(1)
            self._channel.tell(Reached("ready", address))
            exchange = self._met(listening)
        if exchange is not None:
            try:
                self._serve_rows(exchange)
            finally:
                exchange.close()

    def _warm(self) -> None:
        for first, last in runs_of(tuple(self._setup.blocks)):
            feed = zeros(Signature(tuple(self._chain.inputs(first, last).values()), ()))
            if feed is not None:
                self._chain.run(first, last, feed, self._setup.threads)

    def _met(self, listening: socket.socket) -> RowExchange | None:
        """The connection with the body; None if the server stops this worker before."""
        while True:
            waiting: list[ProcessChannel | socket.socket] = [self._channel, listening]
            ready, _, _ = select.select(waiting, [], [])
            if self._channel in ready and not self._follow():
                return None
            if listening in ready:
                sock, _ = listening.accept()
                try:
                    return RowExchange.meet(sock, self._setup.body)
                except PartnerLost:  # whoever else connects is not served
                    sock.close()

    def _follow(self) -> bool:
        """Take a frame from the server; False if it stops this worker."""
        frame = self._channel.receive()
        if frame is None:
            return False
        for order in records_in(frame, decoder(list[Threads]).decode):
            if not 0 < order.duty <= 1:
                raise ProtocolError(f"the server sent {order} to a shadow")
            self._duty = order.duty
        return True

    def _serve_rows(self, exchange: RowExchange) -> None:
        """Compute rows until the body closes the connection, which it does after its batch if the server stops its
        shadow."""
        waiting: list[ProcessChannel | socket.socket] = [self._channel, exchange.sock]
        while True:
            ready, _, _ = select.select(waiting, [], [])
            if self._channel in ready and not self._follow():
                waiting.remove(self._channel)
            if exchange.sock in ready:
                try:
                    self._answer(exchange)
                except PartnerLost:
                    return

    def _answer(self, exchange: RowExchange) -> None:
        rows, arrays = exchange.receive(time.monotonic() + MEET_S_MAX)
        first, last = rows.first, rows.last
        started_s = time.monotonic()
        try:
            made = self._chain.run(first, last, arrays, self._setup.threads)
        except Exception as error:  # whatever the model raises: the body computes the rows, and says what is wrong
            exchange.send_error(first, last, failure_of(error).detail)
            return
        if self._duty < 1:
            time.sleep((time.monotonic() - started_s) * (1 / self._duty - 1))
        ports = self._chain.outputs(first, last)
        exchange.send(first, last, {name: (port.datatype, made[name]) for name, port in ports.items()})
