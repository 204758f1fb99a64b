"""The interface between a worker process and the framework that computes, and its implementations.

`FileRuntime` runs a model file, ONNX or Python, on CPU cores, `CudaRuntime` on a GPU. `FakeRuntime` (`fake:…`) takes a
known time; tests and demonstrations use it. Runtimes run in worker processes only.
"""

import contextlib
import functools
import os
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np

from sloop.cuda import CudaDevice, GpuFailure, failure_on
from sloop.errors import InputError
from sloop.memory import loading, resident_bytes
from sloop.profile.model import (
    NOTHING,
    THREAD_COUNTS,
    OnnxSession,
    Places,
    Session,
    has_runtime,
    is_python,
    onnx_runtime,
    open_model,
    thread_counts_kept,
)
from sloop.profile.warming import WARM_S_MAX, batch_maker, guessed_rows, placeholders, try_on_one_row, warm_up
from sloop.tensor import Port, Signature, described
from sloop.text import counted
from sloop.units import ms
from sloop.user_code import WrongOutputsError, line_in, raised_by_users, said_by

SUBSETS_MAX: Final = 2
"""For how many sets of outputs a runtime keeps sessions that compute nothing else."""

Array = np.ndarray[Any, np.dtype[Any]]


class Runtime(Protocol):
    """A loaded model whose number of threads can change while it serves.

    Another thread may call `load` and `warm` while `run` is in progress. Each method raises what the framework raises.
    """

    @property
    def thread_counts(self) -> int:
        """For how many numbers of threads it keeps what it has loaded."""
        ...

    def load(self, threads: int) -> bool:
        """Prepare to run on `threads` threads. Returns False if the runtime was already prepared."""
        ...

    def warm(self, threads: int) -> None:
        """Run the expected batches on placeholder inputs. InputError if the model would fail for every request."""
        ...

    def give_back(self) -> None:
        """Give back memory that large batches have taken."""
        ...

    def prune(self, outputs: Places) -> None:
        """Prepare to compute only the outputs at these places: passes that need no others will be frequent."""
        ...

    def run(self, inputs: Sequence[Array], threads: int, outputs: Places = ()) -> tuple[Sequence[Array], int]:
        """Run one forward pass. Returns the outputs in the model's order and the number of threads it ran on. `outputs`
        are the places of the outputs that are needed, () stands for all; others may be `NOTHING`.

        `inputs` are in the model's order; those of optional inputs may follow, `NOTHING` for one that is not given. The
        caller reuses their memory after it has sent the outputs. The pass runs on `threads` threads if a session for
        that count is warm, otherwise on the nearest count that is.
        """
        ...


@dataclass(frozen=True, slots=True)
class Expected:
    """What is known beforehand of the batches that a runtime will get."""

    batches: tuple[int, ...] = (1,)
    """Their rows, ascending (`sloop.profile.warming.batches_to_warm`)."""
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """For inputs with open dimensions, the shape of one row that the profile was measured with; empty if unknown."""


NOTHING_KNOWN: Final = Expected()


def open_runtime(
    model: str,
    device: CudaDevice | None = None,
    expected: Expected = NOTHING_KNOWN,
    *,
    examined: Signature | None = None,
    digest: str = "",
    optional: Sequence[str] = (),
) -> Runtime:
    """The runtime for `model`: a path, or `fake:…`; on the GPU of this process, if it has one. The model file is read
    later, by `load`; for the other arguments see `FileRuntime`."""
    if model.startswith("fake:"):
        return FakeRuntime.parse(model)
    if device is None:
        return FileRuntime(model, examined, digest, expected, optional)
    return CudaRuntime(model, device, examined, digest, expected, optional)


def prepare_runtimes(model: str = "") -> None:
    """Load the libraries of a model, or of most models before one is asked for."""
    if model.startswith("fake:") or is_python(Path(model)) or has_runtime(Path(model)):
        return
    with contextlib.suppress(Exception):  # whoever opens a model gets the error
        onnx_runtime()


