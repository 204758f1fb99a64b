"""SM use from launches, metrics over time, iGniter's model, and the published profiles of models on a V100."""

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

from sloop.errors import InputError
from sloop.profile.gpu import (
    GPU_LIMITS,
    PARTITIONS,
    SM_LIMITS,
    GpuLimits,
    IgniterResident,
    KernelLaunch,
    KernelSpan,
    igniter_predictions,
    peak,
    time_weighted,
)
from sloop.profile.interference import DeviceDemand, IgniterLaw, ShareLaw
from sloop.profile.profile import DeviceSharing
from sloop.profile.published import PUBLISHED
from sloop.profile.v100 import IGNITER_V100, IGNITER_V100_MODELS, LANGUAGE_MODELS, V100_ROWS

V100 = GPU_LIMITS["V100"]


@pytest.mark.parametrize(
    ("launch", "per_sm", "percent"),
    [
        (KernelLaunch(64, 1024, 32), 2, 40.0),
        (KernelLaunch(100, 128, 32, 32768), 3, 42.5),
        (KernelLaunch(50 * 2, 256, 128), 2, 62.5),
        (KernelLaunch(640, 32, 16), 32, 25.0),
        (KernelLaunch(4000, 256, 32), 8, 100.0),
    ],
    ids=["threads", "shared memory", "registers", "blocks", "at most all"],
)
def test_the_sms_that_a_launch_needs(launch: KernelLaunch, per_sm: int, percent: float) -> None:
    assert launch.blocks_per_sm(V100) == per_sm
    assert launch.sm_percent(V100) == percent


@pytest.mark.parametrize(
    "launch",
    [
        KernelLaunch(1, 4096, 16),
        KernelLaunch(1, 64, 16, 1 << 20),
        KernelLaunch(1, 64, 256),
        KernelLaunch(1, 0, 16),
        KernelLaunch(0, 64, 16),
    ],
)
def test_a_block_that_fits_on_no_sm_is_refused(launch: KernelLaunch) -> None:
    with pytest.raises(InputError, match="fits on no SM"):
        launch.sm_percent(V100)


@pytest.mark.parametrize(
    ("capability", "threads", "registers", "per_sm", "percent"),
    [
        ((7, 0), 128, 37, 12, 75.0),
        ((7, 0), 320, 37, 4, 62.5),
        ((7, 0), 512, 64, 2, 50.0),
        ((7, 0), 512, 65, 1, 25.0),
    ],
)
def test_the_examples_of_nvidias_guides(
    capability: tuple[int, int], threads: int, registers: int, per_sm: int, percent: float
) -> None:
    """37 registers: CUDA C++ Best Practices Guide, "Calculating Occupancy" (63 % there is 62.5). 64 and 65: CUDA C++
    Programming Guide, "Multiprocessor Level"; it names capability 6.x, whose SMs have as many registers."""
    gpu = GpuLimits.of(capability, 80)
    launch = KernelLaunch(1000, threads, registers)
    assert launch.blocks_per_sm(gpu) == per_sm
    assert launch.theoretical_occupancy(gpu) == percent


BLOCKS = ((128, 37, 0), (320, 37, 0), (256, 32, 16384), (192, 70, 5000), (1024, 33, 0), (33, 255, 0), (64, 0, 0))
"""Threads, registers of a thread, and shared bytes."""
CALCULATED = {
    (7, 0): (12, 4, 6, 4, 1, 4, 32, 2, 1, 1, 2, 1),
    (7, 5): (8, 3, 4, 4, 1, 4, 16, 1, 1, 1, 2, 1),
    (8, 0): (12, 4, 8, 4, 1, 4, 32, 3, 1, 1, 1, 1),
    (8, 6): (12, 4, 5, 4, 1, 4, 16, 2, 1, 1, 1, 1),
    (8, 7): (12, 4, 6, 4, 1, 4, 16, 3, 1, 1, 1, 1),
    (8, 9): (12, 4, 5, 4, 1, 4, 24, 2, 1, 1, 1, 1),
    (9, 0): (12, 4, 8, 4, 1, 4, 32, 4, 1, 1, 1, 1),
    (10, 0): (12, 4, 8, 4, 1, 4, 32, 4, 1, 1, 1, 1),
    (10, 3): (12, 4, 8, 4, 1, 4, 32, 4, 1, 1, 1, 1),
    (11, 0): (12, 4, 6, 4, 1, 4, 24, 4, 1, 1, 1, 1),
    (12, 0): (12, 4, 5, 4, 1, 4, 24, 2, 1, 1, 1, 1),
    (12, 1): (12, 4, 5, 4, 1, 4, 24, 2, 1, 1, 1, 1),
}
"""What `cudaOccMaxActiveBlocksPerMultiprocessor` of NVIDIA's `cuda_occupancy.h` (CUDA 13.5), compiled and run, says of
these blocks, of two with 48 KiB and 65 registers, and of three with all shared memory that a block can have, half of
it, and one byte more than half."""


