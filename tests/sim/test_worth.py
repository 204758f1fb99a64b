"""Three applications whose cores do not suffice, under two ways to divide them."""

from sloop.app.load import load_scenario
from sloop.sim.scenarios import run_scenario

PROFILES = {"rank": "ResNet-T", "faces": "ResNet18-human", "cars": "YOLOv5s-S"}
SCENE = {
    "name": "three",
    "applications": [
        {"name": name, "slo_ms": 600, "stages": [{"name": "only", "profile": profile}]}
        for name, profile in PROFILES.items()
    ],
    "cluster": {"nodes": [{"hardware": "c5.4xlarge", "count": 1}]},
    "systems": [{"name": "elastic", "divide": {"name": name, "idle": "leave"}} for name in ("worth", "max_min")],
    "duration_s": 30,
}


def attainments(rates: tuple[float, ...]) -> list[tuple[dict[str, float], float]]:
    """By application and in all, requests in time per second; for each way."""
    traces = {name: {"kind": "poisson", "rate": rate} for name, rate in zip(PROFILES, rates, strict=True)}
    scenario = load_scenario({**SCENE, "traces": traces})
    rows = [run_scenario(scenario, choice).row for choice in scenario.systems]
    return [({own.name: own.attainment or 0.0 for own in row.applications}, row.goodput_rps or 0.0) for row in rows]


def test_a_core_goes_where_it_is_worth_most() -> None:
    """Equal parts are all that `faces` wants, and much too little for `rank`, which has most of the requests."""
    (worth, served), (equal, served_equally) = attainments((280, 100, 30))
    assert min(worth.values()) > min(equal.values())
    assert served > 1.1 * served_equally


def test_where_all_suffice_nothing_differs() -> None:
    by_worth, equally = attainments((20, 10, 5))
    assert by_worth == equally
