"""Models on a GPU of this machine: latency by batch and share, SM use and occupancy, replicas together, and pairs.

    python -m benchmarks.gpu [--seconds 0.75] [--quick] [--device cuda] [--together 6]

Runs `sloop profile --device cuda` as users do: SqueezeNet on images of 128 × 128 and ResNet18 on 224 × 224, with random
weights. With all of the GPU and with shares by MPS, then S(k) for k = 1 … 6 replicas of each, and one of each beside
the other. Keeps the profiles, with hardware and date, in `benchmarks/results/gpu/`. Without a GPU it says why, and
measures nothing. Nothing else may run on the card.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

from benchmarks.models import resnet18, small
from benchmarks.notebook import RESULTS, arguments, publish, say, table, workspace
from sloop.cuda import gpu_called
from sloop.errors import SloopError
from sloop.profile.model import check_cuda

BATCHES: Final = "1,2,4,8,16,32"
SHARES: Final = "0.125,0.25,0.5"
Answer = dict[str, Any]


def profiled(model: Path, *options: object) -> Answer:
    """What `sloop profile --json` prints. SystemExit with its error if it fails."""
    command = [sys.executable, "-m", "sloop", "profile", str(model), *map(str, options), "--json"]
    say(" ".join(command[3:]))
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    found: Answer = json.loads(done.stdout)
    if done.returncode:
        sys.exit(f"{model.name}: {found['error']}\nhelp: {found['help']}")
    return found


def latencies(answers: dict[str, Answer]) -> str:
    """Medians by model, share and batch."""
    rows: list[tuple[object, ...]] = []
    for name, answer in answers.items():
        whole = [(1.0, sample) for sample in answer["samples"]]
        for share, sample in [*whole, *((each["share"], each["sample"]) for each in answer["shares"])]:
            batch, p50_ms = sample["batch"], sample["p50_ms"]
            rows.append((name, share, batch, p50_ms, sample["p99_ms"], 1e3 * batch / p50_ms, sample["n"]))
    return table(("model", "share", "batch", "p50 ms", "p99 ms", "rows/s", "runs"), rows)


def kernels(answers: dict[str, Answer]) -> str:
    """What a batch takes of the GPU by model and batch, with the source, or why it could not be measured."""
    rows: list[tuple[object, ...]] = []
    remarks: list[str] = []
    for name, answer in answers.items():
        found, why = answer["kernels"], "; ".join(answer["kernels_failures"])
        for each in found["batches"] if found else ():
            parts = (each["busy"], each["sm_use"], each["occupancy"], each["peak_occupancy"])
            rows.append((name, each["batch"], each["kernels"], each["pass_ms"], *(100 * part for part in parts)))
        how = f"{found['source']}, {found['software']}" if found else "not measured"
        remarks.append(f"{name}: {how}{f' ({why})' if why else ''}.")
    columns = ("model", "batch", "kernels", "pass ms", "busy %", "SM use %", "occupancy %", "peak %")
    return "\n\n".join([*([table(columns, rows)] if rows else []), *remarks])


def slowdowns(answers: dict[str, Answer]) -> str:
    """S(k) by model, with the law that fits best."""
    counts = [int(count) for count, _ in next(iter(answers.values()))["points"]]
    rows = []
    for name, answer in answers.items():
        error = answer["fits"][answer["law"]]["mape"]
        factors = [factor for _, factor in answer["points"]]
        rows.append((name, answer["batch"], answer["alone_ms"], *factors, answer["law"], f"{100 * error:.1f} %"))
    return table(("model", "batch", "alone ms", *(f"S({count})" for count in counts), "law", "mean error"), rows)


def main() -> None:
    """Measure, print and write the page; exit code 0 without a GPU, too."""
    parser = arguments(__doc__, seconds=0.75, quick=0.1)
    parser.add_argument("--device", default="cuda", help="cuda, or cuda:1 for the second GPU")
    parser.add_argument("--together", type=int, default=6, help="the most replicas that run together (default 6)")
    wanted = parser.parse_args()
    try:
        gpu = gpu_called(wanted.device)
        check_cuda()
    except SloopError as error:
        sys.stdout.write(f"nothing was measured: {error}\n")
        return
    timing = ("--device", wanted.device, "--seconds", wanted.seconds)
    with workspace(wanted.keep) as folder:
        models = {"SqueezeNet": small(folder, "squeezenet", 128), "ResNet18": resnet18(folder)}
        alone = {
            name: profiled(model, *timing, "--batches", BATCHES, "--shares", SHARES) for name, model in models.items()
        }
        together = {
            name: profiled(
                model, *timing, "--sharing", "--batches", 8, "--together", wanted.together, "--beside", other
            )
            for (name, model), other in zip(models.items(), reversed(models.values()), strict=True)
        }
        if not wanted.no_write:
            (RESULTS / "gpu").mkdir(parents=True, exist_ok=True)
            for answer in together.values():
                shutil.copy(answer["profile"], RESULTS / "gpu")
    pairs = [
        (name, Path(answer["pair"]["beside"]).stem, answer["pair"]["slowdown"], answer["pair"]["beside_slowdown"])
        for name, answer in together.items()
    ]
    memory = [(name, each["device_memory_bytes"] / 2**20, each["load_ms"]) for name, each in alone.items()]
    how = next(iter(together.values()))["sharing"]["source"].rpartition(", ")[2]
    text = [
        f"{gpu.name}, driver {gpu.driver}; {next(iter(alone.values()))['software']}.",
        "## Latency by batch and share",
        latencies(alone),
        "## What a batch takes of the GPU",
        kernels(alone),
        "## Memory and start",
        table(("model", "MiB on the GPU", "load ms"), memory),
        f"## Replicas together, {how}",
        slowdowns(together),
        "## Pairs, batch 8",
        table(("model", "beside", "times as long", "the other"), pairs),
    ]
    publish("gpu", "Models on a GPU", "\n\n".join(text), write=not wanted.no_write)


if __name__ == "__main__":
    main()
