"""The entrances: files, texts and mappings, and that none of them raises anything but InputError."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sloop.app.application import Application
from sloop.app.load import application_from_text, load_application, load_scenario, scenario_from_text
from sloop.errors import InputError
from sloop.profile import Profile


def test_a_scenario_is_an_application_file(tmp_path: Path, scenario_text: str) -> None:
    (tmp_path / "s.yaml").write_text(scenario_text)
    (tmp_path / "t.csv").write_text("1\n")
    assert isinstance(load_application(tmp_path / "s.yaml"), Application)
    (tmp_path / "s.yaml").write_text(scenario_text.replace("{kind: poisson, rate: 100}", "{file: t.csv, scale: 2}"))
    assert load_scenario(tmp_path / "s.yaml").trace["file"] == str((tmp_path / "t.csv").resolve())


@given(st.text(max_size=200))
@settings(max_examples=300, deadline=None)
def test_any_text_is_read_or_refused(text: str) -> None:
    with pytest.raises(InputError):
        application_from_text(text)


@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_any_mutation_is_read_or_refused(scenario_text: str, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(scenario_text) - 1))
    length = data.draw(st.integers(0, 12))
    piece = data.draw(st.one_of(st.text("{}[]:,-&*!#|>'\"\n\t 0.e9a~?%@\\", max_size=8), st.text(max_size=5)))
    mutated = scenario_text[:start] + piece + scenario_text[start + length :]
    try:
        scenario = scenario_from_text(mutated)
    except InputError as error:
        assert error.where.startswith("<text>:")  # noqa: PT017  # both ways are right
    else:
        assert scenario.application.order


WORDS = ["name", "slo_ms", "stages", "system", "cluster", "trace", "truth", "profile", "latency_ms", "table", "form"]
CONTENT = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.sampled_from(WORDS)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.one_of(st.sampled_from(WORDS), st.integers()), inner, max_size=4),
    ),
    max_leaves=12,
)


@given(st.sampled_from(["name", "slo_ms", "stages", "system", "cluster", "trace", "truth", "seed"]), CONTENT)
@settings(max_examples=200, deadline=None)
def test_any_value_is_read_or_refused(key: str, content: object) -> None:
    base = {"name": "a", "slo_ms": 1, "stages": [{"name": "s", "profile": "ResNet-T"}], "trace": {"kind": "poisson"}}
    try:
        scenario = load_scenario({**base, key: content})
    except InputError as error:
        assert error.where  # noqa: PT017
    else:
        assert isinstance(scenario.application.stages[0].variants[0].profile, Profile)
