"""Which versions a server serves, kept in its state folder, so that the server that starts there again goes on with
them: what `sloop deploy` and clients have deployed, promoted and removed survives a restart and a crash.

The file `versions.json` does not depend on the format of the event log. It has each version as its definition
(`sloop.systems.setup.definition_of`), which any later sloop can read, and a digest of each application as the command
line named it: an application whose declaration has changed since is served as the command line names it now.
"""

import asyncio
import hashlib
import logging
import os
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct, structs

from sloop.actions import VersionState
from sloop.app.application import Application, Deployment, Stage, SystemChoice
from sloop.app.load import is_model_application
from sloop.errors import InputError
from sloop.systems.setup import application_in
from sloop.text import listed
from sloop.vocabulary import Canary, version_key

VERSIONS: Final = "versions.json"
UNREAD: Final = "versions-{number}.unread"
"""Where a file is put that is not used, so that nothing of it is lost."""
FORMAT: Final = 1
AGAIN_S: Final = 5.0
"""After which a file that could not be written is tried again."""

_log: Final = logging.getLogger("sloop.deploy")


class KeptVersion(Struct, frozen=True, omit_defaults=True):
    """A version that starts or serves."""

    version: str
    state: VersionState
    canary: Canary | None = None
    definition: dict[str, Any] | None = None
    """None for an application as the command line names it."""
    ordered: SystemChoice | None = None
    """The system that was ordered for its application while that served, or that its overseer has chosen."""

    @property
    def application(self) -> Application:
        """The application of a version that has a definition. InputError for a definition that describes none."""
        assert self.definition is not None
        return application_in(self.definition)


class KeptVersions(Struct, frozen=True):
    """The content of the file."""

    format: int
    named: dict[str, str]
    """By application, the digest of what the command line named."""
    applications: dict[str, list[KeptVersion]]
    """An application that is named and has no version was removed."""
    system: str = ""
    """The system that the command line named beside the applications."""


@dataclass(slots=True)
class Restored:
    """What a server begins with."""

    deployment: Deployment
    """The versions that serve at once."""
    versions: dict[str, list[KeptVersion]] = field(default_factory=dict)
    """By application, these and those that start beside them."""
    notes: list[str] = field(default_factory=list)
    """What differs from the command line, each in some words."""

    @property
    def ordered(self) -> dict[str, SystemChoice]:
        """By application, the systems that were ordered or chosen while it served."""
        return {
            name: each.ordered
            for name, versions in self.versions.items()
            for each in versions
            if each.ordered is not None
        }

    def under(self, choice: SystemChoice | None) -> Deployment:
        """The deployment under the system that the command line names, but for applications with one of their own."""
        deployment, ordered = self.deployment, self.ordered
        if choice is None:
            return deployment
        pairs = zip(deployment.applications, deployment.under(choice).applications, strict=True)
        applications = tuple(own if own.name in ordered else changed for own, changed in pairs)
        return replace(deployment, applications=applications, system=choice)

    @property
    def later(self) -> list[tuple[str, KeptVersion]]:
        """The versions that start beside others, with their applications."""
        keys = {application.key for application in self.deployment.applications}
        return [
            (name, each)
            for name, versions in self.versions.items()
            for each in versions
            if version_key(name, each.version) not in keys and each.definition is not None
        ]

    @classmethod
    def named(cls, deployment: Deployment) -> "Restored":
        """What the command line names."""
        found = cls(deployment)
        for each in deployment.applications:
            found.versions[each.name] = [KeptVersion(each.version, VersionState.SERVING)]
        return found


