"""Measures an ONNX model block by block: latency, bytes of weights, bytes of outputs, and time to load.

The model is cut into blocks (`sloop.profile.onnx_cut`). For each core count, a process loads the uncut model and all
pieces, and runs them in rounds: the uncut model once, then the chain of pieces once, each piece timed on its own. So a
piece finds the caches in the same state as in the whole model, and changes in the machine's speed affect all alike.

If the boundaries between blocks were found automatically, those whose cuts change the results are left out: ONNX
Runtime fuses operators across some boundaries, and a cut that prevents this changes the rounding.

The measured process is `python -m sloop.profile.layers` (`sloop.profile.measured_process`): its order is a
`LayersOrder`, and it answers with a `RoundTimes` for each batch size, then a `LayersLoad`; or with a `CutCheck`.
"""

import contextlib
import glob
import hashlib
import os
import platform
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from math import ceil
from pathlib import Path
from statistics import median
from time import perf_counter_ns
from typing import Final

import msgspec
import numpy as np
from msgspec import Struct, structs

from sloop.errors import InputError, MachineError
from sloop.machine import hardware_name
from sloop.profile.measure import (
    BATCHES,
    PASSES,
    Limit,
    by_affinity,
    checked_batches,
    checked_cores,
    default_cores,
)
from sloop.profile.measured_process import answer_order, measured_process
from sloop.profile.model import Array, Session, feed_for, open_model
from sloop.profile.onnx_cut import LayerGraph, ModelPiece, cut_model, data_file, difference
from sloop.profile.profile import Cells, LatencyTable, LayerBlock, LayerProfile, digest, digest_of_model
from sloop.shared_memory import SharedMemory
from sloop.tensor import elements_of
from sloop.text import counted
from sloop.units import NS_PER_MS, NS_PER_S
from sloop.user_code import said_by

CUTS: Final = 4
"""The version of the code that cuts models; raise it when it cuts them otherwise, or says more of the pieces."""
LISTING: Final = "pieces.json"
"""The file that says which pieces are kept in a folder."""
LEFT_S: Final = 3600
"""Files of a cut that were not touched for this long belong to a process that has died."""
ROWS_TRIED: Final = 3
ROUNDS_MIN: Final = 5
LOADS: Final = 3
"""How many loads are timed; their median is kept, because the first load in a process is slower."""
MOVED_BYTES: Final = 8_000_000
DIFFERENCE_MAX: Final = 1e-6
"""How much the results of a chain of blocks may differ from the uncut model's, relative to the largest output."""
DIFFERENCE_ASKED_MAX: Final = 1e-3
"""The same for cuts that the user asked for: they are refused only if the difference is more than rounding."""

CUT_ELSEWHERE: Final = (
    "cut elsewhere: after QuantizeLinear in a quantised model, and not inside what the runtime joins to one operator"
)

LayersProgress = Callable[[int, int, str], None]
"""Called with the number of finished cells and of all cells, and what was measured last."""


class LayersOrder(Struct, frozen=True):
    """What to measure. `shapes` gives one row's shape for inputs with open dimensions."""

    model: str
    pieces: tuple[ModelPiece, ...]
    threads: int
    batches: tuple[int, ...]
    shapes: dict[str, tuple[int, ...]]
    seconds: float
    is_check: bool = False
    """Only compare the results."""


class CutCheck(Struct, frozen=True, tag="check"):
    """By how much the chain of pieces differs from the uncut model, relative to its largest output."""

    difference: float


class RoundTimes(Struct, frozen=True, tag="rounds"):
    """The durations in ns of one batch size: of the uncut model, and of each piece."""

    batch: int
    whole_ns: list[int]
    pieces_ns: list[list[int]]


class LayersLoad(Struct, frozen=True, tag="load"):
    """The last message: what was measured besides the durations of batches."""

    whole_ns: int
    pieces_ns: list[int]
    input_bytes: int
    output_bytes: list[int]
    crossing_bytes: list[int]
    """Bytes of one row."""
    move_ms_per_mb: float
    difference: float
    software: str


