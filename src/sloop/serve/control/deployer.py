"""The orders of `sloop deploy` and of clients in a running server: versions are checked, started, promoted and removed.

The server compares the signature of a checked version with that of the version that serves. Whatever is wrong is an
error of the order; what serves goes on serving.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import msgspec
from msgspec import structs

from sloop.actions import Decided, Rollout, VersionState
from sloop.app.application import Application, Deployment, SystemChoice
from sloop.app.document import read_name
from sloop.core import ApplicationParts, Core
from sloop.core.planner import plans_beside
from sloop.core.rollout import ENDING_STATES, SERVING_STATES, Version
from sloop.errors import InputError, MachineError, SloopError
from sloop.events import Deployed, Planned, Promoted, Removed, SystemChanged
from sloop.options import Value
from sloop.serve.control.check_process import AcceptedVersion, CheckOrder, SystemOrder, checked, checked_system
from sloop.serve.control.checks import (
    check_canary,
    check_same,
)
from sloop.serve.control.loading import LOADED, LeftOut, UnloadedModel
from sloop.serve.control.memory import KeptVersion, VersionMemory
from sloop.serve.control.orders import (
    ChangeSystem,
    Comparison,
    Deploy,
    Done,
    ListVersions,
    Order,
    Tell,
    VersionStatus,
)
from sloop.serve.control.servables import COPIES, Models
from sloop.serve.control.versions import offer_of, wirings_of
from sloop.serve.copies import (
    VersionFiles,
)
from sloop.serve.driver import Driver, ServedVersion
from sloop.serve.edges import Edges
from sloop.serve.insight import LEAVING, Insight
from sloop.serve.planner import PlannerProcess
from sloop.serve.protocols import Backend, ModelState, Readiness
from sloop.systems.catalogue import beginning_with
from sloop.systems.setup import application_in, build
from sloop.text import listed
from sloop.vocabulary import Life, version_key

WAIT_S_MAX: Final = 600.0
"""Seconds that an order waits for a version to serve, or to end."""
STATUS_S: Final = 0.2
"""How often to look whether a version is ready; states of rollouts are noticed at once."""
ENDED_KEPT: Final = 100
RETRY_S_MIN, RETRY_S_MAX = 10.0, 600.0
"""Between two attempts to load an application that could not be loaded at the server's start; each waits twice as long
as the one before. An attempt examines the model, in a process of the lowest priority but one."""
_log: Final = logging.getLogger("sloop.deploy")


class Deployer:
    """Carries out the orders of `sloop deploy` in a running server."""

    def __init__(
        self,
        deployment: Deployment,
        core: Core,
        driver: Driver,
        backend: Backend,
        planner: PlannerProcess,
        edges: Edges,
        insight: Insight,
        memory: VersionMemory,
    ) -> None:
        self._folder, self._memory = memory.folder.absolute(), memory
        self._definitions = {
            version_key(name, each.version): each.definition
            for name, versions in memory.restored.versions.items()
            for each in versions
        }
        """By key, the versions as they are kept: None for those that the command line names."""
        self._ordered = memory.restored.ordered
        """By application, the system that was ordered while it served, or that its overseer has chosen."""
        self._restoring = memory.restored.later
        """Versions of the server before that have yet to start."""
        self._files = VersionFiles(self._folder / COPIES)
        self._deployment = replace(deployment, applications=(), lines={})
        self._core, self._driver, self._backend, self._planner = core, driver, backend, planner
        self._edges, self._insight = edges, insight
        self._applications = {application.key: application for application in deployment.applications}
        """The versions that have not ended, by key."""
        self._used: dict[str, set[str]] = {}
        """By application, all versions that ever were: their keys must be unique in the log."""
        for application in deployment.applications:
            self._used.setdefault(application.name, set()).add(application.version)
        self._last: dict[tuple[str, str], Rollout] = {}
        """By application and version, the last change of its rollout; of versions that have ended, only of the newest
        `ENDED_KEPT`, for the orders that wait for their end."""
        self._gone: deque[tuple[str, str]] = deque()
        """The versions in `_last` that have ended, oldest first."""
        self._ended: dict[str, Rollout] = {}
        """By application, the end of the version that ended last."""
        self._changed = asyncio.Event()
        driver.on_rollout, driver.on_joining_ended = self._on_rollout, self._offer
        driver.on_choice = self._on_choice
        self._deploying = asyncio.Lock()

    @property
    def refused(self) -> Mapping[str, Readiness]:
        """By name, the applications that are to serve and cannot be loaded."""
        return self._insight.refused

    @contextlib.contextmanager
    def keeping(self, models: Models, left_out: LeftOut = LOADED) -> Iterator[None]:
        """The files of these models stay as long as a version uses them, and those of the versions that are deployed
        while the block runs; those of others are deleted. The files that they were made from are watched. What is left
        out is tried again, until it serves or an order has deployed it."""
        trying: list[asyncio.Task[None]] = []
        try:
            for application in self._applications.values():
                self._keep(application, models)
            self._files.start()
            loop = asyncio.get_running_loop()
            for name, each in left_out.items():
                self._refuse(name, each, each.why, RETRY_S_MIN)
                if each.definition is not None:
                    trying.append(loop.create_task(self._try_again(name, each)))
            trying.append(loop.create_task(self._restore()))
            yield
        finally:
            for attempts in trying:
                attempts.cancel()
            self._files.close()

    def _keep(self, application: Application, models: Models) -> None:
        own = [model for (stage, _), model in models.items() if stage in application.by_name]
        called = f"version {application.version} of {application.name!r}"
        self._files.add(application.key, called, {model.model: model.files for model in own})

    async def handle(self, order: Order, tell: Tell) -> Done:
        """Carry out an order. When this returns, a server that starts again knows of it."""
        if self._driver.is_stopped:
            raise MachineError(LEAVING, help="start it again, and then deploy")
        match order:
            case Deploy():
                done = await self.deploy(order, tell)
            case Promoted():
                done = await self.promote(order, tell)
            case Removed():
                done = await self.remove(order, tell)
            case ChangeSystem():
                done = await self.change_system(order, tell)
            case ListVersions():
                return Done(self.statuses(), ended=tuple(map(_status, self._ended.values())))
        await self._memory.written()
        return done

    async def deploy(self, order: Deploy, tell: Tell) -> Done:
        """Start a version, and wait until it serves, is a canary, or is given up."""
        if order.version:
            read_name(Value(order.version, "--version"))
        if order.canary is not None:
            check_canary(order.canary)
        async with self._deploying:  # one after another: the numbers of versions depend on it
            with self._files.checking():
                found = await self._check(order, tell)
                served = self._start(found, order, found.definition)
        states = (*SERVING_STATES, *ENDING_STATES)
        return await self._until(served.application, served.version, states, SERVING_STATES, tell)

    def _check_order(
        self,
        file: str,
        version: str = "",
        numbers: Mapping[str, str] = {},
        definition: Mapping[str, Any] | None = None,
    ) -> CheckOrder:
        cluster = tuple(self._core.state.ledger.nodes.values())  # as it is now
        described = msgspec.to_builtins(replace(self._deployment, cluster=cluster), str_keys=True)
        ordered = dict(self._ordered)
        return CheckOrder(file, version, dict(numbers), described, str(self._folder), definition, ordered)

    async def _check(self, order: Deploy, tell: Tell) -> AcceptedVersion:
        tell(f"checking {order.file}")
        numbers = {name: _next_number(used) for name, used in self._used.items()}
        found = await checked(self._check_order(order.file, order.version, numbers))
        _, _, served = found.served()
        name, version = served.application, served.version
        if order.application not in ("", name):
            what = f"{order.file}: the application in it is called {name!r}, not {order.application!r}"
            raise InputError(what, help="give the file the name of its application")
        for line in found.warnings:
            _log.warning("%s", line)
            tell(f"note: {line}")
        if version in self._used.get(name, ()):
            fix = f"leave --version out for the next number, {numbers[name]}"
            raise InputError(f"application {name!r} has, or had, a version {version!r}", help=fix)
        serving = self._driver.served(name)
        if serving is None or name not in self._edges.models:
            if order.canary is not None:
                what = f"application {name!r} has no version that could serve the other requests"
                raise InputError(what, help="deploy it without --canary")
            return found
        others = self._core.versions(name)
        for other in others:
            if order.canary is not None and other.canary is not None and other.state in SERVING_STATES:
                fix = f"promote it with `sloop deploy --promote {name}`, or remove it with --remove {name}@{other.name}"
                raise InputError(f"version {other.name} of {name!r} is a canary already", help=fix)
        same_as = f"version {serving.version} of {name!r}, which serves"
        check_same(served.wiring.signature, serving.wiring.signature, same_as)
        for other in others:
            if other.state is VersionState.STARTING:
                tell(f"note: version {other.name} of {name!r} is not ready yet; it is given up for version {version}")
            elif other.state is VersionState.CANARY and order.canary is None:
                tell(f"note: version {other.name} of {name!r} is a canary; version {version} will replace it too")
        return found

    def _start(self, found: AcceptedVersion, order: Deploy, kept: dict[str, Any] | None) -> ServedVersion:
        """Make a checked version known everywhere, the core last. `kept` is how it is kept for a server after this."""
        application, models, served = found.served()
        name, version, key = application.name, application.version, application.key
        parts = build(name, version, found.definition)  # raises what would otherwise stop the core
        self._used.setdefault(name, set()).add(version)
        self._applications[key], self._definitions[key] = application, kept
        self._keep(application, models)
        self._backend.learn(models, wirings_of(served), threads_prepared=found.threads)
        self._driver.add(served)
        self._planner.add(key, Deployed(name, version, found.definition))
        if self._needs_planner(parts):
            self._planner.start()
            self._driver.on_event(Planned(0, {}, restarted=True))
        known = self._edges.models.get(name)
        if known is None:
            self._edges.offer(offer_of(application, [served], ()))
        else:  # a version that may answer before the core moves it to another state
            self._edges.offer(structs.replace(known, answers=known.answers | {version: served.wiring.answer}))
        self._driver.on_event(Deployed(name, version, found.definition, order.canary))
        self._insight.refused.pop(name, None)
        return served

    def _needs_planner(self, parts: ApplicationParts) -> bool:
        """Whether plans are made beside the event loop from now on, because of this version."""
        policies = [each.parts.slowest for each in self._core.state.applications.values()]
        return not self._planner.is_started and plans_beside([*policies, parts.slowest])

    async def change_system(self, order: ChangeSystem, tell: Tell) -> Done:
        """Let another system decide for all versions of an application that start or serve. All or none: nothing has
        changed if this raises."""
        name = self._known(order.application or self._only())
        choice = SystemChoice(order.system, order.parameters, path="--system")
        async with self._deploying:  # no version is added meanwhile
            keys = [version_key(name, each.name) for each in self._living(name)]
            tell(f"checking {choice.text} for {name!r}")
            versions = {key: self._applications[key] for key in keys}
            described = {key: msgspec.to_builtins(replace(each, lines={})) for key, each in versions.items()}
            cluster = tuple(self._core.state.ledger.nodes.values())  # as it is now
            found = await checked_system(SystemOrder(order.system, order.parameters, described, cluster))
            living = {version_key(name, each.name) for each in self._living(name)}
            changed = {key: definition for key, definition in found.definitions.items() if key in living}
            self._follow_system(name, choice, changed, found.threads)
            await asyncio.sleep(0)  # the driver passes events on at the end of this turn
        before = [key for key in changed if (state := self._state_of(key)) is not None and state != choice.text]
        if before:
            raise MachineError(f"the core has refused the system for {listed(before)}", help="see its decisions")
        tell(f"{choice.text} decides for {name!r}; its replicas and open requests stay")
        return Done(tuple(each for each in self.statuses() if each.application == name))

    def _on_choice(self, decided: Decided) -> None:
        """An overseer has chosen: a server that starts again begins with that system, and so do later versions. It
        overrules what their files declare no more than the system before did: nobody has ordered it."""
        application = self._applications[decided.application]
        overseer = self._core.state.applications[application.key].parts.overseer
        assert overseer is not None
        before = self._ordered.get(application.name, self._deployment.system)
        begins = beginning_with(application.system, overseer, decided.choice)
        self._ordered[application.name] = replace(begins, path=before.path)
        self._remember()

    def _living(self, name: str) -> list[Version]:
        return [each for each in self._core.versions(name) if each.state not in ENDING_STATES]

    def _state_of(self, key: str) -> str | None:
        """The system that decides for a version, as text; None if it has ended."""
        state = self._core.state.applications.get(key)
        return state.parts.system if state is not None else None

    def _follow_system(
        self, name: str, choice: SystemChoice, definitions: Mapping[str, dict[str, Any]], threads: int
    ) -> None:
        """Make a checked system known everywhere, the core last."""
        made = {key: application_in(definition) for key, definition in definitions.items()}
        parts = [build(name, made[key].version, definition) for key, definition in definitions.items()]
        for each in parts:
            if why := self._core.cannot_change(each):
                raise InputError(f"{choice.text} cannot take over {each.key!r}: {why}", help=f"deploy {name!r} anew")
        self._ordered[name] = choice
        self._applications |= made
        self._backend.learn({}, {}, threads_prepared=threads)
        needs_planner = any(map(self._needs_planner, parts))
        if needs_planner:
            self._planner.start()
        for key, definition in definitions.items():
            version = made[key].version
            changed = SystemChanged(name, version, definition)
            self._planner.prepare(key, changed)
            self._driver.on_event(changed)
        if needs_planner:
            self._driver.on_event(Planned(0, {}, restarted=True))
        self._remember()

    def _refuse(self, name: str, left_out: UnloadedModel, why: str, wait_s: float) -> None:
        """Say that an application cannot be loaded."""
        is_tried = left_out.definition is not None
        then = f"next attempt within {wait_s:g} s" if is_tried else "deploy it when that is corrected"
        _log.error("%r is not served: %s; %s", name, why, then)
        self._insight.refused[name] = Readiness(ModelState.FAILING, f"it cannot be loaded: {why}; {then}")

    async def _try_again(self, name: str, left_out: UnloadedModel) -> None:
        """Load an application that could not be loaded at the start, as soon as that is possible."""
        wait_s, order = RETRY_S_MIN, self._check_order(left_out.file, definition=left_out.definition)
        while True:
            await asyncio.sleep(wait_s)
            wait_s = min(RETRY_S_MAX, 2 * wait_s)
            with self._files.checking():
                try:
                    found = await checked(order)  # others may deploy meanwhile: a model that hangs takes minutes
                except SloopError as error:
                    if name in self._insight.refused:
                        self._refuse(name, left_out, error.what, wait_s)
                        continue
                async with self._deploying:
                    if name in self._insight.refused and not self._driver.is_stopped:
                        kept = self._definitions.get(version_key(name, found.served()[2].version))
                        self._start(found, Deploy(left_out.file), kept)
                        _log.warning("%r is loaded", name)
                return

    async def _restore(self) -> None:
        """Start what started beside the versions that served when the server before ended."""
        self._remember()
        for name, kept in list(self._restoring):
            try:
                file = kept.application.file
                with self._files.checking():
                    found = await checked(self._check_order(file, definition=kept.definition))
                    async with self._deploying:
                        if name not in self._edges.models:
                            raise InputError("the version beside which it served could not be loaded")
                        if kept.version not in self._used[name]:
                            self._start(found, Deploy(file, kept.version, kept.canary), kept.definition)
            except SloopError as error:
                _log.error("version %s of %r does not start again: %s", kept.version, name, error)
            self._restoring.remove((name, kept))
            self._remember()

    def _remember(self) -> None:
        """Keep which versions there are, for a server that starts again."""
        restored = self._memory.restored.versions
        found = {name: versions for name, versions in restored.items() if name in self._insight.refused}
        for name in self._used:
            found[name] = [
                KeptVersion(
                    *(each.name, each.state, each.canary, self._definitions[version_key(name, each.name)]),
                    ordered=self._ordered.get(name),
                )
                for each in self._living(name)
            ]
        for name, kept in self._restoring:
            if name in self._used:
                found[name].append(kept)
        self._memory.write(found)

    async def promote(self, order: Promoted, tell: Tell) -> Done:
        """Let a version get all requests, and wait until it does."""
        name = self._known(order.application)
        candidates = [
            version.name
            for version in self._core.versions(name)
            if version.state in (VersionState.CANARY, VersionState.STARTING)
        ]
        if not candidates or order.version not in ("", *candidates):
            of = f"version {order.version} of {name!r}" if order.version else f"no version of {name!r}"
            what = f"{of} {'is not' if order.version else 'is'} a canary or about to be one"
            raise InputError(what, help="`sloop deploy --list` shows all versions")
        version = order.version or candidates[-1]
        self._driver.on_event(Promoted(name, version))
        return await self._until(name, version, (VersionState.SERVING, *ENDING_STATES), (VersionState.SERVING,), tell)

    async def remove(self, order: Removed, tell: Tell) -> Done:
        """End an application, or a version of it, and wait until its open requests are finished."""
        name = self._known(order.application)
        living = [each.name for each in self._living(name)]
        if order.version and order.version not in living:
            what = f"application {name!r} has no version {order.version!r} that starts or serves"
            raise InputError(what, help=f"its versions are {listed(living)}")
        ending = [order.version] if order.version else living
        self._check_successor(name, ending)
        if not set(living) - set(ending):
            if len(self._edges.models) == 1:
                what = f"{name!r} is the only application of this server"
                raise InputError(what, help="stop the server instead (SIGTERM); it finishes open requests too")
            self._edges.withdraw(name)
        self._driver.on_event(Removed(name, order.version))
        await asyncio.sleep(0)  # the driver passes events on at the end of this turn
        left = self._living(name)
        if not order.version or not left:
            tell(f"{name!r} gets no new requests; open ones are finished")
        else:
            heir = max(left, key=lambda each: each.share)
            gets = "gets all" if heir.state is VersionState.SERVING else "gets all when it is ready"
            tell(f"version {order.version} of {name!r} gets no new requests; version {heir.name} {gets}")
        ended = [await self._until(name, each, (VersionState.RETIRED,), ENDING_STATES, tell) for each in ending]
        return Done(tuple(status for done in ended for status in done.versions))

    def _check_successor(self, name: str, ending: Sequence[str]) -> None:
        """InputError if all that serves is to end while another version is still starting: its requests would have
        nowhere to go until that one is ready."""
        left = [each for each in self._core.versions(name) if each.name not in ending]
        starting = [each for each in left if each.state is VersionState.STARTING]
        if not starting or any(each.state in SERVING_STATES for each in left):
            return
        successor = starting[0]
        is_canary = successor.canary is not None
        fix = f"promote it (`sloop deploy --promote {name}`)" if is_canary else "wait until it is ready"
        what = f"version {listed(ending)} of {name!r} is all that serves, and version {successor.name} still starts"
        raise InputError(what, help=f"{fix}: then it takes its place; or remove all versions: --remove {name}")

    # Rollouts

    def _on_rollout(self, rollout: Rollout) -> None:
        """The core has moved a version to another state; the driver has followed."""
        name, version = rollout.application, rollout.version
        _log.info("version %s of %r: %s (%s)", version, name, rollout.state.value, rollout.why)
        self._last[name, version] = rollout
        if rollout.state is VersionState.RETIRED:
            self._ended[name] = rollout
            self._gone.append((name, version))
            if len(self._gone) > ENDED_KEPT:
                del self._last[self._gone.popleft()]
        self._changed.set()
        if rollout.state is VersionState.RETIRED:
            key = version_key(name, version)
            del self._applications[key]
            self._files.drop(key)
        self._offer(name)
        self._remember()

    def _offer(self, name: str) -> None:
        """Let the edges know what has changed of an application."""
        served = self._driver.served(name)
        if served is not None and name in self._edges.models:
            others = [other for other in self._driver.versions(name) if other is not served]
            serving = self._insight.versions(name)
            self._edges.offer(offer_of(self._applications[served.key], [served, *others], serving))

    async def _until(
        self, name: str, version: str, ends: Sequence[VersionState], good: Sequence[VersionState], tell: Tell
    ) -> Done:
        """Wait until a version is in one of the states `ends`, and ready if it gets requests then. It is well if the
        state is one of `good`."""
        last_text = ""
        loop = asyncio.get_running_loop()
        give_up_s = loop.time() + WAIT_S_MAX
        await asyncio.sleep(0)  # the driver passes events on at the end of this turn
        while True:
            last = self._last.get((name, version))
            readiness = self._insight.state_of(name, version)
            unready = readiness.why if readiness is not None else ""
            now = f"version {version} of {name!r} {self._progress(name, version, unready)}"
            if now != last_text:
                tell(now)
                last_text = now
            if last is not None and last.state in ends and not unready:
                return Done((_status(last),), is_good=last.state in good)
            if loop.time() >= give_up_s:
                raise MachineError(f"{now}, after {WAIT_S_MAX:g} s", help="it goes on; `sloop deploy --list` shows it")
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), STATUS_S)
            if self._driver.is_stopped:
                raise MachineError("the server has stopped", help="see its messages")

    def _progress(self, name: str, version: str, unready: str) -> str:
        """What a version does now; `unready` is why its model does not answer requests, if it does not."""
        found = next((each for each in self._core.versions(name) if each.name == version), None)
        if found is None or found.state in ENDING_STATES:
            last = self._last.get((name, version))
            why = f": {last.why}" if last is not None else ""
            return f"{'has ended' if found is None else 'ends'}{why}"
        plan = found.control.plan
        planned = sum(group.count for target in plan.stages for group in target.groups) if plan is not None else 0
        own = [each for each in found.application.replicas.values() if each.stage.application is found.application]
        ready = f"{sum(each.life is Life.READY for each in own)} of {planned} replicas ready"
        if found.state is VersionState.STARTING or unready:
            return f"starts: {ready if planned else unready or 'its plan is being made'}"
        if found.state is VersionState.SERVING:
            return "serves all requests"
        is_canary = f"is a canary with {100 * found.share:.3g} % of the requests"
        return is_canary if found.canary is not None else f"{is_canary}; promoted, {ready}"

    def _only(self) -> str:
        if len(self._edges.models) > 1:
            fix = f"name one with --application: {listed(list(self._edges.models))}"
            raise InputError(f"this server has {len(self._edges.models)} applications", help=fix)
        return next(iter(self._edges.models))

    def _known(self, name: str) -> str:
        if name not in self._edges.models:
            served = ", ".join(self._edges.models)
            raise InputError(f"this server has no application {name!r}", help=f"its applications are {served}")
        return name

    def statuses(self) -> tuple[VersionStatus, ...]:
        """All versions that have not ended."""
        found: list[VersionStatus] = []
        for name in self._used:
            versions = self._core.versions(name)
            limits = next((each.canary for each in versions if each.canary and each.state is VersionState.CANARY), None)
            for each in versions:
                last = self._last.get((name, each.name))
                why = last.why if last is not None else "since the server began"
                readiness = self._insight.readiness(name, each.name)
                if readiness is not None and readiness.why:
                    why = f"{why}; {readiness.why}"
                compared = None
                if limits is not None and each.state in SERVING_STATES:
                    ended, share = each.attainment.ended, each.attainment.share
                    compared = Comparison(ended, share if ended else None, max(0, limits.requests_min - ended))
                model = readiness.state.value if readiness is not None else ""
                system = each.application.parts.system
                found.append(VersionStatus(name, each.name, each.state.value, each.share, why, model, system, compared))
        return tuple(found)


def _status(rollout: Rollout) -> VersionStatus:
    return VersionStatus(rollout.application, rollout.version, rollout.state.value, rollout.share, rollout.why)


def _next_number(used: set[str]) -> str:
    return str(max([int(version) for version in used if version.isdecimal()], default=0) + 1)
