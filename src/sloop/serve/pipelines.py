"""Parts of a model in worker processes: the runtime of a worker that starts with some layers and loads the rest later.

A batch passes the workers of a pipeline in the order of their layers, from each to the next through a *pipe*, a socket
that their node has given them (`sloop.serve.node.pipelines` says what for). What passes is in the sockets or in one
worker, and nowhere else, so nobody has to free it. A worker takes the next batch from its pipe when it has passed on
the one before, and waits while the next worker does not read. A worker that has all layers serves like any other.

Source: San Juan, "Flashpoint" (thesis, Waterloo 2023), section 2.7 of our specification.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from msgspec import structs

from sloop.errors import MachineError
from sloop.profile.model import Places, zeros
from sloop.serve.blocks import block_parts, tensors_in
from sloop.serve.messages import CutBlock, PassedBatch, decoder, encode
from sloop.serve.processes import run_aside
from sloop.serve.runtimes import NOTHING_KNOWN, Array, Expected
from sloop.serve.shadows import CutRuntime
from sloop.serve.transport import PAYLOAD_BYTES_MAX, Frame, FrameKind, Head, ProcessChannel, ProtocolError
from sloop.shared_memory import ALIGNMENT, Buffer
from sloop.tensor import Port, Signature, Tensor, array_of, elements_of
from sloop.user_code import ModelFailure

PASSED_BYTES_MAX: Final = PAYLOAD_BYTES_MAX - (1 << 20)
"""Of the tensors of a batch, between two parts; the rest of a frame is for what is said of them."""


class PartRuntime(CutRuntime):
    """A runtime that has consecutive layer blocks of a model at first, `layers`, and all of them when the others are
    loaded (`Runtime`)."""

    def __init__(
        self,
        blocks: Sequence[CutBlock],
        signature: Signature,
        layers: range,
        expected: Expected = NOTHING_KNOWN,
    ) -> None:
        super().__init__(blocks, signature, expected)
        self.layers = layers
        self.is_complete = False
        """Whether it has all layer blocks."""
        ports = [*signature.inputs, *signature.outputs]
        ports += [port for block in blocks for port in (*block.inputs, *block.outputs)]
        datatypes = {port.name: port.datatype for port in ports}
        entering = blocks[layers.start - 1].crossing if layers.start else tuple(port.name for port in signature.inputs)
        self._entering = entering
        """The names of the tensors that its part reads from before."""
        self._leaving = tuple((name, datatypes[name]) for name in blocks[layers.stop - 1].crossing)
        """The names of the tensors that later parts read, with their datatypes."""

    @property
    def is_last(self) -> bool:
        """Whether its part ends with the outputs of the model."""
        return self.layers.stop - 1 == self._last

    def load(self, threads: int) -> bool:
        """See `Runtime`; opens sessions of the blocks that it has."""
        return self._chain.load(threads, None if self.is_complete else self.layers)

    def find_others(self, files: Mapping[int, str]) -> None:
        """Use these files, by position, for the blocks that it does not have yet, instead of the files that were named
        when it started."""
        self._chain.find({place: file for place, file in files.items() if place not in self.layers})

    def load_others(self, threads: int) -> None:
        """Load the other blocks, while another thread runs batches. A thread of low priority reads the files and opens
        sessions with one thread each. Sessions with more threads are opened afterwards at the usual priority, because
        their threads would keep the low one."""
        others = [place for place in range(self._last + 1) if place not in self.layers]
        run_aside(lambda: self._chain.load(1, others))
        if threads != 1:
            self._chain.load(threads, others)
        self.is_complete = True
        self.warm(threads)

    def warm(self, threads: int) -> None:
        """See `Runtime`."""
        if self.is_complete:
            super().warm(threads)
            return
        first, last = self.layers[0], self.layers[-1]
        ports: Mapping[str, Port] = self._chain.inputs(first, last)
        feed = zeros(Signature(tuple(ports.values()), ()))
        if feed is not None:
            with contextlib.suppress(Exception):  # between blocks, the first dimension need not count rows
                self._chain.run(first, last, feed, threads, is_warming=True)
        self._chain.note_warm(threads, self.layers)

    def run(self, inputs: Sequence[Array], threads: int, outputs: Places = ()) -> tuple[Sequence[Array], int]:
        """See `Runtime`. MachineError until it has all blocks."""
        if not self.is_complete:
            own = f"blocks {self.layers[0]} to {self.layers[-1]} of {self._last + 1}"
            what = f"this worker has {own}, and cannot serve alone"
            raise MachineError(what, help="pass the batch through all workers of its pipeline")
        return super().run(inputs, threads, outputs)

    def begin(self, inputs: Sequence[Array]) -> dict[str, Array]:
        """The inputs of the model by name, for the first part."""
        return dict(zip(self._entering, inputs, strict=True))

    def take(self, tensors: Sequence[Tensor]) -> dict[str, Array]:
        """The tensors that the part before has passed on, as arrays by name."""
        arrays = [array_of(each.datatype, each.shape, each.data) for each in tensors]
        return dict(zip(self._entering, arrays, strict=True))

    def run_part(self, known: Mapping[str, Array], threads: int) -> dict[str, Array]:
        """Run its layers on tensors by name. Returns those of the given and computed tensors that later parts read."""
        return self._chain.run(self.layers[0], self.layers[-1], known, threads)

    def passed_on(self, known: Mapping[str, Array]) -> list[Tensor]:
        """The tensors that later parts read."""
        return [Tensor(datatype, known[name].shape, elements_of(known[name])) for name, datatype in self._leaving]

    def outputs(self, known: Mapping[str, Array]) -> list[Array]:
        """The outputs of the model in its order, for the last part."""
        return [known[port.name] for port in self._signature.outputs]


class PartPipes:
    """The pipes of a worker to those with the layers before and after its own."""

    def __init__(self, *, is_last: bool) -> None:
        self.is_last = is_last
        """Whether no worker is after it."""
        self.before: ProcessChannel | None = None
        self.after: ProcessChannel | None = None
        self._memory = memoryview(b"")
        """Of the last batch that came. Memory that is new for each costs as much time as the copy."""
        self._decode = decoder(PassedBatch).decode

    def connect(self, pipe: ProcessChannel, *, is_output: bool) -> None:
        """Use a pipe."""
        if is_output:
            self.after = pipe
        else:
            self.before = pipe

    def take(self) -> Frame | None:
        """The next batch from the worker before, valid until another one is taken; None when that worker has ended,
        perhaps within a batch. Then the worker after gets no more batches either."""
        assert self.before is not None, "a worker without a pipe takes no batch from it"
        with contextlib.suppress(OSError, ProtocolError):
            frame = self.before.receive(self._room)
            if frame is not None:
                return frame
        for pipe in (self.before, self.after):
            if pipe is not None:
                pipe.close()
        self.before = self.after = None
        return None

    def _room(self, head: Head) -> memoryview:
        memory = self._memory  # which another thread may give back
        if len(memory) < head.payload_bytes:
            self._memory = memory = memoryview(bytearray(head.payload_bytes))
        return memory[: head.payload_bytes]

    def give_back(self) -> None:
        """Keep no memory for the next batch. One that runs keeps its own."""
        self._memory = memoryview(b"")

    def pass_on(
        self, batch: int, passed: PassedBatch, passes: Sequence[Sequence[Tensor]], say: Callable[[], None]
    ) -> None:
        """Give a batch to the worker after, with the tensors of each forward pass, and `say` so; before that, if the
        worker does not take all of it at once, because from then on the next worker determines when it continues. If
        that has ended, the batch ends here: the last worker says so (`Reached`), or has ended itself."""
        if self.after is not None:
            self._send(self.after, batch, passed, passes, say)
        else:
            say()

    def _send(
        self,
        after: ProcessChannel,
        batch: int,
        passed: PassedBatch,
        passes: Sequence[Sequence[Tensor]],
        say: Callable[[], None],
    ) -> None:
        blocks = [block_parts(tensors) for tensors in passes]
        sizes = [sum(map(len, block)) for block in blocks]
        if sum(sizes) > PASSED_BYTES_MAX:
            what = f"{sum(sizes)} B pass from one part of the model to the next; the most is {PASSED_BYTES_MAX} B"
            failure = ModelFailure(f"{what}: send fewer rows", what)
            passed, blocks, sizes = structs.replace(passed, failure=failure.encode()), [], []
        record = encode(structs.replace(passed, sizes=sizes))
        payload: list[Buffer] = [record]
        size = len(record)
        for block in blocks:
            payload += (bytes(-size % ALIGNMENT), *block)
            size = sum(map(len, block))
        left = [say]

        def say_once() -> None:
            for each in left:
                each()
            left.clear()

        try:
            after.send(FrameKind.BYTES, batch, len(record), payload, say_once)
        except OSError:
            after.close()
            self.after = None
        say_once()

    def read(self, frame: Frame) -> tuple[PassedBatch, list[list[Tensor]]]:
        """A batch from the worker before, and the tensors of each forward pass, as views."""
        end = frame.value
        passed: PassedBatch = self._decode(frame.payload[:end])
        found: list[list[Tensor]] = []
        for size in passed.sizes:
            start = -(-end // ALIGNMENT) * ALIGNMENT
            end = start + size
            found.append(tensors_in(frame.payload[start:end]))
        return passed, found
