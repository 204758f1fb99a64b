"""What a server begins with: the models of its applications, loaded, without those that cannot be loaded now."""

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from sloop.app.application import Deployment, SystemChoice
from sloop.errors import MachineError, SloopError
from sloop.serve.control.memory import VersionMemory
from sloop.serve.control.servables import Models, models_of, runs_alone
from sloop.serve.control.versions import version_of
from sloop.serve.copies import ExaminedModels
from sloop.serve.driver import ServedVersion
from sloop.serve.protocols import Servable
from sloop.systems.setup import Setup, definition_of, set_up, with_lone_requests

LOAD_S_MAX: Final = 60.0
"""An application that takes longer to load at the start, such as one whose model hangs, is left to later attempts if
others are to be served."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class UnloadedModel:
    """An application that a server was to serve from its start, and could not load."""

    why: str
    file: str
    definition: dict[str, Any] | None = None
    """With which it is tried again; None if not even its speed is known."""


LeftOut = Mapping[str, UnloadedModel]
"""By name, applications that could not be loaded."""
LOADED: Final[LeftOut] = {}
"""All could."""


def within(limit_s: float | None, work: Callable[[], T]) -> T:
    """The result of work in a thread. MachineError if it takes longer; the thread goes on, and nobody waits for it."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name="loading", daemon=True).start()
    try:
        return done.result(limit_s)
    except TimeoutError as error:
        raise MachineError(f"it takes more than {limit_s:g} s to load") from error


def loadable(
    setup: Setup, folder: Path, examined: ExaminedModels | None = None
) -> tuple[Setup, dict[tuple[str, str], Servable], dict[str, UnloadedModel]]:
    """The setup of the applications whose models can be loaded, these models, and by name the other applications; for
    `folder` and `examined` see `servables_of`. Raises the first error if no application can be loaded."""
    found: dict[tuple[str, str], Servable] = {}
    left_out: dict[str, UnloadedModel] = {}
    errors: list[SloopError] = []
    limit_s = None if len(setup.applications) == 1 else LOAD_S_MAX
    for each in setup.applications:
        try:
            found |= within(limit_s, partial(models_of, each, setup.deployment.limits, folder, examined=examined))
        except SloopError as error:
            errors.append(error)
            left_out[each.application.name] = UnloadedModel(error.what, each.application.file, definition_of(each))
    if len(errors) == len(setup.applications):
        raise errors[0]
    if left_out:
        setup = set_up(setup.deployment.without(left_out))
    return setup, found, left_out


def versions_of(setup: Setup, models: Models) -> list[ServedVersion]:
    """The applications as the driver serves them. InputError for one that cannot be served."""
    return [version_of(each, models, setup.deployment.limits) for each in setup.applications]


def begun(
    deployment: Deployment, choice: SystemChoice | None, memory: VersionMemory, examined: ExaminedModels | None = None
) -> tuple[Setup, Models, dict[str, UnloadedModel]]:
    """What a server begins with: what was deployed before it ended, or else what its command line names, which is
    `deployment`. The same values and errors as those of `loadable`."""
    try:
        found = loadable(set_up(memory.restored.under(choice)), memory.folder, examined)
    except Exception as error:  # the file may say anything, and a system that was deployed may raise anything
        if memory.restored.deployment == deployment:
            raise
        memory.give_up(f"what was deployed before the restart cannot be served: {error}")
        found = loadable(set_up(deployment, choice), memory.folder, examined)
    setup, models, left_out = found
    return with_lone_requests(setup, runs_alone(models)), models, left_out
