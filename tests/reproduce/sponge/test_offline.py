"""What needs no simulation comes out exactly."""

from pathlib import Path

import pytest

from sloop.errors import InputError
from sloop.profile.published import YOLOV5S_S
from sloop.reproduce.sponge import ARTEFACT, offline
from sloop.reproduce.sponge.trials import link_of


def test_with_the_recorded_link_everything_is_as_published_or_derived(data: Path) -> None:
    artefact = data / ARTEFACT
    link = link_of(str(artefact / offline.LINK))
    verdicts = {row.metric: row.verdict for row in offline.rows(link, artefact)}
    inconsistent = [metric for metric, verdict in verdicts.items() if verdict == "source-inconsistent"]
    assert inconsistent == [
        "one-core solutions exist when half of the SLO is upload",
        "8 cores, batch 4 feasible at 600 ms upload by Algorithm 2",
    ]
    assert {verdict for verdict in verdicts.values() if verdict != "source-inconsistent"} == {"reproduced"}
    assert offline.infeasible_seconds(link, YOLOV5S_S, 1.0) == [122, 123, 137, 243, 356, 381, 387, 388, 390]


def test_a_synthetic_link_says_that_it_is_one() -> None:
    rows = offline.rows(link_of(""), None)
    assert all("synthetic" in row.note for row in rows if row.experiment in {"S0", "check 10"})
    assert not any(row.experiment == "check 3" for row in rows)
    exact = [row for row in rows if row.experiment in {"S1", "S2"}]
    assert {row.verdict for row in exact} == {"reproduced", "source-inconsistent"}


def test_a_broken_artefact_is_named(tmp_path: Path) -> None:
    (tmp_path / "notebook_outputs").mkdir()
    (tmp_path / offline.FA2_RUN).write_text("{}")
    with pytest.raises(InputError, match="no list 'sla'"):
        offline._fa2(tmp_path)