class VersionMemory:
    """The file of versions in a state folder, for a server whose command line names `deployment`, and perhaps the
    system `choice`."""

    def __init__(self, folder: Path, deployment: Deployment, choice: SystemChoice | None = None) -> None:
        self.folder, self._deployment = folder, deployment
        self._system = choice.name if choice is not None else ""
        self._named = {each.name: digest_of(each) for each in deployment.applications}
        self._is_unread = False
        self._wanted: bytes | None = None
        self._writing: asyncio.Task[None] | None = None
        self._again: asyncio.TimerHandle | None = None
        """If the newest state could not be written: when that is tried again."""
        self.restored = Restored.named(deployment)

    def read(self, left_out: Container[str] = ()) -> None:
        """Set `restored` by what the file says; `left_out` are applications that the command line names and that cannot
        be served as it does. A file that cannot be read is told, and is kept under another name."""
        try:
            kept = msgspec.json.decode((self.folder / VERSIONS).read_bytes(), type=KeptVersions)
            if kept.format != FORMAT:
                raise ValueError(f"it has format {kept.format}, not {FORMAT}")
            self.restored = self._merged(kept if kept.system == self._system else _without_orders(kept), left_out)
        except FileNotFoundError:
            return
        except (OSError, ValueError, RecursionError, InputError, msgspec.MsgspecError) as error:
            why = error.strerror if isinstance(error, OSError) else str(error)
            self.give_up(f"{self.folder / VERSIONS} cannot be read: {why}")
            return
        if self.restored.notes:
            _log.warning("restored from %s: %s", self.folder / VERSIONS, listed(self.restored.notes))

    def give_up(self, why: str) -> None:
        """Begin with what the command line names. The file is kept under another name when the next one is written."""
        self.restored, self._is_unread = Restored.named(self._deployment), True
        _log.error("%s; the server starts with what its command line names, and keeps the file", why)

    def _merged(self, kept: KeptVersions, left_out: Container[str]) -> Restored:
        found = Restored.named(self._deployment)
        applications: list[Application] = []
        for named in self._deployment.applications:
            versions = kept.applications.get(named.name, [])
            if kept.named.get(named.name) == self._named[named.name]:
                applications += self._of(named.name, versions, named, found)
            else:
                applications.append(named)
                if any(each.definition is not None for each in versions):
                    found.notes.append(f"{named.name!r} is as the command line names it, because that has changed")
        for name, versions in kept.applications.items():
            if name in self._named or (name in kept.named and name not in left_out):
                continue
            restored = self._of(name, versions, None, found)
            applications += restored
            if restored and name in kept.named:
                self._named[name] = kept.named[name]
        if not applications:
            raise InputError("all applications of the command line were removed, and no other one was deployed")
        found.deployment = replace(self._deployment, applications=tuple(applications))
        return found

    def _of(
        self, name: str, versions: Sequence[KeptVersion], named: Application | None, found: Restored
    ) -> list[Application]:
        """The version of one application that serves at once. `found` gets all its versions."""
        for each in versions:
            if each.definition is not None and each.application.key != (key := version_key(name, each.version)):
                raise InputError(f"what it calls {key} is {each.application.key}")
        if len({each.version for each in versions}) < len(versions):
            raise InputError(f"it has a version of {name!r} twice")
        found.versions[name] = list(versions)
        if not versions:
            found.notes.append(f"{name!r} is removed")
            return []
        first = next((each for each in versions if each.state is VersionState.SERVING), versions[0])
        for each in versions:
            if each.definition is not None:
                share = f" with {100 * each.canary.share:.3g} %" if each.canary and each is not first else ""
                found.notes.append(f"version {each.version} of {name!r}{share}")
        if first.ordered is not None:
            found.notes.append(f"{name!r} under {first.ordered.text}, as before")
        if first.definition is None:
            return [] if named is None else [replace(named, system=first.ordered or named.system)]
        return [rejoined(first.application, self._deployment, first.ordered)]

    # Writing

    def write(self, applications: Mapping[str, list[KeptVersion]]) -> None:
        """Write which versions there are now, soon, in a thread. Call it in the running event loop."""
        kept = {name: versions for name, versions in applications.items() if versions or name in self._named}
        self._write_soon(msgspec.json.encode(KeptVersions(FORMAT, self._named, kept, self._system)))

    def _write_soon(self, data: bytes) -> None:
        self._wanted = data
        if self._again is not None:
            self._again.cancel()
        if self._writing is None:
            self._writing = asyncio.get_running_loop().create_task(self._write())

    async def written(self) -> None:
        """Wait until the newest state is written, or one attempt has failed."""
        if self._writing is not None:
            await self._writing

    async def _write(self) -> None:
        while (data := self._wanted) is not None:
            self._wanted = None
            try:
                await asyncio.to_thread(self._put, data)
            except OSError as error:
                if self._again is None:
                    what = "%s cannot be written: %s; a server that starts again will not have the present versions"
                    fix = "make room there, and let this user write there: it is tried again every %g s"
                    _log.error(f"{what}; {fix}", self.folder / VERSIONS, error.strerror, AGAIN_S)
                else:
                    self._again.cancel()
                self._again = asyncio.get_running_loop().call_later(AGAIN_S, self._write_soon, data)
            else:
                if self._again is not None:
                    self._again.cancel()
                    self._again = None
                    _log.info("%s is written", self.folder / VERSIONS)
        self._writing = None

    def _put(self, data: bytes) -> None:
        file, made = self.folder / VERSIONS, self.folder / f"{VERSIONS}.new"
        with open(made, "wb", opener=lambda path, flags: os.open(path, flags, 0o600)) as written:
            written.write(data)
            written.flush()
            os.fsync(written.fileno())
        if self._is_unread and file.exists():
            number = 1
            while (aside := self.folder / UNREAD.format(number=number)).exists():
                number += 1
            file.rename(aside)
            _log.warning("%s is now %s", file, aside)
        self._is_unread = False
        made.replace(file)


def _without_orders(kept: KeptVersions) -> KeptVersions:
    """The versions under the system that the command line names now, which is another than when systems were
    ordered."""
    applications = {
        name: [structs.replace(each, ordered=None) for each in versions] for name, versions in kept.applications.items()
    }
    return structs.replace(kept, applications=applications)


def rejoined(application: Application, deployment: Deployment, ordered: SystemChoice | None = None) -> Application:
    """An application that was deployed once, in a deployment: on its cluster, and with its system if that is another
    one, or with the one that was `ordered` for it."""
    system = application.system if application.system.name == deployment.system.name else deployment.system.of(None)
    system = system if ordered is None else ordered
    return replace(application, cluster=deployment.cluster, system=system)


def digest_of(application: Application) -> str:
    """A digest of what a user has declared: not of what was measured, and not of where it stands."""

    def bare(stage: Stage) -> Stage:
        variants = (replace(each, profile=None, profiles={}, files={}) for each in stage.variants)
        return replace(stage, variants=tuple(variants))

    declared = replace(
        application,
        stages=tuple(map(bare, application.stages)),
        slo_ms=0.0 if is_model_application(application) else application.slo_ms,
        system=replace(application.system, file="", path="", lines={}, inherited={}, overrules=""),
        cluster=(),
        file="",
        path="",
        lines={},
    )
    data = msgspec.json.encode(declared, order="sorted")
    return hashlib.sha256(data.replace(f'"{application.key}/'.encode(), b'"')).hexdigest()
