"""iGniter's plan: for each model a batch and a share of a GPU, on the GPU where the shares of all models together grow
least.

Half of a deadline is for the inference, the other half for waiting. The batch has the requests that arrive in that
half; the share is the smallest with which a batch alone is in time. A model that needs more than a whole GPU first gets
GPUs of its own. Then models are placed, the largest share first, on the GPU where they and all residents together need
the least additional share, according to the model of interference (`igniter_predictions`).

Source: iGniter (Xu et al., TPDS 2023) and its public code, with two corrections. On a GPU of its own, a model has the
largest batch that is in time (the code uses this number as an index into a list). A model that is the first on a later
GPU gets the share that it needs there too (`check_new`; the code checks only models that join others). One thing is
added: workers whose largest batch is smaller than the requests of that half need a larger share (`batch_max`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from sloop.api import ROUNDING, InputError
from sloop.api.devices import IgniterGpu, IgniterModel, IgniterResident, igniter_gpu_ms

WHOLE: Final = 100.0
"""All SMs of a GPU, in percent."""
ALONE_BATCH_MAX: Final = 32
"""The largest batch of a GPU of its own."""
ALONE_LOAD: Final = 0.9
"""The rate that a model gives to a GPU of its own, as a fraction of what the GPU serves."""
REPLICAS_MAX: Final = 10_000
"""If one model needs more GPUs of its own than this, its rate is probably wrong."""


@dataclass(frozen=True, slots=True)
class IgniterPrediction:
    """What iGniter predicts for one resident."""

    latency_ms: float
    """t_inf: load, GPU and feedback."""
    gpu_ms: float
    served_rps: float
    """Loading overlaps with execution."""


def igniter_predictions(gpu: IgniterGpu, residents: Sequence[IgniterResident]) -> list[IgniterPrediction]:
    """Equations 1 to 8: the prediction for each resident beside the others."""
    l2_percents = [each.model.l2_percent(each.batch, each.share) for each in residents]
    powers_w = [each.model.power_w(each.batch, each.share) for each in residents]
    found: list[IgniterPrediction] = []
    for each, l2_percent, power_w in zip(residents, l2_percents, powers_w, strict=True):
        others = sum(l2_percents) - l2_percent, sum(powers_w) - power_w
        gpu_ms = igniter_gpu_ms(gpu, each, len(residents) - 1, *others)
        load_ms = each.model.load_bytes * each.batch / gpu.pcie_bytes_per_ms
        feedback_ms = each.model.feedback_bytes * each.batch / gpu.pcie_bytes_per_ms
        served_rps = 1000.0 * each.batch / (gpu_ms + feedback_ms)
        found.append(IgniterPrediction(load_ms + gpu_ms + feedback_ms, gpu_ms, served_rps))
    return found


@dataclass(frozen=True, slots=True)
class IgniterWorkload:
    """A model with its rate and its deadline."""

    name: str
    model: IgniterModel
    rate_rps: float
    slo_ms: float
    batch_max: int = 0
    """The largest batch that its workers take; 0: any, as published."""
    memory: float = 0.0
    """The fraction of a GPU's memory that a replica reserves; the publication does not consider memory."""

    @property
    def limit_ms(self) -> float:
        """The longest time of the inference: half of the deadline."""
        return self.slo_ms / 2

    def batch_limit_ms(self, batch: int, rate_rps: float) -> float:
        """The longest time of a batch at this rate: half of the deadline. If it is the largest batch that workers take,
        at most the time in which as many requests arrive."""
        if not self.batch_max or batch < self.batch_max:
            return self.limit_ms
        return min(self.limit_ms, 1000.0 * batch / rate_rps)


@dataclass(frozen=True, slots=True)
class IgniterReplica:
    """A replica of the plan. `share` is in percent of the SMs."""

    workload: IgniterWorkload
    batch: int
    share: float
    rate_rps: float
    is_alone: bool = False
    """Whether it is on a GPU of its own because one GPU is too small for the model."""

    @property
    def limit_ms(self) -> float:
        """The longest time of its batch."""
        return self.workload.batch_limit_ms(self.batch, self.rate_rps)

    @property
    def resident(self) -> IgniterResident:
        """The replica as an input of the model of interference."""
        return IgniterResident(self.workload.model, self.batch, self.share)


IgniterContents = tuple[IgniterReplica, ...]
"""The replicas of one GPU."""


def batch_for(gpu: IgniterGpu, workload: IgniterWorkload, rate_rps: float) -> int:
    """The number of requests that arrive during half of the deadline and the transfer of the batch; at least 1, and at
    most the largest batch of the workers."""
    rate, load = rate_rps / 1000.0, workload.model.load_bytes
    arrived = workload.limit_ms * rate * gpu.pcie_bytes_per_ms / (gpu.pcie_bytes_per_ms + load * rate)
    batch = max(1, math.ceil(arrived - ROUNDING))
    return min(batch, workload.batch_max) if workload.batch_max else batch


