"""Reading scenarios: what a file means, and that mistakes in one are named."""

from pathlib import Path

import pytest

from sloop.app.document import parse
from sloop.app.read_scenario import read_scenario
from sloop.app.scenario import Scenario
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
