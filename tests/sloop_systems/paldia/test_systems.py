"""The entries of PALDIA and its baselines, with their published parameters."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from sloop.cli import main
from sloop.core.protocols import Policies
from sloop.errors import InputError
from sloop.policies.admit import Open
from sloop.policies.batch import WorkConserving
from sloop.policies.divide import MaxMin
from sloop.policies.drop import Never
from sloop.policies.forecast import Ewma, OracleForecast
from sloop.policies.order import Fifo
from sloop.policies.place import BestFit
from sloop.policies.route import FirstIdle
from sloop.sim.advice import advise
from sloop.systems import build_system
from sloop.units import s
from sloop_systems.paldia.policy import Hybrid, Paldia
from tests.sim.test_advice import deployment, poisson, question

PUBLISHED: dict[str, tuple[str, Any, Any]] = {
    "paldia": (
        "system",
        Paldia(choice="slo_first", sharing="hybrid", headroom_cpu=0.5, headroom_gpu=0.75, wait_limit=3),
        Hybrid(),
    ),
    "paldia-band": ("system", Paldia(choice="tolerance", sharing="hybrid"), Hybrid()),
    "molecule-cost": ("baseline", Paldia(choice="isolated", sharing="queue", keep_alive_ns=s(600)), WorkConserving()),
    "molecule-performance": ("baseline", Paldia(choice="fastest", sharing="queue"), WorkConserving()),
    "infless-llama-cost": ("baseline", Paldia(choice="isolated", sharing="together"), WorkConserving()),
    "infless-llama-performance": ("baseline", Paldia(choice="fastest", sharing="together"), WorkConserving()),
    "oracle": ("baseline", Paldia(choice="slo_first", sharing="hybrid", wait_limit=0), Hybrid()),
    "offline-hybrid": ("baseline", Paldia(choice="fastest", sharing="hybrid"), Hybrid()),
    "mps-only": ("baseline", Paldia(choice="fastest", sharing="together"), WorkConserving()),
    "time-shared": ("baseline", Paldia(choice="fastest", sharing="queue"), WorkConserving()),
}
"""Kind, scale and batch policy; the figures stand here although most are defaults, because they are published."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_parameters(name: str) -> None:
    system = build_system(name)
    kind, scale, batch = PUBLISHED[name]
    forecast = OracleForecast(horizon_ns=s(2)) if name == "oracle" else Ewma(s(1), at_least_last=True)
    before = (Fifo(), batch, FirstIdle(), Never(), Open(), BestFit(), forecast)
    assert (system.kind, system.policies) == (kind, Policies(*before, scale, MaxMin()))


def test_a_plan_names_the_replica_that_reserves_no_share_of_its_accelerator(tmp_path: Path) -> None:
    app = tmp_path / "app.yaml"
    app.write_text(
        "name: photos\nslo_ms: 200\nsystem: molecule-cost\n"
        "stages: [{name: c, profiles: {m4.xlarge: ResNet50@m4.xlarge, g3s.xlarge: ResNet50@g3s.xlarge}}]\n"
        "cluster: {nodes: [{hardware: m4.xlarge, count: 0, most: 1}, {hardware: g3s.xlarge, count: 0, most: 1}]}\n"
    )

    def planned(rate: str, *options: str) -> str:
        return CliRunner().invoke(main, ["plan", str(app), "--rate", rate, *options]).stdout

    [low], [high] = (json.loads(planned(rate, "--json"))["stages"] for rate in ("4", "100"))
    assert (low["hardware"], high["hardware"], high["share"], high["cores"]) == ("m4.xlarge", "g3s.xlarge", 0, 1)
    shown = " ".join(planned("100").split())
    assert "g3s.xlarge: M60 1" in shown
    assert "64 of them together and 36 queued" in shown


def test_a_system_that_cannot_plan_is_left_out_and_none_at_all_is_an_error() -> None:
    made = deployment(a=150, b=150)
    traces = {"a": poisson(20.0), "b": poisson(20.0, 1)}
    report = advise(question(made, traces, "molecule-cost", "mixed"))
    assert [each.name for each in report.left_out] == ["molecule-cost"]
    assert report.closest.system == "mixed"
    with pytest.raises(InputError, match=r"no system can serve these applications: molecule-cost: .*one model"):
        advise(question(made, traces, "molecule-cost"))
