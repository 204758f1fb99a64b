"""Operating errors: what a user or the machine did wrong, with the fix. They are shown without a traceback.

    SloopError
    ├── InputError          a file, option or request is wrong                     (exit code 1; HTTP 400)
    └── MachineError        the machine refuses: a port in use, no free core, no cgroup rights

Programmer errors are `assert`s. Every message says what is wrong, the value, and after `help:` the fix.

`Refused` is no operating error: a stage in Python raises it for inputs that it does not take.
"""


class SloopError(Exception):
    """An error that a user can cause and repair. `what` says what is wrong, `help` how to fix it."""

    def __init__(self, what: str, *, help: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.help = help

    def __str__(self) -> str:
        return f"{self.what}\nhelp: {self.help}" if self.help else self.what


class InputError(SloopError):
    """A file, option or request is wrong; `where` gives file, line and key."""

    def __init__(self, what: str, *, where: str = "", help: str = "") -> None:
        super().__init__(f"{where}: {what}" if where else what, help=help)
        self.where = where


class MachineError(SloopError):
    """The machine cannot do what sloop needs, or does not permit it."""


class Refused(Exception):  # authors of stages write `raise Refused("…")`
    """A stage's `run` raises it to refuse a request. The client gets the text and status 400 (gRPC: INVALID_ARGUMENT).
    It does not count as a failure of the model."""
