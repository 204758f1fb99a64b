"""Interference: how much batches that run at the same time on one device slow each other down.

A device is an accelerator, or the cores of a node. There is one interface for all laws, and it is the same for the
beliefs of policies and for the truth of the simulator, which have parameters of their own:

    factor = law.slowdown(own, others)

`own` is the demand of the worker's batch on the device while it runs; `others` has the demand of each *other batch that
runs there at this moment*. A worker without a batch demands nothing and is not in `others`. The factor multiplies the
duration that the worker's profile has for its batch. It is 1 for a worker that is alone and has the share with which it
was profiled. When a batch starts or ends on a device, the factors of its neighbours change: the remaining time of each
is multiplied by its new factor divided by its old one. An observed duration is divided by the believed factor before a
profile learns from it.

The law belongs to the model whose batch is slowed (`DeviceSharing.law`), the demands to each model. Laws are values
without state; profiles contain them, as they contain latencies.

Sources: `BandwidthLaw` and `CountLaw`, PALDIA, specification 2.1.1 (Eq. 1 restates Prophet's law; as printed it is
linear, and queueing never pays); its processor sharing, 3.4. `ScalabilityLaw`: Gunther. `ProcessorSharing` over SM use
and `ShareLaw`: Elvinger's thesis (ETH Zurich 2024), specification 7.4. `IgniterLaw`: iGniter (Xu et al., TPDS 2023),
see `sloop.profile.gpu`. This module knows nothing of views, plans and time; numbers only.
"""

from collections.abc import Sequence
from itertools import pairwise
from math import fsum, isfinite
from typing import Final, Literal, Protocol

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from sloop.profile.gpu import IgniterGpu, IgniterModel, IgniterResident, igniter_gpu_ms

Vector = NDArray[np.float64]


class DeviceDemand(Struct, frozen=True, omit_defaults=True):
    """What one batch demands of the device on which it runs. Parts of the device are between 0 and 1; 0 if unknown."""

    variant: str = ""
    """Whose batch it is, for laws that were measured by pairs."""
    batch: int = 1
    """Requests in the batch."""
    full: float = 1.0
    """The size of the batch divided by the full batch: laws that count batches count half a batch as half a
    neighbour."""
    bandwidth: float = 0.0
    """The part of the device's memory bandwidth that it uses when it is alone; PALDIA's FBR × b/BS."""
    sm_use: float = 0.0
    """The mean part of the device's SMs that its kernels need, weighted by time."""
    occupancy: float = 0.0
    """The mean part of the device's warps that are active, weighted by time."""
    cache: float = 0.0
    """The part of the device's L2 cache throughput that it uses when it is alone."""
    power_w: float = 0.0
    """The power that it draws above that of the idle device."""
    share: float = 1.0
    """The share of the device in its slot."""
    is_capped: bool = False
    """Whether its kernels cannot use more than `share`; otherwise the share is only reserved."""
    peak_occupancy: float = 0.0
    """The largest part of the device's warps that are active at any time."""
    memory: float = 0.0
    """The part of the device's memory that a worker with such batches reserves."""


class Interference(Protocol):
    """The protocol of a law. The docstring of this module explains `own` and `others`."""

    def slowdown(self, own: DeviceDemand, others: Sequence[DeviceDemand]) -> float:
        """The factor on the duration of the batch `own` while `others` run on the same device; positive, and at least
        1 if `own` has the share for which it was profiled."""
        ...

    def among_equals(self, own: DeviceDemand, counts: Vector) -> Vector:
        """The factors if this many batches like `own` run on the device, itself included. Each count is at least 1, and
        may have a fraction for a batch that is only partly full."""
        ...


def _by_whole_counts(law: Interference, own: DeviceDemand, counts: Vector) -> Vector:
    """`among_equals` of a law that is defined for whole numbers of neighbours; linear in between."""
    wholes = np.arange(1, int(np.ceil(counts.max(initial=1.0))) + 1)
    factors = [law.slowdown(own, [own] * (int(whole) - 1)) for whole in wholes]
    return np.interp(counts, wholes, factors)


class BandwidthLaw(Struct, frozen=True, tag_field="form", tag="bandwidth", forbid_unknown_fields=True):
    """S(L) = max(1, L) · (1 + α · max(0, L - 1)), where L is the sum of all bandwidths demanded.

    PALDIA, specification 2.1.1. With α = 0 it is the literal law, under which running together is never slower than
    queueing; α of 0.3 to 0.7 stands for the contention for caches and memory that the bandwidth does not show.
    """

    alpha: float = 0.5

    def __post_init__(self) -> None:
        """ValueError for an α out of range."""
        if not 0 <= self.alpha < float("inf"):
            raise ValueError(f"alpha is {self.alpha}; it must be a number of at least 0")

    def slowdown(self, own: DeviceDemand, others: Sequence[DeviceDemand]) -> float:
        """See `Interference`."""
        load = own.bandwidth + fsum(other.bandwidth for other in others)
        return max(1.0, load) * (1.0 + self.alpha * max(0.0, load - 1.0))

    def among_equals(self, own: DeviceDemand, counts: Vector) -> Vector:
        """See `Interference`."""
        load = own.bandwidth * counts
        factors: Vector = np.maximum(1.0, load) * (1.0 + self.alpha * np.maximum(0.0, load - 1.0))
        return factors


