"""Answers of IPA's solvers and forecaster: tables of `tests.sloop_systems.recorded`."""

from collections.abc import Callable, Mapping
from random import Random
from typing import Final

import numpy as np

from sloop.solvers import (
    forecasting,
)
from sloop_systems.ipa import label_setting, lstm
from sloop_systems.ipa import solver as ipa
from tests.sloop_systems.ipa.scene import drawn, fan, large
from tests.sloop_systems.tables import Answers


def ipa_answers() -> Answers:
    """Label setting on chains and graphs, and what to do if nothing is feasible."""
    found: Answers = []
    for seed in range(40):
        stages, goal = drawn(seed, coarse=seed % 2 == 0, paths=seed % 3 == 0)
        solved = label_setting.solve(stages, goal)
        found += [solved.solution, solved.gave_up, label_setting.best_effort(stages, goal)]
        found.append([ipa.pareto_options(ipa.options_of(stage)) for stage in stages])
    found += [label_setting.solve(*large(seed, 30.0)).solution for seed in range(2)]
    found += [label_setting.solve(*fan(seed)).solution for seed in range(2)]
    names = ["a", "b", "c"]
    for measure in ("pas", "pas_rank", "norm_prod"):
        found.append(ipa.scores(measure, (0.5, 0.7, 0.9), (1.0, 2.0, 8.0), names))
    sizes = [ipa.VariantSizes(lambda batch, cores, base=base: base * batch / cores, (1, 2, 4, 8)) for base in (50, 400)]  # type: ignore[misc]
    found.append(ipa.base_allocation(sizes, threshold_rps=5.0, batch_max=8))
    return found


def forecasting_answers() -> Answers:
    """Rates, peaks, and the recurrent network with weights drawn from a seed."""
    random = Random(0)
    counts = [random.randint(0, 90) for _ in range(240)]
    rates = forecasting.seconds_rps(counts, 250_000_000)
    found: Answers = [rates, lstm.peaks_of(rates, 5)]
    for bins, units in ((12, 5), (24, 25)):
        flat = np.array([random.uniform(-0.4, 0.4) for _ in range(4 * units * units + 9 * units + 1)])
        network = lstm.LstmNetwork(bins, 5, 20, flat)
        found += [network.forecast([random.randint(1, 400) for _ in range(bins)]) for _ in range(10)]
    return found


TABLES: Final[Mapping[str, Callable[[], Answers]]] = {"ipa": ipa_answers, "forecasting": forecasting_answers}
