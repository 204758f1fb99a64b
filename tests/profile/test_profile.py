"""Profiles: what they refuse, what they were measured for, what the published ones say."""

import pytest
from msgspec import structs

from sloop.profile import PUBLISHED, RESNET18_HUMAN, RESNET_T, YOLOV5S_S, Amdahl, Profile, Quadratic, Region, Sample


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"max_batch": 0}, "max_batch is 0"),
        ({"max_cores": 0.0}, "max_cores is 0"),
        ({"max_cores": float("inf")}, "max_cores is inf"),
        ({"load_s": -1.0}, "load_s is -1"),
        ({"memory_bytes": -1}, "memory_bytes is -1"),
        ({"latency_ms": Amdahl(-9, 0, 0, 0)}, "latency_ms is"),
        ({"latency_ms": Amdahl(float("nan"), 0, 0, 0)}, "latency_ms is nan"),
    ],
)
def test_refuses_figures_out_of_range(change: dict[str, object], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        structs.replace(RESNET_T, **change)


def test_region_is_declared_or_spanned_by_samples_or_cells() -> None:
    assert RESNET_T.region == Region(1, 8, 1, 8)
    assert structs.replace(RESNET_T, measured=None).region == Region(1, 8, 1, 8)
    assert RESNET18_HUMAN.region == Region(1, 16, 1, 32)
    assert YOLOV5S_S.region is None


def test_says_where_it_extrapolates() -> None:
    assert not RESNET_T.is_extrapolated(8, 8)
    assert RESNET_T.is_extrapolated(9, 8)
    assert RESNET_T.is_extrapolated(8, 0.5)
    assert not YOLOV5S_S.is_extrapolated(100, 100)
    samples = (Sample(1, 1, 5, 6, 10), Sample(4, 1, 9, 10, 10))
    quadratic = Profile(latency_ms=Quadratic(0, 1, 4), max_batch=8, max_cores=1, samples=samples)
    assert not quadratic.is_extrapolated(4, 2)  # cores do not enter
    assert quadratic.is_extrapolated(5, 1)


def test_published_profiles_say_where_they_come_from() -> None:
    for name, profile in PUBLISHED.items():
        assert profile.source, name
        assert profile.hardware, name
        assert profile.date, name
    assert YOLOV5S_S.origin == "assumed"
    assert YOLOV5S_S.latency_ms.latency_ms(1, 8) == pytest.approx(50.5)
    assert YOLOV5S_S.latency_ms.latency_ms(10, 16) == pytest.approx(350.5)


def test_speaks_through_a_fit() -> None:
    assert RESNET18_HUMAN.latency_ms.latency_ms(16, 4) == 169.0
    assert int(RESNET18_HUMAN.with_fit("amdahl_whole_ms").latency_ms.latency_ms(10, 5)) == 91