_FAKE_FORMAT = "write fake:burn:FIXED_MS:ROW_MS or fake:sleep:FIXED_MS:ROW_MS"


@dataclass(frozen=True, slots=True)
class FakeRuntime:
    """A model without weights: it takes a given time and returns its inputs.

    `fake:burn:FIXED_MS:ROW_MS` uses FIXED_MS + rows × ROW_MS of CPU time on one core, `fake:sleep:…` sleeps for that
    time. The thread count has no effect.
    """

    burns: bool
    fixed_ns: int
    row_ns: int

    @property
    def thread_counts(self) -> int:
        """Nothing is loaded."""
        return THREAD_COUNTS[1]

    @classmethod
    def parse(cls, model: str) -> "FakeRuntime":
        """Read a `fake:…` name. Raises `InputError` if it has another format."""
        parts = model.split(":")
        try:
            _, mode, fixed_ms, row_ms = parts
            if mode not in ("burn", "sleep"):
                raise ValueError(model)
            return cls(mode == "burn", ms(float(fixed_ms)), ms(float(row_ms)))
        except ValueError as error:
            raise InputError(f"{model!r} is not a fake model", help=_FAKE_FORMAT) from error

    def load(self, threads: int) -> bool:
        """Does nothing."""
        return False

    def warm(self, threads: int) -> None:
        """Does nothing."""

    def give_back(self) -> None:
        """Does nothing."""

    def prune(self, outputs: Places) -> None:
        """Does nothing."""

    def run(self, inputs: Sequence[Array], threads: int, outputs: Places = ()) -> tuple[Sequence[Array], int]:
        """Take the time that the model's name gives, then return the inputs."""
        rows = len(inputs[0]) if inputs and inputs[0].ndim else 1
        duration_ns = self.fixed_ns + rows * self.row_ns
        if self.burns:
            end_ns = time.thread_time_ns() + duration_ns
            while time.thread_time_ns() < end_ns:
                pass
        else:
            time.sleep(duration_ns / 1e9)
        return inputs, threads