class CountLaw(Struct, frozen=True, tag_field="form", tag="count", forbid_unknown_fields=True):
    """S(k), measured for k = 1, 2, …, K full batches that run together: linear in between, with the last slope beyond.

    PALDIA, specification 2.1.1 (`table`). A batch that is half full counts as half a batch. A single factor holds for
    every k.
    """

    factors: tuple[float, ...]
    """For 1, 2, … batches."""

    def __post_init__(self) -> None:
        """ValueError for factors that are below 1 or become smaller with more neighbours, or a first one above 1."""
        if not self.factors:
            raise ValueError("factors is empty; it needs the slowdown of at least one batch, which is 1")
        if not all(factor >= 1 and isfinite(factor) for factor in self.factors):
            raise ValueError(f"factors are {list(self.factors)}; each must be at least 1")
        if any(after < before for before, after in pairwise(self.factors)):
            raise ValueError(f"factors are {list(self.factors)}; more neighbours cannot make a batch faster")
        if self.factors[0] != 1:
            raise ValueError(f"the first factor is {self.factors[0]}; it is that of a batch alone, which must be 1")

    def slowdown(self, own: DeviceDemand, others: Sequence[DeviceDemand]) -> float:
        """See `Interference`."""
        return float(self._at(np.array([own.full + fsum(other.full for other in others)]))[0])

    def among_equals(self, own: DeviceDemand, counts: Vector) -> Vector:
        """See `Interference`."""
        return self._at(own.full * counts)

    def _at(self, counts: Vector) -> Vector:
        known = np.arange(1.0, len(self.factors) + 1.0)
        factors: Vector = np.interp(counts, known, self.factors)
        if len(self.factors) > 1:
            slope = self.factors[-1] - self.factors[-2]
            factors = factors + slope * np.maximum(0.0, counts - known[-1])
        return factors


class ScalabilityLaw(Struct, frozen=True, tag_field="form", tag="scalability", forbid_unknown_fields=True):
    """S(k) = 1 + σ · (k - 1) + κ · k · (k - 1) for k full batches: Gunther's universal scalability law, by which k
    workers do k / S(k) times the work of one.

    σ is the fraction of a batch's time that cannot overlap with other batches, so that each other batch delays it by
    this fraction. The rest overlaps, such as the time in sockets and in the worker's own loop: S(k) / k falls towards
    σ. κ is the cost of contention for caches and memory; with it, S(k) / k is least at k = sqrt((1 - σ) / κ).

    Source: N. J. Gunther, Guerrilla Capacity Planning, Springer 2007; "A general theory of computational scalability
    based on rational functions", arXiv:0808.1431.
    """

    contention: float
    """σ, not negative; on cores usually at most 1."""
    coherency: float = 0.0
    """κ, not negative."""

    def __post_init__(self) -> None:
        """ValueError for a parameter out of range."""
        for name, value in (("contention", self.contention), ("coherency", self.coherency)):
            if not 0 <= value < float("inf"):
                raise ValueError(f"{name} is {value}; it must not be negative")

    def slowdown(self, own: DeviceDemand, others: Sequence[DeviceDemand]) -> float:
        """See `Interference`. A batch that is half full counts as half a batch."""
        count = max(1.0, own.full + fsum(other.full for other in others))
        return 1.0 + (count - 1.0) * (self.contention + self.coherency * count)

    def among_equals(self, own: DeviceDemand, counts: Vector) -> Vector:
        """See `Interference`."""
        together = np.maximum(1.0, own.full * counts)
        factors: Vector = 1.0 + (together - 1.0) * (self.contention + self.coherency * together)
        return factors


class PairLaw(Struct, frozen=True, tag_field="form", tag="pairs", forbid_unknown_fields=True):
    """A factor for each neighbour, measured in pairs: 1 + the sum of all (factor - 1).

    The sum extrapolates from pairs to three batches and more. Measured triples would be better, but there are many
    more of them.
    """

    factors: dict[str, float]
    """The factor by the variant of the neighbour."""
    other: float = 1.0
    """The factor for neighbours that were not measured."""

    def __post_init__(self) -> None:
        """ValueError for a factor below 1."""
        for name, factor in {**self.factors, "other": self.other}.items():
            if not 1 <= factor < float("inf"):
                raise ValueError(f"the factor beside {name} is {factor}; it must be at least 1")

    def slowdown(self, own: DeviceDemand, others: Sequence[DeviceDemand]) -> float:
        """See `Interference`."""
        return 1.0 + fsum(self.factors.get(each.variant, self.other) - 1.0 for each in others)

    def among_equals(self, own: DeviceDemand, counts: Vector) -> Vector:
        """See `Interference`."""
        return _by_whole_counts(self, own, counts)