def measure_layers(  # noqa: PLR0913  # those of `measure`, and where to cut
    model_path: Path,
    *,
    file: Path | None = None,
    cuts: Sequence[str] | None = None,
    folder: Path | None = None,
    batches: Sequence[int] = BATCHES,
    cores: Sequence[float] | None = None,
    seconds: float = 1.0,
    passes: int = PASSES,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    limit: Limit = by_affinity,
    progress: LayersProgress = lambda done, cells, now: None,
) -> LayerProfile:
    """Cut a model, and measure its pieces; `seconds` for each batch size on each core count in each pass.

    `file` is opened instead of the model's own file (`sloop.profile.examine`); `cuts` are those of `cut_model`. The
    pieces are kept in `folder` if it is given. InputError for a model that cannot be cut, or not at these places, or
    cannot be measured with these choices, and if the pieces' results differ from the model's; MachineError if a process
    dies.
    """
    if model_path.suffix != ".onnx":
        what = "only an ONNX model has a graph of layers that can be cut"
        raise InputError(what, where=str(model_path), help="export it as ONNX")
    batches, cores = checked_batches(batches), checked_cores(default_cores() if cores is None else cores)
    source = file or model_path
    order = LayersOrder(str(source), (), ceil(cores[0]), tuple(batches), dict(shapes or {}), seconds)
    runs: dict[tuple[int, float], list[RoundTimes]] = {}
    loads: list[LayersLoad] = []
    with tempfile.TemporaryDirectory(prefix="sloop-layers-") as made:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        place = folder or Path(made)
        pieces = cut_model(source, cuts, place) if cuts is not None else _exact_pieces(order, cores[0], limit, place)
        for _ in range(passes):
            for count in cores:
                for message in _measured(structs.replace(order, pieces=pieces, threads=ceil(count)), count, limit):
                    if isinstance(message, LayersLoad):
                        loads.append(message)
                    elif isinstance(message, RoundTimes):
                        runs.setdefault((message.batch, count), []).append(message)
                        now = f"{counted(len(pieces), 'block')}, batch {message.batch} on {counted(count, 'core')}"
                        progress(sum(map(len, runs.values())), passes * len(batches) * len(cores), now)
    found = max(each.difference for each in loads)
    if found > DIFFERENCE_ASKED_MAX:
        what = f"in pieces it gives other results: they differ by {found:.1e} of the largest output"
        raise InputError(what, where=str(model_path), help=CUT_ELSEWHERE)
    return _layer_profile(model_path, pieces, runs, loads)


def _exact_pieces(order: LayersOrder, cores: float, limit: Limit, folder: Path) -> tuple[ModelPiece, ...]:
    """The pieces of a model, cut at all boundaries that do not change the results; written to `folder`."""
    graph = LayerGraph.read(Path(order.model))
    cuts = list(graph.boundaries())
    alone: dict[int, float] = {}

    def difference_at(chosen: Sequence[int]) -> float:
        with tempfile.TemporaryDirectory(prefix="sloop-layers-") as made:
            pieces = graph.pieces(chosen, Path(made))
            checks = _measured(structs.replace(order, pieces=pieces, is_check=True), cores, limit)
            return max(each.difference for each in checks if isinstance(each, CutCheck))

    while cuts and difference_at(cuts) > DIFFERENCE_MAX:
        alone = alone or {cut: difference_at([cut]) for cut in cuts}
        worst = max(alone[cut] for cut in cuts)
        cuts = [cut for cut in cuts if alone[cut] < min(worst, DIFFERENCE_MAX)]
    return graph.pieces(cuts, folder)