class FileRuntime:
    """A model file on the CPU, with one session for each thread count, because a session's thread count is fixed.

    Profiles are measured with the same sessions (`sloop.profile.model`). As many are kept as a profile counts
    (`thread_counts_kept`): the least recently used is dropped before another one is opened.
    """

    def __init__(
        self,
        path: str,
        examined: Signature | None = None,
        digest: str = "",
        expected: Expected = NOTHING_KNOWN,
        optional: Sequence[str] = (),
    ) -> None:
        """With `examined`, the file must have these inputs and outputs. With `digest`, it is a user's own file, which
        must have this content each time it is opened. Arrays of the `optional` inputs may follow the others."""
        self._path, self._expected, self._examined, self._digest = Path(path), expected, examined, digest
        self.thread_counts = THREAD_COUNTS[1]
        self._sessions: OrderedDict[int, Session] = OrderedDict()
        self._warm: set[int] = set()
        """The thread counts whose sessions have been run."""
        self._lock = threading.Lock()
        self._names: list[str] = []
        self._optional = optional
        self._subsets: list[Places] = []

    def load(self, threads: int) -> bool:
        """Open a session for `threads` threads. Returns False if there is one. InputError if the file is not what was
        examined."""
        if threads in self._sessions:
            return False
        with self._lock:
            is_first = not self._sessions
            while len(self._sessions) >= self.thread_counts:
                dropped = next(iter(self._sessions))
                del self._sessions[dropped]  # no name may hold it while the other one is opened
                self._warm.discard(dropped)
        before_bytes = resident_bytes()
        with loading():
            session = self._opened(threads)
        if is_first:
            self.thread_counts = min(self.thread_counts, thread_counts_kept(resident_bytes() - before_bytes))
        if self._examined is not None:
            check_offer(self._path, session.signature, self._examined)
        self._names = [*(port.name for port in session.signature.inputs), *self._optional]
        with self._lock:
            self._sessions[threads] = session
        return True

    def warm(self, threads: int) -> None:
        """See `Runtime`. Inputs are random, in the shapes of the profile; without these, the model's own example.
        Without both, one row of usual sizes is run if dimensions are open; the model may refuse it."""
        session, loaded = self.session(threads, is_warming=True)
        batches, shapes = self._expected.batches, self._expected.shapes
        if session.signature.fixed_batch is not None:
            batches = (session.signature.fixed_batch,)
        try:
            # The note was shown when the model was examined.
            is_known, _ = try_on_one_row(session, shapes, self._path, batches[0])
            made = batch_maker(session.signature, shapes, session.example) if is_known else None
            if made is not None:
                # Sessions for other numbers of threads may never be used: they take no memory for the largest batch.
                warm_batches(session.run, made, batches, self._path, for_memory=not self._warm)
        except BaseException:
            with self._lock:
                self._sessions.pop(loaded, None)
            raise
        for outputs in self._subsets:
            self._prune(session, outputs)
        self.note_warm(loaded)

    def note_warm(self, threads: int) -> None:
        """The session for this number of threads may run batches from now on."""
        with self._lock:
            if threads in self._sessions:
                self._warm.add(threads)

    def prune(self, outputs: Places) -> None:
        """Open sessions for these outputs alone, where that saves work, for the first `SUBSETS_MAX` sets of outputs."""
        if outputs not in self._subsets and len(self._subsets) < SUBSETS_MAX:
            self._subsets.append(outputs)
            with self._lock:
                sessions = list(self._sessions.values())
            for session in sessions:
                self._prune(session, outputs)

    def _prune(self, session: Session, outputs: Places) -> None:
        """Open a session for these outputs beside this one, and warm it. This one gives back memory of large
        batches."""
        if not isinstance(session, OnnxSession):
            return
        made = batch_maker(session.signature, self._expected.shapes)

        def warm(run: Callable[[Mapping[str, Array]], object]) -> None:
            if made is not None:
                warm_batches(run, made, self._expected.batches, self._path, for_memory=False)

        if session.prune(outputs, warm):
            self._shrink(session)

    def give_back(self) -> None:
        """See `Runtime`."""
        with self._lock:
            sessions = [self._sessions[threads] for threads in self._warm]
        for session in sessions:
            self._shrink(session)

    def _shrink(self, session: Session) -> None:
        """Run one row, of usual sizes if they are unknown, and give back what larger batches took."""
        shapes = self._expected.shapes
        feed = placeholders(session.signature, session.signature.fixed_batch or 1, shapes, guessed_rows(session))
        if feed is not None and isinstance(session, OnnxSession):
            with contextlib.suppress(*raised_by_users()):  # sizes were guessed
                session.shrink(feed)

    def run(self, inputs: Sequence[Array], threads: int, outputs: Places = ()) -> tuple[Sequence[Array], int]:
        """Run on the session that `session` chooses."""
        session, loaded = self.session(threads)
        feed = {name: array for name, array in zip(self._names, inputs, strict=False) if array is not NOTHING}
        return session.run(feed, outputs), loaded

    def _opened(self, threads: int, device: CudaDevice | None = None) -> Session:
        if self._digest:
            from sloop.serve.copies import open_checked  # noqa: PLC0415  # only where there is no room for a copy

            return open_checked(self._path, threads, self._digest, device)
        return open_model(self._path, threads, device=device)

    def session(self, threads: int, *, is_warming: bool = False) -> tuple[Session, int]:
        """The warm session whose thread count is nearest to `threads`, and that count; of two equally near, the
        smaller. Of all sessions while none is warm, or to warm one."""
        with self._lock:
            known = self._sessions if is_warming or not self._warm else self._warm
            loaded = threads if threads in known else min(known, key=lambda n: (abs(n - threads), n))
            self._sessions.move_to_end(loaded)
            return self._sessions[loaded], loaded


