"""Imports Python files that a user wrote: custom policies and systems, models as scripts.

Any exception in such a file becomes an `InputError` with file and line. The file's folder becomes the first entry of
the import path, as for `python FILE`.
"""

import importlib.util
import sys
import traceback
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from sloop.errors import InputError


@cache
def module_in(path: Path) -> ModuleType:
    """The module in a file; only the first call executes it. InputError if that fails."""
    if not path.is_file():
        raise InputError("there is no such file", where=str(path), help="give the path of a Python file")
    name = f"sloop_user_{path.stem}"  # the stem alone could shadow a library
    spec = importlib.util.spec_from_file_location(name, path.absolute())
    assert spec is not None, path
    assert spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their module there
    sys.path.insert(0, str(path.resolve().parent))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise_user_error(error, path, "it cannot be imported")
    return module


def raise_user_error(error: BaseException, path: Path, what: str) -> NoReturn:
    """Raise an `InputError` for an exception of the user's code. It names the file's last line in the traceback."""
    own = str(path.absolute())
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == own]
    line = frames[-1].lineno if frames else None
    if isinstance(error, SyntaxError) and error.filename == own:
        line = error.lineno
    where = f"{path}:{line}" if line else str(path)
    raise InputError(f"{what}: {type(error).__name__}: {error}", where=where, help="correct the file") from error