def kept_pieces(
    path: Path, ends: Sequence[str], shapes: Mapping[str, tuple[int, ...]], folder: Path, *, divides_rows: bool = True
) -> tuple[ModelPiece, ...]:
    """The pieces of a model whose last layers are these, kept in a folder below `folder` for later calls.

    They are tried when they are cut: InputError if they give other results than the model, or, with `divides_rows`, if
    the rows of a batch cannot be divided at each boundary. MachineError if they cannot be written.
    """
    made_of = hashlib.sha256(msgspec.json.encode([digest_of_model(path), ends, CUTS, divides_rows])).hexdigest()[:12]
    target = folder / f"{path.name}.blocks-{made_of}"
    kept = _kept_in(target)
    if kept is not None:
        return kept
    part = folder / f".{os.getpid()}-{target.name}"
    try:
        _remove_left(folder, path.name)
        part.mkdir(parents=True, exist_ok=True)
        made = cut_model(path, list(ends[:-1]), part)
        _check_pieces(path, made, shapes, divides_rows=divides_rows)
        made = tuple(structs.replace(piece, checksums=_checksums(Path(piece.file))) for piece in made)
        (part / LISTING).write_bytes(msgspec.json.encode(made))
        _sync_files(part)
        for _ in range(2):
            with contextlib.suppress(OSError):  # another process was quicker, or what is there is damaged
                part.rename(target)
            kept = _kept_in(target)
            if kept is not None:
                return kept
            shutil.rmtree(target, ignore_errors=True)
    except OSError as error:
        what = f"the blocks of {path} cannot be written to {folder}: {error.strerror}"
        raise MachineError(what, help="free some space, or name another state folder with --state") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    what = f"the blocks of {path} cannot be kept in {target}"
    raise MachineError(what, help="remove it, or name another state folder with --state")


def _kept_in(folder: Path) -> tuple[ModelPiece, ...] | None:
    """The pieces in a folder of `kept_pieces`; None if it is not there, or not as it was written."""
    try:
        pieces = msgspec.json.decode((folder / LISTING).read_bytes(), type=tuple[ModelPiece, ...])
    except (OSError, msgspec.DecodeError):
        return None
    placed = [structs.replace(piece, file=str(folder / Path(piece.file).name)) for piece in pieces]
    return tuple(placed) if all(Path(piece.file).is_file() for piece in placed) else None


