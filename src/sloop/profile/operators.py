"""Libraries of operators that ONNX Runtime does not have.

A process names the libraries that it needs (`use`); from then on they are in every session that it opens. Such
processes are workers, and those that measure or examine a user's model, but never the server's own: it loads no native
code of a user.
"""

import hashlib
import importlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from sloop.errors import InputError

EXTENSIONS: Final = "onnxruntime-extensions"
"""Stands for the library in the package of this name."""
MODULE: Final = "onnxruntime_extensions"
"""What that package is imported as."""
DIGITS: Final = 12

_in_use: dict[str, None] = {}


def use(operators: Iterable[str]) -> None:
    """Add these libraries to every session that this process opens from now on: `EXTENSIONS`, or paths."""
    _in_use.update(dict.fromkeys(operators))


def in_use() -> tuple[str, ...]:
    """The libraries in use in this process, in the order of `use`."""
    return tuple(_in_use)


def library_of(name: str) -> str:
    """The path of a library. InputError if there is none."""
    if name != EXTENSIONS:
        if not Path(name).is_file():
            what = "there is no such library of operators"
            raise InputError(what, where=name, help="give the path of a shared library, on each machine that serves it")
        return name
    try:
        package = importlib.import_module(MODULE)
    except ImportError as error:
        what = f"the package {EXTENSIONS} is not installed ({error})"
        raise InputError(what, where=f"operators: {EXTENSIONS}", help=f"pip install {EXTENSIONS}") from error
    return str(package.get_library_path())


def add_to(options: Any) -> None:  # noqa: ANN401  # ONNX Runtime's SessionOptions have no types
    """Add the libraries in use to the options of a session. InputError if one is missing or cannot be loaded."""
    for name in _in_use:
        path = library_of(name)
        try:
            options.register_custom_ops_library(path)
        except Exception as error:  # ONNX Runtime's exceptions share no base class
            what = f"ONNX Runtime cannot load this library of operators: {str(error).strip().splitlines()[0]}"
            help = "it must be a shared library for this platform that exports RegisterCustomOps"
            raise InputError(what, where=name, help=help) from error


def software() -> str:
    """Names and versions of the libraries in use, for a profile; empty without any."""
    return "".join(f", {_version(name)}" for name in _in_use)


def _version(name: str) -> str:
    if name == EXTENSIONS:
        from importlib.metadata import version  # noqa: PLC0415  # 40 ms

        return f"{EXTENSIONS} {version(EXTENSIONS)}"
    return f"{Path(name).name} {hashlib.sha256(Path(name).read_bytes()).hexdigest()[:DIGITS]}"
