"""A scenario: an application, the requests that come, and what is true of the world it is simulated in.

Plain values. `Truth` only declares: the simulator acts on it, and no policy sees it (law 2).

Sources of the defaults: Sponge specification §1.4 and §7.3-6 (P99 over mean 1.05, variation 3 %, resize 50 ms), §3.1
(payload 284 KiB).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from sloop.app.application import Application, SystemChoice
from sloop.options import OutOfRange, limited
from sloop.units import s

ResizeRule = Literal["next_batch", "rescale"]
"""A resize during a batch counts from the next batch, or rescales what remains of this one."""

Delivery = Literal["delay", "attach"]
"""A slow upload delays the arrival, or the request arrives at once with that much less budget."""

NoiseShape = Literal["normal", "exponential", "deterministic"]
"""The distribution of service times; the last two are for comparison with queueing theory."""


@dataclass(frozen=True, slots=True)
class ServiceTruth:
    """How long batches really take: mean = profile / `ratio` (P99 over mean), with coefficient of variation `cv`.

    By default as the profile was measured, or 1.05 and 0.03 if it was not measured or only one of them is given. `cv`
    counts only for the normal `shape`.
    """

    ratio: float | None = limited(None, above=0, most=100)
    cv: float | None = limited(None, least=0, most=10)
    spread: float | None = limited(None, least=0, most=10)
    """Runs may be slower or faster by this fraction, which gives results a range; 0 for none. By default as far as the
    passes of a measured profile were apart."""
    shape: NoiseShape = "normal"


@dataclass(frozen=True, slots=True)
class ColdStartTruth:
    """How long a new replica really takes to be ready: `start_s`, uniform within ± `jitter` (a fraction of it).

    By default as long as the variant's profile says (`load_s`), or an assumed 10 s if it does not. With `warm`, the
    replicas of the first plan are ready at time 0.
    """

    start_s: float | None = limited(None, least=0, most=1e6)
    jitter: float = limited(0.0, least=0, most=1)
    warm: bool = True


@dataclass(frozen=True, slots=True)
class NetworkTruth:
    """The network between clients and server: a link's bandwidth over time, and payloads."""

    link: str | Mapping[str, object]
    """A file of bandwidths, or the options of a generated link (`sloop.workload.link`)."""
    payload_kb: tuple[float, ...] = limited((284.0,), least=0, most=1e9)
    """Drawn for each request, each equally likely."""
    semantics: Delivery = "delay"

    def __post_init__(self) -> None:
        """OutOfRange without a payload size."""
        if not self.payload_kb:
            raise OutOfRange("payload_kb", "must be at least one payload size, not an empty list")


@dataclass(frozen=True, slots=True)
class FailureTruth:
    """Replicas are lost at random, each on average every `mtbf_s` seconds."""

    mtbf_s: float = limited(above=0, most=1e12)


@dataclass(frozen=True, slots=True)
class Truth:
    """What is true in the simulated world and unknown to every policy."""

    service: ServiceTruth = ServiceTruth()
    profile_error: float = limited(1.0, above=0, most=100)
    """True durations are those of the profile times this: above 1 the profile is optimistic."""
    resize_ms: float = limited(50.0, least=0, most=1e7)
    resize: ResizeRule = "next_batch"
    cold_start: ColdStartTruth = ColdStartTruth()
    network: NetworkTruth | None = None
    failures: FailureTruth | None = None
    fan_out: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """For stages with `each`: the number of parts of a request; several numbers are equally likely."""
    shares: Mapping[str, float] = field(default_factory=dict)
    """For stages with `when`: the share of the requests that could take the branch and do, 0 to 1."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """One experiment; each of `systems` runs on the same requests and the same truth."""

    application: Application
    trace: Mapping[str, object]
    """Options of `sloop.workload.trace_from`; `file`, if present, is an absolute path."""
    duration_s: float
    seed: int
    truth: Truth
    systems: tuple[SystemChoice, ...]

    @property
    def duration_ns(self) -> int:
        """The length of the run in ns."""
        return s(self.duration_s)
