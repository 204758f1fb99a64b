"""What a log's header says of a run, the way back from it to the same core, and the comparison of the two.

Promises that `rebuild(header_of(setup, …))` decides as the recorded core did: the header holds the application with its
profiles and its system with its parameters. Knows no driver, no clock, no file.
"""

import platform
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import msgspec
from msgspec import Struct

from sloop import __version__
from sloop.actions import Action
from sloop.app.application import Application, SystemChoice
from sloop.core import Core
from sloop.errors import InputError
from sloop.log import ACTIONS, EVENTS, Header, Record
from sloop.systems.setup import Setup, set_up


def header_of(setup: Setup, *, origin: str, seed: int | None = None, date: str = "") -> Header:
    """What a log of this run begins with; `origin` is `live` or `sim`, `date` an ISO 8601 instant."""
    application = replace(setup.application, lines={})  # a copy has no cached values, and lines belong to the file
    return Header(
        origin=origin,
        application=msgspec.to_builtins(application, str_keys=True),
        system=application.system.name,
        parameters=dict(application.system.parameters),
        profiles={
            f"{stage}/{variant}": msgspec.to_builtins(belief.profile, str_keys=True)
            for (stage, variant), belief in setup.beliefs.items()
        },
        seed=seed,
        software={"sloop": __version__, "python": platform.python_version()},
        date=date,
    )


def rebuild(header: Header) -> Setup:
    """The setup a log was recorded with, as fresh as it was then. InputError where the header does not say it all."""
    try:
        application = msgspec.convert(header.application, Application, strict=False)
    except msgspec.ValidationError as error:
        raise InputError(
            f"the log's header describes no application: {error}", help="record the run again with this sloop"
        ) from error
    return set_up(application, SystemChoice(header.system, header.parameters))


class Difference(Struct, frozen=True):
    """Where a replay left its recording."""

    at_ns: int
    record: int
    """Which record of the log, from 1; the header is not counted."""
    recorded: dict[str, Any]
    """What the log has there."""
    replayed: dict[str, Any] | None
    """What the core answered instead; None where it answered nothing more."""


class Replayed(Struct, frozen=True):
    """How a replay went; `difference` is None where every action was the recorded one."""

    events: int
    actions: int
    difference: Difference | None


def replay_log(records: Iterable[tuple[int, Record]], core: Core) -> Replayed:
    """Feed the recorded events to a fresh core and compare its answers with the recorded actions, up to the first
    difference. What follows an event in a log is the answer to it; a log that was cut may lack the end of the last one.
    """
    events = actions = 0
    pending: list[Action] = []
    for number, (now_ns, record) in enumerate(records, start=1):
        if isinstance(record, ACTIONS):
            actions += 1
            if not pending or pending[0] != record:
                return Replayed(events, actions, _difference(now_ns, number, recorded=record, replayed=pending))
            pending.pop(0)
            continue
        assert isinstance(record, EVENTS), record
        if pending:
            return Replayed(events, actions, _difference(now_ns, number, recorded=record, replayed=pending))
        events += 1
        pending = core.handle(now_ns, record)
    return Replayed(events, actions, None)


def _difference(now_ns: int, number: int, *, recorded: Record, replayed: list[Action]) -> Difference:
    first = msgspec.to_builtins(replayed[0]) if replayed else None
    return Difference(now_ns, number, msgspec.to_builtins(recorded), first)