@pytest.mark.parametrize("capability", list(SM_LIMITS), ids=str)
def test_nvidias_calculator_says_the_same(capability: tuple[int, int]) -> None:
    gpu = GpuLimits.of(capability, 80)
    whole = gpu.sm.shared_bytes - gpu.sm.reserved_bytes
    large = ((256, 128, whole), (128, 168, whole // 2), (64, 24, whole // 2 + 1))
    blocks = (*BLOCKS, (96, 40, 49152), (512, 65, 1), *large)
    assert tuple(KernelLaunch(1, *each).blocks_per_sm(gpu) for each in blocks) == CALCULATED[capability]


def test_an_unknown_capability_is_named() -> None:
    with pytest.raises(InputError, match=r"compute capability 6\.1 are not known"):
        GpuLimits.of((6, 1), 20)


def placed_one_by_one(launch: KernelLaunch, gpu: GpuLimits) -> int:
    """Put block after block on an SM, warp after warp into the partition with most registers left, until one lacks
    something."""
    sm = gpu.sm
    registers = [sm.registers // PARTITIONS] * PARTITIONS
    warps, shared_bytes, blocks = sm.threads // 32, sm.shared_bytes, 0
    of_warp = math.ceil(32 * launch.registers / 256) * 256
    of_block = math.ceil((launch.shared_bytes + sm.reserved_bytes) / sm.shared_unit) * sm.shared_unit
    while blocks < sm.blocks:
        for _ in range(math.ceil(launch.threads / 32)):
            freest = registers.index(max(registers))
            if not warps or registers[freest] < of_warp:
                return blocks
            warps -= 1
            registers[freest] -= of_warp
        if shared_bytes < of_block:
            return blocks
        shared_bytes -= of_block
        blocks += 1
    return blocks


launches = st.builds(
    KernelLaunch,
    blocks=st.integers(1, 5000),
    threads=st.integers(1, 1024),
    registers=st.integers(0, 255),
    shared_bytes=st.one_of(st.just(0), st.integers(0, 240 << 10)),
)
gpus = st.builds(GpuLimits.of, st.sampled_from(list(SM_LIMITS)), st.integers(1, 200))


@given(launches, gpus)
def test_occupancy_is_what_fits_one_by_one(launch: KernelLaunch, gpu: GpuLimits) -> None:
    fits = placed_one_by_one(launch, gpu)
    if not fits:
        with pytest.raises(InputError, match="fits on no SM"):
            launch.blocks_per_sm(gpu)
        return
    assert launch.blocks_per_sm(gpu) == fits
    assert launch.theoretical_occupancy(gpu) == pytest.approx(100 * fits * launch.warps / (gpu.sm.threads // 32))
    assert launch.theoretical_occupancy(gpu) <= 100


@given(launches, gpus)
def test_sms_and_occupancy_when_blocks_are_dealt_out(launch: KernelLaunch, gpu: GpuLimits) -> None:
    """Blocks go to SMs in turn. SMs that are needed: full ones first. Occupancy: the mean over SMs that have a
    block."""
    if not (fits := placed_one_by_one(launch, gpu)):
        return
    needed = len(range(0, launch.blocks, fits))
    assert launch.sm_percent(gpu) == pytest.approx(100 * min(gpu.sms, needed) / gpu.sms)
    held = [0] * gpu.sms
    for block in range(min(launch.blocks, fits * gpu.sms)):
        held[block % gpu.sms] += 1
    used = [blocks for blocks in held if blocks]
    mean = sum(used) / len(used) * launch.warps / (gpu.sm.threads // 32)
    assert launch.expected_occupancy(gpu) == pytest.approx(100 * mean)
    assert launch.expected_occupancy(gpu) <= launch.theoretical_occupancy(gpu) + 1e-9


SPANS = [KernelSpan(0, 2, 50), KernelSpan(1, 3, 30), KernelSpan(5, 6, 100)]


def test_peaks_and_means_over_time() -> None:
    assert peak(SPANS) == 100
    assert peak(SPANS[:2]) == 80
    assert time_weighted(SPANS) == pytest.approx((50 + 80 + 30 + 0 + 0 + 100) / 6), "gaps count as 0"
    assert time_weighted(SPANS, 4) == time_weighted(SPANS)
    assert time_weighted(SPANS, 10) == pytest.approx(260 / 10), "the kernels are a part of a longer time"
    assert peak([]) == time_weighted([]) == 0


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 9), st.integers(0, 100)), min_size=1, max_size=8))
def test_metrics_against_every_instant(spans: list[tuple[int, int, int]]) -> None:
    made = [KernelSpan(start, start + length, value) for start, length, value in spans]
    first, last = min(each.start for each in made), max(each.end for each in made)
    running = [
        sum(each.value for each in made if each.start <= instant < each.end) for instant in range(int(first), int(last))
    ]
    assert peak(made) == max(running, default=0)
    assert time_weighted(made) == pytest.approx(sum(running) / len(running) if running else 0)


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
    root = Path(os.environ.get("SLOOP_SHARED", Path(__file__).resolve().parents[3] / "shared"))
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
