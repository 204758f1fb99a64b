"""The worker process: it serves one replica, reading batches from its socket, running the model and answering with its
outputs.

A backend starts it as `python -m sloop.serve.worker FD PARENT ARENA ARENA_FD`, and tells it in a first record what it
serves. A spare one, which is started before a replica is needed (`sloop.serve.processes`), loads its libraries, says
that it waits, and is told later. A worker never outlives the server, answers each batch once, reuses the memory of its
inputs, and exits with a message when it receives a malformed frame or record.

A batch comes as blocks (`sloop.serve.blocks`). The worker assembles the inputs of each visit, runs visits with equal
rows in one forward pass, and writes one block for each visit. What the outputs decide, how many parts go along each
edge, it reports as numbers; a visit whose tensors do not fit fails alone.

A resize sets the thread count of the following batches. Sessions for other thread counts are opened in the background;
until one is ready, batches run on the nearest count. If the machine cannot enforce a fraction of a core, the worker
enforces it with a duty cycle: after computing for t it sleeps for t·(1/duty − 1).

If its first record is a `ShadowSetup`, it becomes the shadow of another worker (`sloop.serve.shadows`), which gets a
`PairSetup`.

If it is ordered to begin with some layers of a model, it runs these on batches that pass several workers, from a pipe
to a pipe, and loads the other layers in the background (`sloop.serve.pipelines`).
"""

import contextlib
import os
import queue
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NoReturn, TypeVar

import numpy as np
from msgspec import structs

from sloop.cuda import GpuFailure
from sloop.errors import MachineError, SloopError
from sloop.events import Finished, WorkerLost, WorkerReady
from sloop.memory import give_back, is_out_of_memory
from sloop.profile import operators
from sloop.profile.model import NOTHING, fault_of_inputs, is_python
from sloop.profile.threads import follow_cores
from sloop.serve.blocks import Block, BlockReader, write_block
from sloop.serve.dataflow import APPLICATION, Assembler, Decision, Passed, RequestTensors
from sloop.serve.messages import (
    ITSELF,
    BatchFinished,
    BatchPassed,
    BatchRaised,
    CompleteWorker,
    ConnectParts,
    Free,
    PairSetup,
    PassedBatch,
    Reached,
    Report,
    Run,
    RunBatch,
    ShadowSetup,
    Threads,
    WorkerDiffers,
    decoder,
)
from sloop.serve.pipelines import PartPipes, PartRuntime
from sloop.serve.processes import begin, set_name
from sloop.serve.protocols import StageSetup
from sloop.serve.runtimes import (
    SUBSETS_MAX,
    Array,
    Expected,
    Runtime,
    open_runtime,
    prepare_runtimes,
)
from sloop.serve.shadows import CutRuntime, Partner, PartnerLost, ShadowWorker
from sloop.serve.transport import Frame, ProcessChannel, ProtocolError, records_in
from sloop.serve.verify import Verification
from sloop.serve.worker_memory import LOOK_S, WorkerMemory
from sloop.shared_memory import ALIGNMENT, Address, Arena, ArenaFull, offsets
from sloop.tensor import (
    ARRAY_TYPES,
    ITEM_BYTES,
    MISSING,
    NUMPY_TYPES,
    Port,
    Slices,
    Tensor,
    array_of,
    bytes_of,
    elements_of,
    fill,
    open_places_of,
    row_starts,
    size_and_shape,
)
from sloop.text import listed
from sloop.user_code import ModelFailure, WrongOutputsError, failure_of, raised_by_users
from sloop.vocabulary import BatchId

T = TypeVar("T")

STEPS: Final = ("spawning", "fetching", "loading", "warming")
"""The steps of a cold start."""

IDLE_S: Final = 0.02
"""A worker that has received nothing for so long is idle: it may run requests that shared a pass again."""
OTHER_LAYERS, GIVE_BACK = 0, -1
"""What the thread that prepares thread counts is told so that it completes the model, or gives memory back."""
Kept = tuple[Sequence[Slices], Sequence[Slices]]
"""The parts of the inputs and of the outputs of a visit that remain when padding is cut off."""
DATATYPE_OF: Final = {dtype: name for name, dtype in NUMPY_TYPES.items()}
Answer = BatchFinished | ModelFailure | list[list[Tensor]]
"""What becomes of a batch in a worker; the tensors of each pass if it goes on to another worker."""
ToWorker = (
    StageSetup | ShadowSetup | RunBatch | Free | Threads | PairSetup | WorkerDiffers | ConnectParts | CompleteWorker
)


# Batches


