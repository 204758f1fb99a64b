"""Folders of fitted MAP matrices: files MAPk_D0 and MAPk_D1, one pair for each hour k, as published with BATCH.

Promises a trace in which pair after pair is in force for `dwell_s` seconds. Each file holds a square matrix, a row a
line, entries separated by commas, in rates per second. Source: Ali et al., BATCH, SC'20, and its artefact.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path

from sloop.errors import InputError
from sloop.options import Limits
from sloop.streams import stream
from sloop.units import s
from sloop.workload.archive import Text, read_folder
from sloop.workload.markov import STATES_MAX, Map, Matrix
from sloop.workload.trace import Trace

_NAME = re.compile(r"MAP(\d{1,6})_D([01])(\.\w+)?", re.ASCII)


def is_maps(path: Path) -> bool:
    """Whether this is a folder, or the common beginning of a pair's two file names."""
    return path.is_dir() or (not path.exists() and path.with_name(f"{path.name}_D0").exists())


def read_maps(path: Path, *, member: str, dwell_s: float, seed: int) -> Trace:
    """The trace of a folder or archive of matrices, or of one pair of them (`path` without its _D0)."""
    if not path.exists() and (chosen := _NAME.fullmatch(f"{path.name}_D0")):
        processes = _parsed(read_folder(path.parent), str(path.parent), only=int(chosen[1]))
    else:
        processes = _parsed(read_folder(path, member=member), str(path))
    dwell_ns = s(dwell_s)

    def blocks() -> Iterator[Sequence[int]]:
        rng = stream(seed, "arrivals")
        for place, process in enumerate(processes):
            for block in process.blocks(rng, dwell_ns):
                yield [place * dwell_ns + at_ns for at_ns in block]

    source = f"fitted: MAP matrices of {path.name}, {len(processes)} of {dwell_s:g} s each, seed {seed}"
    return Trace(path.name, dwell_ns * len(processes), source, blocks)


def _parsed(files: Mapping[str, Text], where: str, only: int | None = None) -> list[Map]:
    found: dict[int, dict[str, Text]] = {}
    for name, text in files.items():
        match = _NAME.fullmatch(name)
        if match and only in (None, int(match[1])):
            found.setdefault(int(match[1]), {})[match[2]] = text
    if not found:
        raise InputError("no files MAP1_D0, MAP1_D1, … here", where=where, help="name the folder that holds them")
    return [_process(number_, pair, where) for number_, pair in sorted(found.items())]


def _process(hour: int, pair: dict[str, Text], where: str) -> Map:
    for half in "01":
        if half not in pair:
            raise InputError(f"MAP{hour}_D{half} is missing", where=where, help="each MAPk needs its D0 and its D1")
    try:
        return Map(_matrix(pair["0"]), _matrix(pair["1"]))
    except InputError as error:
        if error.where:
            raise
        raise InputError(error.what, where=pair["0"].where, help=error.help) from None


def _matrix(text: Text) -> Matrix:
    rows: list[tuple[float, ...]] = []
    for line, content in islice(enumerate(text.text.splitlines(), start=1), STATES_MAX + 1):
        if content.strip():
            here = f"{text.where}:{line}"
            rows.append(tuple(_rate(cell, here) for cell in content.replace(",", " ").split()))
    if not rows:
        raise InputError("the matrix is empty", where=text.where, help="a row a line, entries separated by commas")
    return tuple(rows)


def _rate(cell: str, where: str) -> float:
    try:
        return Limits(least=-1e7, most=1e7).check(float(cell), where)
    except ValueError:
        raise InputError(f"{cell[:40]!r} is not a number", where=where, help="entries are rates per second") from None
