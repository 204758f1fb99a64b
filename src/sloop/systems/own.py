"""Systems of a user's own: a Python file whose `SYSTEM` is a `System`, named by its path where a system's name stands.

Promises that what is no such file is refused with its place. `docs/write-a-system.md` shows how to write one.
"""

from pathlib import Path
from typing import Final

from sloop.authored import module_in
from sloop.core.protocols import Policies
from sloop.errors import InputError
from sloop.systems.system import System

SUFFIX: Final = ".py"


def is_own(name: str) -> bool:
    """Whether a system's name is the path of a file."""
    return name.endswith(SUFFIX)


def own_system(name: str) -> System:
    """The system in a file; one file is read once. InputError where there is none."""
    found = getattr(module_in(Path(name)), "SYSTEM", None)
    if not isinstance(found, System) or not isinstance(found.policies, Policies):
        what = "it has no SYSTEM" if found is None else f"its SYSTEM is no System but {type(found).__name__}"
        fix = "end it with SYSTEM = System(name=…, kind='system', source=…, policies=Policies(…))"
        raise InputError(what, where=name, help=fix)
    return found
