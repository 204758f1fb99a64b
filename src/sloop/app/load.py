"""The two entrances: an application or a scenario from a file, a text or a mapping.

Promises that a wrong one raises InputError and nothing else, whatever it contains.
"""

from collections.abc import Mapping
from pathlib import Path

from sloop.app.application import Application
from sloop.app.document import Value, from_plain, parse, read
from sloop.app.read_application import read_application
from sloop.app.read_scenario import SCENARIO_KEYS, read_scenario
from sloop.app.scenario import Scenario

Source = str | Path | Mapping[str, object]


def load_application(source: Source, *, folder: Path | None = None) -> Application:
    """The application in a file (a path), or in a mapping. A scenario file serves too: its world is passed over."""
    document, base = _document(source, folder)
    return read_application(document, base, extra=SCENARIO_KEYS)


def load_scenario(source: Source, *, folder: Path | None = None) -> Scenario:
    """The scenario in a file (a path), or in a mapping. InputError also where it has no `trace`."""
    document, base = _document(source, folder)
    return read_scenario(document, base)


def application_from_text(text: str, *, folder: Path | None = None, file: str = "<text>") -> Application:
    """The application in a YAML text; relative paths start at `folder`, else where we are."""
    return read_application(parse(text, file), folder or Path(), extra=SCENARIO_KEYS)


def scenario_from_text(text: str, *, folder: Path | None = None, file: str = "<text>") -> Scenario:
    """The scenario in a YAML text; relative paths start at `folder`, else where we are."""
    return read_scenario(parse(text, file), folder or Path())


def _document(source: Source, folder: Path | None) -> tuple[Value, Path]:
    if isinstance(source, Mapping):
        return from_plain(dict(source)), folder or Path()
    path = Path(source)
    return read(path), folder or path.parent
