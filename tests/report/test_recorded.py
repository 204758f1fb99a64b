"""A log is all a report needs."""

from pathlib import Path

from msgspec import structs

from sloop.app.application import Application, Stage, SystemChoice, Variant
from sloop.profile.forms import Quadratic
from sloop.profile.profile import Profile
from sloop.report.recorded import report
from sloop.runlog import FileLog, Record, read_log
from sloop.systems.recording import header_of
from sloop.systems.setup import set_up
from sloop.vocabulary import Node

PROFILE = Profile(latency_ms=Quadratic(0, 30, 50), max_batch=4, max_cores=8, origin="assumed", source="nobody")
APPLICATION = Application(
    name="demo",
    slo_ms=200,
    stages=(Stage("classify", (Variant("small", profile=PROFILE),)),),
    system=SystemChoice("static", {"cores": 2.0}),
    cluster=(Node("n0", "local", 8, 2**30, usd_per_h=1.0),),
)


def test_a_log_on_disk_as_a_page(story: list[tuple[int, Record]], tmp_path: Path) -> None:
    for origin, said in (("sim", "a simulated run of static"), ("live", "a live run of static")):
        path = tmp_path / f"{origin}.jsonl"
        header = structs.replace(header_of(set_up(APPLICATION), origin=origin, seed=4), date="2026-01-01")
        with FileLog(path, header) as log:
            for now_ns, record in story:
                log.append(now_ns, record)
        found = report(read_log(path))
        assert (found.row.system, found.row.seed, found.row.requests) == ("static", 4, 6)
        assert found.row.usd > 0
        assert found.metrics.service_errors()[0].batches == 3
        assert any("assumed profile (nobody)" in line for line in found.row.assumed)
        assert said in found.page
        assert "cores 2.0" in found.page
        assert "2026-01-01" in found.page