def group(
    visits: Sequence[Sequence[Tensor]],
    *,
    batchable: bool,
    inputs: int | None = None,
    opened: Mapping[int, tuple[int, ...]] = MappingProxyType({}),
) -> list[list[int]]:
    """The visits of each forward pass, by their positions: one pass for all whose rows have the same types and shapes.
    `opened` has, by input, the dimensions in which they may differ, because they are padded. A batch has one size; only
    at a stage behind others may it have several shapes.

    Each visit gives its tensors in the model's input order, all with the same number of rows. If the model is not
    `batchable`, each visit has a pass of its own, and so has one with more tensors than the model has `inputs`: it
    gives optional ones.
    """
    if not batchable:
        return [[index] for index in range(len(visits))]
    if len(visits) == 1:
        return [[0]]
    by_kind: dict[object, list[int]] = {}
    for index, tensors in enumerate(visits):
        kind: object = tuple([(tensor.datatype, tensor.shape[1:]) for tensor in tensors])
        if opened:
            kind = tuple([_closed(tensor, opened.get(place, ())) for place, tensor in enumerate(tensors)])
        if inputs is not None and len(tensors) > inputs:
            kind = index
        by_kind.setdefault(kind, []).append(index)
    return list(by_kind.values())


def _closed(tensor: Tensor, opened: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """The type of a tensor and its dimensions, without that of the rows; 0 for each dimension that may differ."""
    return tensor.datatype, tuple([0 if at in opened else size for at, size in enumerate(tensor.shape[1:], 1)])


def rows_of(tensors: Sequence[Tensor], first: int, count: int) -> list[Tensor]:
    """`count` rows of a visit, beginning with row `first`, as views."""
    found: list[Tensor] = []
    for tensor in tensors:
        starts = row_starts(tensor)
        data = memoryview(tensor.data)[starts[first] : starts[first + count]]
        found.append(Tensor(tensor.datatype, (count, *tensor.shape[1:]), data))
    return found


def check_rows(tensors: Sequence[Tensor], rows: int) -> None:
    """Raise `WrongOutputsError` unless all outputs of a piece of a request have one row for each of its rows."""
    for place, tensor in enumerate(tensors):
        if tensor.datatype != MISSING.datatype and tensor.shape[:1] != (rows,):
            what = f"output {place} has the shape {list(tensor.shape)} for {rows} rows of a larger request"
            raise WrongOutputsError(what)


class InputMemory:
    """Memory for a batch's inputs, aligned, and grown to the largest batch so far."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)

    def load(
        self, passes: Sequence[Sequence[Sequence[Tensor]]], elements: Mapping[int, Any] = MappingProxyType({})
    ) -> list[list[Array]]:
        """Copy tensors into arrays. For each pass and input, `passes` has the tensors whose rows become one array.
        `elements` has, by input, what fills rows up to the longest of their pass.

        The arrays may be written, and are valid until the next call.
        """
        pieces = [
            (joined, elements.get(place) if len({piece.shape[1:] for piece in joined}) > 1 else None)
            for inputs in passes
            for place, joined in enumerate(inputs)
        ]
        starts, size = offsets(_joined_bytes(joined, is_padded=element is not None) for joined, element in pieces)
        memory = self._of(size)
        arrays: list[Array] = []
        for start, (joined, element) in zip(starts, pieces, strict=True):
            if element is not None:
                own = [array_of(each.datatype, each.shape, each.data) for each in joined]
                part = memory[start : start + _joined_bytes(joined, is_padded=True)]
                arrays.append(array_of(joined[0].datatype, _joined_shape(joined), part))
                fill(arrays[-1], element, own)
                continue
            at = start
            for piece in joined:
                end = at + len(piece.data)
                memory[at:end] = piece.data
                at = end
            first = joined[0]
            if first.datatype == MISSING.datatype:
                arrays.append(NOTHING)
                continue
            shape = first.shape
            if len(joined) > 1:
                shape = (sum([piece.shape[0] for piece in joined]), *shape[1:])
            arrays.append(array_of(first.datatype, shape, memory[start:at]))
        left = iter(arrays)
        return [[next(left) for _ in inputs] for inputs in passes]

    def _of(self, size: int) -> memoryview:
        if size + ALIGNMENT > len(self._memory):
            self._memory = np.empty(size + ALIGNMENT, np.uint8)
        base = -self._memory.ctypes.data % ALIGNMENT
        return self._memory.data[base:]


def _joined_shape(joined: Sequence[Tensor]) -> tuple[int, ...]:
    """The shape of the rows of all these tensors together, padded to the longest in each dimension."""
    rows = sum([each.shape[0] for each in joined])
    return rows, *map(max, zip(*(each.shape[1:] for each in joined), strict=True))


def _joined_bytes(joined: Sequence[Tensor], *, is_padded: bool) -> int:
    """The bytes of the rows of all these tensors together."""
    if is_padded:
        return prod(_joined_shape(joined)) * ITEM_BYTES[joined[0].datatype]
    return sum([len(each.data) for each in joined])


def cut_back(tensor: Tensor, kept: Slices) -> Tensor:
    """The tensor without padding: the part `kept` of each row."""
    if tensor is MISSING or all(part.stop in (None, size) for part, size in zip(kept, tensor.shape[1:], strict=True)):
        return tensor
    array = np.ascontiguousarray(array_of(tensor.datatype, tensor.shape, tensor.data)[(slice(None), *kept)])
    return Tensor(tensor.datatype, array.shape, elements_of(array))


def tensors_of(outputs: Sequence[Array], ports: Sequence[Port]) -> list[Tensor]:
    """The outputs of a forward pass as tensors, `MISSING` for those that were not computed. Raises
    `WrongOutputsError` if they are not as many as the model declares, or of a type that does not exist in the
    protocol."""
    if len(outputs) != len(ports):
        raise WrongOutputsError(f"the model returned {len(outputs)} outputs; it declares {len(ports)}")
    found: list[Tensor] = []
    for place, (output, port) in enumerate(zip(outputs, ports, strict=True)):
        if output is NOTHING:
            found.append(MISSING)
            continue
        array = np.asarray(output, order="C")
        if array.dtype == ARRAY_TYPES.get(port.datatype):
            datatype: str | None = port.datatype
        elif array.dtype.kind in "OSU":
            datatype, array = "BYTES", array.astype(object)
        else:
            datatype = DATATYPE_OF.get(array.dtype)
        if datatype is None:
            raise WrongOutputsError(f"output {place} has the type {array.dtype}, which cannot be sent")
        found.append(Tensor(datatype, array.shape, elements_of(array)))
    return found


def split(tensors: Sequence[Tensor], rows: Sequence[int]) -> list[list[Tensor]]:
    """The rows of each visit of a pass, as views. Raises `WrongOutputsError` if a tensor does not have one row
    per row of input."""
    if len(rows) == 1:
        return [list(tensors)]
    total = sum(rows)
    found: list[list[Tensor]] = [[] for _ in rows]
    for place, tensor in enumerate(tensors):
        if tensor is MISSING:
            for own in found:
                own.append(MISSING)
            continue
        if not tensor.shape or tensor.shape[0] != total:
            raise WrongOutputsError(f"output {place} has the shape {list(tensor.shape)} for {total} rows of input")
        starts, data, row_shape, at = row_starts(tensor), memoryview(tensor.data), tensor.shape[1:], 0
        for own, count in zip(found, rows, strict=True):
            own.append(Tensor(tensor.datatype, (count, *row_shape), data[starts[at] : starts[at + count]]))
            at += count
    return found


class ModelWorker:
    """Serves one model over one socket until the server sends no more."""

    def __init__(
        self,
        channel: ProcessChannel,
        arena: Arena,
        *,
        is_spare: bool = False,
        taken: WorkerMemory | None = None,
    ) -> None:
        self._channel, self._arena, self._is_spare = channel, arena, is_spare
        self._taken = taken or WorkerMemory()
        self._threads, self._duty = 1, 1.0
        self._memory = InputMemory()
        self._wanted: queue.SimpleQueue[int | tuple[int, ...]] = queue.SimpleQueue()
        """Thread counts and choices of outputs to prepare for."""
        self._choices: set[tuple[int, ...]] = set()
        """Of outputs, those that were put there."""
        self._decode = decoder(list[ToWorker]).decode
        self._pipes = PartPipes(is_last=True)
        self._counting: int | None = None
        """The first input whose first dimension is the number of rows."""
        self._edges: tuple[Passed, ...] = ()
        """What each outgoing edge passes on, if the rows of later visits may differ in size or number."""
        self._opened_places: dict[int, tuple[int, ...]] = {}
        """By input, the open dimensions of its rows."""
        self._elements: dict[int, Any] = {}
        """By input, the element with which these dimensions are padded; empty if rows are not padded."""
        self._replied_ns = 0
        """When the last batch was answered."""
        self._turns = 0
        """Raised when the model begins and ends to run: odd while it does."""

    def serve(self) -> None:
        """Load the model, then process frames; returns when the server sends no more."""
        if self._is_spare:
            self._channel.tell(Reached("waiting"))
        first = self._channel.receive()
        if first is None:
            return
        match records_in(first, self._decode):
            case [ShadowSetup() as setup]:
                self._serve_as_shadow(setup)
            case [StageSetup() as setup]:
                self._serve_as_replica(setup)
            case records:
                names = listed([type(record).__name__ for record in records]) or "no record"
                raise ProtocolError(f"the server sent {names} first, instead of what to serve")

    def _serve_as_replica(self, setup: StageSetup) -> None:
        runtime = self._opened(setup)
        threading.Thread(target=self._prepare, args=(runtime,), daemon=True).start()
        if self._setup.wiring.outputs:
            self._choices.add(self._setup.wiring.outputs)
            self._wanted.put(self._setup.wiring.outputs)
        self._prepare_all(runtime)
        self._channel.tell(Reached("ready"))
        while (frame := self._next(runtime)) is not None:
            for order in records_in(frame, self._decode):
                self._follow(runtime, order)

    def _next(self, runtime: Runtime) -> Frame | None:
        """The next frame of the server. Until it comes, batches are taken from the worker before, if this one has a
        part of a model, and requests that shared a pass are run again, one at a time."""
        while (before := self._pipes.before) is not None or self._verification.is_waiting:
            sources = [self._channel] if before is None else [self._channel, before]
            ready, _, _ = select.select(sources, [], [], IDLE_S if self._verification.is_waiting else None)
            if self._channel in ready:
                break
            if ready:
                self._take(runtime)
            else:
                self._verify(runtime)
        return self._channel.receive()

    def _verify(self, runtime: Runtime) -> None:
        """Run one request that shared a pass again."""
        self._turns += 1
        try:
            why = self._verification.check(lambda given: runtime.run(given, self._threads)[0])
        except Exception as error:
            fails = f"a request that shared a forward pass fails alone: {failure_of(error).detail}"
            why = "" if is_out_of_memory(error) else fails
        self._turns += 1
        self._replied_ns = time.monotonic_ns()
        if why:
            self._run_alone()
            self._channel.tell(WorkerDiffers(self._setup.worker, why))

    def _run_alone(self) -> None:
        """From the next batch on, requests share no forward pass."""
        self._is_batchable = False
        self._verification = Verification(self._servable.signature.outputs, 0, 0.0)

    def _opened(self, setup: StageSetup) -> Runtime:
        """The loaded model."""
        self._setup, self._servable = setup, (servable := setup.servable)
        self._is_batchable = servable.is_batchable
        self._padding = servable.padding if self._is_batchable else None
        signature, cut, hardware = servable.signature, servable.cut, setup.hardware
        self._verification = Verification(signature.outputs, servable.verify_first, servable.verify_share)
        self._assembler, self._reader = Assembler(setup.wiring.inputs), BlockReader(setup.holders)
        self._threads = setup.threads
        ports = signature.inputs
        self._counting = next((n for n, port in enumerate(ports) if port.counts_rows), None)
        self._opened_places = dict(open_places_of(ports))
        passed = setup.wiring.passed
        is_open = any(each.opened or each.from_client for each in passed)
        counted = [each for each in passed if each.counting is not None]
        may_differ = any(each.is_whole or each.is_joined or not self._is_batchable for each in counted)
        self._edges = passed if is_open or may_differ else ()
        elements = self._padding.elements(ports) if self._padding is not None else []
        self._elements = {place: elements[place] for place in self._opened_places} if elements else {}
        set_name(f"sloop {setup.wiring.stage}")
        prepare_runtimes(servable.model)  # they count as part of the process, which a spare worker saves
        self._channel.tell(Reached("loading"))
        operators.use(servable.operators)
        if is_python(Path(servable.model)):
            follow_cores(self._threads)
        runtime: Runtime
        expected = Expected(servable.batches_on(hardware), servable.shapes)
        try:
            if cut is not None and setup.layers is not None:
                runtime = PartRuntime(cut.blocks, signature, setup.layers.between, expected)
                self._pipes = PartPipes(is_last=runtime.is_last)
            elif cut is not None:
                runtime = CutRuntime(cut.blocks, signature, expected)
            else:
                runtime = open_runtime(
                    *(servable.model, setup.device, expected),
                    examined=signature,
                    digest=servable.digest,
                    optional=setup.wiring.optional,
                )
            runtime.load(self._threads)
            self._channel.tell(Reached("warming"))
            runtime.warm(self._threads)
            give_back()
            memory_bytes = servable.memory_bytes.get(hardware, 0)
            self._taken.expect(memory_bytes, servable.worker_bytes, has_device=setup.device is not None)
            self._taken.settle()
        except raised_by_users() as error:
            self._refuse(error)
            raise
        return runtime

    def _follow(self, runtime: Runtime, order: ToWorker) -> None:
        """Do what the server orders."""
        match order:
            case RunBatch(is_part=False):
                self._run(runtime, order)
                if isinstance(runtime, CutRuntime) and runtime.lost is not None:
                    lost, runtime.lost = runtime.lost, None
                    self._channel.tell(Report(WorkerLost(*lost)))
            case RunBatch() if isinstance(runtime, PartRuntime):
                self._enter(runtime, order)
            case Free(block):
                self._free(block)
            case Threads():
                self._resize(order)
            case WorkerDiffers():
                self._run_alone()
            case PairSetup() if isinstance(runtime, CutRuntime):
                self._pair(runtime, order)
            case ConnectParts(before) if isinstance(runtime, PartRuntime):
                self._pipes.connect(self._channel.receive_socket(), is_output=before == self._setup.worker)
            case CompleteWorker(files=files) if isinstance(runtime, PartRuntime):
                runtime.find_others(files)
                self._wanted.put(OTHER_LAYERS)
            case _:
                raise ProtocolError(f"the server sent {type(order).__name__}")

    def _serve_as_shadow(self, setup: ShadowSetup) -> None:
        set_name(f"shadow {setup.stage}")
        self._channel.tell(Reached("loading"))
        try:
            ShadowWorker(self._channel, setup).serve()
        except raised_by_users() as error:
            self._refuse(error)
            raise

    def _refuse(self, error: BaseException) -> None:
        """Say why this worker ends."""
        text = str(error).replace("\n", "; ") if isinstance(error, SloopError) else failure_of(error).detail
        self._channel.tell(Report(WorkerLost(ITSELF, text)))

    def _pair(self, runtime: CutRuntime, setup: PairSetup) -> None:
        """Share the following batches with a shadow, or no longer."""
        if not setup.address:
            if runtime.partner is not None and runtime.partner.number == setup.shadow:
                runtime.detach()
            return
        try:
            if runtime.partner is not None and runtime.partner.number == setup.shadow:
                runtime.partner.learn(setup)
            else:
                runtime.detach()
                runtime.partner = Partner.connect(setup)
        except PartnerLost as error:
            self._channel.tell(Report(WorkerLost(setup.shadow, str(error))))
        else:
            self._channel.tell(Report(WorkerReady(setup.shadow)))

    def _prepare(self, runtime: Runtime) -> None:
        """In the background, open a session for each requested thread count and choice of outputs, and give memory back
        that is not usual."""
        while True:
            try:
                wanted = self._wanted.get(timeout=LOOK_S)
            except queue.Empty:
                if self._taken.is_due():
                    self._give_back(runtime)
                continue
            if wanted == GIVE_BACK:
                self._give_back(runtime)
                if why := self._taken.stays:
                    self._end(MachineError(why))
                continue
            if wanted == OTHER_LAYERS:
                self._complete(runtime)
                continue
            try:
                with self._taken.growing():
                    if isinstance(wanted, tuple):
                        runtime.prune(wanted)
                    elif runtime.load(wanted):
                        runtime.warm(wanted)
                    give_back()
            except raised_by_users() as error:  # the replica continues with the sessions it has
                what = f"outputs {wanted}" if isinstance(wanted, tuple) else f"{wanted} threads"
                sys.stderr.write(f"sloop worker {os.getpid()}: cannot prepare {what}: {error}\n")

    def _give_back(self, runtime: Runtime) -> None:
        """Give back what large requests have left, while another thread may run the next one."""
        turns = self._turns
        self._memory = InputMemory()  # a batch that runs keeps its own
        self._pipes.give_back()
        runtime.give_back()
        give_back()
        if turns == self._turns and turns % 2 == 0:
            self._taken.note_kept()

    def _end(self, error: BaseException) -> NoReturn:
        """End this process in whatever thread, and say why."""
        with contextlib.suppress(OSError):  # the server has closed the socket
            self._refuse(error)
        os._exit(1)

    def _prepare_all(self, runtime: Runtime) -> None:
        """Have sessions opened for all numbers of threads, unless they would evict each other before they are used."""
        if self._setup.prepared <= runtime.thread_counts:
            for threads in range(1, self._setup.prepared + 1):
                self._wanted.put(threads)

    def _complete(self, runtime: Runtime) -> None:
        """In the background, load the layers that the worker does not have. A worker that fails to ends, because the
        other workers of its pipeline wait for it."""
        assert isinstance(runtime, PartRuntime), "a worker with all layers completes them"
        try:
            with self._taken.growing():
                runtime.load_others(self._threads)
            self._channel.tell(Reached("complete"))
        except BaseException as error:
            self._end(error)
        self._prepare_all(runtime)

    def _resize(self, order: Threads) -> None:
        if not (0 < order.threads <= 4096 and 0 < order.duty <= 1):
            raise ProtocolError(f"a resize requests {order}")
        self._threads, self._duty = order.threads, order.duty
        if is_python(Path(self._servable.model)):
            follow_cores(self._threads)
        self._wanted.put(order.threads)
        self._channel.tell(Reached("resized"))

    def _free(self, block: Address) -> None:
        if block.arena != self._arena.number:
            raise ProtocolError(f"{block} is not in the arena of this worker")
        self._arena.free(block)

    def _run(self, runtime: Runtime, ordered: RunBatch) -> None:
        order = ordered.order
        visits, places, faults = self._assembled(order)

        def done() -> BatchFinished:
            passes, arrays = self._loaded(visits, self._elements)
            needed = self._needed(order, places, passes)
            results = self._timed(
                [partial(runtime.run, given, self._threads, own) for given, own in zip(arrays, needed, strict=True)]
            )
            rows = list(map(self._rows, visits))
            found = self._distributed(rows, passes, [outputs for outputs, _ in results])
            for members, given, (outputs, _) in zip(passes, arrays, results, strict=True):
                if len(members) > 1:
                    kept = self._kept([visits[index] for index in members], outputs)
                    for index, (_, of_outputs) in zip(members, kept, strict=False):
                        found[index] = list(map(cut_back, found[index], of_outputs))
                    self._verification.note([rows[index] for index in members], given, outputs, kept)
            stored = self._stored(ordered.batch, order, places, found, faults)
            if self._elements or len(passes) != 1:  # otherwise it says so already
                elements, padded = self._padded(visits, rows, passes, arrays) if self._elements else (0, 0)
                counted = structs.replace(stored.event, passes=len(passes), elements=elements, padded=padded)
                stored = structs.replace(stored, event=counted)
            return stored

        self._answer(ordered.batch, ordered.sent_ns, done)

    def _answer(
        self, number: BatchId, sent_ns: int, compute: Callable[[], Answer], batch: PassedBatch | None = None
    ) -> None:
        """Answer a batch with what `compute` returns, or say why it failed. `batch` is given for one that passes
        several workers."""
        is_short_of_memory = False
        self._turns += 1
        try:
            answer = compute()
        except ArenaFull as error:
            answer = ModelFailure("there is no room for the outputs in shared memory", str(error))
        except GpuFailure as error:  # all further batches would fail: the batch is lost with the worker
            self._refuse(error)
            raise
        except BaseException as error:  # also SystemExit: whatever the model raises fails this batch, not the worker
            answer = self._failure(error)
            is_short_of_memory = is_out_of_memory(error)
        self._reply(number, sent_ns, answer, batch)
        self._turns += 1
        if is_short_of_memory:  # now that the exception holds nothing any longer
            self._wanted.put(GIVE_BACK)

    def _failure(self, error: BaseException) -> ModelFailure:
        """What to say of a failed batch. The inputs of an ONNX model can be to blame only where clients send them: what
        another stage has made of them is no matter of theirs."""
        is_from_client = all(need.stage == APPLICATION for need in self._setup.wiring.inputs.needs)
        if self._taken.refusal and is_out_of_memory(error):
            remedy = "if it should be served, give the application `limits: {worker_bytes: …}`"
            detail = f"{self._taken.refusal}: {failure_of(error).detail}; {remedy}"
            return ModelFailure(self._taken.refusal, detail, is_refusal=is_from_client)
        if not is_python(Path(self._servable.model)) and is_from_client:
            reason = fault_of_inputs(error)
            if reason:
                return ModelFailure(reason, f"refused: {reason}", is_refusal=True)
        return failure_of(error)

    def _loaded(
        self, visits: Sequence[Sequence[Tensor]], elements: Mapping[int, Any]
    ) -> tuple[list[list[int]], list[list[Array]]]:
        """The visits of each forward pass, and its inputs, padded with these elements by input."""
        passes = group(
            visits,
            batchable=self._is_batchable,
            inputs=len(self._servable.signature.inputs),
            opened=self._opened_places if elements else {},
        )
        inputs = [[list(joined) for joined in zip(*(visits[i] for i in each), strict=True)] for each in passes]
        return passes, self._memory.load(inputs, elements)

    def _kept(self, visits: Sequence[Sequence[Tensor]], outputs: Sequence[Array]) -> list[Kept]:
        """The parts of the inputs and outputs of each visit of a pass that remain when padding is cut off; empty if the
        pass is not padded."""
        padding = self._padding
        if padding is None or len({tuple([tensor.shape[1:] for tensor in tensors]) for tensors in visits}) == 1:
            return []
        ranks = [np.ndim(output) for output in outputs]
        found: list[Kept] = []
        for tensors in visits:
            shapes = [tensor.shape for tensor in tensors]
            found.append(([tuple(map(slice, shape[1:])) for shape in shapes], padding.kept(shapes, ranks)))
        return found

    def _padded(
        self,
        visits: Sequence[Sequence[Tensor]],
        rows: Sequence[int],
        passes: Sequence[Sequence[int]],
        arrays: Sequence[Sequence[Array]],
    ) -> tuple[int, int]:
        """The sum of the sizes of all rows (`sloop.vocabulary.Request.size`), and how many elements padding has added
        to it."""

        def size(shapes: Sequence[tuple[int, ...]]) -> int:
            return max([prod([shapes[place][at] for at in places]) for place, places in self._opened_places.items()])

        elements = sum(
            own * size([tensor.shape for tensor in tensors]) for own, tensors in zip(rows, visits, strict=True)
        )
        run = sum(
            sum([rows[index] for index in members]) * size([array.shape for array in given])
            for members, given in zip(passes, arrays, strict=True)
        )
        return elements, run - elements

    def _needed(self, order: Run, places: Sequence[int], passes: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
        """The places of the outputs that each pass must compute: what one of its visits needs. A choice that is new is
        prepared in the background."""
        always = self._setup.wiring.outputs
        if not order.outputs:
            return [always] * len(passes)
        found: list[tuple[int, ...]] = []
        for members in passes:
            own = [order.outputs[places[index]] for index in members]
            needed = always if () in own else tuple(sorted({place for each in own for place in each}))
            found.append(needed if len(needed) < len(self._servable.signature.outputs) else ())
            if found[-1] and found[-1] not in self._choices and len(self._choices) < SUBSETS_MAX:
                self._choices.add(found[-1])
                self._wanted.put(found[-1])
        return found

    def _timed(self, passes: Sequence[Callable[[], T]]) -> list[T]:
        """The results of forward passes, after the pause that the duty cycle wants."""
        started_ns = time.monotonic_ns()
        results = [run() for run in passes]
        if self._duty < 1:
            time.sleep((time.monotonic_ns() - started_ns) / 1e9 * (1 / self._duty - 1))
        return results

    def _enter(self, runtime: PartRuntime, ordered: RunBatch) -> None:
        """Run the layers of this worker, the first ones, on a batch."""
        order = ordered.order
        batch = PassedBatch(order.visits, [], [], [], {}, order.outputs, order.pieces)

        def passed_on() -> Answer:
            visits, places, faults = self._assembled(order)  # of a batch that is lost, blocks may be gone
            passes, arrays = self._loaded(visits, {})  # the last part does not know how long each request was
            batch.places.extend(places)
            batch.rows.extend(map(self._rows, visits))
            batch.passes.extend(passes)
            batch.faults.update(faults)
            return self._computed(runtime, ordered.batch, batch, map(runtime.begin, arrays))

        self._answer(ordered.batch, ordered.sent_ns, passed_on, batch)

    def _take(self, runtime: Runtime) -> None:
        """Run the layers of this worker on the next batch of the worker before."""
        assert isinstance(runtime, PartRuntime), "only a part of a model has workers before it"
        frame = self._pipes.take()
        if frame is None:
            if runtime.is_last:
                self._channel.tell(Reached("drained"))
            return
        batch, tensors = self._pipes.read(frame)
        number, taken_ns = BatchId(frame.subject), time.monotonic_ns()
        if batch.failure:
            self._reply(number, taken_ns, ModelFailure.decode(batch.failure), batch)
        else:
            compute = partial(self._computed, runtime, number, batch, map(runtime.take, tensors))
            self._answer(number, taken_ns, compute, batch)

    def _computed(
        self, runtime: PartRuntime, number: BatchId, batch: PassedBatch, known: Iterable[Mapping[str, Array]]
    ) -> Answer:
        """Run the layers of this worker on a batch, for each pass on tensors by name."""
        results = self._timed([partial(runtime.run_part, given, self._threads) for given in known])
        if not runtime.is_last:
            return [runtime.passed_on(made) for made in results]
        found = self._distributed(batch.rows, batch.passes, [runtime.outputs(made) for made in results])
        return self._stored(number, batch, batch.places, found, dict(batch.faults))

    def _discard(self, blocks: Sequence[Block | None]) -> None:
        for block in blocks:
            if isinstance(block, Address):
                self._arena.free(block)

    def _reply(self, number: BatchId, sent_ns: int, answer: Answer, batch: PassedBatch | None = None) -> None:
        """Answer a batch, or pass it on to the worker with the next layers. It has taken the time since it was sent, or
        since the answer before: what a worker does, or what the machine does to it, between frames belongs to no batch
        otherwise."""
        took_ns = time.monotonic_ns() - max(sent_ns, self._replied_ns)
        if batch is not None:
            took_ns += batch.took_ns
        if isinstance(answer, BatchFinished):
            event = structs.replace(answer.event, service_ns=took_ns)
            self._channel.tell(structs.replace(answer, event=event))
        elif batch is not None and not self._pipes.is_last:
            failure, tensors = (answer.encode(), []) if isinstance(answer, ModelFailure) else (b"", answer)
            passed = structs.replace(batch, took_ns=took_ns, failure=failure)
            self._pipes.pass_on(number, passed, tensors, lambda: self._channel.tell(BatchPassed(number)))
        else:
            assert isinstance(answer, ModelFailure), "the last part answers"
            self._channel.tell(BatchRaised(number, self._setup.worker, answer.encode()))
        self._replied_ns = time.monotonic_ns()

    def _assembled(self, order: Run) -> tuple[list[list[Tensor]], list[int], dict[int, str]]:
        """The inputs of all visits that can run, their positions in the batch, and why the others cannot."""
        width = len(self._setup.wiring.inputs.needs)
        of_visits = (len(each) for each in (order.parts, order.pieces) if each)
        if len(order.blocks) != width * order.visits or any(count != order.visits for count in of_visits):
            raise ProtocolError(f"a batch of {order.visits} visits has {len(order.blocks)} blocks")
        visits: list[list[Tensor]] = []
        places: list[int] = []
        faults: dict[int, str] = {}
        stage, parts, blocks = self._setup.wiring.stage, order.parts, order.blocks
        count = len(self._servable.signature.inputs)
        for place in range(order.visits):
            part, own = parts[place] if parts else 0, blocks[place * width : (place + 1) * width]
            try:
                tensors = self._assembler.inputs(stage, part, own, self._reader.tensors)
            except ValueError as error:
                faults[place] = str(error)
                continue
            if self._setup.wiring.optional and {each.datatype for each in tensors[count:]} == {MISSING.datatype}:
                del tensors[count:]
            if order.pieces and (piece := order.pieces[place]) is not None:
                if wrong := [each.shape for each in tensors[:count] if each.shape[:1] != (piece.of,)]:
                    faults[place] = f"an input has the shape {list(wrong[0])}, where {piece.of} rows are to be divided"
                    continue
                tensors = [*rows_of(tensors[:count], piece.first, piece.rows), *tensors[count:]]
            visits.append(tensors)
            places.append(place)
        return visits, places, faults

    def _rows(self, tensors: Sequence[Tensor]) -> int:
        """How many rows a visit has, or a piece of one; 1 if none of its inputs counts rows."""
        return tensors[self._counting].shape[0] if self._counting is not None else 1

    def _distributed(
        self, rows: Sequence[int], passes: Sequence[Sequence[int]], results: Sequence[Sequence[Array]]
    ) -> list[list[Tensor]]:
        """The outputs of each visit, which has so many rows."""
        found: list[list[Tensor]] = [[] for _ in rows]
        for members, outputs in zip(passes, results, strict=True):
            tensors = tensors_of(outputs, self._servable.signature.outputs)
            for index, own in zip(members, split(tensors, [rows[index] for index in members]), strict=True):
                found[index] = own
        return found

    def _stored(
        self,
        number: BatchId,
        order: Run | PassedBatch,
        places: Sequence[int],
        outputs: Sequence[list[Tensor]],
        faults: dict[int, str],
    ) -> BatchFinished:
        """Write the outputs of each visit that ran, at these places of the batch, as a block, and read from them what
        they decide."""
        stage, decisions = self._setup.wiring.stage, self._setup.wiring.decisions
        blocks: list[Block | None] = [None] * order.visits
        counts: list[tuple[int, ...]] = [()] * order.visits
        sizes: list[tuple[tuple[int, int], ...]] = [()] * order.visits
        always = self._setup.wiring.outputs
        if order.outputs or always:
            chosen = order.outputs or [always] * order.visits
            outputs = [_chosen(made, chosen[place] or always) for place, made in zip(places, outputs, strict=True)]
        try:
            for place, tensors in zip(places, outputs, strict=True):
                if self._edges:
                    sizes[place] = tuple([size_passed(each, tensors) for each in self._edges])
                if order.pieces and (piece := order.pieces[place]) is not None:
                    check_rows(tensors, piece.rows)
                if decisions:
                    try:
                        counts[place], parts = edge_counts(stage, decisions, tensors)
                    except ValueError as error:
                        faults[place] = str(error)
                        continue
                    blocks[place] = write_block([*tensors, *parts], self._arena)
                else:
                    blocks[place] = write_block(tensors, self._arena)
        except ArenaFull:
            self._discard(blocks)
            raise
        event = Finished(
            *(number, self._setup.worker, 0, tuple(counts) if decisions or faults else ()),
            sizes=tuple(sizes) if self._edges else (),
        )
        return BatchFinished(event, blocks, faults)


def _chosen(tensors: list[Tensor], places: tuple[int, ...]) -> list[Tensor]:
    """The tensors at these places, and nothing in place of others; all without places."""
    return [tensor if place in places else MISSING for place, tensor in enumerate(tensors)] if places else tensors


def size_passed(passed: Passed, tensors: Sequence[Tensor]) -> tuple[int, int]:
    """How many rows these outputs of a visit pass on along an edge, and the size of a row; see
    `sloop.events.Finished.sizes`."""
    lengths = [tuple([tensors[output].shape[at] for at in places]) for output, places in passed.opened]
    rows = tensors[passed.counting].shape[0] if passed.counting is not None else 0
    size = size_and_shape(lengths)[0] if lengths else 0
    if not rows or not passed.is_whole:
        return rows, size
    return 0 if passed.is_joined else 1, rows * (size or 1)


def edge_counts(
    stage: str, decisions: Sequence[Decision], tensors: Sequence[Tensor]
) -> tuple[tuple[int, ...], list[Tensor]]:
    """How many parts go along each edge, and for each edge with `each` a tensor of the rows that become parts.

    Raises `ValueError` if the outputs do not fit the edges.
    """
    found = RequestTensors({})
    counts = found.edge_counts(stage, decisions, tensors)
    rows = [found.rows[decision.target] for decision in decisions if decision.each is not None]
    arrays = [np.array(each, np.int64) for each in rows]
    return counts, [Tensor("INT64", array.shape, bytes_of(array)) for array in arrays]


def prepare() -> None:
    """What a spare worker does before it waits for its model (`sloop.serve.processes`)."""
    prepare_runtimes()


def main(arguments: Sequence[str], *, is_spare: bool = False) -> None:
    """Entry point of the process; the module docstring lists its arguments."""
    fd, parent, number, memory = map(int, arguments)
    begin(parent, (fd, memory))
    arena = Arena(number, memory)
    try:
        with socket.socket(fileno=fd) as sock, contextlib.suppress(ConnectionError):  # the server has closed the socket
            ModelWorker(ProcessChannel(sock), arena, is_spare=is_spare, taken=WorkerMemory(is_bound=True)).serve()
    except SloopError:  # the server has been told, and writes it into its log
        sys.stderr.flush()
        os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(0)  # a normal exit would abort while the background thread still opens a session