def least_share(gpu: IgniterGpu, workload: IgniterWorkload, batch: int, rate_rps: float) -> float:
    """The smallest share, in whole units, with which a batch alone takes at most half of the deadline. If it is the
    largest batch of the workers, it must also carry the rate. May be above 100, and infinite if no share suffices."""
    model = workload.model
    transfer_ms = batch * (model.load_bytes + model.feedback_bytes) / gpu.pcie_bytes_per_ms
    left_ms = workload.batch_limit_ms(batch, rate_rps) - model.schedule_ms - transfer_ms - model.active[4]
    if left_ms <= 0:
        return math.inf
    units = (model.work_ms(batch) / left_ms - model.active[3]) / gpu.share_unit
    return max(1, math.ceil(units - ROUNDING)) * gpu.share_unit


def split(gpu: IgniterGpu, workload: IgniterWorkload) -> list[IgniterReplica]:
    """The replicas of one model: it gets GPUs of its own while it needs more than one, and last a replica for the rest
    of its rate. InputError if no batch is in time on a whole GPU."""
    rate_rps = workload.rate_rps
    batch = batch_for(gpu, workload, rate_rps)
    share = least_share(gpu, workload, batch, rate_rps)
    if share <= WHOLE:
        return [IgniterReplica(workload, batch, share, rate_rps)]
    largest, cap_rps = _alone(gpu, workload)
    count = max(0, math.ceil(rate_rps / cap_rps - ROUNDING) - 1)
    if count > REPLICAS_MAX:
        what = f"{workload.name} needs {count} GPUs for {rate_rps:g} requests/s"
        raise InputError(what, help="lower the rate; is it in requests per second?")
    alone = [IgniterReplica(workload, largest, WHOLE, cap_rps, is_alone=True)] * count
    rest_rps = rate_rps - count * cap_rps
    batch = batch_for(gpu, workload, rest_rps)
    share = least_share(gpu, workload, batch, rest_rps)
    if share > WHOLE:  # the rest fills a GPU as well; the source does not say what then
        return [*alone, IgniterReplica(workload, largest, WHOLE, rest_rps, is_alone=True)]
    return [*alone, IgniterReplica(workload, batch, share, rest_rps)]


def _alone(gpu: IgniterGpu, workload: IgniterWorkload) -> tuple[int, float]:
    """The largest batch in time on a whole GPU, and the rate that the GPU is given."""
    for batch in range(min(ALONE_BATCH_MAX, workload.batch_max or ALONE_BATCH_MAX), 0, -1):
        (found,) = igniter_predictions(gpu, [IgniterResident(workload.model, batch, WHOLE)])
        if found.latency_ms < workload.limit_ms:
            return batch, math.ceil(ALONE_LOAD * found.served_rps - ROUNDING)
    what = f"{workload.name} takes longer than {workload.limit_ms:g} ms, half of its deadline, on a whole GPU"
    raise InputError(what, help="raise its deadline, or choose a faster accelerator")


def with_one_more(gpu: IgniterGpu, contents: IgniterContents, added: IgniterReplica) -> IgniterContents | None:
    """The GPU with one more replica, with shares with which all are in time; None if they need more than the GPU or its
    memory.

    In rounds, each replica that is too late gets one unit more.
    """
    replicas = [*contents, added]
    if contents and math.fsum(each.workload.memory for each in replicas) > 1 + ROUNDING:
        return None
    while sum(each.share for each in replicas) <= WHOLE + ROUNDING:
        found = igniter_predictions(gpu, [each.resident for each in replicas])
        late = [
            at
            for at, (each, prediction) in enumerate(zip(replicas, found, strict=True))
            if prediction.latency_ms > each.limit_ms
        ]
        if not late:
            return tuple(replicas)
        for at in late:
            replicas[at] = replace(replicas[at], share=replicas[at].share + gpu.share_unit)
    return None


def plan(gpu: IgniterGpu, workloads: Sequence[IgniterWorkload], *, check_new: bool = True) -> list[IgniterContents]:
    """The GPUs of the plan, as many as it needs: first the shared ones in the order in which they got their first
    model, then those with a single model. InputError if a model is too slow for its deadline on a whole GPU.

    Without `check_new`, as published: of the models that are the first on a GPU, only that on the first GPU is checked.
    """
    alone: list[IgniterContents] = []
    rest: list[IgniterReplica] = []
    for workload in workloads:
        if workload.rate_rps > 0:
            for replica in split(gpu, workload):
                if replica.is_alone:
                    alone.append((replica,))
                else:
                    rest.append(replica)
    shared: list[IgniterContents] = []
    for replica in sorted(rest, key=lambda each: -each.share):
        best: tuple[float, int, IgniterContents] | None = None
        for at, contents in enumerate(shared):
            tried = with_one_more(gpu, contents, replica)
            if tried is not None:
                more = _total(tried) - _total(contents)
                if best is None or more < best[0] - ROUNDING:
                    best = (more, at, tried)
        if best is not None:
            shared[best[1]] = best[2]
            continue
        if check_new or not shared:
            shared.append(with_one_more(gpu, (), replica) or (replace(replica, share=WHOLE),))
        else:
            shared.append((replica,))
    return shared + alone


def _total(contents: IgniterContents) -> float:
    return sum(each.share for each in contents)
