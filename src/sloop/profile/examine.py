"""What a model file takes and gives, and whether its rows may be joined.

Python files are looked at in a process of their own, `python -m sloop.profile.examine MODEL SHAPES`, so that neither
their authors' code nor their libraries get into whoever asks; it says in one line of JSON what it found. What the code
prints goes to the standard error.
"""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from sloop.errors import InputError, MachineError
from sloop.profile.rows import obstacle
from sloop.profile.session import is_python, open_model
from sloop.tensor import Signature

EXAMINE_S_MAX: Final = 300.0
"""For a Python file to be imported, its model made, and two rows run."""


class Seen(Struct, frozen=True, tag="seen"):
    """A model that can be run."""

    signature: Signature
    obstacle: str


class Refused(Struct, frozen=True, tag="refused"):
    """One that cannot, for a reason the user can mend."""

    what: str
    where: str
    help: str


def examine(path: Path, shapes: Mapping[str, tuple[int, ...]] | None = None) -> tuple[Signature, str]:
    """What the model takes and gives, and why its rows cannot be joined (`sloop.profile.rows`), empty where they can.

    InputError for an unusable file, MachineError where looking at it kills the process that looks.
    """
    if not is_python(path):
        return examine_here(path, shapes or {})
    command = [sys.executable, "-P", "-m", __name__, str(path), msgspec.json.encode(shapes or {}).decode()]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, timeout=EXAMINE_S_MAX, check=False)
    except subprocess.TimeoutExpired as error:
        what = f"it was not imported and tried within {EXAMINE_S_MAX:g} s"
        raise InputError(what, where=str(path), help="do less when the file is imported and 'Model' is made") from error
    try:
        found = msgspec.json.decode(done.stdout, type=Seen | Refused)
    except msgspec.DecodeError as error:
        what = f"the process that looked at {str(path)!r} ended with exit status {done.returncode}"
        raise MachineError(what, help="see above what it said; it may have run out of memory") from error
    if isinstance(found, Refused):
        raise InputError(found.what, where=found.where, help=found.help)
    return found.signature, found.obstacle


def examine_here(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> tuple[Signature, str]:
    """`examine`, in this process. A model that brings an example must be able to run it."""
    session = open_model(path, 1, optimise=False)
    example = session.example(1)
    if example is not None:
        try:
            session.run(example)
        except Exception as error:  # the author's code
            what = f"it fails on its own example: {type(error).__name__}: {error}"
            raise InputError(what, where=str(path), help="correct 'run', 'outputs' or 'example'") from error
    return session.signature, obstacle(session, shapes, where=str(path))


def check_rows(path: Path, shapes: Mapping[str, tuple[int, ...]] | None = None) -> None:
    """Raise an InputError where batches of several rows would mean nothing to a server."""
    found = examine(path, shapes)[1]
    if found:
        freed = "" if is_python(path) else "; a batch that was fixed may open with --free-batch"
        raise InputError(
            f"{found}, so that requests cannot share a forward pass",
            where=str(path),
            help=f"measure what one request needs, with --batches 1{freed}",
        )


def main(arguments: Sequence[str]) -> None:
    """Entry of the process: see the module's text."""
    path, shapes = arguments
    with os.fdopen(os.dup(1), "wb") as out:
        os.dup2(2, 1)
        try:
            rows = msgspec.json.decode(shapes, type=dict[str, tuple[int, ...]])
            found: Seen | Refused = Seen(*examine_here(Path(path), rows))
        except InputError as error:
            found = Refused(error.what, error.where, error.help)
        out.write(msgspec.json.encode(found))


if __name__ == "__main__":
    main(sys.argv[1:])
