"""Delays from an order to start or resize a replica, or to acquire a node, until it takes effect.

A cold start takes `load_s` of the variant's profile for its kind of hardware, measured from the order to start a
replica to its first answer (process, libraries, weights, first pass). `truth.cold_start.start_s` of a scenario
overrides the profiles. If neither is known, 10 s are assumed (Sponge specification, §3.1) and reported with the run.
The delay varies uniformly by ± `jitter` (a fraction). In a warm world, everything ordered within `WARM_NS` is there at
once, as in a cluster that is already running. Where a topology is declared, the node must have the weights before that
(`sloop.sim.truth.weights`), and the delay is divided into the steps that the profile knows.

To acquire a node takes as long as its hardware kind says (`HardwareKind.acquire_s`), or `truth.nodes.acquire_s`.

A shadow waits for a spare worker of its node, which then loads its blocks (`SpareWorkers`,
`ColdStartSampler.shadow_ns`). A replica takes a spare worker if one is there, and otherwise starts a new process.

A part of a model loads the other layers with the cores of its replica, and at a tenth of the speed while it computes
(`sloop.sim.pipelines.RestLoad`). If the model is sent to an accelerator, it loads them at full speed, and
its batches take no longer.

A resize in place takes effect within some tens of milliseconds (Sponge specification, §3.1: below 100 ms, simulated as
50 ms). The scenario chooses how the running batch behaves (§2.6): with `next_batch` it keeps its speed, because
the model's thread count changes only between batches; with `rescale` its remaining work runs at the new speed.

The delays do not depend on the reason for a start or resize.
"""

from collections.abc import Mapping
from heapq import heappop, heappush
from random import Random
from typing import Final

from sloop.app.scenario import ResizeRule
from sloop.profile.blocks import shadow_load_ms
from sloop.profile.pipelines import layer_share
from sloop.profile.profile import START_CORES_MIN, START_S_ASSUMED, Profile
from sloop.runlog.durations import VariantKey
from sloop.sim.truth.service import noise
from sloop.streams import stream
from sloop.units import s
from sloop.vocabulary import LayerSet, ReplicaSpec, Slot, Worker

FETCHING, SPAWNING, LOADING, SENDING, WARMING = "fetching", "spawning", "loading", "sending", "warming"
"""The steps of a cold start, as a server reports them. Without a topology every start is one step, `LOADING`."""

MS_PER_S: Final = 1e3

WARM_NS: Final = 1_000
"""The first plan of a run, and all that is ordered for it, comes within the first microsecond: orders that follow from
each other at once are a nanosecond apart."""


class ColdStartSampler:
    """The cold starts of one application version, drawn from stream `cold_start`. `start_s` overrides `load_s` of all
    profiles, and `local_s` both where a node has the weights."""

    def __init__(
        self,
        seed: int,
        profiles: Mapping[VariantKey, Profile],
        *,
        start_s: float | None = None,
        local_s: float | None = None,
        jitter: float = 0.0,
        warm: bool = True,
    ) -> None:
        self._load_s = {key: profile.load_s for key, profile in profiles.items()}
        self._parts = {key: profile.startup for key, profile in profiles.items() if profile.startup is not None}
        self._layers = {key: profile.layers for key, profile in profiles.items() if profile.layers is not None}
        self._start_s = start_s
        self._local_s = local_s
        self._jitter = jitter
        self._warm = warm
        self._random = stream(seed, "cold_start")
        self._of_shadows = stream(seed, "shadow_start")

    def shadow_ns(self, spec: ReplicaSpec, shadow: Worker) -> int:
        """How long a running worker takes to load the blocks of a shadow."""
        load_ms = shadow_load_ms(self._layers[spec.stage, spec.variant, spec.slot.hardware], shadow)
        return _varied_ns(load_ms / MS_PER_S, self._jitter, self._of_shadows)

    def draw_ns(self, now_ns: int, spec: ReplicaSpec, *, is_local: bool = False) -> int:
        """The time until a replica ordered now is ready. `is_local`: whether its node has the weights."""
        if self._warm and now_ns < WARM_NS:
            return 0
        start_s = self._local_s if is_local and self._local_s is not None else self._start_s
        if start_s is None:
            start_s = self._load_s.get((spec.stage, spec.variant, spec.slot.hardware)) or START_S_ASSUMED
        return _varied_ns(start_s, self._jitter, self._random)

    def process_ns(self, spec: ReplicaSpec, length_ns: int) -> int:
        """How much of a start that takes `length_ns` in all is the start of the process; 0 if the profile does not
        say."""
        parts = self._parts.get((spec.stage, spec.variant, spec.slot.hardware))
        return round(length_ns * (parts.process_s / parts.sum_s)) if parts is not None and parts.sum_s else 0

    def share(self, spec: ReplicaSpec, layers: LayerSet) -> float:
        """The fraction of the time to load and send a model that these layers take, by their size."""
        return layer_share(self._layers[spec.stage, spec.variant, spec.slot.hardware], layers)

    def rest_ns(self, spec: ReplicaSpec, slot: Slot, length_ns: int) -> int:
        """How long a part loads the other layers if it computes nothing, on the slot that it has now. `length_ns`: how
        long a starting replica would. With several threads, a worker opens the layers with one thread first, and then
        with all."""
        if not self.loads_on_cores(spec):
            return length_ns
        cores = min(START_CORES_MIN, slot.cores) if slot.is_capped else START_CORES_MIN
        return round(length_ns * (1 + (slot.cores > 1)) * START_CORES_MIN / cores)

    def loads_on_cores(self, spec: ReplicaSpec) -> bool:
        """Whether a part loads the other layers with the cores that run its batches."""
        parts = self._parts.get((spec.stage, spec.variant, spec.slot.hardware))
        return not spec.slot.accelerator and (parts is None or not parts.send_s)

    def steps(self, spec: ReplicaSpec, length_ns: int) -> list[tuple[str, int]]:
        """The steps of a start that takes `length_ns` in all, each with its length, in proportion to the parts in the
        profile; loading alone if it does not know them."""
        parts = self._parts.get((spec.stage, spec.variant, spec.slot.hardware))
        sum_s = parts.sum_s if parts is not None else 0.0
        if parts is None or not sum_s:
            return [(LOADING, length_ns)]
        spawned_ns = self.process_ns(spec, length_ns)
        loaded_ns = round(length_ns * ((parts.process_s + parts.weights_s) / sum_s))
        sent_ns = round(length_ns * ((parts.process_s + parts.weights_s + parts.send_s) / sum_s))
        sending = [(SENDING, sent_ns - loaded_ns)] if parts.send_s else []
        return [
            (SPAWNING, spawned_ns),
            (LOADING, loaded_ns - spawned_ns),
            *sending,
            (WARMING, length_ns - sent_ns),
        ]


