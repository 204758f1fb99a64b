"""Examines a model before it is measured or served: whether requests can share a forward pass, and which file to open.

Joining requests along the first dimension is correct only if each row of a batch gets the outputs it gets alone. An
open first dimension does not imply that: it may be a sequence length, or a softmax may run across the rows.
`sloop.profile.joining` decides, unless the user does (`Declared`).

If the batch of an ONNX file was fixed when it was exported, or its outputs are lists of mappings (ZipMap), a changed
copy is opened instead, provided that it gives the same results (`prepare`).

Python models are examined in a separate process, `python -m sloop.profile.examine MODEL ORDER`, which prints one line
of JSON: the caller never imports the author's code and its libraries. Anything that code prints goes to stderr.
"""

import contextlib
import hashlib
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from msgspec import Struct, structs

from sloop.errors import InputError, MachineError, SloopError
from sloop.memory import bounded, is_out_of_memory
from sloop.onnx_file import (
    has_external_weights,
    open_batch,
    open_outputs,
    read_onnx,
    replace_zip_maps,
    unranked_inputs,
    write_onnx,
)
from sloop.profile import operators
from sloop.profile.batch_axis import draws_random_numbers
from sloop.profile.joining import is_same, obstacle_in_ports, obstacle_to_joining, read_sample
from sloop.profile.model import (
    OnnxSession,
    OpenDimension,
    Session,
    equal_lengths,
    has_runtime,
    input_shapes,
    is_python,
    open_dimensions,
    open_model,
    open_session,
    read_signature,
    signature_of,
    synthesise,
)
from sloop.profile.padding import padding_of
from sloop.profile.profile import Joining, digest_of_model, size_of_model
from sloop.profile.threads import before_cores_are_known
from sloop.profile.warming import accepted_sizes, try_on_one_row
from sloop.tensor import Padding, PadValue, Port, Signature
from sloop.text import listed
from sloop.units import GIB
from sloop.user_code import runtime_reason

EXAMINE_S_MAX: Final = 300.0
"""Limit for examining a model in a process of its own: importing its code, creating it, and all trials."""
EXAMINE_BYTES_MIN: Final = 4 * GIB
EXAMINE_TIMES: Final = 6
"""A model of 128 MiB took 0.5 GiB, VGG-19 with 550 MiB of weights 2.5 GiB."""
NVIDIA: Final = Path("/dev/nvidiactl")
PRINTED_BYTES_MAX: Final = 8192
"""The most bytes that are shown of what the examined code prints."""
ENDED_S: Final = 0.02
"""How soon its end is noticed if the pipes from it stay open."""
BATCHES_TRIED: Final = 3
"""Batches of the original model that are joined to test the model whose batch dimension was opened."""
MADE_UP: Final = re.compile(
    r"unk__\d+|(?:.*\.)?DynamicDimension\.\d+|(?:\w*_)?dim_?\d+|[snd]\d+|\?|.*batch.*", re.IGNORECASE
)
"""Names of dimensions that say nothing of what the inputs have apart from each other."""
SAME_PART_MIN: Final = 0.9
"""The fraction of an output of integers that must be equal: near a tie, rounding decides."""
MAPS, OPEN, OUTPUTS = "maps", "open", "outputs"
"""What is changed in a copy: its ZipMaps are replaced, or the batch is opened, or only that of the outputs."""
COPIES: Final = 2
"""The version of the code that changes copies; raise it when the code makes other copies."""
CLASSES_MAX: Final = 20
"""The most classes that a note lists."""
GRAPH: Final = "its graph keeps rows apart, and no trial disagrees"
AUTHOR: Final = "its author says so (`joins_rows = True`), and no trial disagrees"
USER_SAYS: Final = "the user says"
DECLARED: Final = f"{USER_SAYS} so (`joins_rows: true`)"
"""Why requests can share a forward pass."""


