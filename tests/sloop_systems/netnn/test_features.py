"""Features of flows: encodings with and without who sent what, and votes."""

from dataclasses import replace

import numpy as np
import pytest

from sloop.errors import InputError
from sloop_systems.netnn.accuracy import dataset
from sloop_systems.netnn.features import GAP_MAX, FeatureEncoding, PointArrays, Representation, vote
from sloop_systems.netnn.traffic import HEAD_BYTES, calls


def points(**changes: object) -> PointArrays:
    """One point, of a packet whose bytes are 1, 2, 3, …"""
    made = PointArrays(
        keys=np.arange(13, dtype=np.uint8)[None],
        heads=np.arange(1, HEAD_BYTES + 1, dtype=np.uint8)[None],
        lengths=np.array([200]),
        gaps_us=np.array([5]),
        gap_min_us=np.array([5]),
        gap_max_us=np.array([258]),
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def test_bits_are_those_of_head_flow_and_gaps_in_order() -> None:
    (row,) = FeatureEncoding(identity=True).rows(points())
    octets = [*range(1, HEAD_BYTES + 1), *range(13), 0, 0, 0, 5, 0, 0, 1, 2]
    bits = [octet >> (7 - place) & 1 for octet in octets for place in range(8)]
    assert row.tolist() == bits + [0] * (814 - len(bits))
    (head,) = FeatureEncoding(identity=True, flow_features=False).rows(points())
    assert head.tolist() == bits[: 8 * HEAD_BYTES]


def test_bytes_and_numbers_have_seven_bits() -> None:
    (octets,) = FeatureEncoding(Representation.BYTE, identity=True).rows(points(gap_max_us=np.array([GAP_MAX])))
    assert octets[:3].tolist() == [0, 1, 1]
    assert octets[-4:].tolist() == [127] * 4
    (numbers,) = FeatureEncoding(Representation.BASE10, identity=True).rows(points())
    assert numbers[:2].tolist() == [(3 << 8 | 4) >> 9, (5 << 8 | 6) >> 9]
    assert numbers[10] == 200 >> 4


@pytest.mark.parametrize("representation", list(Representation))
def test_a_masked_row_says_nothing_of_who_sent_it(representation: Representation) -> None:
    other = points()
    other.heads[0, 12:24] ^= 0xFF
    other.keys[0, :12] ^= 0xFF
    masked, seen = (FeatureEncoding(representation, identity=identity) for identity in (False, True))
    assert np.array_equal(masked.rows(points()), masked.rows(other))
    assert not np.array_equal(seen.rows(points()), seen.rows(other))
    for encoding in (masked, seen):
        row = encoding.rows(other)
        assert row.shape == (1, encoding.inputs)
        assert encoding.range.low <= row.min()
        assert row.max() <= encoding.range.high


def test_an_encoding_that_is_too_short_is_refused() -> None:
    with pytest.raises(InputError, match="712 features do not fit into 700 inputs"):
        FeatureEncoding(length=700).rows(points())


def test_points_are_the_powers_of_two_with_the_gaps_so_far() -> None:
    (flow,) = calls(3, 1, packets=70)
    found = dataset([flow]).points
    gaps = np.diff(flow.times_us)
    assert found.lengths.tolist() == [flow.lengths[at - 1] for at in (1, 2, 4, 8, 16, 32, 64)]
    assert found.gap_min_us.tolist() == [0, *(gaps[: at - 1].min() for at in (2, 4, 8, 16, 32, 64))]
    assert found.gap_max_us.tolist() == [0, *(gaps[: at - 1].max() for at in (2, 4, 8, 16, 32, 64))]
    assert found.gaps_us.tolist() == [0, *(gaps[at - 2] for at in (2, 4, 8, 16, 32, 64))]


def test_votes() -> None:
    assert vote([1, -9, 1])
    assert not vote([-1, 9, -1])
    assert vote([3, -2])
    assert not vote([2, -3])
