"""The files the tests of this room read, and break."""

from pathlib import Path

import pytest

from sloop.app.application import Application
from sloop.app.document import parse_yaml
from sloop.app.load import read_application, read_scenario
from sloop.app.scenario import Scenario


def application_from_text(text: str, *, file: str = "<text>") -> Application:
    return read_application(parse_yaml(text, file), Path())


def scenario_from_text(text: str, *, file: str = "<text>") -> Scenario:
    return read_scenario(parse_yaml(text, file), Path())


DEMO = """\
name: demo
slo_ms: 200
stages:
  - name: detect
    profile: ResNet-T
  - name: crop
    variants:
      - name: small
        accuracy: 69.8
        profile: {latency_ms: {form: amdahl, gamma: 36, epsilon: 5.5, delta: 0.9, eta: 15}, max_batch: 8, max_cores: 16}
      - name: large
        accuracy: 76.1
        profile:
          {latency_ms: {form: quadratic, alpha: 0.1, beta: 20, gamma: 9}, max_batch: 4, load_s: 5, memory_bytes: 1e8}
    after: [detect]
  - name: blur
    profile: {latency_ms: {table: {1: {1: 46.0, 2: 28.9}, 4: {1: 145, 2: 82}}}, max_batch: 4}
    after: detect
  - {name: join, profile: ResNet-T, after: [crop, blur]}
system: {name: elastic, margin: 0.9}
estimates: {correct: false, margin: 1.1}
cluster:
  nodes:
    - {hardware: c5.4xlarge, count: 2}
    - {hardware: custom, name: box, cores: 12, devices: [T4, T4]}
"""

SCENARIO = (
    DEMO.replace("system: {name: elastic, margin: 0.9}\n", "systems: [elastic, {name: static, cores: 16}]\n")
    + """\
trace: {kind: poisson, rate: 100}
duration_s: 600
seed: 7
truth:
  service: {ratio: 1.1}
  profile_error: 1.2
  resize: rescale
  cold_start: {start_s: 5, warm: false}
  network: {link: {kind: lte}, payload_kb: [100, 200], semantics: attach}
  failures: {mtbf_s: 3600}
"""
)


@pytest.fixture(scope="session")
def demo() -> str:
    """An application file with every kind of key."""
    return DEMO


@pytest.fixture(scope="session")
def scenario_text() -> str:
    """A scenario file with every kind of key, on the application of `demo`."""
    return SCENARIO