class RefusedModel(Struct, frozen=True, tag="refused"):
    """A model that cannot be run: the fields of an InputError, sent between processes."""

    what: str
    where: str
    help: str

    @classmethod
    def of(cls, error: InputError) -> "RefusedModel":
        """What an error says."""
        return cls(error.what.removeprefix(f"{error.where}: "), error.where, error.help)

    @property
    def error(self) -> InputError:
        """The error."""
        return InputError(self.what, where=self.where, help=self.help)


class ExaminedModel(Struct, frozen=True, tag="examined"):
    """A model that can be run."""

    signature: Signature
    obstacle: str
    """Why requests cannot share a forward pass; empty if it is proven, or declared, that they can."""
    file: str
    """The file to open: the model's own, or a changed copy."""
    labels: dict[str, tuple[str, ...]] = {}  # msgspec copies the empty dict for each
    """The classes of the columns of an output, where the model says them."""
    notes: tuple[str, ...] = ()
    """What a user should know about it."""
    dimensions: tuple[OpenDimension, ...] = ()
    """The open dimensions besides the batch whose sizes must be known to run it; none if it has an example."""
    changes: tuple[str, ...] = ()
    """What was changed in the copy, one after the other, for `changed_copy`; empty for the model's own file."""
    evidence: str = ""
    """Why requests can share a forward pass; empty if they cannot."""
    fault: RefusedModel | None = None
    """Why it would fail for every request; None if one row has not shown that (`sloop.profile.warming`)."""
    is_random: bool = False
    """Whether its graph draws random numbers, so that no request has the same outputs twice."""
    refusal: str = ""
    """Why it fails on inputs whose open dimensions have the proposed sizes; empty if it runs on them."""
    padding: Padding | None = None
    """How rows of different lengths share a forward pass, if the user has declared it and requests can share one."""

    @property
    def joining(self) -> Joining | None:
        """What its profile keeps of this; None for what a user declares, because it is not found in the model."""
        is_found = self.evidence in (GRAPH, AUTHOR) or (self.obstacle and not self.obstacle.startswith(USER_SAYS))
        return Joining(self.obstacle) if is_found else None

    @property
    def batches_alone(self) -> tuple[int, ...]:
        """The only batch size of a model whose requests cannot share a forward pass; empty if they can."""
        return (1,) if self.obstacle else ()


def joining_text(obstacle: str, evidence: str) -> str:
    """Whether requests share a forward pass, and why, in one line."""
    return f"each request runs alone: {obstacle}" if obstacle else f"requests may share a forward pass: {evidence}"


class Declared(Struct, frozen=True):
    """What a user says about a model."""

    joins_rows: bool | None = None
    """Whether requests may share a forward pass; None: it is examined."""
    batch: bool = True
    """False if no first dimension counts rows: each request is one unit."""
    sample: str = ""
    """A file with real inputs (`read_sample`); empty for none."""
    known: Joining | None = None
    """What an earlier examination of the same bytes has found."""
    operators: tuple[str, ...] = ()
    """Libraries of operators that it needs (`sloop.profile.operators`)."""
    pad: tuple[tuple[str, PadValue], ...] = ()
    """By input, what fills its open dimensions (`sloop.profile.padding`); empty if rows are not padded."""


UNDECLARED: Final = Declared()


class ExamineOrder(Struct, frozen=True):
    """The order to the process that examines a model with code of its own."""

    shapes: dict[str, tuple[int, ...]]
    declared: Declared
    folder: str = ""


