"""Rollouts: which version of an application gets a request, and how a new version replaces the old one.

A new version starts beside the one that serves, and gets no request before each of its stages has a ready replica and
no replica is still starting. Then it gets all requests, or, as a canary, a share of them. A canary is compared with the
version that serves the others: it is rolled back if its attainment is lower, and gets all requests when somebody
promotes it or its time has come. A version that gets no more requests ends when it has finished those it has.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import fsum, sqrt

from msgspec import structs

from sloop.actions import Action, Decided, End, Rollout, VersionState
from sloop.core.application import ApplicationState
from sloop.core.control import ControlPath, own_traffic
from sloop.core.controlled import ControlledApplication
from sloop.core.oversight import Attainment
from sloop.core.views import Bucket, Traffic
from sloop.text import counted
from sloop.units import NS_PER_S, ROUNDING, s
from sloop.vocabulary import Canary, Outcome, Request, RequestId

LOSSES_MAX = 3
"""A version whose replicas were lost this often before it was ready is given up."""
ROOM_NS_MAX = s(60)
"""How long a new version waits for room beside the version that serves."""
Z = 1.645
"""One-sided 95 % of a normal distribution."""

SERVING_STATES = (VersionState.CANARY, VersionState.SERVING)
ENDING_STATES = (VersionState.RETIRING, VersionState.RETIRED)


@dataclass(slots=True, eq=False)
class Version:
    """One version of an application."""

    application: ApplicationState
    control: ControlledApplication
    canary: Canary | None
    since_ns: int
    """When it entered its state."""
    state: VersionState = VersionState.STARTING
    share: float = 0.0
    """Fraction of the requests that it gets."""
    credit: float = 0.0
    """Of a canary: how much of a request it is owed."""
    attainment: Attainment = field(default_factory=Attainment)
    """Since the comparison began."""
    retires_why: str = ""

    @property
    def name(self) -> str:
        return self.application.parts.version


class Rollouts:
    """The versions of all applications, by name. The order of versions is the order in which they were deployed."""

    def __init__(self, control: ControlPath) -> None:
        self._control = control
        self._versions: dict[str, list[Version]] = {}
        self.counted: dict[RequestId, tuple[Attainment, ...]] = {}
        """Open requests whose ends are counted: of versions that are compared with each other, and of those with an
        overseer."""
        self._has_removed = False
        """Whether an application has ended. Requests may still name it, so that their names must be read."""
        control.traffic = self.traffic

    @property
    def is_plain(self) -> bool:
        """Whether there is one application with one version, which serves, and no request can be for another."""
        return (
            len(self._versions) == 1
            and not self._has_removed
            and all(
                len(versions) == 1 and versions[0].state is VersionState.SERVING for versions in self._versions.values()
            )
        )

    def versions(self, name: str) -> Sequence[Version]:
        """The versions of an application; empty if it is unknown."""
        return self._versions.get(name, ())

    def add(
        self,
        now_ns: int,
        application: ApplicationState,
        control: ControlledApplication,
        canary: Canary | None = None,
    ) -> Version:
        """Add a version. The first version of an application gets requests at once; they wait until it is ready."""
        versions = self._versions.setdefault(application.parts.name, [])
        made = Version(application, control, canary, now_ns)
        if any(version.state in SERVING_STATES for version in versions):
            control.share = canary.share if canary else 1.0
        else:
            made.state, made.share = VersionState.SERVING, 1.0
        versions.append(made)
        return made

    def announce(self, now_ns: int, version: Version, out: list[Action]) -> None:
        """A version was deployed. Versions that wait for a start are given up for it."""
        for other in self._versions[version.application.parts.name]:
            if other is not version and other.state is VersionState.STARTING:
                self._retire(now_ns, other, f"version {version.name} was deployed before it was ready", out)
        why = "deployed" if version.state is VersionState.STARTING else "deployed: the first version"
        name = version.application.parts.name
        out.append(Rollout(name, version.name, version.state, version.share, why))

    def choose(self, request: Request) -> ApplicationState | None:
        """The version that serves a request; None if there is none."""
        versions = self._versions.get(request.application)
        if versions is None and not request.application and len(self._versions) == 1:
            (versions,) = self._versions.values()
        serving = [version for version in versions or () if version.state in SERVING_STATES]
        if request.version:
            serving = [version for version in serving if version.name == request.version]
        if not serving:
            return None
        chosen = serving[0]
        if len(serving) > 1:
            chosen = self._next(serving)
            self.count_end(request.id, chosen.attainment)
        return chosen.application

    def with_own_deadline(self, request: Request, application: ApplicationState) -> Request:
        """The request with the deadline of the version that serves it, unless its client named one. Where the client
        named none, the edge has set that of one version; so a deadline that some version has counts as not named."""
        slo_ns = application.graph.slo_ns
        given = {version.application.graph.slo_ns for version in self.versions(application.parts.name)}
        if request.slo_ns == slo_ns or request.slo_ns not in given:
            return request
        return structs.replace(request, deadline_ns=request.sent_ns + slo_ns)

    def _next(self, serving: Sequence[Version]) -> Version:
        """The version that serves the next request: each canary its share, evenly spread, and the last version that is
        no canary all others. Of several canaries that are owed a request, the newest is first."""
        chosen = serving[0]
        for version in serving:
            if version.state is VersionState.SERVING:
                chosen = version
        for version in serving:
            if version.state is VersionState.CANARY:
                version.credit += version.share
                if version.credit >= 1.0 - ROUNDING:
                    chosen = version
        if chosen.state is VersionState.CANARY:
            chosen.credit -= 1.0
        return chosen

    def count_end(self, request: RequestId, attainment: Attainment) -> None:
        """Count the end of a request here."""
        self.counted[request] = (*self.counted.get(request, ()), attainment)

    def count(self, actions: Iterable[Action]) -> None:
        """Count the requests that these actions end."""
        for action in actions:
            if type(action) is End:
                for attainment in self.counted.pop(action.request, ()):
                    attainment.ended += 1
                    attainment.served += action.outcome is Outcome.SERVED

    def traffic(self, application: ApplicationState) -> Traffic:
        """The requests of all versions of an application. Those of ending versions are part of the others' history."""
        versions = [each for each in self._versions.get(application.parts.name, ()) if each.state not in ENDING_STATES]
        if len(versions) < 2:
            return own_traffic(application)
        bucket_ns = application.ingress.bucket_ns
        sums: dict[int, Bucket] = {}
        for version in versions:
            for bucket in version.application.ingress.buckets:
                total = sums.setdefault(bucket.start_ns, Bucket(bucket.start_ns))
                total.arrivals += bucket.arrivals
                total.waiting_ns += bucket.waiting_ns
                total.running_ns += bucket.running_ns
        return Traffic(buckets=tuple(sums[start_ns] for start_ns in sorted(sums)), bucket_ns=bucket_ns)

    def promote(self, now_ns: int, name: str, version: str, out: list[Action]) -> None:
        """Somebody orders that a canary gets all requests."""
        for each in self._versions.get(name, ()):
            if each.name == version and each.state in (VersionState.CANARY, VersionState.STARTING):
                each.canary = None
                each.control.share = 1.0
                why = "it is promoted: planned for all requests"
                out.append(Decided("plan", why, application=each.application.key))

    def remove(self, now_ns: int, name: str, version: str, out: list[Action]) -> None:
        """Somebody orders that an application, or one version of it, ends. If it is the only version that serves and
        another one starts, it serves until that one is ready; if that is given up, it stays."""
        versions = self._versions.get(name, ())
        removed = [each for each in versions if version in ("", each.name)]
        left = [each for each in versions if each not in removed and each.state in SERVING_STATES]
        starting = [each for each in versions if each not in removed and each.state is VersionState.STARTING]
        if starting and not left and any(each.state in SERVING_STATES for each in removed):
            (heir,) = starting
            heir.canary, heir.control.share = None, 1.0
            why = f"version {version} is to be removed: it serves until this one is ready and gets all requests"
            out.append(Decided("plan", why, application=heir.application.key))
            return
        if left and all(each.state is VersionState.CANARY for each in left):  # it takes over the history of the others
            self._serve(now_ns, left[-1], "the version that served the other requests was removed", out)
        for each in removed:
            self._retire(now_ns, each, "it was removed", out)

    def tick(self, now_ns: int, out: list[Action]) -> list[ApplicationState]:
        """Advance every rollout. Returns the versions that have ended."""
        ended: list[ApplicationState] = []
        for versions in self._versions.values():
            for version in versions:
                if version.state is VersionState.STARTING:
                    self._start(now_ns, version, out)
                elif version.state is VersionState.CANARY:
                    self._judge(now_ns, version, out)
            for version in list(versions):
                if version.state is VersionState.RETIRING and self._has_ended(now_ns, version, out):
                    ended.append(version.application)
                    versions.remove(version)
        for name in [name for name, versions in self._versions.items() if not versions]:
            del self._versions[name]
            self._has_removed = True
        return ended

    def _start(self, now_ns: int, version: Version, out: list[Action]) -> None:
        """Let a version serve when it is ready; give it up if it cannot become ready."""
        losses = sum(stage.backoff.losses for stage in version.application.all_stages)
        if losses >= LOSSES_MAX:
            errors = [stage.backoff.error for stage in version.application.all_stages if stage.backoff.losses]
            error, _, _ = errors[0].partition("\n")
            why = f"its replicas were lost {losses} times before one was ready: {error}"
            self._retire(now_ns, version, why, out)
        elif version.control.is_ready:
            if version.canary is None:
                self._serve(now_ns, version, "it is ready", out)
            else:
                left = self._left_share(version)  # several canaries never leave nothing
                share = version.canary.share if version.canary.share < left else left / 2
                self._enter(now_ns, version, VersionState.CANARY, share, "it is ready", out)
                for other in self._others_serving(version):
                    other.attainment = Attainment()
                self._divide_requests(version)
        elif now_ns - version.since_ns >= ROOM_NS_MAX and not any(
            replica.stage.application is version.application for replica in version.application.replicas.values()
        ):
            why = f"no node had room for its replicas beside the version that serves, for {ROOM_NS_MAX // NS_PER_S} s"
            self._retire(now_ns, version, why, out)

    def _judge(self, now_ns: int, version: Version, out: list[Action]) -> None:
        """Promote a canary, or roll it back."""
        canary = version.canary
        if canary is None:  # promoted: wait until it has the replicas for all requests
            if version.control.share == 1.0 and version.control.is_ready and version.control.is_settled:
                self._serve(now_ns, version, "it was promoted and is ready for all requests", out)
            return
        others = self._others_serving(version)
        if not others:
            self._serve(now_ns, version, "no other version serves", out)
            return
        stable = others[-1].attainment
        why = is_worse(version.attainment, stable, canary)
        if why:
            self._retire(now_ns, version, f"rolled back: {why}", out)
        elif canary.promote_after_s and now_ns - version.since_ns >= s(canary.promote_after_s):
            version.canary = None
            version.control.share = 1.0
            why = f"{comparison(version.attainment, stable)}: it is planned for all requests"
            out.append(Decided("plan", why, application=version.application.key))

    def _serve(self, now_ns: int, version: Version, why: str, out: list[Action]) -> None:
        """Give a version all requests; the versions before it retire."""
        versions = self._versions[version.application.parts.name]
        others = [each for each in versions[: versions.index(version)] if each.state not in ENDING_STATES]
        version.canary = None
        version.control.share = 1.0
        self._enter(now_ns, version, VersionState.SERVING, 1.0, why, out)
        for other in others:
            self._retire(now_ns, other, f"version {version.name} serves all requests", out)
        version.share = self._left_share(version)

    def _retire(self, now_ns: int, version: Version, why: str, out: list[Action]) -> None:
        if version.state in ENDING_STATES:
            return
        self._enter(now_ns, version, VersionState.RETIRING, 0.0, why, out)
        version.retires_why = why
        self._control.freeze(version.application.key)
        self._divide_requests(version)
        for heir in self._others_serving(version):
            heir.application.ingress.absorb(now_ns, version.application.ingress)

    def _has_ended(self, now_ns: int, version: Version, out: list[Action]) -> bool:
        """Whether a retiring version has neither requests nor replicas; orders its replicas to stop."""
        application = version.application
        if not application.is_idle:
            return False
        self._control.retire(now_ns, application.key, out)
        if any(replica.stage.application is application for replica in application.replicas.values()):
            return False
        self._enter(now_ns, version, VersionState.RETIRED, 0.0, version.retires_why, out)
        return True

    def _enter(
        self, now_ns: int, version: Version, state: VersionState, share: float, why: str, out: list[Action]
    ) -> None:
        version.state, version.share, version.since_ns = state, share, now_ns
        version.attainment = Attainment()
        out.append(Rollout(version.application.parts.name, version.name, state, share, why))

    def _divide_requests(self, version: Version) -> None:
        """Give the version that serves what the canaries of the application leave."""
        for each in self._others_serving(version):
            each.share = self._left_share(each)

    def _left_share(self, version: Version) -> float:
        """What the canaries of the application leave of the requests."""
        versions = self._versions[version.application.parts.name]
        return 1.0 - fsum(each.share for each in versions if each.state is VersionState.CANARY)

    def _others_serving(self, version: Version) -> list[Version]:
        """The other versions of the application that serve, without canaries."""
        versions = self._versions[version.application.parts.name]
        return [each for each in versions if each is not version and each.state is VersionState.SERVING]

    def __iter__(self) -> Iterator[tuple[str, Sequence[Version]]]:
        return iter(self._versions.items())


def is_worse(canary: Attainment, stable: Attainment, limits: Canary) -> str:
    """Why the canary's attainment is too low, with 95 % confidence; empty if it is not.

    Compares two proportions, with the correction of Agresti and Caffo (2000) for small counts: one served and one
    missed request more on each side.
    """
    if min(canary.ended, stable.ended) < limits.requests_min:
        return ""
    shares = [(each.served + 1) / (each.ended + 2) for each in (canary, stable)]
    error = sqrt(sum(p * (1 - p) / (each.ended + 2) for p, each in zip(shares, (canary, stable), strict=True)))
    if shares[1] - shares[0] - Z * error <= limits.tolerance:
        return ""
    return comparison(canary, stable)


def comparison(canary: Attainment, stable: Attainment) -> str:
    """Both attainments as text."""
    if not canary.ended:
        return "it had no requests"
    return (
        f"{canary.share:.1%} of {counted(canary.ended, 'request')} in time, "
        f"{stable.share:.1%} of {stable.ended} in the version that serves the others"
    )
