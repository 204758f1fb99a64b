"""What installed distributions add to sloop: systems, policies, profiles, runtimes and commands, by entry points.

Names come from the metadata of the distributions. What a name stands for is imported when somebody asks for it, so an
installed distribution costs a run nothing that does not use it. `docs/write-a-system.md` shows how to write one.
"""

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import unquote, urlsplit

from sloop.errors import InputError
from sloop.text import listed

if TYPE_CHECKING:
    from importlib.metadata import Distribution, EntryPoint

T = TypeVar("T")

DISTRIBUTION: Final = "sloop-serve"
"""Our own: it has entry points too."""
NOUNS: Final = {
    "sloop.systems": "system",
    "sloop.policies": "policy",
    "sloop.profiles": "profile",
    "sloop.runtimes": "runtime",
    "sloop.commands": "command",
    "sloop.reproductions": "reproduction",
}
"""The groups of entry points, and what an entry of each is."""


class Registry(Mapping[str, T]):
    """Entries by name: sloop's `own` first, then those of installed distributions, of which each is a `kind`.

    Metadata of distributions is read for a name that is not among the own ones, or for all names. Reading an entry
    imports it; InputError if that fails, if it is something else, or if several distributions have one of this name.
    With a `prefix`, the entry points of the group are called `PREFIX.NAME`. An entry point whose name has a `*` names a
    mapping: a family of entries with their whole names, imported for a name that it matches, or for all names.
    """

    def __init__(self, group: str, own: Mapping[str, T], kind: type[Any], prefix: str = "") -> None:
        self.own = own
        self._group = group
        self._kind = kind
        self._prefix = prefix and f"{prefix}."

    def __contains__(self, name: object) -> bool:
        return name in self.own or (isinstance(name, str) and self._added(name) is not None)

    def __getitem__(self, name: str) -> T:
        if name in self.own:
            return self.own[name]
        if (added := self._added(name)) is None:
            raise KeyError(name)
        entry: T = added[name] if isinstance(added, Mapping) else load(added, self._kind)
        return entry

    def __iter__(self) -> Iterator[str]:
        added = self._points()
        names = dict.fromkeys([*self.own, *(name for name in added if "*" not in name)])
        for entries in self._families(name for name in added if "*" in name):
            names |= dict.fromkeys(entries)
        yield from names

    def _points(self, *, complete: bool = True) -> "Mapping[str, tuple[EntryPoint, ...]]":
        """The entry points by name, without the prefix; not `complete`: those that there are."""
        found = points(self._group) if complete else installed_points(self._group)
        return {name.removeprefix(self._prefix): found[name] for name in found if name.startswith(self._prefix)}

    def _added(self, name: str) -> "tuple[EntryPoint, ...] | Mapping[str, T] | None":
        """The entry points of this name, or the family that has it."""
        added = self._points()
        if found := added.get(name):
            return found
        matching = (family for family in added if "*" in family and fnmatchcase(name, family))
        return next((entries for entries in self._families(matching) if name in entries), None)

    def _families(self, names: Iterable[str]) -> Iterator[Mapping[str, T]]:
        for name in names:
            for point in self._points()[name]:
                yield load((point,), Mapping)  # type: ignore[type-abstract]

    def package_of(self, name: str) -> str:
        """The package that adds an entry, such as `sloop_systems.ipa`; `sloop` for its own."""
        return "sloop" if name in self.own else self._points()[name][0].module

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def names_in(self, package: str) -> list[str]:
        """The names of entries that a package adds, without importing it; the own ones are those of `sloop`."""
        if package == "sloop":
            return list(self.own)
        return [name for name, found in self._points().items() if f"{found[0].module}.".startswith(f"{package}.")]

    def name_of(self, kind: type[Any]) -> str | None:
        """The name of a class that is an entry, or None. No distribution's module is imported to find out."""
        there = f"{kind.__module__}:{kind.__qualname__}"
        own = next((name for name, entry in self.own.items() if entry is kind), None)
        added = self._points(complete=False)
        return own or next((name for name, found in added.items() if found[0].value == there), None)


@cache
def installed_points(group: str) -> "Mapping[str, tuple[EntryPoint, ...]]":
    """The entry points of a group by name; several if several distributions have one of a name."""
    from importlib.metadata import entry_points  # noqa: PLC0415  # 40 ms, for names that are not sloop's own

    found: dict[str, tuple[EntryPoint, ...]] = {}
    for point in entry_points(group=group):
        found[point.name] = (*found.get(point.name, ()), point)
    return found


@cache
def points(group: str) -> "Mapping[str, tuple[EntryPoint, ...]]":
    """The same. InputError if an editable installation is older than its pyproject.toml, so that it lacks some."""
    found = installed_points(group)
    distributions = {point.dist.name for same_name in found.values() for point in same_name if point.dist is not None}
    for name in sorted(distributions | {DISTRIBUTION}):
        _refuse_stale(name, group)
    return found


def load(found: "tuple[EntryPoint, ...]", kind: type[T]) -> T:
    """Import what an entry point names. InputError if that raises, if it is no `kind`, or if there are several."""
    point = found[0]
    what = f"{NOUNS[point.group]} {point.name!r} of {_origin(point)}"
    if len(found) > 1:
        others = listed([_origin(each) for each in found])
        raise InputError(
            f"{others} each add a {NOUNS[point.group]} {point.name!r}", help="uninstall all but one of them"
        )
    try:
        entry = point.load()
    except InputError:
        raise
    except Exception as error:  # of any kind: the author's code
        raise InputError(
            f"{what} ({point.value}) cannot be imported: {type(error).__name__}: {error}",
            help=f"correct or reinstall {_origin(point)}; an editable installation is refreshed by installing it again",
        ) from error
    if not isinstance(entry, kind):
        is_what = f"{point.value} is a {type(entry).__name__}, not a {kind.__name__}"
        raise InputError(f"{what}: {is_what}", help=f"correct the entry point of {_origin(point)}")
    return entry


def _origin(point: "EntryPoint") -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist is not None else point.module


def _refuse_stale(name: str, group: str) -> None:
    """InputError if the distribution is an editable installation whose pyproject.toml has entry points of this group
    that are not installed: they were added, or renamed, after it was made."""
    import tomllib  # noqa: PLC0415  # like the metadata
    from importlib.metadata import PackageNotFoundError, distribution  # noqa: PLC0415

    try:
        found = distribution(name)
    except PackageNotFoundError:  # sloop itself may run from a folder
        return
    folder = _folder_of(found)
    try:
        document = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8")) if folder else {}
    except (OSError, ValueError):  # moved, or no longer valid
        return
    declared = document.get("project", {}).get("entry-points", {}).get(group, {})
    installed = {(point.name, point.value) for point in found.entry_points if point.group == group}
    if missing := [each for each, value in declared.items() if (each, value) not in installed]:
        raise InputError(
            f"the installation of {name} in this environment is older than its pyproject.toml: it lacks "
            f"{NOUNS[group]} {listed(missing)}",
            where=str(folder),
            help=f"refresh it: {sys.executable} -m pip install --no-deps --editable {folder}",
        )


def _folder_of(found: "Distribution") -> Path | None:
    """The folder of an editable installation's source; None for any other installation."""
    try:
        record = json.loads(found.read_text("direct_url.json") or "{}")
        is_editable = record.get("dir_info", {}).get("editable", False)
        return Path(unquote(urlsplit(record["url"]).path)) if is_editable else None
    except (ValueError, KeyError, AttributeError):
        return None