def examine(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    *,
    folder: Path | None = None,
    declared: Declared = UNDECLARED,
) -> ExaminedModel:
    """Find out what must be known about a model before it runs.

    `shapes` gives one row's shape for inputs with further open dimensions; without it, usual sizes are tried.
    `folder` is where a changed copy is written, by default beside the model. InputError for an unusable file,
    MachineError if the examining process is killed, or if a copy cannot be written.
    """
    if not is_python(path) and not declared.operators:
        return examine_here(path, shapes or {}, folder, declared)
    order = msgspec.json.encode(ExamineOrder(dict(shapes or {}), declared, str(folder or ""))).decode()
    command = [sys.executable, "-P", "-m", __name__, str(path), order]
    own = {**os.environ, **before_cores_are_known(os.environ)}  # it opens the model for one thread
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=own) as process:
        try:
            answer = _answer(process, time.monotonic() + EXAMINE_S_MAX)
        finally:
            process.kill()
    if answer is None:
        what = f"importing and running it took more than {EXAMINE_S_MAX:g} s"
        raise InputError(what, where=str(path), help="do less when the file is imported and 'Model' is created")
    try:
        found = msgspec.json.decode(answer, type=ExaminedModel | RefusedModel)
    except msgspec.DecodeError as error:
        status = process.returncode
        what = f"the process that examined it ended with exit status {status}"
        if status == -signal.SIGKILL:
            help = "see its messages above; it may have run out of memory"
            raise MachineError(f"{path}: {what}", help=help) from error
        help = "see its messages above, and correct what ends it (`os._exit`, a crash of native code)"
        raise InputError(what, where=str(path), help=f"{help}, or give it an `example(rows)`") from error
    if isinstance(found, RefusedModel):
        raise found.error
    return found


def _answer(process: subprocess.Popen[bytes], until_s: float) -> bytes | None:
    """What the process has written to stdout when it ends; None if it is late. The first of what the author's code
    prints is printed, and the rest dropped: nobody may read our own stderr. Both pipes may stay open when the process
    has ended, because the author's code has started others."""
    answer, left = b"", PRINTED_BYTES_MAX
    with selectors.DefaultSelector() as selector:
        for pipe in filter(None, (process.stdout, process.stderr)):
            selector.register(pipe, selectors.EVENT_READ)
        while time.monotonic() < until_s:
            has_ended = process.poll() is not None
            ready = selector.select(0 if has_ended else ENDED_S)
            for key, _ in ready:
                part = os.read(key.fd, PRINTED_BYTES_MAX)
                if not part:
                    selector.unregister(key.fileobj)
                elif key.fileobj is process.stdout:
                    answer += part
                else:
                    sys.stderr.write(part[:left].decode(errors="replace"))
                    sys.stderr.flush()
                    left = max(0, left - len(part))
            if has_ended and all(key.fileobj is not process.stdout for key, _ in ready):
                return answer
    return None


def examine_here(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    folder: Path | None = None,
    declared: Declared = UNDECLARED,
) -> ExaminedModel:
    """`examine`, without a separate process.

    What it allocates is bounded (`growth_of`). A model that cannot be opened within the bound is unusable, and one of
    which not even one row can be run there has a fault.
    """
    is_unbound = is_python(path) and NVIDIA.exists()  # its drivers reserve memory that they do not use
    with contextlib.nullcontext(0) if is_unbound else bounded(growth_of(path)) as most_bytes:
        try:
            found = _examined(path, shapes, folder, declared)
        except (MemoryError, InputError) as error:
            if most_bytes and is_out_of_memory(error):
                raise _too_large("opening it", path, most_bytes).error from error
            raise
    if not most_bytes:
        return found
    if any(map(is_out_of_memory, (found.fault.what if found.fault is not None else "", *found.notes))):
        return structs.replace(found, fault=_too_large("running it on one row", path, most_bytes), notes=())
    if is_out_of_memory(found.obstacle):
        return structs.replace(found, obstacle=_too_large("trying several rows at once", path, most_bytes).what)
    return found


def growth_of(path: Path) -> float:
    """How much memory the examination of a model may take in addition: six times its files, because it opens several
    sessions, and at least `EXAMINE_BYTES_MIN`; of a model in Python, which brings libraries and weights that are not
    known here, as much as the machine has."""
    return inf if is_python(path) else max(EXAMINE_BYTES_MIN, EXAMINE_TIMES * size_of_model(path))