class SpareWorkers:
    """The workers without a model that wait on each node, `count` of them; one that is taken is replaced `spare_s`
    later."""

    def __init__(self, count: int = 1, spare_s: float = 1.0) -> None:
        self._count, self._spare_ns = count, s(spare_s)
        self._ready_ns: dict[str, list[int]] = {}
        """By node, when each of its spare workers is ready."""

    def take_ns(self, now_ns: int, node: str) -> int:
        """How long a shadow waits for its worker, which it takes."""
        if not self._count:
            return self._spare_ns
        ready_ns = self._ready_ns.setdefault(node, [0] * self._count)
        at_ns = max(now_ns, heappop(ready_ns))
        heappush(ready_ns, at_ns + self._spare_ns)
        return at_ns - now_ns

    def take(self, now_ns: int, node: str) -> bool:
        """Take a worker of the node if one is there."""
        if not self._count or self._ready_ns.setdefault(node, [0] * self._count)[0] > now_ns:
            return False
        self.take_ns(now_ns, node)
        return True

    def lose(self, node: str) -> None:
        """The node is gone; if it comes back, its spare workers are there with it."""
        self._ready_ns.pop(node, None)


class AcquisitionSampler:
    """The times until an ordered node is ready, drawn from stream `acquire`, by kind of hardware."""

    def __init__(self, seed: int, acquire_s: Mapping[str, float], *, jitter: float = 0.0, warm: bool = True) -> None:
        self._acquire_s = acquire_s
        self._jitter = jitter
        self._warm = warm
        self._random = stream(seed, "acquire")

    def draw_ns(self, now_ns: int, hardware: str) -> int:
        """The time until a node of this kind that is ordered now is ready."""
        if self._warm and now_ns < WARM_NS:
            return 0
        return _varied_ns(self._acquire_s[hardware], self._jitter, self._random)


class ResizeSampler:
    """The resize delays of one application version, drawn from stream `resize`."""

    def __init__(self, seed: int, *, delay_ns: int = 0, cv: float = 0.0, in_flight: ResizeRule = "next_batch") -> None:
        self._delay_ns = delay_ns
        self._factors = noise("normal", cv, stream(seed, "resize"))
        self.rescales = in_flight == "rescale"

    def draw_ns(self) -> int:
        """The time until a resize ordered now takes effect."""
        return round(self._delay_ns * next(self._factors))


def _varied_ns(mean_s: float, jitter: float, random: Random) -> int:
    """A duration, uniform within ± `jitter` of its mean."""
    return round(s(mean_s) * (1.0 + jitter * (2.0 * random.random() - 1.0)))
