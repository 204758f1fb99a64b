"""A scenario: an application, the requests that come, and what is true of the world it is simulated in.

Plain values, checked. `Truth` only declares: how it acts is the simulator's business, and no policy sees it (law 2).

Sources of the defaults: Sponge specification §1.4 and §7.3-6 (P99 over mean 1.05, variation 3 %, resize 50 ms), §3.1
(new instance 10 s, payload 284 KiB).
"""

from collections.abc import Mapping
from typing import Literal

from msgspec import Struct, field

from sloop.app.application import Application, SystemChoice
from sloop.units import s

ResizeRule = Literal["next_batch", "rescale"]
"""A resize during a batch counts from the next batch, or rescales what remains of this one."""

Delivery = Literal["delay", "attach"]
"""A slow upload delays the arrival, or the request arrives at once with that much less budget."""


class ServiceTruth(Struct, frozen=True):
    """How long batches really take: mean = profile / `ratio` (P99 over mean), normal with variation `cv`.

    Where neither is said, as the profile was measured; 1.05 and 0.03 if it was not, or for what is not said.
    """

    ratio: float | None = None
    cv: float | None = None


class ColdStart(Struct, frozen=True):
    """How long a new replica really takes to be ready: `start_s`, spread evenly by ± `jitter` (a fraction).

    With `warm`, the replicas of the first plan are ready at time 0.
    """

    start_s: float = 10.0
    jitter: float = 0.0
    warm: bool = True


class NetworkTruth(Struct, frozen=True):
    """The way of requests to the server: a link's bandwidth over time (a file, or how to make one) and payloads."""

    link: str | Mapping[str, object]
    payload_kb: tuple[float, ...] = (284.0,)
    """Drawn evenly per request where there are several."""
    semantics: Delivery = "delay"


class Failures(Struct, frozen=True):
    """Replicas are lost at random, each on average every `mtbf_s` seconds."""

    mtbf_s: float


class Truth(Struct, frozen=True):
    """What is true in the simulated world and unknown to every policy."""

    service: ServiceTruth = ServiceTruth()
    profile_error: float = 1.0
    """Truth is the profile times this: above 1 the profile is optimistic."""
    resize_ms: float = 50.0
    resize: ResizeRule = "next_batch"
    cold_start: ColdStart = ColdStart()
    network: NetworkTruth | None = None
    failures: Failures | None = None
    fan_out: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """For stages with `each`: how many parts requests fall into, each number being equally likely."""
    shares: Mapping[str, float] = field(default_factory=dict)
    """For stages with `when`: how many of those that could take the branch really do, 0 to 1."""


class Scenario(Struct, frozen=True):
    """One experiment; each of `systems` runs on the same requests and the same truth."""

    application: Application
    trace: Mapping[str, object]
    """What `sloop.workload` makes requests from; `file`, where there is one, is an absolute path."""
    duration_s: float
    seed: int
    truth: Truth
    systems: tuple[SystemChoice, ...]

    @property
    def duration_ns(self) -> int:
        """The length of the run in ns."""
        return s(self.duration_s)