def _too_large(what: str, path: Path, most_bytes: int) -> RefusedModel:
    most = f"the {most_bytes / GIB:.3g} GiB that its examination may take"
    help = "give smaller sizes (--shape, or a profile), or examine it on a machine with more memory"
    return RefusedModel(f"{what} needs more memory than {most}", str(path), help)


def _examined(
    path: Path, shapes: Mapping[str, tuple[int, ...]], folder: Path | None, declared: Declared
) -> ExaminedModel:
    """`examine_here`, without a bound."""
    began_s = time.monotonic()

    def obstacle_of(session: Session, file: Path) -> str:
        return _obstacle(session, path, file, shapes, declared, time.monotonic() - began_s)

    if is_python(path) or has_runtime(path) or not declared.batch:
        prepared = PreparedModel(path, open_model(path, 1))
    else:
        prepared = prepare(path, shapes, folder, obstacle_of)
    session = prepared.session
    if path.suffix == ".onnx" and any(port.shape == () for port in session.signature.inputs):
        for name in unranked_inputs(prepared.file):
            what = f"input {name!r} has no shape, not even a number of dimensions"
            raise InputError(what, where=str(path), help="export it with one; its sizes may be open")
    rows = session.signature.fixed_batch or 1
    example = session.example(rows)
    fault, note = None, ""
    try:
        _, note = try_on_one_row(session, shapes, path, rows)
    except InputError as error:
        fault = RefusedModel.of(error)
    signature, obstacle = session.signature, prepared.obstacle
    if obstacle is None:
        obstacle = obstacle_of(session, prepared.file) if fault is None else ""
    things = _counted_things(session) if obstacle and declared.joins_rows is None and declared.batch else []
    if len(things) > 1 or not declared.batch or signature.fixed_batch is not None:
        signature = signature.without_rows()
    padding = None
    equal = open_dimensions(session, signature) if is_python(path) else ()
    if declared.pad and not obstacle and fault is None:
        samples = read_sample(Path(declared.sample), signature) if declared.sample else None
        padding, found_equal = padding_of(session, path, shapes, dict(declared.pad), samples)
        equal = (*equal, *(each for each in found_equal if each not in equal))
    signature = structs.replace(signature, equal=equal_lengths(equal, signature))
    notes, has_run_on_one = prepared.notes, len(things) > 1 and not note and fault is None
    if declared.pad and obstacle:
        notes += (f"{path.name}: `pad` is not used, because each request runs alone: {obstacle}",)
    if len(things) > 1:
        what = f"its first dimensions count different things ({listed(things)})"
        notes += (f"{path.name}: {what}, so a request is one unit with any number of each (`batch: false`)",)
    of = session.signature if has_run_on_one else signature
    dimensions = open_dimensions(session, of) if example is None else ()
    if note and not is_python(path) and (found := accepted_sizes(session, signature, dimensions, shapes)):
        dimensions, note = found, ""
    return ExaminedModel(
        signature,
        obstacle,
        str(prepared.file),
        prepared.labels,
        notes + ((f"{path.name}: {note}",) if note else ()),
        dimensions,
        prepared.changes,
        "" if obstacle or fault else DECLARED if declared.joins_rows else AUTHOR if is_python(path) else GRAPH,
        fault,
        bool(declared.joins_rows) and path.suffix == ".onnx" and draws_random_numbers(prepared.file),
        note if dimensions else "",
        padding,
    )


def _counted_things(session: Session) -> list[str]:
    """What the first dimensions count, by their names; those that exporters make up, and a batch, are one thing."""
    named = session.dimension_names
    names = {named.get((port.name, 0), "") for port in session.signature.inputs if port.counts_rows}
    return sorted({name for name in names if name and not MADE_UP.fullmatch(name)})


