"""Operating errors: what the user or the machine did wrong, said so that it can be put right.

    SloopError
    ├── InputError          a file, option or request we were given is wrong       (exit code 1; HTTP 400)
    └── MachineError        the machine refuses: a port in use, no free core, no cgroup rights

Programmer errors are `assert`s. Every message says what is wrong, the value, and after `help:` the fix.
"""


class SloopError(Exception):
    """Anything a user can cause and repair."""

    def __init__(self, what: str, *, help: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.help = help

    def __str__(self) -> str:
        return f"{self.what}\nhelp: {self.help}" if self.help else self.what


class InputError(SloopError):
    """Something sloop was given to read is wrong; `where` names file, line and key."""

    def __init__(self, what: str, *, where: str = "", help: str = "") -> None:
        super().__init__(f"{where}: {what}" if where else what, help=help)
        self.where = where


class MachineError(SloopError):
    """The machine cannot do what was asked of it."""
