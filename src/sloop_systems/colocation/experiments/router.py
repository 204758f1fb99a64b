"""The serving stack of the colocation thesis as a small simulation, which judges placements (specification, 7.4).

Requests are Poisson arrivals at the achieved rate. A router builds one batch at a time for each model, bound to the
next replica in turn, and checks its timeout only when a request arrives. Each replica serves its batches in order.
Other models on a device have no effect beyond the factor on all durations; shares that are limits make batches slower.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from statistics import fmean
from typing import Final

from sloop.api.solvers import BatchOption, Content, PlacedModel, ServingAssumptions
from sloop_systems.colocation.experiments.scene import share_slowdown

SERVING: Final = ServingAssumptions(
    wait_ms=100.0, slower=1.18, rpc_ms=1.0, network_ms=0.32, network_ms_per_mb=0.87, horizon_s=8.0
)
"""Those of the thesis and its specification."""


@dataclass(frozen=True, slots=True)
class ModelRun:
    """The results of one model."""

    good_rps: float = 0.0
    """In time, per second of submission."""
    served_rps: float = 0.0
    """Per second until the last one is done."""
    wait_p95_ms: float = 0.0
    """In the queues of replicas."""
    batch_mean: float = 0.0
    """The mean size of batches."""
    by_replica: tuple[int, ...] = ()
    """Requests of each replica."""
    latencies_ms: tuple[float, ...] = ()
    """Of all requests, ascending; only if asked for."""


def run_model(
    model: PlacedModel,
    batches: Sequence[int],
    seed: int,
    *,
    slower: float = 1.0,
    requests: int = 0,
    shares: Sequence[float] = (),
    timer: bool = False,
    with_latencies: bool = False,
) -> ModelRun:
    """Simulate the requests of one model on replicas with these batches. `shares`, in percent of the SMs, limit them.

    With a `timer`, a batch leaves when its time is up and not when the next request comes.
    """
    if not batches:
        return ModelRun()
    random = Random(f"{model.name}/{seed}")
    count = requests or round(8 * model.rate_rps)
    arrivals, now = [], 0.0
    for _ in range(count):
        now += random.expovariate(model.rate_rps / 1000.0)
        arrivals.append(now)
    limits = list(shares) or [100.0] * len(batches)
    free = [0.0] * len(batches)
    served = [0] * len(batches)
    replica, sent, good = 0, 0, 0
    open_batch: list[float] = []
    waits: list[float] = []
    latencies: list[float] = []

    def send(at_ms: float) -> None:
        nonlocal replica, open_batch, sent, good
        size = len(open_batch)
        ready = at_ms + SERVING.rpc_ms + SERVING.transfer_ms(size * model.request_bytes)
        start = max(ready, free[replica])
        slowdown = slower * share_slowdown(model.name, size, limits[replica])
        free[replica] = start + slowdown * model.latency_ms(0, size)
        waits.extend([start - ready] * size)
        answered = free[replica] + SERVING.rpc_ms
        served[replica] += size
        sent += 1
        good += sum(answered - arrived <= model.slo_ms for arrived in open_batch)
        if with_latencies:
            latencies.extend(answered - arrived for arrived in open_batch)
        replica, open_batch = (replica + 1) % len(batches), []

    for arrived in arrivals:
        if timer and open_batch and arrived > open_batch[0] + SERVING.wait_ms:
            send(open_batch[0] + SERVING.wait_ms)
        open_batch.append(arrived)
        if len(open_batch) >= batches[replica] or arrived >= open_batch[0] + SERVING.wait_ms:
            send(arrived)
    if open_batch:
        send(arrivals[-1])
    seconds = arrivals[-1] / 1000.0
    waits.sort()
    return ModelRun(
        good_rps=good / seconds,
        served_rps=count / max(seconds, max(free) / 1000.0),
        wait_p95_ms=waits[math.ceil(0.95 * len(waits)) - 1],
        batch_mean=count / sent,
        by_replica=tuple(served),
        latencies_ms=tuple(sorted(latencies)),
    )


def batches_of(contents: Sequence[Content], models: int) -> list[list[BatchOption]]:
    """By model, the batches of its replicas."""
    found: list[list[BatchOption]] = [[] for _ in range(models)]
    for content in contents:
        for at, option in content:
            found[at].append(option)
    return found


def run_all(
    models: Sequence[PlacedModel],
    contents: Sequence[Content],
    seed: int,
    *,
    slower: float,
    requests: Sequence[int] | int = 0,
    is_limited: bool = False,
) -> list[ModelRun]:
    """Each model on its replicas. If shares limit replicas, the share of each is the compute that its batch needs."""
    counts = [requests] * len(models) if isinstance(requests, int) else requests
    found = []
    for model, own, count in zip(models, batches_of(contents, len(models)), counts, strict=True):
        shares = [each.compute / 100 for each in own] if is_limited else ()
        batches = [each.batch for each in own]
        found.append(run_model(model, batches, seed, slower=slower, requests=count, shares=shares))
    return found


def goodput_rps(
    models: Sequence[PlacedModel],
    contents: Sequence[Content],
    *,
    slower: float,
    seeds: Sequence[int],
    requests: int = 0,
    is_limited: bool = False,
) -> float:
    """The requests of all models in time, per second, as the mean over seeds."""
    return fmean(
        sum(
            each.good_rps
            for each in run_all(models, contents, seed, slower=slower, requests=requests, is_limited=is_limited)
        )
        for seed in seeds
    )


def achieved_rps(target_rps: float, overhead_ms: float = 0.2) -> float:
    """What the thesis's clients submit: each request takes a little longer than its gap."""
    return 1.0 / (1.0 / target_rps + overhead_ms / 1000.0)
