"""Runs a model before it serves, on placeholders or on its own example, and says what a failure means.

`sloop check` and each worker, before it is ready, run a model on one row. Some failures are *certain*: they would
happen for every request, such as outputs that differ from the declared ones, a missing module, or a name that does not
exist. Other failures may be due to sizes or texts that were guessed.

A worker then runs the batches that it will get, so that no request pays for what a model does once for each size
(`warm_up`).
"""

import resource
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Final

import numpy as np
from msgspec import structs

from sloop.errors import InputError, Refused
from sloop.profile.model import (
    Array,
    OpenDimension,
    Session,
    fault_of_inputs,
    is_python,
    open_dimensions,
    row_shapes,
    synthesise,
)
from sloop.tensor import Port, Signature
from sloop.text import listed
from sloop.user_code import LIBRARIES, WrongOutputsError, failure_of, line_in, raised_by_users, said_by

WARM_S_MAX: Final = 10.0
"""How long a worker may run batches of one session beyond the first one before it is ready."""
LARGEST_S_MAX: Final = 0.2
"""If sizes cost nothing once, the largest batch is run only if it should take less: it merely allocates memory."""
CONFIRMING: Final = 3
"""So many sizes in turn that cost nothing once show that a first slow pass was chance."""
DEARER: Final = 2.0
DEARER_S: Final = 0.02
"""The model does something once for a size if the first pass with it takes more than `DEARER` times as long as later
ones, and at least `DEARER_S` longer."""
SIZES_TRIED: Final = tuple(sorted((*(1 << place for place in range(15)), 3, 48, 80, 400, 16_000)))
"""Powers of two, and what else models have: channels, heights of lines of text, bands and windows of spectra, a second
of speech."""
DECLARED_PROFILE: Final = (
    "profile: {max_batch: 1, max_cores: 1, latency_ms: {form: quadratic, alpha: 0, beta: 0, gamma: MS}}"
)
"""With which a model is not measured."""
SEARCH_S_MAX: Final = 3.0
"""How long sizes are looked for that a model accepts."""


def placeholders(
    signature: Signature, rows: int, shapes: Mapping[str, tuple[int, ...]], guessed: Mapping[str, tuple[int, ...]]
) -> dict[str, Array] | None:
    """A batch of equal random rows, as those that a profile is measured with. `shapes` gives the shape of one row for
    inputs with open dimensions, `guessed` for inputs that are not in `shapes`. None if a size is in neither."""
    found: dict[str, tuple[int, ...]] = {}
    for port in signature.inputs:
        size = shapes.get(port.name, guessed.get(port.name, port.shape[1:]))
        first = port.shape[:1] if len(size) < len(port.shape) else ()  # a size may be that of the whole input
        found[port.name] = tuple(1 if each < 0 else each for each in first) + size
        if -1 in found[port.name]:
            return None
    made = synthesise(signature, found)
    return {port.name: _repeated(made[port.name], port, rows) for port in signature.inputs}


def _repeated(array: Array, port: Port, rows: int) -> Array:
    return np.repeat(array, rows, axis=0) if port.has_rows and port.shape[:1] == (-1,) else array


def guessed_rows(session: Session) -> dict[str, tuple[int, ...]]:
    """One row's shape with usual sizes, for inputs with open dimensions."""
    dimensions = open_dimensions(session)
    found = row_shapes(session.signature, dimensions, [each.proposal for each in dimensions])
    for port in session.signature.inputs:  # their open sizes are those of the batch
        if not port.has_rows and -1 in port.shape:
            found[port.name] = tuple(1 if size < 0 else size for size in found.get(port.name, port.shape))
    return found


def try_on_one_row(
    session: Session, shapes: Mapping[str, tuple[int, ...]], path: Path, rows: int = 1
) -> tuple[bool, str]:
    """Run a model on the smallest batch, of `rows` rows. Returns whether larger batches can be run too (the sizes are
    known, and the model has not failed), and a note for users about a failure that may be due to the inputs.

    InputError for a certain failure (see above), and for one on the model's own example or on known sizes.
    """
    example = None if shapes else session.example(rows)
    feed, is_known = example, True
    if feed is None:
        feed = placeholders(session.signature, rows, shapes, {})
        is_known = feed is not None and not _has_texts(session)
    if feed is None:
        feed = placeholders(session.signature, rows, shapes, guessed_rows(session))
    if feed is None:
        return False, ""
    sizes = ", ".join(f"{name} {list(array.shape)}" for name, array in feed.items())
    on = "its own example" if example is not None else "the shapes of its profile" if shapes else "random inputs"
    try:
        session.run(feed)
    except Refused as error:
        return (
            False,
            f"it refuses {on} ({sizes}): {failure_of(error).summary}; give it an `example(rows)` that it takes",
        )
    except raised_by_users() as error:  # the author's code; exceptions of frameworks share no base class
        if example is None and _is_certain(error):
            raise InputError(said_by(error), where=line_in(path, error), help="correct the file") from error
        if is_known and not (example is None and fault_of_inputs(error)):
            what = f"it fails on {on}: {said_by(error)}"
            raise InputError(what, where=line_in(path, error), help=remedy(session, path)) from error
        return False, f"it fails on {on} ({sizes}): {failure_of(error).detail}; {remedy(session, path)}"
    return is_known, ""


