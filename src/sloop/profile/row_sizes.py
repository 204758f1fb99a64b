"""Which sizes of rows a model is measured with, and what they say: typical ones, their input shapes, and a law.

A size is the number of elements of a row's largest input in the dimensions that the model leaves open, as edges count
it (`sloop.tensor.size_and_shape`). It is given by the lengths of these dimensions, which inputs may share: one length
for a text, height and width for an image.
"""

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from itertools import accumulate
from math import ceil, prod
from pathlib import Path
from typing import Final

from sloop.errors import InputError
from sloop.profile.examine import ExaminedModel
from sloop.profile.fit import Point, fit_quadratic
from sloop.profile.model import OpenDimension, row_shapes
from sloop.profile.profile import Fit, Profile, Quadratic
from sloop.tensor import Signature, size_and_shape
from sloop.text import counted, listed

Lengths = tuple[int, ...]
"""The lengths of the open dimensions of one row, in the order of `sized_dimensions`."""
Shapes = Mapping[str, tuple[int, ...]]
"""One row's shape by input."""

SHARES: Final = (0.05, 0.5, 0.95, 1.0)
"""The sizes to measure where many are known: these quantiles, of which the last is the largest. Beyond it a profile
would have to extrapolate."""
LENGTH_MAX: Final = 10**8
FILE_BYTES_MAX: Final = 64 << 20
_LENGTHS: Final = re.compile(r"\s*\d+(\s*x\s*\d+)*\s*")


def lengths_in(text: str) -> Lengths:
    """The lengths in `128` or `224x224`. ValueError for other text."""
    if not _LENGTHS.fullmatch(text):
        raise ValueError(f"{text.strip()!r} is not a size; write 128, or 224x224 for two open dimensions")
    found = tuple(map(int, text.split("x")))
    if not all(1 <= length <= LENGTH_MAX for length in found):
        raise ValueError(f"the size {text.strip()} is not between 1 and {LENGTH_MAX:g}")
    return found


def lengths_in_file(path: Path) -> Counter[Lengths]:
    """How often each size is in a text file with one size a line. InputError for a line without one."""
    help = "give a text file with one size a line, such as 128, or the log of a server"
    try:
        if path.stat().st_size > FILE_BYTES_MAX:
            raise InputError(f"it has more than {FILE_BYTES_MAX >> 20} MiB", where=str(path), help="give fewer sizes")
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read sizes: {error}", where=str(path), help=help) from error
    found = Counter[Lengths]()
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                found[lengths_in(line)] += 1
            except ValueError as error:
                raise InputError(str(error), where=f"{path}:{number}", help=help) from error
    if not found:
        raise InputError("it has no sizes", where=str(path), help=help)
    return found


def typical(found: Mapping[Lengths, int]) -> list[Lengths]:
    """A few sizes that stand for all, each of which came so often: the quantiles `SHARES`, ascending."""
    ascending = sorted(found, key=lambda lengths: (prod(lengths), lengths))
    reached = list(accumulate(found[lengths] for lengths in ascending))
    places = [bisect_left(reached, max(1, ceil(share * reached[-1]))) for share in SHARES]
    return [*{prod(ascending[place]): ascending[place] for place in places}.values()]


def sized_dimensions(known: ExaminedModel) -> tuple[OpenDimension, ...]:
    """The open dimensions of rows: those that only inputs without rows have are not asked for."""
    rows = {port.name for port in known.signature.inputs if port.has_rows}
    found = known.dimensions or tuple(
        OpenDimension(f"{port.name}[{place}]", ((port.name, place - port.has_rows),), 1)
        for port in known.signature.inputs
        for place in port.open_places
    )
    with_rows = tuple(each for each in found if any(name in rows for name, _ in each.ports))
    return with_rows or found


def shapes_at(known: ExaminedModel, lengths: Lengths, others: Shapes, where: str) -> dict[str, tuple[int, ...]]:
    """The shapes of inputs whose open dimensions have these lengths; `others` has the shapes of the remaining inputs.
    One length stands for all dimensions if no input has two. InputError if the model has other open dimensions."""
    dimensions = sized_dimensions(known)
    names = listed([each.name for each in dimensions])
    if not dimensions:
        what = "its rows have no open dimensions, so they all have one size"
        raise InputError(what, where=where, help="leave out --sizes and --sizes-from")
    inputs = [name for each in dimensions for name, _ in each.ports]
    if len(lengths) == 1 and len(set(inputs)) == len(inputs):
        lengths *= len(dimensions)
    if len(lengths) != len(dimensions):
        example = "x".join(str(each.proposal) for each in dimensions)
        given = f"the size {'x'.join(map(str, lengths))} has {counted(len(lengths), 'number')}"
        what = f"{given}, and its rows have {counted(len(dimensions), 'open dimension')}: {names}"
        raise InputError(what, where=where, help=f"write a number for each, for example {example}")
    return {**others, **row_shapes(known.signature, dimensions, lengths)}


def lengths_of(known: ExaminedModel, size: int, shape: tuple[int, ...]) -> Lengths:
    """The lengths of the open dimensions of rows with which requests came (`sloop.vocabulary.Request`). ValueError if
    they were of a model with other open dimensions."""
    ports = {port.name: port for port in known.signature.inputs}
    places = [(name, place) for name, port in ports.items() for place in port.open_places]
    if shape and len(shape) != len(places):
        raise ValueError(f"rows with the open dimensions {shape}, of {len(places)}")
    by_place = dict(zip(places, shape or (size,) * len(places), strict=True))
    firsts = [each.ports[0] for each in sized_dimensions(known)]
    return tuple(by_place[name, place + ports[name].has_rows] for name, place in firsts)


def size_of(signature: Signature, shapes: Shapes) -> int:
    """The size of rows of these shapes, as edges count it; 0 if the model leaves no dimension of theirs open, or their
    shapes are not known."""
    lengths = []
    for port in signature.inputs:
        if port.open_places:
            row = shapes.get(port.name)
            if row is None:
                return 0
            first = len(port.shape) - len(row)  # the whole shape is given for an input without rows
            lengths.append(tuple(row[place - first] for place in port.open_places if place >= first))
    return size_and_shape(lengths)[0] if lengths else 0


def law_of(profile: Profile) -> Fit | None:
    """What a full batch takes on as many cores as help, by size: αs² + βs + γ ms. None for fewer than three sizes."""
    if len(profile.sizes) < 3:
        return None
    batch, cores = profile.max_batch, profile.max_cores
    return fit_quadratic([Point(each.size, cores, each.latency_ms.latency_ms(batch, cores)) for each in profile.sizes])


def curved_share(law: Fit, size: int) -> float:
    """The fraction of the time at this size that grows with its square."""
    assert isinstance(law.params, Quadratic)
    return law.params.alpha * size * size / law.params.latency_ms(size, 1.0)