def _remove_left(folder: Path, name: str) -> None:
    """Delete the files of processes that were killed while they cut a model of this name."""
    for left in folder.glob(f".*-{glob.escape(name)}.blocks-*"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > LEFT_S:
                shutil.rmtree(left, ignore_errors=True)


def _sync_files(folder: Path) -> None:
    """Make the content of the files in a folder last, before the folder gets the name that promises it."""
    for file in folder.iterdir():
        with file.open("rb") as opened:
            os.fsync(opened.fileno())


def _checksums(piece: Path) -> dict[str, str]:
    """The SHA-256 of the files of a piece."""
    return {file.name: digest(file) for file in (piece, data_file(piece)) if file.is_file()}


def _check_pieces(
    path: Path, pieces: Sequence[ModelPiece], shapes: Mapping[str, tuple[int, ...]], *, divides_rows: bool
) -> None:
    """InputError if the chain of pieces gives other results than the model or, with `divides_rows`, if a piece gives
    other results for some rows of a batch than for the whole batch."""
    whole = open_model(path, 1)
    feed = feed_for(whole, ROWS_TRIED, shapes, where=str(path))
    expected = list(whole.run(feed))
    names, known = [port.name for port in whole.signature.outputs], dict(feed)
    del whole
    for piece in pieces:
        session = open_model(Path(piece.file), 1)
        made = dict(zip([port.name for port in session.signature.outputs], _run(session, piece, known), strict=True))
        if divides_rows:
            _check_rows(path, session, piece, known, made)
        known.update(made)
    found = difference([known[name] for name in names], expected)
    if found > DIFFERENCE_ASKED_MAX:
        what = f"in pieces it gives other results: they differ by {found:.1e} of the largest output"
        raise InputError(what, where=str(path), help=CUT_ELSEWHERE)


def _check_rows(
    path: Path, session: Session, piece: ModelPiece, known: Mapping[str, Array], made: Mapping[str, Array]
) -> None:
    """InputError if a piece gives other results for some rows of a batch than for the whole batch, whose results are
    `made`."""
    rows = {port.name for port in (*piece.inputs, *piece.outputs) if port.shape[:1] == (-1,)}

    def part(row: int) -> dict[str, Array]:
        return {
            port.name: known[port.name][row : row + 1] if port.name in rows else known[port.name]
            for port in piece.inputs
        }

    name = next(iter(made))
    try:
        parts = [_run(session, piece, part(row)) for row in range(ROWS_TRIED)]
        for place, (name, value) in enumerate(made.items()):
            each = [found[place] for found in parts]
            if difference([np.concatenate(each) if name in rows else each[0]], [value]) > DIFFERENCE_ASKED_MAX:
                raise ValueError(name)
    except Exception as error:  # whatever ONNX Runtime raises, these rows are none for it
        what = f"the rows of a batch cannot be divided at {name!r}, which crosses the end of a block"
        help = f"measure other blocks with --cut; {CUT_ELSEWHERE}"
        raise InputError(what, where=str(path), help=help) from error


def _run(session: Session, piece: ModelPiece, known: Mapping[str, Array]) -> list[Array]:
    return list(session.run({port.name: known[port.name] for port in piece.inputs}))


def _layer_profile(
    model_path: Path,
    pieces: Sequence[ModelPiece],
    runs: Mapping[tuple[int, float], Sequence[RoundTimes]],
    loads: Sequence[LayersLoad],
) -> LayerProfile:
    def table(of: Callable[[RoundTimes], Sequence[int]]) -> LatencyTable:
        cells: Cells = {}
        for (batch, cores), found in sorted(runs.items()):
            cells.setdefault(batch, {})[cores] = _median_ms([run_ns for each in found for run_ns in of(each)])
        return LatencyTable(cells)

    def block(place: int, piece: ModelPiece) -> LayerBlock:
        return LayerBlock(
            end=piece.layers[-1],
            operators=_operators(piece.operators),
            layers=len(piece.layers),
            param_bytes=piece.param_bytes,
            output_bytes=loads[0].output_bytes[place],
            crossing_bytes=loads[0].crossing_bytes[place],
            load_ms=_median_ms([each.pieces_ns[place] for each in loads]),
            latency_ms=table(lambda each: each.pieces_ns[place]),
        )

    return LayerProfile(
        blocks=tuple(block(place, piece) for place, piece in enumerate(pieces)),
        load_ms=_median_ms([each.whole_ns for each in loads]),
        latency_ms=table(lambda each: each.whole_ns),
        input_bytes=loads[0].input_bytes,
        move_ms_per_mb=round(median(each.move_ms_per_mb for each in loads), 4),
        difference=max(each.difference for each in loads),
        source=f"sloop profile {model_path.name} --layers, medians",
        hardware=hardware_name(),
        software=", ".join((loads[0].software, f"Python {platform.python_version()}", platform.system())),
        date=datetime.now(UTC).date().isoformat(),
        model_digest=digest_of_model(model_path),
    )


def _median_ms(found_ns: Sequence[int]) -> float:
    """In milliseconds, to the nanosecond; never zero."""
    return max(1, round(median(found_ns))) / NS_PER_MS


def _operators(names: Sequence[str]) -> str:
    return ", ".join(name if count == 1 else f"{name} ×{count}" for name, count in Counter(names).most_common())


def _measured(order: LayersOrder, cores: float, limit: Limit) -> Iterator[RoundTimes | LayersLoad | CutCheck]:
    """Measure on one core count in a new process. InputError if it refuses the model, MachineError if it dies."""
    with measured_process(__name__, order.model, cores) as process, limit(process.pid, cores):
        process.order(order)
        for message in process.answers(RoundTimes | LayersLoad | CutCheck):
            yield message
            if isinstance(message, LayersLoad | CutCheck):
                return


# The measured process


def measure_here(order: LayersOrder) -> Iterator[RoundTimes | LayersLoad | CutCheck]:
    """Load and time the uncut model and its pieces in this process. InputError for a batch that it refuses."""
    loads = 1 if order.is_check else LOADS
    whole, whole_ns = _loaded(Path(order.model), order.threads, loads)
    found = [_loaded(Path(piece.file), order.threads, loads) for piece in order.pieces]
    chain = PieceChain(order.pieces, [session for session, _ in found])
    worst = 0.0
    sizes: tuple[int, list[int], list[int]] | None = None
    for batch in order.batches:
        feed = feed_for(whole, batch, order.shapes, where=order.model)
        try:
            expected = list(whole.run(feed))
        except Exception as error:  # exceptions of frameworks share no base class
            what = f"a batch of {batch} fails: {said_by(error)}"
            raise InputError(what, where=order.model, help="measure smaller batches") from error
        known, _ = chain.run(feed)
        names = [port.name for port in whole.signature.outputs]
        worst = max(worst, difference([known[name] for name in names], expected))
        if order.is_check:
            continue
        sizes = sizes or _row_sizes(order.pieces, known, feed, batch)
        whole_runs, pieces_runs = _rounds(whole, chain, feed, order.seconds)
        yield RoundTimes(batch, whole_runs, pieces_runs)
    if order.is_check:
        yield CutCheck(worst)
        return
    assert sizes is not None, "an order has a batch"
    yield LayersLoad(whole_ns, [each for _, each in found], *sizes, move_ms_per_mb(), worst, whole.software)


def _loaded(path: Path, threads: int, loads: int) -> tuple[Session, int]:
    """The loaded model, and the median duration in ns of `LOADS` loads."""
    took: list[int] = []
    session: Session | None = None
    for _ in range(loads):
        session = None  # two at once would double the memory
        start_ns = perf_counter_ns()
        session = open_model(path, threads)
        took.append(perf_counter_ns() - start_ns)
    assert session is not None
    return session, round(median(took))


class PieceChain:
    """Pieces with their sessions, run one after the other."""

    def __init__(self, pieces: Sequence[ModelPiece], sessions: Sequence[Session]) -> None:
        self.sessions = sessions
        self._inputs = [[port.name for port in piece.inputs] for piece in pieces]
        self._outputs = [[port.name for port in session.signature.outputs] for session in sessions]

    def run(self, feed: Mapping[str, Array]) -> tuple[dict[str, Array], list[int]]:
        """All tensors between the pieces by name, and the ns that each piece took."""
        known, took = dict(feed), []
        for session, inputs, outputs in zip(self.sessions, self._inputs, self._outputs, strict=True):
            given = {name: known[name] for name in inputs}
            start_ns = perf_counter_ns()
            made = session.run(given)
            took.append(perf_counter_ns() - start_ns)
            known.update(zip(outputs, made, strict=True))
        return known, took


def _rounds(
    whole: Session, chain: PieceChain, feed: Mapping[str, Array], seconds: float
) -> tuple[list[int], list[list[int]]]:
    """The durations in ns of the uncut model, and of each piece, in as many rounds as fit into the time."""
    whole_ns: list[int] = []
    pieces_ns: list[list[int]] = [[] for _ in chain.sessions]
    end_ns = perf_counter_ns() + round(seconds * NS_PER_S)
    while len(whole_ns) < ROUNDS_MIN or perf_counter_ns() < end_ns:
        start_ns = perf_counter_ns()
        whole.run(feed)
        whole_ns.append(perf_counter_ns() - start_ns)
        for each, took_ns in zip(pieces_ns, chain.run(feed)[1], strict=True):
            each.append(took_ns)
    return whole_ns, pieces_ns


def _row_sizes(
    pieces: Sequence[ModelPiece], known: Mapping[str, Array], feed: Mapping[str, Array], batch: int
) -> tuple[int, list[int], list[int]]:
    """Bytes of one row: of the inputs, of each piece's outputs, and of all tensors that cross the end of the piece."""

    def row_bytes(names: Sequence[str]) -> int:
        return ceil(sum(len(elements_of(known[name])) for name in names) / batch)

    outputs = [row_bytes([port.name for port in piece.outputs]) for piece in pieces]
    return row_bytes(list(feed)), outputs, [row_bytes(piece.crossing) for piece in pieces]


def move_ms_per_mb() -> float:
    """Milliseconds to write 10⁶ bytes into new shared memory, and to read them; 0 without shared memory."""
    content, took = np.ones(MOVED_BYTES, np.uint8), []
    for _ in range(ROUNDS_MIN):
        shared = SharedMemory.make()
        if shared is None:
            return 0.0
        start_ns = perf_counter_ns()
        shared.writable(MOVED_BYTES)[:] = content.data
        np.frombuffer(shared.readable(MOVED_BYTES), np.uint8).copy()
        took.append(perf_counter_ns() - start_ns)
        shared.close()
    return median(took) / NS_PER_MS / (MOVED_BYTES / 1e6)


if __name__ == "__main__":
    answer_order(LayersOrder, measure_here)
