"""Order is kept, whatever the number of processes."""

from math import sqrt

from sloop.reproduce.parallel import each, silent, workers


def test_in_one_process() -> None:
    heard: list[tuple[float, str]] = []
    assert each(sqrt, [1, 4, 9, 16], processes=1, progress=lambda *told: heard.append(told)) == [1, 2, 3, 4]
    assert heard == [(0.25, "1"), (0.5, "4"), (0.75, "9"), (1.0, "16")]


def test_in_several() -> None:
    heard: list[float] = []
    found = each(sqrt, [float(n * n) for n in range(7)], processes=2, progress=lambda share, _: heard.append(share))
    assert found == [0, 1, 2, 3, 4, 5, 6]
    assert heard[-1] == 1.0


def test_nothing_to_do() -> None:
    assert each(sqrt, [], progress=silent) == []
    assert workers() >= 1
