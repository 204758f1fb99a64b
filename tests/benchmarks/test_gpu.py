"""The benchmark of GPUs: what it says without one, and its tables."""

import sys
from pathlib import Path

import pytest

from benchmarks import gpu
from tests.nvidia import T4, FakeNvidia, why_no_gpu


def test_without_a_gpu_it_says_why_and_measures_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nvidia = FakeNvidia(tmp_path / "nvidia", monkeypatch)
    monkeypatch.setattr(sys, "argv", ["gpu", "--no-write"])
    monkeypatch.setattr(gpu, "profiled", lambda *_: pytest.fail("there is nothing to measure"))
    gpu.main()
    assert capsys.readouterr().out.startswith("nothing was measured: nvidia-smi failed (exit status 6): No devices")
    assert why_no_gpu() == "nvidia-smi failed (exit status 6): No devices were found"
    nvidia.has(T4)
    gpu.main()
    assert "has no CUDAExecutionProvider" in capsys.readouterr().out
    assert "has no CUDA" in why_no_gpu()


def test_its_tables() -> None:
    def sample(batch: int, p50_ms: float) -> dict[str, float]:
        return {"batch": batch, "p50_ms": p50_ms, "p99_ms": 2 * p50_ms, "n": 20}

    alone = {"Net": {"samples": [sample(1, 2.0), sample(8, 4.0)], "shares": [{"share": 0.5, "sample": sample(1, 3.0)}]}}
    assert gpu.latencies(alone).splitlines()[2:] == [
        "| Net | 1 | 1 | 2 | 4 | 500 | 20 |",
        "| Net | 1 | 8 | 4 | 8 | 2,000 | 20 |",
        "| Net | 0.5 | 1 | 3 | 6 | 333.3 | 20 |",
    ]
    together = {
        "Net": {
            **{"batch": 8, "alone_ms": 4.0, "points": [[1.0, 1.0], [2.0, 1.5]], "law": "literal"},
            "fits": {"literal": {"mape": 0.125}},
        }
    }
    assert gpu.slowdowns(together).splitlines() == [
        "| model | batch | alone ms | S(1) | S(2) | law | mean error |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| Net | 8 | 4 | 1 | 1.5 | literal | 12.5 % |",
    ]


def test_the_table_of_kernels_names_its_source() -> None:
    use = {"batch": 8, "kernels": 90, "pass_ms": 2.0, "busy": 0.5, "sm_use": 0.25, "occupancy": 0.125}
    found = {"source": "launches", "software": "PyTorch 2.11", "batches": [{**use, "peak_occupancy": 0.75}]}
    answers: dict[str, gpu.Answer] = {
        "Net": {"kernels": found, "kernels_failures": ["Nsight Compute: refused"]},
        "Other": {"kernels": None, "kernels_failures": ["Nsight Compute: refused", "Nsight Systems: not there"]},
    }
    assert gpu.kernels(answers).splitlines() == [
        "| model | batch | kernels | pass ms | busy % | SM use % | occupancy % | peak % |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        "| Net | 8 | 90 | 2 | 50 | 25 | 12.5 | 75 |",
        "",
        "Net: launches, PyTorch 2.11 (Nsight Compute: refused).",
        "",
        "Other: not measured (Nsight Compute: refused; Nsight Systems: not there).",
    ]
