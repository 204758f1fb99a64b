"""The serving stack of the colocation thesis as a small simulation, for checks of placements (specification, 7.4).

Poisson arrivals at the achieved rate; a router that builds one batch for each model and looks at its timeout only when
a request comes; batches go round the replicas; each replica serves its batches in order. Neighbours have no effect
beyond the factor on all durations.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from statistics import fmean

from sloop.profile.interference import SHARE_EXPONENT
from sloop.solvers.colocation import BatchOption, Content
from sloop.solvers.harbor import PlacedModel, ServingAssumptions

SERVING = ServingAssumptions()


@dataclass(frozen=True)
class ModelRun:
    """What became of the requests of one model."""

    good_rps: float
    """In time, per second of submission."""
    served_rps: float
    wait_p95_ms: float
    """In the queues of replicas."""


def run_model(
    model: PlacedModel,
    batches: Sequence[int],
    seed: int,
    *,
    slower: float = 1.0,
    requests: int = 0,
    slowdowns: Sequence[float] = (),
) -> ModelRun:
    """Simulate the requests of one model on replicas with these batches, each as many times as slow as `slowdowns`."""
    if not batches:
        return ModelRun(0.0, 0.0, 0.0)
    random = Random(f"{model.name}/{seed}")
    count = requests or round(8 * model.rate_rps)
    arrivals, now = [], 0.0
    for _ in range(count):
        now += random.expovariate(model.rate_rps / 1000.0)
        arrivals.append(now)
    factors = list(slowdowns) or [1.0] * len(batches)
    free = [0.0] * len(batches)
    replica, done, good = 0, 0, 0
    open_batch: list[float] = []
    waits: list[float] = []

    def send(at_ms: float) -> None:
        nonlocal replica, open_batch, done, good
        size = len(open_batch)
        ready = at_ms + SERVING.rpc_ms + SERVING.transfer_ms(size * model.request_bytes)
        start = max(ready, free[replica])
        free[replica] = start + slower * factors[replica] * model.latency_ms(0, size)
        waits.extend([start - ready] * size)
        answered = free[replica] + SERVING.rpc_ms
        done += size
        good += sum(answered - arrived <= model.slo_ms for arrived in open_batch)
        replica, open_batch = (replica + 1) % len(batches), []

    for arrived in arrivals:
        open_batch.append(arrived)
        if len(open_batch) >= batches[replica] or arrived >= open_batch[0] + SERVING.wait_ms:
            send(arrived)
    if open_batch:
        send(arrivals[-1])
    seconds = arrivals[-1] / 1000.0
    waits.sort()
    over = max(seconds, max(free) / 1000.0)
    return ModelRun(good / seconds, done / over, waits[math.ceil(0.95 * len(waits)) - 1])


def batches_of(contents: Sequence[Content], models: int) -> list[list[BatchOption]]:
    """By model, the batches of its replicas."""
    found: list[list[BatchOption]] = [[] for _ in range(models)]
    for content in contents:
        for at, option in content:
            found[at].append(option)
    return found


def goodput_rps(
    models: Sequence[PlacedModel],
    contents: Sequence[Content],
    *,
    slower: float,
    seeds: Sequence[int],
    requests: int = 0,
    sm_use: Mapping[tuple[str, int], float] | None = None,
) -> float:
    """The requests of all models in time, per second, as the mean over seeds. With `sm_use` (in percent, by model and
    batch), shares limit replicas to what their option says."""
    total = []
    for seed in seeds:
        runs = []
        for model, own in zip(models, batches_of(contents, len(models)), strict=True):
            slowdowns = [
                max(1.0, 100 * sm_use[model.name, each.batch] / each.compute) ** SHARE_EXPONENT if sm_use else 1.0
                for each in own
            ]
            batches = [each.batch for each in own]
            runs.append(run_model(model, batches, seed, slower=slower, requests=requests, slowdowns=slowdowns))
        total.append(sum(each.good_rps for each in runs))
    return fmean(total)


def achieved_rps(target_rps: float, overhead_ms: float = 0.2) -> float:
    """What the thesis's clients submit: each request takes a little longer than its gap."""
    return 1.0 / (1.0 / target_rps + overhead_ms / 1000.0)
