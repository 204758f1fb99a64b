"""`sloop advise` as people and programs call it."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from sloop.cli import main

SLOW = "{latency_ms: {form: quadratic, alpha: 0, beta: 10, gamma: 20}, max_batch: 8, max_cores: 8}"
FAST = "{latency_ms: {form: quadratic, alpha: 0, beta: 1, gamma: 9}, max_batch: 16, max_cores: 4, accelerator: T4}"
APPLICATION = f"""\
name: photos
slo_ms: 200
stages:
  - name: classify
    profiles: {{c5.2xlarge: {SLOW}, g4dn.xlarge: {FAST}}}
cluster: {{nodes: [{{hardware: c5.2xlarge}}, {{hardware: g4dn.xlarge}}]}}
"""
SHORT = ["--duration-s", "10"]


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    path = tmp_path / "photos.yaml"
    path.write_text(APPLICATION)
    return path


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["advise", *map(str, arguments)])


def answer(*arguments: object) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_the_json_has_the_promised_keys(photos: Path) -> None:
    found = answer(photos, "--rate", 40, *SHORT)
    assert found.keys() == {
        *("wanted", "recommended", "closest", "frontier", "steps", "choices", "needs", "placements", "plan", "kinds"),
        *("left_out", "requests", "rate_rps", "rate_max_rps", "duration_s", "seed"),
        *("simulated", "pruned", "unfinished", "notes", "assumed"),
    }
    assert found["recommended"].keys() == {
        *("name", "system", "nodes", "as_needed", "usd_per_h", "usd_per_million", "attainment", "attainment_least"),
        *("applications", "watts", "on_frontier", "why"),
    }
    assert found["wanted"] == 0.99
    assert found["recommended"]["attainment_least"] >= 0.99
    per_h = 3600 * found["recommended"]["attainment"] * found["requests"] / found["duration_s"]
    million = found["recommended"]["usd_per_million"]
    assert million == pytest.approx(1e6 * found["recommended"]["usd_per_h"] / per_h)
    assert {each["hardware"]: each["usd_per_h"] for each in found["kinds"]} == {
        "c5.2xlarge": 0.34,
        "g4dn.xlarge": 0.526,
    }


def test_people_see_what_to_rent_and_what_less_would_cost(photos: Path) -> None:
    shown = run(photos, "--rate", 90, *SHORT).stdout
    assert re.match(r"rent .* under mixed: .* USD/h, .* it serves .* % of requests in time \(wanted: 99 %\)", shown)
    assert "Price against deadlines" in shown
    assert "What each step down costs" in shown
    assert "Who runs where, as planned" in shown
    assert "on offer: c5.2xlarge at 0.34 USD/h and g4dn.xlarge at 0.526 USD/h" in shown


def test_the_frontier_can_be_drawn(photos: Path, tmp_path: Path) -> None:
    file = tmp_path / "frontier.svg"
    answer(photos, "--rate", 10, *SHORT, "--plot", file)
    assert file.stat().st_size > 1000


def test_a_published_model_is_offered_on_every_kind_that_it_is_published_for() -> None:
    pytest.importorskip("sloop_systems.paldia", reason="its profiles are PALDIA's")
    found = answer("ResNet50", "--slo-ms", 200, "--rate", 5, *SHORT, "--system", "mixed")
    kinds = {each["hardware"] for each in found["kinds"]}
    assert kinds == {"m4.xlarge", "c6i.2xlarge", "c6i.4xlarge", "g3s.xlarge", "p2.xlarge", "p3.2xlarge"}
    named = answer("ResNet50", "--slo-ms", 200, "--rate", 5, *SHORT, "--hardware", "p3.2xlarge")
    assert [each["hardware"] for each in named["kinds"]] == ["p3.2xlarge"]


def test_a_scenario_brings_its_requests_seed_and_truth(photos: Path) -> None:
    scenario = "trace: {kind: poisson, rate: 20}\nduration_s: 10\nseed: 5\ntruth: {profile_error: 30}\n"
    photos.write_text(APPLICATION + scenario)
    found = answer(photos)
    assert (found["seed"], found["duration_s"], found["recommended"]) == (5, 10, None)
    photos.write_text(APPLICATION + scenario.replace("30}", "1}"))
    assert answer(photos)["recommended"] is not None
    assert answer(photos, "--rate", 40)["rate_rps"] > 30
    assert answer(photos, "--seed", 6)["seed"] == 6


def test_a_scenario_brings_what_fails(photos: Path) -> None:
    """As `sloop simulate` does on the same nodes."""
    scenario = """
