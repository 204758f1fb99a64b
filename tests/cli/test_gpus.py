"""`sloop profile --device cuda`, with stand-ins for NVIDIA's programs and for an ONNX Runtime with CUDA."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from msgspec.structs import replace

from benchmarks.models import perceptron
from sloop.cli import main
from sloop.profile.profile import Profile, Quadratic, digest_of_model, load_profile, path_beside, save_profile
from tests.nvidia import A100, T4, CountedKernel, FakeNvidia

BRIEF = ("--batches", "1,2", "--seconds", "0.01", "--passes", "1", "--alone", "--json")


@pytest.fixture
def network(tmp_path: Path) -> Path:
    return perceptron(tmp_path, width=16, layers=3)


@pytest.fixture
def nvidia(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeNvidia:
    made = FakeNvidia(tmp_path / "nvidia", monkeypatch)
    made.has(T4, A100)
    return made


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["profile", *map(str, arguments), *BRIEF])


def test_a_profile_of_a_gpu(network: Path, nvidia: FakeNvidia) -> None:
    nvidia.install_runtime()
    nvidia.install_mps()
    result = run(network, "--device", "cuda:1", "--shares", "0.5")
    assert result.exit_code == 0, result.stderr
    answer = json.loads(result.stdout)
    assert [(each["share"], each["sample"]["batch"]) for each in answer["shares"]] == [(0.5, 1), (0.5, 2)]
    profile = load_profile(path_beside(network))
    assert (profile.accelerator, profile.origin, profile.max_batch, profile.max_cores) == ("A100", "measured", 2, 1)
    assert profile.hardware.startswith("NVIDIA A100-SXM4-40GB, driver 550.54.15; ")
    assert "CUDA" in profile.software
    assert profile.date
    sessions = [json.loads(line) for line in nvidia.lines("sessions")]
    assert {variables["CUDA_VISIBLE_DEVICES"] for _, _, variables in sessions} == {"GPU-a100beef"}
    limits = [variables.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE") for _, _, variables in sessions]
    assert limits == [None, "50"], "all of it first, then the share"


def test_without_mps_shares_are_left_out_and_it_says_why(network: Path, nvidia: FakeNvidia) -> None:
    nvidia.install_runtime()
    nvidia.install_mps()
    nvidia.happens("refuses")
    arguments = [each for each in BRIEF if each != "--json"]
    result = CliRunner().invoke(main, ["profile", str(network), "--device", "cuda", "--shares", "0.5", *arguments])
    assert result.exit_code == 0, result.stderr
    assert "shares were not measured: nvidia-cuda-mps-control -d failed" in result.stdout
    assert load_profile(path_beside(network)).accelerator == "T4"


def test_what_batches_take_of_a_gpu(network: Path, nvidia: FakeNvidia) -> None:
    """One kernel of 0.2 ms on 10 of 40 SMs. A pass takes what the profile says, or the 1 ms that the stand-in reports,
    whichever is less."""
    nvidia.install_runtime()
    nvidia.install_ncu([CountedKernel("gemm", "200,000", "40.00", "50.00", 20, 512, 64)])
    result = run(network, "--device", "cuda")
    assert result.exit_code == 0, result.stderr
    answer = json.loads(result.stdout)
    found = answer["kernels"]
    assert (found["source"], answer["kernels_failures"]) == ("ncu", [])
    assert [each["batch"] for each in found["batches"]] == [1, 2]
    kept = load_profile(path_beside(network)).sharing
    assert kept is not None
    assert kept.demands is not None
    assert (kept.demands.source, kept.demands.software) == ("ncu", "Nsight Compute 2024.1.0.0")
    for each in found["batches"]:
        assert each["sm_use"] == kept.sm_use[each["batch"]] == pytest.approx(each["busy"] * 0.25)
        assert each["occupancy"] == kept.occupancy[each["batch"]] == pytest.approx(each["busy"] * 0.4)
        assert each["sm_throughput"] == pytest.approx(each["busy"] * 0.5)
    arguments = [each for each in BRIEF if each != "--json"]
    shown = CliRunner().invoke(main, ["profile", str(network), "--device", "cuda", "--kernels", "ncu", *arguments])
    assert "of the T4, by Nsight Compute 2024.1.0.0" in shown.stdout


def test_measured_kernels_decide_which_models_share_a_gpu(network: Path, nvidia: FakeNvidia, tmp_path: Path) -> None:
    """Two models that need a quarter of the SMs while they run share one of two cards; two that need all of them do
    not. Before anything is measured, the system says how to."""
    pytest.importorskip("sloop_systems.colocation", reason="`wsm-milp` needs measured kernels")
    nvidia.install_runtime()
    other = network.with_name("other.onnx")
    other.write_bytes(network.read_bytes())
    stages = "".join(f"  - {{name: {name}, model: ./{file.name}}}\n" for name, file in (("a", network), ("b", other)))
    cluster = "cluster: {nodes: [{hardware: local, devices: [T4], count: 2}]}\n"
    file = tmp_path / "app.yaml"
    file.write_text(f"name: two\nslo_ms: 1000\nstages:\n{stages}system: wsm-milp\n{cluster}")

    def planned(blocks: int, *options: str) -> Result:
        nvidia.install_ncu([CountedKernel("gemm", "9,000,000", "40.00", "50.00", blocks, 512, 64)])
        for model in (network, other):
            assert run(model, "--device", "cuda", *options).exit_code == 0
            measured = load_profile(path_beside(model))  # the latencies of the stand-in are those of a busy machine
            save_profile(replace(measured, latency_ms=Quadratic(0, 9, 1)), path_beside(model))
        return CliRunner().invoke(main, ["plan", str(file), "--rate", "5", "--json"])

    refused = planned(20, "--kernels", "none")
    assert refused.exit_code == 1
    assert "`sloop profile MODEL --device cuda` measures it" in refused.stderr
    for blocks, cards in ((20, 1), (80, 2)):
        result = planned(blocks)
        assert result.exit_code == 0, result.stderr
        placements = json.loads(result.stdout)["placements"]
        assert len(placements) == 2
        assert len({(each["node"], each["device"]) for each in placements}) == cards


def test_a_profile_without_kernels_keeps_those_that_are_known(network: Path, nvidia: FakeNvidia) -> None:
    nvidia.install_runtime()
    nvidia.install_ncu([CountedKernel("gemm", "200,000", "40.00", "50.00", 20, 512, 64)])
    run(network, "--device", "cuda")
    known = load_profile(path_beside(network)).sharing
    assert json.loads(run(network, "--device", "cuda", "--kernels", "none").stdout)["kernels"] is None
    assert load_profile(path_beside(network)).sharing == known
    nvidia.happens("refuses-counters")
    arguments = [each for each in BRIEF if each != "--json"]
    shown = CliRunner().invoke(main, ["profile", str(network), "--device", "cuda", "--kernels", "ncu", *arguments])
    assert "were not measured: Nsight Compute: this user may not read the counters" in " ".join(shown.stdout.split())
    assert load_profile(path_beside(network)).sharing == known
    nvidia.install_mps()
    run(network, "--device", "cuda", "--sharing", "--together", "2")
    law = load_profile(path_beside(network)).sharing
    assert known is not None
    assert law is not None
    assert (law.demands, law.sm_use) == (known.demands, known.sm_use)
    assert len(law.points) == 2


def test_a_model_that_does_not_fit_says_so(network: Path, nvidia: FakeNvidia) -> None:
    nvidia.install_runtime()
    nvidia.happens("full")
    result = run(network, "--device", "cuda")
    assert result.exit_code == 1
    assert "the GPU has too little memory left for it: CUDA failure 2: out of memory" in result.stderr


def test_an_onnx_runtime_without_cuda_is_refused(network: Path, nvidia: FakeNvidia) -> None:
    result = run(network, "--device", "cuda")
    assert result.exit_code == 1
    assert "has no CUDAExecutionProvider" in result.stderr
    assert "pip install 'onnxruntime-gpu[cuda,cudnn]'" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--device", "cuda:7"), "this machine has no GPU 7"),
        (("--device", "tpu"), "'tpu' is not a device"),
        (("--device", "cuda", "--shares", "1.5"), "a share of 1.5; shares are above 0 and below 1"),
        (("--shares", "0.5"), "shares are those of a GPU"),
        (("--device", "cuda", "--cores", "1"), "--layers and --cores are about CPU cores"),
        (("--kernels", "ncu"), "--kernels says how kernels on a GPU are measured"),
        (("--device", "cuda", "--sharing", "--kernels", "ncu"), "add --device, without --sharing"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    network: Path, nvidia: FakeNvidia, arguments: tuple[str, ...], says: str
) -> None:
    result = run(network, *arguments)
    assert result.exit_code in (1, 2)
    assert says in result.stderr


def test_profiles_of_cores_and_gpus_do_not_replace_each_other(network: Path, nvidia: FakeNvidia) -> None:
    path = path_beside(network)
    save_profile(Profile(latency_ms=Quadratic(0, 1, 1), max_batch=2, max_cores=1), path)
    result = run(network, "--device", "cuda")
    assert "is of CPU cores; what is measured on T4 would replace it" in result.stderr
    save_profile(Profile(latency_ms=Quadratic(0, 1, 1), max_batch=2, max_cores=1, accelerator="V100"), path)
    assert "is of V100; what is measured on T4 would replace it" in run(network, "--device", "cuda").stderr
    assert "is of V100; what is measured on CPU cores would replace it" in run(network).stderr


def test_how_a_model_shares_a_gpu(network: Path, nvidia: FakeNvidia) -> None:
    nvidia.install_runtime()
    nvidia.install_mps()
    assert (
        "measure it first: `sloop profile MODEL --device cuda`" in run(network, "--device", "cuda", "--sharing").stderr
    )
    base = Profile(latency_ms=Quadratic(0, 1, 1), max_batch=2, max_cores=1, accelerator="T4")
    save_profile(replace(base, model_digest=digest_of_model(network)), path_beside(network))
    result = run(network, "--device", "cuda", "--sharing", "--together", "2")
    assert result.exit_code == 0, result.stderr
    answer = json.loads(result.stdout)
    assert [count for count, _ in answer["points"]] == [1, 2]
    kept = load_profile(path_beside(network))
    assert kept.accelerator == "T4"
    assert kept.sharing is not None
    assert kept.sharing.hardware.startswith("Tesla T4, driver 550.54.15; ")
    assert (kept.sharing.full_batch, kept.sharing.cores) == (2, 0.0)
    assert kept.sharing.source.endswith("--sharing, batch 2, by MPS")
    sessions = [json.loads(line)[2] for line in nvidia.lines("sessions")]
    assert len(sessions) == 2
    assert all("CUDA_MPS_PIPE_DIRECTORY" in each for each in sessions)
    assert not any("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" in each for each in sessions), "no share limits them"
