"""Plans, simulated runs and solvers give what is recorded (`recorded.py`)."""

import pytest

from sloop.systems import SYSTEMS
from tests.sloop_systems import recorded
from tests.sloop_systems.recorded import PUBLICATIONS, Run, differences, planned, played, runs, scene, tabled
from tests.sloop_systems.tables import tables
from tests.without import publications

RUNS = list(runs())


def test_every_system_of_the_catalogue_is_in_a_scene() -> None:
    played_ones = {choice.name for name in {run.scene for run in RUNS} for choice in scene(name).systems}
    assert played_ones >= set(SYSTEMS)


def test_what_is_compared_is_recorded() -> None:
    """And nothing else, unless the folder of a publication is not there."""
    names = {str(run) for run in RUNS}
    assert len(names) == len(RUNS)
    found = recorded.recorded()
    assert found.keys() == {"machine", "plans", "runs", "tables"}
    assert found["plans"].keys() == found["runs"].keys()
    assert names <= found["plans"].keys()
    assert tables().keys() <= found["tables"].keys()
    if len(publications()) == PUBLICATIONS:
        assert names == found["plans"].keys()
        assert tables().keys() == found["tables"].keys()


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_a_system_plans_and_serves_as_recorded(run: Run) -> None:
    found = [*differences("plans", str(run), planned(run)), *differences("runs", str(run), played(run))]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("name", tables())
def test_a_solver_answers_as_recorded(name: str) -> None:
    found = differences("tables", name, tabled(name))
    assert not found, "\n".join(found)


def test_what_differs_is_named_by_its_key() -> None:
    name = str(RUNS[0])
    entry = dict(recorded.recorded()["runs"][name])
    assert differences("runs", name, entry, exact=True) == []
    found = differences("runs", name, {**entry, "ends": "0", "served": entry["served"] - 1}, exact=True)
    assert [line.split()[1] for line in found] == ["served", "ends"]


def test_another_machine_may_round_otherwise_but_not_serve_otherwise() -> None:
    name = str(RUNS[0])
    entry = dict(recorded.recorded()["runs"][name])
    nearly = {**entry, "ends": "0", "served": entry["served"] - 1, "core_seconds": entry["core_seconds"] * 1.01}
    assert differences("runs", name, nearly, exact=False) == []
    (found,) = differences("runs", name, {**entry, "served": entry["served"] // 2}, exact=False)
    assert "served" in found
