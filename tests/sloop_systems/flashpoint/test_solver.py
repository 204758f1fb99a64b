"""The planners with which Flashpoint's cuts are compared, against brute force."""

from itertools import combinations

import numpy as np
import pytest

from sloop_systems.flashpoint.solver import fewest_pieces, filled_pieces
from tests.solvers.test_cuts import T5_MB


@pytest.mark.parametrize(("model_mb", "pieces"), [(499, 2), (890, 4), (1626, 7), (3135, 13), (6282, 26), (11_408, 46)])
def test_gillis_needs_as_many_pieces_as_250_mb_allow(model_mb: float, pieces: int) -> None:
    """Section 5.1, with layers that are fine enough."""
    count = int(model_mb / 1.9)
    assert len(fewest_pieces([model_mb / count] * count, [1.0] * (count - 1), 250)) + 1 == pieces


def test_gillis_equals_brute_force() -> None:
    for seed in range(30):
        random = np.random.default_rng(seed)
        sizes, transfer = random.uniform(20, 120, 8).tolist(), random.integers(1, 4, 7).astype(float).tolist()
        found = fewest_pieces(sizes, transfer, 150)
        allowed = [
            (count, sum(transfer[cut - 1] for cut in cuts), cuts)
            for count in range(8)
            for cuts in combinations(range(1, 8), count)
            if all(sum(sizes[a:b]) <= 150 for a, b in zip((0, *cuts), (*cuts, 8), strict=True))
        ]
        assert found == min(allowed)[2]
    assert fewest_pieces([300.0, 10.0], [1.0], 250) == (1,), "a layer above the limit is a piece of its own"


def test_serfer_fills_from_the_left() -> None:
    assert filled_pieces([100.0, 90.0, 30.0, 250.0, 20.0], 250) == (2, 3, 4)
    assert filled_pieces(T5_MB, 250) == tuple(range(1, 49)), "every block of T5 exceeds 0.8 × 250 MB together"