trace: {kind: poisson, rate: 20}
duration_s: 10
truth: {failures: {bad_requests: 0.2}}
"""
    photos.write_text(APPLICATION + scenario)
    (choice,) = answer(photos, "--system", "static", "--hardware", "g4dn.xlarge", "--budget-s", 0.000001)["choices"]
    nodes = f"{{hardware: g4dn.xlarge, count: {choice['nodes'][0]['nodes']}}}"
    one_kind = APPLICATION.partition("cluster:")[0] + f"cluster: {{nodes: [{nodes}]}}\n"
    photos.write_text(one_kind + scenario)
    result = CliRunner().invoke(main, ["simulate", str(photos), "--system", "static", "--json"])
    assert result.exit_code == 0, result.output
    (row,) = json.loads(result.stdout)["runs"]
    assert row["attainment"] < 0.9
    assert choice["attainment"] == pytest.approx(row["attainment"])


def test_an_application_may_be_called_as_the_stage_of_another(photos: Path) -> None:
    document = yaml.safe_load(APPLICATION)
    stage = document["stages"][0]
    photos.write_text(yaml.safe_dump({**document, "stages": [stage, {**stage, "name": "more", "after": ["classify"]}]}))
    other = photos.with_name("other.yaml")
    other.write_text(APPLICATION.replace("name: photos", "name: photos.more"))
    found = answer(photos, other, "--rate", 5, *SHORT)
    assert [each["application"] for each in found["closest"]["applications"]] == ["photos", "photos.more"]
    assert {each["stage"] for each in found["placements"]} >= {"photos.more", "photos.more."}


def test_more_requests_than_can_be_simulated_are_refused(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = photos.with_name("other.yaml")
    other.write_text(APPLICATION.replace("photos", "other"))
    monkeypatch.setattr("sloop.cli.advise.REQUESTS_MAX", 150)
    assert run(photos, "--rate", 10, *SHORT).exit_code == 0
    result = run(photos, other, "--rate", 10, *SHORT)
    assert result.exit_code == 1
    assert "over 150 requests for each choice are too many" in result.stderr


def test_systems_that_are_named_twice_are_one(photos: Path) -> None:
    twice, once = (answer(photos, "--rate", 5, *SHORT, "--system", names) for names in ("mixed,mixed", "mixed"))
    assert twice == once


def test_traces_are_those_of_one_application_or_of_all(photos: Path) -> None:
    other = photos.with_name("other.yaml")
    other.write_text(APPLICATION.replace("photos", "other"))
    constant = "{kind: poisson, rate: 8}"
    found = answer(photos, other, "--trace", f"other={constant}", "--rate", "photos=2", *SHORT)
    requests = {each["application"]: each["requests"] for each in found["closest"]["applications"]}
    assert requests["other"] > 2 * requests["photos"] > 0
    both = answer(photos, other, "--trace", constant, *SHORT)
    first, second = (each["requests"] for each in both["closest"]["applications"])
    assert first != second, "seeds of their own"


def test_nothing_that_serves_enough_is_said(photos: Path) -> None:
    photos.write_text(APPLICATION.replace("200", "11"))
    shown = run(photos, "--rate", 200, *SHORT, "--attainment", 1).stdout
    assert shown.startswith("no choice serves 100 % in time; mixed on ")
    assert "comes closest" in shown


def test_the_search_ends_with_its_budget(photos: Path) -> None:
    result = run(photos, "--rate", 40, *SHORT, "--budget-s", 0.000001)
    assert "1 choice simulated" in result.stdout
    assert "when the search ended (--budget-s)" in result.stdout


def test_the_same_seed_prints_the_same_bytes(photos: Path) -> None:
    one, other = (run(photos, "--rate", 20, *SHORT, "--seed", 3, "--json").stdout for _ in range(2))
    assert one == other


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["{app}"], 2, "give the requests: --rate R, --trace TRACE, or a scenario file"),
        (["{app}", "--rate", "photo=3"], 1, "--rate: no application is called 'photo'"),
        (["{app}", "--rate", "5", "--trace", "{kind: poisson, rate: 5}"], 2, "give either --rate or --trace"),
        (["{app}", "--rate", "0"], 1, "photos: its trace has no requests"),
        (["{app}", "--rate", "5", "--attainment", "1.5"], 2, "--attainment"),
        (["{app}", "--rate", "5", "--system", "mixxed"], 1, "did you mean 'mixed'"),
        (["{app}", "--rate", "5", "--hardware", "c5.9xlarge"], 1, "no kind of hardware is called 'c5.9xlarge'"),
        (["{app}", "--rate", "5", "--hardware", "m5.xlarge"], 1, "classify has no profile for any kind on offer"),
        (["{app}", "--rate", "5", "--price", "c5.9xlarge=1"], 1, "--price: no kind of hardware is called 'c5.9xlarge'"),
        (["{app}", "--rate", "5", "--price", "p3.2xlarge=1"], 1, "--price: 'p3.2xlarge' has a price and is not among"),
        (["{app}", "--rate", "5", "--price", "c5.2xlarge"], 2, "is not NAME=NUMBER"),
        (["{app}", "--rate", "5", "--price", "c5.2xlarge=0", "--price", "g4dn.xlarge=0"], 1, "have no price"),
        (["{app}", "--rate", "5", "--slo-ms", "50"], 2, "write --slo-ms NAME=MS"),
        (["{app}", "--rate", "5", "--slo-ms", "photos=5"], 1, "g4dn.xlarge comes closest with 10 ms, 5 ms too long"),
        (["{app}", "--rate", "5", "--slo-ms", "foto=5"], 1, "--slo-ms: no application is called 'foto'"),
        (["{app}", "--rate", "5", "--plot", "x.gif"], 1, "is no .svg"),
        (
            ["{app}", "--rate", "5", "--plot", "no-folder/x.svg"],
            1,
            "no-folder/x.svg cannot be written: no-folder is no folder",
        ),
        (["ResNet-S", "--rate", "5"], 1, "there is no file and no published profile 'ResNet-S'"),
        (["ResNet-T", "--rate", "5", "--hardware", "c5.2xlarge"], 1, "ResNet-T: a published profile has no deadline"),
        (["ResNet-T", "--rate", "5", "--slo-ms", "400"], 1, "for no kind of hardware in particular"),
        (["{app}", "--rate", "1", "--hardware", "p3"], 1, "no kind of hardware is called 'p3'"),
        (["{app}", "--rate", "1", *["--price", "p3.2xlarge=2"] * 2], 2, "two prices for p3.2xlarge; keep one"),
    ],
)
def test_mistakes_are_named(photos: Path, arguments: list[str], code: int, said: str) -> None:
    result = run(*(str(photos) if each == "{app}" else each for each in arguments), *SHORT)
    assert result.exit_code == code, result.output
    assert said in " ".join(result.stderr.split())
