"""The published table as profiles, and iGniter's coefficients with its law of interference."""

import csv
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from sloop.profile.gpu import IgniterResident
from sloop.profile.interference import DeviceDemand, IgniterLaw, ShareLaw
from sloop.profile.profile import DeviceSharing
from sloop.profile.published import PUBLISHED
from sloop_systems.colocation.igniter import igniter_predictions
from sloop_systems.colocation.published import IGNITER_V100, IGNITER_V100_MODELS, LANGUAGE_MODELS, V100_ROWS

residents = st.lists(
    st.builds(
        IgniterResident,
        st.sampled_from(list(IGNITER_V100_MODELS.values())),
        st.integers(1, 32),
        st.integers(1, 16).map(lambda units: 2.5 * units),
    ),
    min_size=1,
    max_size=4,
)


@given(residents)
def test_the_law_of_interference_is_igniters_model(together: Sequence[IgniterResident]) -> None:
    """What the law says of one resident beside the others, times its time alone on the GPU, is the prediction."""
    laws = [IgniterLaw(IGNITER_V100, each.model) for each in together]
    demands = [
        DeviceSharing(law=law, full_batch=32).demand(each.batch, share=each.share / 100)
        for law, each in zip(laws, together, strict=True)
    ]
    predicted = igniter_predictions(IGNITER_V100, together)
    for at, (law, each) in enumerate(zip(laws, together, strict=True)):
        (alone,) = igniter_predictions(IGNITER_V100, [IgniterResident(each.model, each.batch, 100.0)])
        others = [demand for other, demand in enumerate(demands) if other != at]
        assert law.slowdown(demands[at], others) * alone.gpu_ms == pytest.approx(predicted[at].gpu_ms)


def test_more_share_is_never_slower_and_neighbours_never_help() -> None:
    for model in IGNITER_V100_MODELS.values():
        alone = [
            igniter_predictions(IGNITER_V100, [IgniterResident(model, 8, share)])[0].gpu_ms for share in (10, 50, 100)
        ]
        assert alone == sorted(alone, reverse=True)
        crowd = [IgniterResident(model, 8, 20.0)] * 4
        assert igniter_predictions(IGNITER_V100, crowd)[0].gpu_ms > alone[-1]


def test_forty_neighbours_slow_a_model_down_and_do_not_turn_time_round() -> None:
    """The line of the clock was fitted to five models at most."""
    law = IgniterLaw(IGNITER_V100, IGNITER_V100_MODELS["ssd"])
    cache, power_w = law.used(8, 1.0)
    own = DeviceDemand(batch=8, cache=cache, power_w=power_w)
    factors = law.among_equals(own, np.arange(1.0, 49.0))
    assert factors[0] == pytest.approx(1)
    assert (np.diff(factors) > 0).all()
    assert IGNITER_V100.mhz(1e5) == pytest.approx(0.09 * 1530)


@pytest.mark.parametrize(
    "change",
    [{"max_mhz": 0}, {"pcie_bytes_per_ms": 0.0}, {"share_unit": 0.0}, {"share_unit": 1e-9}, {"mhz_per_w": 1.0}],
    ids=str,
)
def test_coefficients_of_a_gpu_that_cannot_be(change: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        structs.replace(IGNITER_V100, **change)
    with pytest.raises(ValueError, match="idle_w is nan; it must be finite"):
        structs.replace(IGNITER_V100, idle_w=math.nan)


@pytest.mark.parametrize(
    "change",
    [{"kernels": -1}, {"active": (0.0, -1.0, 0.0, 0.1, 0.0)}, {"active": (0.0, 1.0, 1.0, -100.0, 1.0)}],
    ids=str,
)
def test_coefficients_of_a_model_that_cannot_be(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        structs.replace(IGNITER_V100_MODELS["ssd"], **change)


def test_shares_below_those_of_a_fit_take_long_and_never_a_negative_time() -> None:
    model = structs.replace(IGNITER_V100_MODELS["ssd"], active=(0.0, 1.0, 1.0, -5.0, 1.0))
    times_ms = [model.active_ms(4, share) for share in (1.0, 5.0, 5.05, 6.0, 50.0, 100.0)]
    assert times_ms == sorted(times_ms, reverse=True)
    assert times_ms[-1] > 0


def test_the_share_law_at_its_two_printed_points() -> None:
    law = ShareLaw()

    def slower(name: str, share: float) -> float:
        sharing = PUBLISHED[f"{name}-V100"].sharing
        assert sharing is not None
        return law.slowdown(structs.replace(sharing, is_capped=True).demand(4, share=share), [])

    assert slower("resnet50", 0.1755) == pytest.approx(3.3, abs=0.05)
    assert slower("bert", 0.3183) == pytest.approx(6.3, abs=0.05)
    assert slower("resnet50", 0.3626) == 1.0


# The published table


def test_the_table_is_consistent_in_itself() -> None:
    assert sum(map(len, V100_ROWS.values())) == 71
    assert set(V100_ROWS) >= LANGUAGE_MODELS
    for rows in V100_ROWS.values():
        for row in rows:
            assert 1000 * row.batch / row.latency_ms == pytest.approx(row.rate_rps, rel=0.03)


def test_the_table_is_the_published_one() -> None:
    root = Path(os.environ.get("SLOOP_SHARED", Path(__file__).resolve().parents[4] / "shared"))
    path = root / "specs" / "data" / "colocation_v100_profiles.csv"
    if not path.is_file():
        pytest.skip("the table of the thesis is not here")
    with path.open(newline="") as file:
        printed = [
            (
                row["model"],
                int(row["batch"]),
                pytest.approx(1000 * float(row["latency_s"])),
                *(
                    float(row[key])
                    for key in (
                        "throughput_rps",
                        "mem_cap_pct",
                        "ach_occ_pct",
                        "wavg_ach_occ_pct",
                        "wavg_sm_util_pct",
                    )
                ),
            )
            for row in csv.DictReader(file)
        ]
    assert [(name, *row) for name, rows in V100_ROWS.items() for row in rows] == printed


@pytest.mark.parametrize("name", V100_ROWS)
def test_profiles_have_the_printed_rates_and_needs(name: str) -> None:
    profile = PUBLISHED[f"{name}-V100"]
    assert profile.accelerator == "V100"
    assert profile.sharing is not None
    for row in V100_ROWS[name]:
        latency_ms = profile.latency_ms.latency_ms(row.batch, 1)
        assert 1000 * row.batch / latency_ms == pytest.approx(row.rate_rps)
        demand = profile.sharing.demand(row.batch)
        assert (demand.sm_use, demand.occupancy, demand.peak_occupancy, demand.memory) == pytest.approx(
            tuple(each / 100 for each in (row.sm_use, row.occupancy, row.peak_occupancy, row.memory_percent))
        )
