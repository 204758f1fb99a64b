"""Python files that a user wrote: run once, their names taken out, their errors told as the user's.

Promises that whatever goes wrong in such a file becomes an `InputError` with file and line. The file's folder goes
first on the import path, as a program's does. Knows nothing of what the names are for.
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
    """The module in a file, which is run the first time. InputError where that fails."""
    if not path.is_file():
        raise InputError("there is no such file", where=str(path), help="give the path of a Python file")
    name = f"sloop_authored_{path.stem}"  # not the stem alone, which may be that of a library
    spec = importlib.util.spec_from_file_location(name, path.absolute())
    assert spec is not None, path
    assert spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and the like look themselves up there
    sys.path.insert(0, str(path.resolve().parent))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise_theirs(error, path, "it cannot be imported")
    return module


def raise_theirs(error: BaseException, path: Path, what: str) -> NoReturn:
    """An error in the author's code as one of the user's, with the last line of the file that it went through."""
    own = str(path.absolute())
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == own]
    line = frames[-1].lineno if frames else None
    if isinstance(error, SyntaxError) and error.filename == own:
        line = error.lineno
    where = f"{path}:{line}" if line else str(path)
    raise InputError(f"{what}: {type(error).__name__}: {error}", where=where, help="correct the file") from error
