import pytest

from sloop.systems.planning.words import figure, shown
from sloop.vocabulary import Path


@pytest.mark.parametrize(
    ("value", "said"), [(0.0, "0"), (1.0, "1"), (0.12345, "0.1235"), (12345.6, "12,346"), (float("inf"), "inf")]
)
def test_figures(value: float, said: str) -> None:
    assert figure(value) == said


def test_paths() -> None:
    assert shown(Path(("a", "b"), 1)) == "a → b"
