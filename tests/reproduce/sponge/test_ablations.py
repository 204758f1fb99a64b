"""Directions are judged with their noise."""

import pytest

from sloop.reproduce.sponge import ablations
from sloop.reproduce.sponge.ablations import Direction, follows
from sloop.reproduce.sponge.trials import Results


@pytest.mark.parametrize(
    ("direction", "means", "expected"),
    [
        ("rising", (1, 2, 3), True),
        ("rising", (1, 0.95, 3), True),
        ("rising", (3, 2, 1), False),
        ("rising", (1.0, 0.92, 0.84), False),
        ("falling", (3, 2, 1), True),
        ("falling", (1, 2), False),
        ("level", (1, 1.05), True),
        ("level", (1, 1.2), False),
    ],
)
def test_directions(direction: Direction, means: tuple[float, ...], expected: bool) -> None:
    assert follows(direction, means) is expected


def test_every_setting_has_a_row(results: Results) -> None:
    rows = ablations.rows(results)
    assert len(rows) == len(ablations.trials())
    assert {row.verdict for row in rows} <= {"shape", "off"}
    assert rows[0].note.endswith("8.50 cores")
