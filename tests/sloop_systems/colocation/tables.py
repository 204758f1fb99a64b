"""Answers of the solvers of colocation, and of harbor, on its models: tables of `tests.sloop_systems.recorded`."""

from collections.abc import Callable, Mapping
from random import Random
from typing import Final

from sloop.solvers import contents as shared_contents
from sloop.solvers import (
    harbor,
)
from sloop_systems.colocation import igniter, milp, usher
from sloop_systems.colocation.experiments.router import SERVING
from sloop_systems.colocation.experiments.scene import LANGUAGE_MIX, MIXED, VISION, models_of, placed_models
from sloop_systems.colocation.published import IGNITER_V100, IGNITER_V100_MODELS
from tests.sloop_systems.tables import Answers


def colocation_answers() -> Answers:
    """The most goodput of the thesis' models, by each metric."""
    found: Answers = []
    for metric in ("peak_occupancy", "occupancy", "sm_use"):
        for names, rate_rps, slo_ms in ((VISION, 500, 200), (MIXED, 300, 300), (LANGUAGE_MIX, 400, 250)):
            models = models_of(names, rate_rps, slo_ms, metric)
            for devices in (1, 3, 5):
                placed = milp.most_goodput(models, devices)
                found += [placed, milp.planned_rates(models, placed.contents)]
    found.append(shared_contents.possible_contents([each.options[:3] for each in models]))
    found.append(shared_contents.relabelled([["a", "b"], ["c"], ["a"]], [["c"], ["a", "b"], ["b"]]))
    found += [milp.mean_batch(8, rate_rps, 100.0, timer=timer) for rate_rps in (3, 90) for timer in (True, False)]
    return found


def usher_answers() -> Answers:
    """Groups and placements."""
    found: Answers = []
    for metric in ("peak_occupancy", "occupancy"):
        for names, rate_rps, slo_ms in ((VISION, 500, 200), (MIXED, 300, 300), (LANGUAGE_MIX, 400, 250)):
            models = models_of(names, rate_rps, slo_ms, metric)
            found.append(usher.grouped(models))
            found += [usher.plan(models, devices) for devices in (1, 2, 4, 6)]
    return found


def igniter_answers() -> Answers:
    """Shares of devices by the public coefficients."""
    found: Answers = []
    for seed in range(20):
        random = Random(seed)
        workloads = [
            igniter.IgniterWorkload(name, model, random.uniform(50, 900), random.uniform(15, 200))
            for name, model in sorted(IGNITER_V100_MODELS.items())
        ]
        for check_new in (True, False):
            planned = igniter.plan(IGNITER_V100, workloads, check_new=check_new)
            found.append([[(each.workload.name, each.batch, each.share) for each in own] for own in planned])
    return found


def harbor_answers() -> Answers:
    """Placements on owned and rented devices of one kind and of two, and least changes."""
    found: Answers = []
    for names, rate_rps, slo_ms in ((VISION, 500.0, 200.0), (MIXED, 300.0, 300.0), (LANGUAGE_MIX, 400.0, 250.0)):
        models = placed_models(names, rate_rps, slo_ms)
        for kind in (
            harbor.DeviceKind("V100", 3),
            harbor.DeviceKind("V100", 1, rentable=4, usd_per_h=2.5),
        ):
            problem = harbor.HarborProblem(models, (kind,), SERVING)
            placed = harbor.place_models(problem)
            found += [placed, harbor.replaced(problem, placed.contents[:1], gain=0.02)]
    model = models[0]
    for option in model.options[0]:
        found.append([SERVING.in_time_rps(model, 0, option, replicas) for replicas in (1, 2, 3)])
    return found


TABLES: Final[Mapping[str, Callable[[], Answers]]] = {
    "colocation": colocation_answers,
    "usher": usher_answers,
    "igniter": igniter_answers,
    "harbor": harbor_answers,
}