Resource = Literal["bandwidth", "sm_use", "occupancy", "batches"]
"""What a device divides among its batches; `batches` gives each batch an equal part of its time."""


class ProcessorSharing(Struct, frozen=True, tag_field="form", tag="processor_sharing", forbid_unknown_fields=True):
    """S = max(1, sum of all demands for one resource): the device divides it in proportion to what each demands.

    With `batches`, k batches each take k times as long, as on one core.
    """

    resource: Resource = "sm_use"

    def slowdown(self, own: DeviceDemand, others: Sequence[DeviceDemand]) -> float:
        """See `Interference`."""
        return max(1.0, self._demand(own) + fsum(self._demand(other) for other in others))

    def among_equals(self, own: DeviceDemand, counts: Vector) -> Vector:
        """See `Interference`."""
        factors: Vector = np.maximum(1.0, self._demand(own) * counts)
        return factors

    def _demand(self, of: DeviceDemand) -> float:
        if self.resource == "batches":
            return 1.0
        demand: float = getattr(of, self.resource)
        return demand


SHARE_EXPONENT: Final = 1.65
"""Fitted to the only two printed points of the thesis: ResNet50 at batch 4 with 17.55 % of the SMs takes about 4 times
as long as alone, BERT at batch 4 with 31.83 % about 5.3 times. The law gives 3.3 and 6.3; 1 / share is worse."""


class ShareLaw(Struct, frozen=True, tag_field="form", tag="share", forbid_unknown_fields=True):
    """S = max(1, need / share)^exponent · max(1, sum of what all use) over SM use.

    The first factor applies if the worker's share is a cap (MPS) below what its kernels need. The second is that of
    `ProcessorSharing`, in which a capped neighbour uses at most its share. Real interference between workers without
    caps is stronger, because they share caches too; no published number says by how much.
    """

    exponent: float = SHARE_EXPONENT

    def __post_init__(self) -> None:
        """ValueError for an exponent out of range."""
        if not 1 <= self.exponent < float("inf"):
            raise ValueError(f"exponent is {self.exponent}; it must be at least 1")

    def slowdown(self, own: DeviceDemand, others: Sequence[DeviceDemand]) -> float:
        """See `Interference`."""
        crowding = max(1.0, _used_sms(own) + fsum(map(_used_sms, others)))
        return self._capping(own) * crowding

    def among_equals(self, own: DeviceDemand, counts: Vector) -> Vector:
        """See `Interference`."""
        factors: Vector = self._capping(own) * np.maximum(1.0, _used_sms(own) * counts)
        return factors

    def _capping(self, own: DeviceDemand) -> float:
        if not own.is_capped or own.share <= 0:
            return 1.0
        factor: float = max(1.0, own.sm_use / own.share) ** self.exponent
        return factor


def _used_sms(of: DeviceDemand) -> float:
    """The part of the SMs that the batch can use."""
    return min(of.sm_use, of.share) if of.is_capped and of.share > 0 else of.sm_use


class IgniterLaw(Struct, frozen=True, tag_field="form", tag="igniter", forbid_unknown_fields=True):
    """S = the time on the GPU with this share and these neighbours, over the time alone on all of it: iGniter's model.

    Each neighbour delays launches, lengthens the active time by its use of the cache, and lowers the clock by its power
    if that exceeds the cap.
    """

    gpu: IgniterGpu
    model: IgniterModel

    def slowdown(self, own: DeviceDemand, others: Sequence[DeviceDemand]) -> float:
        """See `Interference`. Only `cache` and `power_w` of the neighbours count, and how many they are."""
        l2_percent, power_w = 100.0 * fsum(each.cache for each in others), fsum(each.power_w for each in others)
        return self._gpu_ms(own, len(others), l2_percent, power_w) / self._alone_ms(own.batch)

    def among_equals(self, own: DeviceDemand, counts: Vector) -> Vector:
        """See `Interference`."""
        return _by_whole_counts(self, own, counts)

    def used(self, batch: int, share: float) -> tuple[float, float]:
        """The part of the L2 cache, and the power in W above idle, that a batch uses with this share of the SMs."""
        percent = 100.0 * share if share > 0 else 100.0
        return self.model.l2_percent(batch, percent) / 100.0, self.model.power_w(batch, percent)

    def _gpu_ms(self, own: DeviceDemand, neighbours: int, l2_percent: float, power_w: float) -> float:
        resident = IgniterResident(self.model, own.batch, 100.0 * own.share if own.share > 0 else 100.0)
        return igniter_gpu_ms(self.gpu, resident, neighbours, l2_percent, power_w)

    def _alone_ms(self, batch: int) -> float:
        return igniter_gpu_ms(self.gpu, IgniterResident(self.model, batch, 100.0), 0, 0.0, 0.0)


Slowdown = BandwidthLaw | CountLaw | ScalabilityLaw | PairLaw | ProcessorSharing | ShareLaw | IgniterLaw
"""Any law; in files the key `form` names it."""

NO_SLOWDOWN: Final = CountLaw((1.0,))
"""The law of a device whose batches do not slow each other down."""
