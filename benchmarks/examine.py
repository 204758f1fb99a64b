"""How long it takes to prove that requests for a model may share a forward pass, and the memory for it.

    python -m benchmarks.examine [MODEL.onnx …]

Each model is examined in a process of its own, as `sloop serve` does before it serves one without a profile. The models
are architectures from the `onnx` package for images of 224 × 224, whose weights are constants that the graph makes, and
a perceptron of 100 MB, unless others are named.
"""

import subprocess
import sys
from pathlib import Path
from typing import Final

from benchmarks.models import INSIDE, perceptron
from benchmarks.notebook import arguments, publish, say, table, workspace

NAMES: Final = ("squeezenet", "shufflenet", "inception_v1", "densenet121", "resnet50")
EXAMINE: Final = """
import sys, time
from pathlib import Path
from sloop.profile.examine import examine
began_s = time.perf_counter()
known = examine(Path(sys.argv[1]), folder=Path(sys.argv[2]))
spent_s = time.perf_counter() - began_s
(peak,) = [line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")]
print(spent_s, int(peak) / 1024, known.obstacle or known.evidence, sep="\\t")
"""
"""What runs in each process: prints seconds, the largest resident memory in MiB, and what was found."""


def main() -> None:
    """Entry point."""
    parser = arguments(__doc__)
    parser.add_argument("models", type=Path, nargs="*")
    given = parser.parse_args()
    with workspace(given.keep) as folder:
        models = given.models or [
            *(INSIDE / f"light_{name}.onnx" for name in NAMES),
            perceptron(folder, width=2500, layers=4),
        ]
        rows: list[tuple[object, ...]] = []
        for model in models:
            say(model.name)
            command = [sys.executable, "-c", EXAMINE, str(model.absolute()), str(folder)]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            spent_s, memory_mib, found = done.stdout.strip().split("\t")
            rows.append((model.name, model.stat().st_size / 1e6, float(spent_s), float(memory_mib), found))
    text = table(("model", "MB", "seconds", "peak MiB", "found"), rows)
    publish("examine", "Examination of models", text, write=not given.no_write)


if __name__ == "__main__":
    main()