def accepted_sizes(
    session: Session, signature: Signature, dimensions: Sequence[OpenDimension], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[OpenDimension, ...]:
    """The open dimensions with other proposals, on which a model runs that fails with the usual ones; none if they are
    not found soon. `shapes` gives one row's shape of the inputs whose sizes are known."""
    until_s = time.monotonic() + SEARCH_S_MAX
    for sizes in _nearby_sizes([each.proposal for each in dimensions]):
        if time.monotonic() > until_s:
            break
        guessed = guessed_rows(session) | row_shapes(signature, dimensions, sizes)
        feed = placeholders(session.signature, session.signature.fixed_batch or 1, shapes, guessed)
        if feed is None:
            break
        try:
            session.run(feed)
        except raised_by_users():  # other sizes are tried
            continue
        return tuple(structs.replace(each, proposal=size) for each, size in zip(dimensions, sizes, strict=True))
    return ()


def _nearby_sizes(usual: Sequence[int]) -> Iterator[list[int]]:
    """Other sizes of the open dimensions: of each alone, and of all together. Smaller ones, which cost less, come
    first."""
    near = [
        [*(size for size in reversed(SIZES_TRIED) if size < most), *(size for size in SIZES_TRIED if size > most)]
        for most in usual
    ]
    for sizes in zip(*near, strict=False):
        for place, size in enumerate(sizes):
            yield [*usual[:place], size, *usual[place + 1 :]]
        if len(sizes) > 1:
            yield list(sizes)


def remedy(session: Session, path: Path) -> str:
    """What to do about a model that fails on inputs that sloop has made."""
    if not is_python(path):
        made_up = [f"{port.name!r}" for port in session.signature.inputs if port.datatype.startswith(("INT", "UINT"))]
        if not made_up:
            return "give other sizes (--shape), or write a `profile` of it into the application file"
        values = f"other values of {listed(made_up)} than 0 and 1, which sloop makes up"
        return f"give other sizes (--shape); if it needs {values}, write an application file with `{DECLARED_PROFILE}`"
    if _has_texts(session):
        return "it has text inputs, for which sloop writes only 'a', and no `example(rows)`: write one"
    return "correct the file, or give it an `example(rows)`"


def _has_texts(session: Session) -> bool:
    return any(port.datatype == "BYTES" for port in session.signature.inputs)


def _is_certain(error: BaseException) -> bool:
    """Whether a stage would raise this for every request, whatever its inputs."""
    if isinstance(error, WrongOutputsError):
        return error.is_certain
    if isinstance(error, AttributeError):
        return isinstance(error.obj, ModuleType)
    if isinstance(error, TypeError):  # `run` takes other arguments, if no line of it was reached
        return all(frame.filename.startswith(LIBRARIES) for frame in traceback.extract_tb(error.__traceback__))
    return isinstance(error, ImportError | NameError) and not isinstance(error, UnboundLocalError)


def cpu_s() -> float:
    """The CPU time of this process, and of those that it started and that have ended, such as compilers."""
    used = [resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def warm_up(
    run: Callable[[int], object],
    batches: Sequence[int],
    *,
    for_memory: bool = True,
    clock_s: Callable[[], float] = time.monotonic,
    work_s: Callable[[], float] = cpu_s,
) -> tuple[int, ...]:
    """Run batches beyond the smallest, which has been run. `batches` are sizes in ascending order. Returns the sizes
    that there was no time for.

    The second size is run three times. If the first of these passes works much longer than the others, the model may do
    something once for each size. Otherwise, with `for_memory`, the largest is run if that should take less than
    `LARGEST_S_MAX`; it may be so too if that works much longer than expected. One such pass proves nothing: it may have
    allocated memory. So one of the next `CONFIRMING` sizes has to be dearer in its first pass than in its second; then
    every size up to the largest is run, those in `batches` first, for at most `WARM_S_MAX`.

    Passes are compared by `work_s`, CPU time: on a machine that others use, the times that passes take vary too much.
    """
    if len(batches) < 2:
        return ()

    def spent_s(rows: int) -> float:
        began_s = work_s()
        run(rows)
        return work_s() - began_s

    began_s = clock_s()
    probe, largest = batches[1], batches[-1]
    first_s = spent_s(probe)
    later_s = min(spent_s(probe), spent_s(probe))
    may_cost_once, expected_s = _is_dearer(first_s, later_s), later_s * largest / probe
    left = [*batches[2:], *(rows for rows in range(batches[0], largest) if rows not in batches)]
    if not may_cost_once and for_memory and largest > probe and expected_s <= LARGEST_S_MAX:
        may_cost_once = _is_dearer(spent_s(largest), expected_s)
        left.remove(largest)
    if not may_cost_once:
        return ()
    costs_once = False
    for place, rows in enumerate(left):
        if clock_s() - began_s + first_s > WARM_S_MAX:
            return tuple(left[place:])
        first_s = spent_s(rows)
        costs_once = costs_once or _is_dearer(first_s, spent_s(rows))
        if not costs_once and place + 1 >= CONFIRMING:
            return ()
    return ()


def _is_dearer(first_s: float, later_s: float) -> bool:
    return first_s > max(DEARER * later_s, later_s + DEARER_S)


def batches_to_warm(measured: Iterable[int]) -> tuple[int, ...]:
    """The batch sizes that a worker runs before it is ready, ascending: those that were measured, and powers of two."""
    sizes = set(measured)
    return tuple(sorted(sizes | {1 << place for place in range(max(sizes).bit_length())}))


def batch_maker(
    signature: Signature,
    shapes: Mapping[str, tuple[int, ...]],
    example: Callable[[int], Mapping[str, Array] | None] = lambda rows: None,
) -> Callable[[int], Mapping[str, Array]] | None:
    """A function that makes batches of known sizes, as `try_on_one_row` does; None if sizes are unknown."""

    def made(rows: int) -> Mapping[str, Array]:
        found = (None if shapes else example(rows)) or placeholders(signature, rows, shapes, {})
        assert found is not None, "sizes are known"
        return found

    is_known = placeholders(signature, 1, shapes, {}) is not None or example(signature.fixed_batch or 1) is not None
    return made if is_known else None
