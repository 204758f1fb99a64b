"""SM use from launches, metrics over time, iGniter's model, and the published profiles of models on a V100."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sloop.errors import InputError
from sloop.profile.gpu import (
    PARTITIONS,
    SM_LIMITS,
    GpuLimits,
    KernelLaunch,
    KernelSpan,
    peak,
    time_weighted,
)

V100 = GpuLimits.of((7, 0), 80)


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
    assert launch.expected_occupancy(gpu) == percent


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
    assert launch.expected_occupancy(gpu) <= 100


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