def _obstacle(
    session: Session,
    path: Path,
    file: Path,
    shapes: Mapping[str, tuple[int, ...]],
    declared: Declared,
    load_s: float,
) -> str:
    """Why requests cannot share a forward pass: what the user declares, what is known of these bytes, or what an
    examination of `file` finds."""
    if not declared.batch:
        return f"{USER_SAYS} that it has no batch (`batch: false`)"
    if declared.joins_rows is False:
        return f"{USER_SAYS} so (`joins_rows: false`)"
    if declared.joins_rows:
        if without := obstacle_in_ports(session.signature):
            what = f"{USER_SAYS} that rows may be joined (`joins_rows: true`), but {without}"
            help = "leave `joins_rows` out, or export the model with an open batch"
            raise InputError(what, where=str(path), help=help)
        return ""
    # What a Python file imports may have changed: it is tried again, unless it was refuted.
    if declared.known is not None and (declared.known.obstacle or not is_python(path)):
        return declared.known.obstacle
    samples = read_sample(Path(declared.sample), session.signature) if declared.sample else None
    return obstacle_to_joining(session, file, shapes, samples, load_s=load_s)


def _same(together: Any, alone: Sequence[Any], port: Port) -> bool:  # noqa: ANN401  # arrays of any type
    """Whether the joined output equals the separate outputs concatenated, within rounding."""
    many, parts = np.asarray(together), [np.asarray(one) for one in alone]
    if not many.ndim or any(part.shape != (len(many) // len(parts), *many.shape[1:]) for part in parts):
        return False
    joined = np.concatenate(parts)
    if many.shape != joined.shape:
        return False
    if joined.dtype.kind == "f" or port.datatype == "BF16":
        return is_same(joined, many, port)
    # Rounding decides the last bit of a byte, and which of two equally large elements is the largest.
    slack = joined.dtype.itemsize == 1 and joined.dtype.kind in "iu"
    same = np.abs(many.astype(np.int16) - joined.astype(np.int16)) <= 1 if slack else many == joined
    return bool(np.mean(same) >= SAME_PART_MIN)


# Copies of ONNX files, in which the batch is open and ZipMaps are replaced.


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """The file to open for a model, its own or a copy that was changed, and a session of it."""

    file: Path
    session: Session
    labels: dict[str, tuple[str, ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()
    """See `ExaminedModel`."""
    obstacle: str | None = None
    """Why requests cannot share a forward pass, if that is known; empty if they can."""


def prepare(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    folder: Path | None = None,
    obstacle_of: Callable[[Session, Path], str] = lambda session, file: "",
) -> PreparedModel:
    """The file to open for an ONNX model.

    A copy is written beside the model, or in `folder`, if the model has ZipMaps, or a fixed batch that can be opened.
    It can be opened if the results stay the same and `obstacle_of` a session of the copy is empty. InputError for an
    unusable file, MachineError if a copy is needed and cannot be written.
    """
    labels: dict[str, tuple[str, ...]] = {}
    notes: list[str] = []
    changes: list[str] = []
    file, opened = path, open_session(path, 1)
    if any(given.type.startswith("seq(map") for given in opened.get_outputs()):
        opened = None
        file, labels = _without_maps(path, folder)
        changes.append(MAPS)
        for name, classes in labels.items():
            of = f", one column for each of the classes {listed(classes)}" if len(classes) <= CLASSES_MAX else ""
            notes.append(f"output {name!r} is a list of mappings (ZipMap); it is served as a tensor{of}")
    session = OnnxSession(file, 1, opened=opened)  # a model may be large: it is opened once
    batch, obstacle = session.signature.fixed_batch, None
    if batch is not None:
        try:
            file = _with_open_batch(file, batch, shapes, folder, obstacle_of)
            session, obstacle = OnnxSession(file, 1), ""
            changes.append(f"{OPEN} {batch}")
            notes.append(
                f"its batch is fixed to {batch}; {file.name} is a copy with an open batch and the same results"
            )
        except SloopError as error:
            obstacle = f"its batch is fixed to {batch}: {error.what.removeprefix(f'{file}: ')}"
    elif closed := _outputs_that_are_closed(session.signature):
        with contextlib.suppress(SloopError):  # rows meet, or there is no room for a copy: requests run alone
            file = _with_open_outputs(file, folder, obstacle_of)
            session, obstacle = OnnxSession(file, 1), ""
            changes.append(OUTPUTS)
            what = f"the number of rows of {listed(closed)} is fixed, but not that of the inputs"
            notes.append(f"{what}; {file.name} is a copy in which both are open")
    named = tuple(f"{path.name}: {note}" for note in notes)
    return PreparedModel(file, session, labels, named, tuple(changes), obstacle)


def changed_copy(path: Path, changes: Sequence[str], folder: Path) -> Path:
    """The copy of a model in which another machine has made these changes, and tested them (`ExaminedModel.changes`).
    It is written into `folder`. InputError for an unusable file, MachineError if the copy cannot be written."""
    for change in changes:
        path, _ = _copy(path, change, folder, lambda copy, is_new: None)
    return path


def _changed(path: Path, change: str) -> tuple[Any, dict[str, tuple[str, ...]]]:
    """The message of a file with a change, and the classes of the columns by output, where ZipMaps are replaced."""
    model, labels = read_onnx(path), dict[str, tuple[str, ...]]()
    if change == MAPS:
        labels = replace_zip_maps(model)
    elif change == OUTPUTS:
        open_outputs(model)
    else:
        open_batch(model, int(change.partition(" ")[2]))
    return model, labels


def _without_maps(path: Path, folder: Path | None) -> tuple[Path, dict[str, tuple[str, ...]]]:
    """A copy whose ZipMaps are replaced, and the classes of the columns by output."""

    def check(copy: Path, is_new: bool) -> None:
        if is_new:
            signature_of(open_session(copy, 1), path)

    return _copy(path, MAPS, folder, check)


def _with_open_batch(
    path: Path,
    batch: int,
    shapes: Mapping[str, tuple[int, ...]],
    folder: Path | None,
    obstacle_of: Callable[[Session, Path], str],
) -> Path:
    """A copy whose batch is open. InputError if its results would differ, if its rows may meet, or if the user's shape
    of one request has all rows."""
    for port in read_signature(path).inputs:
        if batch > 1 and len(shapes.get(port.name, ())) == len(port.shape):
            what = f"the shape that is given for input {port.name!r} has all its {batch} rows"
            raise InputError(what, where=str(path), help="give the shape of one row")

    def check(copy: Path, is_new: bool) -> None:
        session = _check_opened(path, copy, batch, shapes) if is_new else OnnxSession(copy, 1)
        if obstacle := obstacle_of(session, copy):
            raise InputError(obstacle, where=str(path), help="export it with an open first dimension")

    return _copy(path, f"{OPEN} {batch}", folder, check)[0]


def _outputs_that_are_closed(signature: Signature) -> list[str]:
    """The outputs whose first dimension is fixed, if that of all inputs is open."""
    if not signature.inputs or not all(port.counts_rows for port in signature.inputs):
        return []
    return [f"output {port.name!r}" for port in signature.outputs if port.shape and port.shape[0] >= 0]


def _with_open_outputs(path: Path, folder: Path | None, obstacle_of: Callable[[Session, Path], str]) -> Path:
    """A copy with an open first dimension of all outputs. InputError if its rows may meet, or if an output has other
    numbers of rows than the inputs."""

    def check(copy: Path, is_new: bool) -> None:
        if obstacle := obstacle_of(OnnxSession(copy, 1), copy):
            raise InputError(obstacle, where=str(path))

    return _copy(path, OUTPUTS, folder, check)[0]


def _copy(
    path: Path, change: str, folder: Path | None, check: Callable[[Path, bool], object]
) -> tuple[Path, dict[str, tuple[str, ...]]]:
    """The changed copy of a file, see `_changed`. A new one is kept only if `check` does not raise.

    One that is there already is checked as not new: its results are known to be the same, but it may have been made
    because the user said so then (`joins_rows: true`). Its name has a digest of the model that it was made from, so
    that the copy of an earlier version is not used.
    MachineError if it cannot be written.
    """
    made_of = hashlib.sha256(f"{digest_of_model(path)} {COPIES}".encode()).hexdigest()[:12]
    name = f"{path.name}.{change.partition(' ')[0]}-{made_of}.onnx"
    model, labels = _changed(path, change)
    place = path.parent if folder is None else folder
    if place != path.parent and has_external_weights(model):
        what = "a copy of it is needed, and the weights in other files are found in the folder of the model only"
        raise MachineError(f"{path}: {what}", help="free space for a copy of all its files")
    if (place / name).is_file():
        check(place / name, False)
        return place / name, labels
    part = place / f".{os.getpid()}-{name}"
    try:
        place.mkdir(parents=True, exist_ok=True)
        write_onnx(model, part)
        check(part, True)
        return part.replace(place / name), labels
    except (OSError, MachineError) as error:
        what = f"a copy of it is needed, and {place} cannot be written"
        raise MachineError(f"{path}: {what}", help="make that folder writable, or free some space") from error
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def free_batch(path: Path, target: Path, *, shapes: dict[str, tuple[int, ...]] | None = None) -> Signature:
    """Write a copy of the model with an open batch to `target`; its signature. InputError if its results differ."""
    batch = read_signature(path).fixed_batch
    model = read_onnx(path) if batch is None else _changed(path, f"{OPEN} {batch}")[0]
    part = target.with_name(f".{os.getpid()}-{target.name}")
    try:
        write_onnx(model, part)
        signature = _check_opened(path, part, batch or 1, shapes or {}).signature
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
    return signature


def _check_opened(path: Path, opened: Path, batch: int, shapes: Mapping[str, tuple[int, ...]]) -> OnnxSession:
    """A session of the opened model. InputError, naming the output, if its results differ from the original's."""
    remedy = "export it with an open first dimension"
    before = OnnxSession(path, 1)
    try:
        after = OnnxSession(opened, 1)
        signature = after.signature
        inputs = synthesise(signature, input_shapes(signature, BATCHES_TRIED * batch, shapes, where=str(path)))
        together = after.run(inputs)
    except Exception as error:  # whatever ONNX Runtime raises, the graph still contains the old batch
        reason = error.what if isinstance(error, SloopError) else runtime_reason(error)
        for file in (path, opened):
            reason = reason.removeprefix(f"{file}: ")
        raise InputError(f"its batch cannot be opened: {reason}", where=str(path), help=remedy) from error
    slices = [slice(start, start + batch) for start in range(0, BATCHES_TRIED * batch, batch)]
    alone = [
        before.run({name: value[part] if value.ndim else value for name, value in inputs.items()}) for part in slices
    ]
    for place, port in enumerate(signature.outputs):
        if not _same(together[place], [outputs[place] for outputs in alone], port):
            what = f"its batch cannot be opened: output {port.name!r} of joined rows differs from that of each alone"
            raise InputError(what, where=str(path), help=remedy)
    return after


def main(arguments: Sequence[str]) -> None:
    """Entry point of the process that examines a model with code of its own; see the module docstring."""
    path, order = arguments
    with os.fdopen(os.dup(1), "wb") as out:
        os.dup2(2, 1)
        try:
            asked = msgspec.json.decode(order, type=ExamineOrder)
            operators.use(asked.declared.operators)
            folder = Path(asked.folder) if asked.folder else None
            found: ExaminedModel | RefusedModel = examine_here(Path(path), asked.shapes, folder, asked.declared)
        except InputError as error:
            found = RefusedModel.of(error)
        out.write(msgspec.json.encode(found))


if __name__ == "__main__":
    main(sys.argv[1:])
