"""Reading scenarios: what a file means, and that mistakes in one are named."""

from pathlib import Path

import pytest

from sloop.app.document import parse
from sloop.app.read_scenario import read_scenario
from sloop.app.scenario import Scenario, Truth
from sloop.errors import InputError


def read(text: str) -> Scenario:
    return read_scenario(parse(text), Path())


def test_reads_a_scenario(scenario_text: str) -> None:
    scenario = read(scenario_text)
    assert scenario.application.name == "demo"
    assert scenario.trace == {"kind": "poisson", "rate": 100}
    assert (scenario.duration_ns, scenario.seed) == (600 * 10**9, 7)
    assert [(system.name, dict(system.parameters)) for system in scenario.systems] == [
        ("sponge", {}),
        ("static", {"cores": 16}),
    ]
    assert scenario.systems[1].path == "systems[1]"
    truth = scenario.truth
    assert (truth.service.ratio, truth.service.cv, truth.profile_error) == (1.1, None, 1.2)
    assert (truth.resize_ms, truth.resize) == (50, "rescale")
    assert (truth.cold_start.start_s, truth.cold_start.jitter, truth.cold_start.warm) == (5, 0, False)
    assert truth.network is not None
    assert (truth.network.payload_kb, truth.network.semantics) == ((100, 200), "attach")
    assert truth.network.link == {"kind": "lte"}
    assert truth.failures is not None
    assert truth.failures.mtbf_s == 3600


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("{kind: poisson, rate: 100}", "{rate: 100}", "either 'kind' or 'file'"),
        ("{kind: poisson, rate: 100}", "{file: none.csv}", "no file 'none.csv'"),
        ("trace: {kind: poisson, rate: 100}\n", "", "the key 'trace' is missing"),
        ("seed: 7", "seed: -1", "must be a whole number"),
        ("seed: 7", "seed: 7\nsystem: sponge", "either 'system' or 'systems'"),
        ("ratio: 1.1", "ratio: 0", "must be a number above 0"),
        ("ratio: 1.1", "ration: 1.1", "unknown key 'ration'"),
        ("resize: rescale", "resize: now", "must be one of next_batch, rescale"),
        ("mtbf_s: 3600", "", "'mtbf_s' is missing"),
        ("link: {kind: lte}", "link: 4g.csv", "no file '4g.csv'"),
        ("warm: false", "warm: 1", "must be true or false"),
        ("payload_kb: [100, 200]", "payload_kb: []", "at least one payload"),
        ("systems: [sponge, {name: static, cores: 16}]", "systems: []", "at least one system"),
    ],
)
def test_wrong_scenarios_are_refused(old: str, new: str, what: str, scenario_text: str) -> None:
    assert old in scenario_text
    with pytest.raises(InputError) as caught:
        read(scenario_text.replace(old, new, 1))
    assert what in caught.value.what


GRAPH = """\
name: graph
slo_ms: 200
stages:
  - {name: a, profile: ResNet-T}
  - {name: b, after: a, each: boxes, profile: ResNet-T}
  - {name: c, after: a, when: {output: kind, is: 1}, profile: ResNet-T}
  - {name: d, after: a, when: {output: kind, is: 2}, profile: ResNet-T}
  - {name: e, after: a, when: {output: kind, is: [1]}, profile: ResNet-T}
trace: {kind: poisson, rate: 1}
truth:
"""


def truth_of(text: str) -> Truth:
    return read(f"{GRAPH}  {text}\n").truth


def test_what_requests_do_in_a_graph_is_part_of_the_truth() -> None:
    assert (truth_of("{}").fan_out, truth_of("{}").shares) == ({}, {})
    assert truth_of("fan_out: {b: 3}").fan_out == {"b": (3,)}
    assert truth_of("fan_out: {b: [0, 1, 1, 2000]}").fan_out == {"b": (0, 1, 1, 2000)}
    assert truth_of("shares: {c: 0.8, d: 0, e: 0.8}").shares == {"c": 0.8, "d": 0.0, "e": 0.8}


@pytest.mark.parametrize(
    ("text", "where", "what", "help"),
    [
        ("fan_out: {c: 3}", "truth.fan_out.c", "unknown key 'c'", "known here: b"),
        ("fan_out: 3", "truth.fan_out", "must be a mapping", ""),
        ("fan_out: {b: []}", "truth.fan_out.b", "must be at least one number of parts", ""),
        ("fan_out: {b: -1}", "truth.fan_out.b", "must be a whole number of at least 0 and at most 1e+06, not -1", ""),
        ("fan_out: {b: [1, 2.5]}", "truth.fan_out.b[1]", "must be a whole number", ""),
        ("shares: {b: 0.5}", "truth.shares.b", "unknown key 'b'", "known here: c, d, e"),
        ("shares: {c: 1.5}", "truth.shares.c", "must be a number of at least 0 and at most 1, not 1.5", ""),
        (
            "shares: {c: 0.8, d: 0.3}",
            "truth.shares.d",
            "more than all are to take the branches after 'a'",
            "their shares sum up to 1 at most",
        ),
    ],
)
def test_a_truth_that_does_not_fit_the_graph_is_refused(text: str, where: str, what: str, help: str) -> None:
    with pytest.raises(InputError) as caught:
        truth_of(text)
    assert caught.value.where.endswith(f":11: {where}")
    assert what in caught.value.what
    assert help in caught.value.help


@pytest.mark.parametrize(("truth", "key"), [("fan_out: {detect: 3}", "each"), ("shares: {crop: 0.3}", "when")])
def test_a_truth_about_branches_of_a_graph_without_any_is_refused(truth: str, key: str, scenario_text: str) -> None:
    with pytest.raises(InputError, match=f"no stage has `{key}`"):
        read(scenario_text.replace("truth:\n", f"truth:\n  {truth}\n"))
