"""Answers of Flashpoint's solvers, recorded as `tests.sloop_systems.tables` says."""

from collections.abc import Callable, Mapping
from typing import Final

from sloop.solvers import cuts
from sloop_systems.flashpoint.solver import fewest_pieces, filled_pieces
from tests.sloop_systems.tables import DOWNLOADS, Answers, piece_costs


def flashpoint_answers() -> Answers:
    """Cuts of models, by the exact solver and by those of others."""
    found: Answers = []
    for seed in range(8):
        costs = piece_costs(seed)
        fronts = cuts.plan_fronts(costs)
        found.append(fronts)
        for requests in (1, 7, 60, 400):
            for devices in (2, 5, 12):
                found.append(cuts.best_plan(fronts, requests, devices, starts=DOWNLOADS))
                found.append(cuts.best_plan(fronts, requests, devices, pieces_max=3, shared_download_s=2.0))
        found += [cuts.even_plan(costs, pieces) for pieces in (2, 4)]
        sizes = [each * 1e9 for each in costs.cold_s]
        found += [fewest_pieces(sizes, costs.transfer_s, 3e8), filled_pieces(sizes, 3e8)]
        found.append(cuts.coarse_fronts(costs, 4))
    return found


TABLES: Final[Mapping[str, Callable[[], Answers]]] = {"flashpoint": flashpoint_answers}