def warm_batches(
    run: Callable[[Mapping[str, Array]], object],
    made: Callable[[int], Mapping[str, Array]],
    batches: Sequence[int],
    path: Path,
    *,
    for_memory: bool = True,
) -> None:
    """Run the batches beyond the smallest (`sloop.profile.warming.warm_up`). If one fails, which may be too large, no
    more are run. InputError if the model would return wrong outputs for every request."""
    try:
        cold = warm_up(lambda rows: run(made(rows)), batches, for_memory=for_memory)
    except WrongOutputsError as error:
        if error.is_certain:
            raise InputError(said_by(error), where=line_in(path, error), help="correct the file") from error
    except GpuFailure:
        raise
    except raised_by_users() as error:  # the batches that fail will say so
        say(f"{path.name} is not warm for all batches: {said_by(error)}")
    else:
        if cold:
            these = f"{counted(len(cold), 'size')} from {min(cold)} to {max(cold)} rows"
            say(f"{path.name} was warmed for {WARM_S_MAX:g} s; the first batch of {these} will still take longer")


@functools.cache
def say(what: str) -> None:
    """Write a line into the server's log, once."""
    sys.stderr.write(f"sloop worker {os.getpid()}: {what}\n")
    sys.stderr.flush()


class CudaRuntime(FileRuntime):
    """A model file on the GPU of this process, in one session: the number of CPU threads hardly matters there, and each
    session would hold a copy of the weights.

    Raises `GpuFailure` when the GPU cannot be used any longer.
    """

    def __init__(
        self,
        path: str,
        device: CudaDevice,
        examined: Signature | None = None,
        digest: str = "",
        expected: Expected = NOTHING_KNOWN,
        optional: Sequence[str] = (),
    ) -> None:
        super().__init__(path, examined, digest, expected, optional)
        self._device = device

    def load(self, threads: int) -> bool:
        """Open the session. Returns False if it is open."""
        return not self._sessions and super().load(threads)

    def warm(self, threads: int) -> None:
        """See `FileRuntime`."""
        if not self._warm:
            super().warm(threads)

    def give_back(self) -> None:
        """Does nothing: the profile has a bound for the memory of the GPU."""

    def prune(self, outputs: Places) -> None:
        """Does nothing: a second copy of weights would need memory of the GPU."""

    def run(self, inputs: Sequence[Array], threads: int, outputs: Places = ()) -> tuple[Sequence[Array], int]:
        """See `FileRuntime`. A batch for which there is too little memory fails like any other."""
        try:
            return super().run(inputs, threads, outputs)
        except Exception as error:
            failure = failure_on(self._device, str(error))
            if isinstance(failure, GpuFailure):
                raise failure from error
            raise

    def _opened(self, threads: int, device: CudaDevice | None = None) -> Session:
        return super()._opened(threads, self._device)


def check_offer(model: Path, offered: Signature, examined: Signature) -> None:
    """InputError if an opened model has other inputs or outputs than those that were examined. A size that is open in
    only one of them does not matter: ONNX Runtime infers more sizes when it optimises a graph."""
    for kind in ("inputs", "outputs", "optional"):
        there, known = getattr(offered, kind), getattr(examined, kind)
        if len(there) != len(known) or not all(map(_fits, there, known)):
            named = "optional inputs" if kind == "optional" else kind
            what = f"its {named} are {described(there)}; those that were examined are {described(known)}"
            raise InputError(what, where=str(model), help="the file has changed: deploy it with `sloop deploy`")


def _fits(there: Port, known: Port) -> bool:
    """Whether a port may be the one that was examined."""
    has_ranks = bool(there.shape and known.shape)
    sizes = zip(there.shape, known.shape, strict=True) if len(there.shape) == len(known.shape) else ()
    return (
        (there.name, there.datatype) == (known.name, known.datatype)
        and (not has_ranks or len(there.shape) == len(known.shape))
        and all(ours == theirs or min(ours, theirs) < 0 for ours, theirs in sizes)
    )
