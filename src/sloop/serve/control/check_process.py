"""The check of a version, or of another system, before a server hears of it, in a process of its own.

Its file loads, every model opens and has a profile, its system is the server's and has a plan that fits the cluster.
Reading models and planning would stop the event loop for seconds, and a model's library may crash.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct

from sloop.app.application import Application, Deployment, SystemChoice
from sloop.app.load import load_application, with_deadline
from sloop.errors import InputError, MachineError, SloopError
from sloop.serve.control.checks import (
    check_live,
    warnings_of,
)
from sloop.serve.control.memory import rejoined
from sloop.serve.control.orders import Failed
from sloop.serve.control.servables import Models, models_of, runs_alone
from sloop.serve.control.versions import rows_of, served_version, threads_of, version_of
from sloop.serve.driver import ServedVersion
from sloop.serve.processes import begin, own_stdout, said_by
from sloop.serve.protocols import Servable
from sloop.systems.setup import (
    application_in,
    check_in_place,
    definition_of,
    set_up,
    with_lone_requests,
)
from sloop.vocabulary import Node

CHECK_S_MAX: Final = 600.0
"""Seconds for the check of a version; it opens every model and makes a plan."""
NICE: Final = 19


class CheckOrder(Struct, frozen=True, tag="version"):
    """What the process is to check: a file, as a version of its application in a running deployment."""

    file: str
    version: str
    """Empty for the next number."""
    next_versions: dict[str, str]
    """By application, the next number; "1" for others."""
    deployment: dict[str, Any]
    """Its system and cluster; without applications."""
    folder: str
    """The server's state folder."""
    definition: Mapping[str, Any] | None = None
    """The application version instead of the file's, joined with the deployment already."""
    ordered: dict[str, SystemChoice] = {}  # msgspec copies the empty dict for each instance
    """By application, the systems that were ordered instead of the deployment's."""


class SystemOrder(Struct, frozen=True, tag="system"):
    """What the process is to check: another system for versions of an application that serve."""

    system: str
    parameters: dict[str, Any]
    versions: dict[str, dict[str, Any]]
    """By key, the versions as they serve (`Application`)."""
    cluster: tuple[Node, ...]


class AcceptedVersion(Struct, frozen=True, tag="accepted"):
    """A version that can be served, with everything that the server needs of it."""

    definition: dict[str, Any]
    models: tuple[tuple[str, str, Servable], ...]
    """Each with its stage and variant."""
    rows_max: int
    threads: int
    warnings: tuple[str, ...]

    def served(self) -> tuple[Application, Models, ServedVersion]:
        """The application, its models, and how the driver serves it."""
        application = application_in(self.definition)
        models = {(stage, variant): model for stage, variant, model in self.models}
        return application, models, served_version(application, models, self.rows_max)


class AcceptedSystem(Struct, frozen=True, tag="accepted_system"):
    """A system that can decide for the versions of an application."""

    definitions: dict[str, dict[str, Any]]
    """By key, the versions under it."""
    threads: int


def check_version(order: CheckOrder) -> AcceptedVersion:
    """The version if it can be served. SloopError if it cannot."""
    deployment = msgspec.convert(order.deployment, Deployment, strict=False)
    if order.definition is not None:
        application = application_in(order.definition)
        application = joined = rejoined(application, deployment, order.ordered.get(application.name))
    else:
        application = load_application(order.file, cluster=deployment.cluster)
        version = order.version or order.next_versions.get(application.name, "1")
        system = order.ordered.get(application.name, deployment.system)
        joined = replace(deployment, system=system).joined_by(application).qualified(version)
    whole = set_up(replace(deployment, applications=(joined,)))
    (setup,) = whole.applications
    check_live(setup)
    models = models_of(setup, deployment.limits, Path(order.folder), must_run=True)
    (setup,) = with_lone_requests(whole, runs_alone(models)).applications
    version_of(setup, models, deployment.limits)
    return AcceptedVersion(
        definition=definition_of(setup),
        models=tuple((*key, model) for key, model in models.items()),
        rows_max=rows_of(joined, deployment.limits),
        threads=threads_of(setup),
        warnings=(*filter(None, (with_deadline(application)[1],)), *warnings_of(setup, models)),
    )


def check_system(order: SystemOrder) -> AcceptedSystem:
    """The versions under the system if it can take over. SloopError if it cannot."""
    choice, threads = SystemChoice(order.system, order.parameters, path="--system"), 0
    definitions: dict[str, dict[str, Any]] = {}
    for key, described in order.versions.items():
        application = replace(application_in(described), cluster=order.cluster)
        setup = check_in_place(application, replace(application, system=choice))
        check_live(setup)
        definitions[key], threads = definition_of(setup), max(threads, threads_of(setup))
    return AcceptedSystem(definitions, threads)


async def checked(order: CheckOrder) -> AcceptedVersion:
    """`check_version` in a process of its own. Raises what it raises, and MachineError if the process dies."""
    found = await _answered(order, order.file)
    assert isinstance(found, AcceptedVersion), found
    return found


async def checked_system(order: SystemOrder) -> AcceptedSystem:
    """`check_system` in a process of its own, likewise."""
    found = await _answered(order, order.system)
    assert isinstance(found, AcceptedSystem), found
    return found


async def _answered(order: CheckOrder | SystemOrder, what: str) -> AcceptedVersion | AcceptedSystem:
    try:
        answer, status = await said_by("sloop.serve.control.check_process", msgspec.json.encode(order), CHECK_S_MAX)
    except TimeoutError as error:
        why = f"{what}: the check has taken more than {CHECK_S_MAX:g} s"
        raise InputError(why, help="a model may wait for something when it is opened") from error
    try:
        found = msgspec.json.decode(answer, type=AcceptedVersion | AcceptedSystem | Failed)
    except msgspec.DecodeError as error:
        why = f"{what}: the process that checked it ended with exit status {status}"
        raise MachineError(why, help="see the server's messages; it may have run out of memory") from error
    if isinstance(found, Failed):
        raise InputError(found.what, help=found.help)
    return found


def main(arguments: Sequence[str]) -> None:
    """Entry point of the process: reads an order from stdin, and writes the answer to stdout."""
    begin(int(arguments[0]), ())
    os.nice(NICE)
    with own_stdout() as out:
        try:
            order = msgspec.json.decode(sys.stdin.buffer.read(), type=CheckOrder | SystemOrder)
            found: AcceptedVersion | AcceptedSystem | Failed
            found = check_version(order) if isinstance(order, CheckOrder) else check_system(order)
        except SloopError as error:
            found = Failed(str(error.args[0]), error.help)
        out.write(msgspec.json.encode(found))


if __name__ == "__main__":
    main(sys.argv[1:])
