"""A default system: attainment, goodput and core-seconds of the candidates on applications that name no system.

    python -m benchmarks.defaults [--seeds 5] [--systems vertical-only,hpa] [--scenes README] [--drawn HASH]

The scenes are those of README and the tutorial, the five-stage pipeline of a user on two cores, text recognition
(`examples/ocr`), published profiles on larger machines, and loads that outgrow one node. All candidates use idle
cores, as defaults do (docs/systems.md). All is simulated.

`elastic` was designed on these scenes with seeds from 0. `--drawn HASH` judges it on others: the rates and the deadline
of each scene are multiplied by factors that are drawn, with the seeds, from the hash of the commit that froze it.
"""

import random
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from benchmarks.notebook import arguments, publish, say, table
from sloop.app.application import SystemChoice
from sloop.app.load import load_scenario
from sloop.errors import InputError
from sloop.machine import usable_cpus
from sloop.sim.scenarios import run_scenario

IDLE: Final[Mapping[str, object]] = {"divide": {"name": "max_min", "idle": "use"}}
OCR: Final = Path(__file__).parents[1] / "examples" / "ocr"


def _steps(rates: Sequence[float], each_s: float) -> dict[str, object]:
    return {"kind": "step", "rates": list(rates), "each_s": each_s}


def _square(rate: float, burst_rate: float, period_s: float = 20, burst_s: float = 5) -> dict[str, object]:
    return {"kind": "square", "rate": rate, "burst_rate": burst_rate, "period_s": period_s, "burst_s": burst_s}


def _poisson(rate: float) -> dict[str, object]:
    return {"kind": "poisson", "rate": rate}


def _profile(ms: Mapping[int, float], load_s: float = 1.0, gain: float = 1.7) -> dict[str, object]:
    """Latencies by batch size on one core; on two cores they are `gain` times as short."""
    cells = {batch: {1: alone, 2: alone / gain} for batch, alone in ms.items()}
    return {"latency_ms": {"form": "table", "table": cells}, "max_batch": max(ms), "load_s": load_s}


DIGITS: Final = _profile({1: 1.2, 2: 2.3, 4: 4.5, 8: 9.0, 16: 18.0}, 0.6, gain=1.2)
"""The shipped model of README, as `sloop profile` measures it on an idle machine."""
PYTHON: Final = _profile({1: 0.3, 16: 0.6}, 0.3, gain=1.0)
PAGES: Final = {"page": 215.8, "line": 46.45, "orient": 104.6, "flip": 76.75, "labels": 13.45}
AFTER: Final[Mapping[str, list[str]]] = {"orient": ["page"], "flip": ["line"], "labels": ["orient", "flip"]}


def _stage(name: str, profile: object, after: Sequence[str] = (), **more: object) -> dict[str, object]:
    return {"name": name, "profile": profile, **({"after": list(after)} if after else {}), **more}


CHAIN: Final = (_stage("detect", "YOLOv5s-S"), _stage("classify", "ResNet-T", ["detect"]))
DIAMOND: Final = (
    _stage("detect", "YOLOv5s-S"),
    _stage("person", "ResNet-T", ["detect"]),
    _stage("car", "ResNet-T", ["detect"]),
    _stage("track", DIGITS, ["person", "car"]),
)


@dataclass(frozen=True)
class Scene:
    """An application without a system, and its traffic."""

    name: str
    stages: tuple[dict[str, object], ...]
    slo_ms: float
    cores: float
    trace: Mapping[str, object]
    nodes: int = 1
    duration_s: float = 120
    truth: Mapping[str, object] | None = None

    @property
    def declared(self) -> dict[str, Any]:
        node = {"hardware": "custom", "cores": self.cores, "count": self.nodes}
        return {
            "name": "scene",
            "slo_ms": self.slo_ms,
            "stages": list(self.stages),
            "cluster": {"nodes": [node]},
            "trace": dict(self.trace),
            "duration_s": self.duration_s,
            "truth": dict(self.truth or {}),
        }


NUMBERS: Final = (_stage("prepare", PYTHON), _stage("read", DIGITS, ["prepare"]), _stage("join", PYTHON, ["read"]))
PAGEDIR: Final = tuple(
    _stage(
        name, {"latency_ms": {"form": "table", "table": {1: {1: ms}}}, "max_batch": 1, "load_s": 2}, AFTER.get(name, ())
    )
    for name, ms in PAGES.items()
)
READER: Final = (
    _stage("detect", str(OCR / "detect.py.profile.json")),
    _stage(
        "orient", str(OCR / "orient.py.profile.json"), ["detect"], each={"output": "strips", "mean": 3.5, "most": 64}
    ),
    _stage("recognise", str(OCR / "recognise.py.profile.json"), ["orient"]),
)
RESNET: Final = (_stage("classify", "ResNet-T"),)
SERIAL: Final = (_stage("parse", _profile({1: 20.0}, gain=1.0)),)
MOBILE: Final = {"network": {"link": {"kind": "lte"}, "payload_kb": 200}}

SCENES: Final = (
    Scene("README: wave.yaml", (_stage("read", DIGITS),), 100, 2, _square(20, 200)),
    Scene("README: 30 requests/s", (_stage("read", DIGITS),), 100, 2, _poisson(30)),
    Scene("one model, bursts, 16 cores", RESNET, 1000, 16, _square(10, 100)),
    Scene("one model, steps, 16 cores", RESNET, 1000, 16, _steps((5, 40, 120, 60, 10, 90), 20)),
    Scene("one model, steady, 16 cores", RESNET, 500, 16, _poisson(50)),
    Scene("one model, clients on 4G, 16 cores", RESNET, 1000, 16, _poisson(40), truth=MOBILE),
    Scene("one model on one core each, 8 cores", SERIAL, 200, 8, _square(20, 150)),
    Scene("one model on one core each, 2 × 4 cores", SERIAL, 200, 4, _square(20, 150, 40, 20), nodes=2),
    Scene("one model, 4 × 4 cores", RESNET, 1000, 4, _steps((10, 40, 120, 60), 60), nodes=4, duration_s=240),
    Scene("tutorial: numbers.yaml", NUMBERS, 200, 2, _poisson(50)),
    Scene("tutorial: numbers.yaml, bursts", NUMBERS, 200, 2, _square(20, 300)),
    Scene("five stages, 2 cores", PAGEDIR, 1000, 2, _poisson(1)),
    Scene("five stages, 2 cores, bursts", PAGEDIR, 1000, 2, _square(0.5, 3)),
    Scene("text (ocr), 1.75 cores", READER, 900, 1.75, _square(1.75, 4)),
    Scene("chain, 16 cores", CHAIN, 1500, 16, _poisson(15)),
    Scene("chain, bursts, 16 cores", CHAIN, 1500, 16, _square(5, 25)),
    Scene("chain, steps, 16 cores", CHAIN, 1500, 16, _steps((3, 10, 25, 15, 5, 20), 20)),
    Scene("diamond, steps, 16 cores", DIAMOND, 1500, 16, _steps((3, 10, 20, 15, 5, 18), 20)),
    Scene("chain, 4 × 4 cores", CHAIN, 1500, 4, _steps((3, 8, 16, 12), 60), nodes=4, duration_s=240),
    Scene("chain, bursts, 4 × 8 cores", CHAIN, 1500, 8, _square(5, 30, 40, 10), nodes=4, duration_s=240),
    Scene("diamond, 4 × 8 cores", DIAMOND, 1500, 8, _steps((3, 10, 25, 12), 60), nodes=4, duration_s=240),
)

CANDIDATES: Final[Mapping[str, SystemChoice]] = {
    "elastic": SystemChoice("elastic"),
    "sponge": SystemChoice("sponge", {"criterion": "steady", **IDLE}),
    **{
        name: SystemChoice(name, IDLE)
        for name in (
            "biscale",
            "vertical-only",
            "mixed",
            "harbor",
            "headstart",
            "hpa",
            "kpa",
            "vpa",
            "early-drop",
            "static",
        )
    },
}


def drawn(scene: Scene, hash_text: str) -> Scene:
    """The scene with other rates (0.6 to 1.4 times as high) and another deadline (0.8 to 1.5 times as long)."""
    chance = random.Random(f"{hash_text}/{scene.name}")
    busier, longer = chance.uniform(0.6, 1.4), chance.uniform(0.8, 1.5)
    trace: dict[str, Any] = dict(scene.trace)
    for key in ("rate", "burst_rate"):
        if key in trace:
            trace[key] *= busier
    if "rates" in trace:
        trace["rates"] = [rate * busier for rate in trace["rates"]]
    name = f"{scene.name}; rate × {busier:.2f}, deadline × {longer:.2f}"
    return replace(scene, name=name, trace=trace, slo_ms=scene.slo_ms * longer)


@dataclass(frozen=True)
class Result:
    """Means over the seeds of a scene under one candidate."""

    attainment: float
    least: float
    goodput_rps: float
    cores: float
    p50_ms: float


def _play(scene: Scene, choice: SystemChoice, seeds: range) -> Result | str:
    """The result, or why the candidate cannot run the scene."""
    try:
        scenario = load_scenario(scene.declared, folder=OCR)
        rows = [run_scenario(replace(scenario, seed=seed), choice).row for seed in seeds]
    except InputError as error:
        return error.what
    shares = [row.attainment for row in rows]
    cores = fmean(row.core_seconds for row in rows) / scene.duration_s
    goodput_rps, p50_ms = fmean(row.goodput_rps for row in rows), fmean(row.p50_ms or 0.0 for row in rows)
    return Result(100 * fmean(shares), 100 * min(shares), goodput_rps, cores, p50_ms)


FIGURES: Final = (
    ("In time, %: the mean (the worst run)", "{0.attainment:.1f} ({0.least:.1f})"),
    ("Goodput, requests/s", "{0.goodput_rps:.1f}"),
    ("Cores, mean over the run (core-seconds divided by its duration)", "{0.cores:.2f}"),
    ("p50, ms", "{0.p50_ms:.0f}"),
)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--seeds", type=int, default=5, help="runs of each (default 5)")
    parser.add_argument("--systems", default=",".join(CANDIDATES), help="names, separated by commas")
    parser.add_argument("--scenes", default="", help="only scenes whose name contains this")
    parser.add_argument("--drawn", default="", metavar="HASH", help="rates, deadlines and seeds drawn from a hash")
    given = parser.parse_args()
    first = int(given.drawn[:6], 16) if given.drawn else 0
    seeds = range(first, first + given.seeds)
    scenes = [scene for scene in SCENES if given.scenes in scene.name]
    if given.drawn:
        scenes = [drawn(scene, given.drawn) for scene in scenes]
    names = given.systems.split(",")
    choices = {name: CANDIDATES.get(name) or SystemChoice(name, IDLE) for name in names}
    pairs = list(product(scenes, choices))
    with ProcessPoolExecutor(len(usable_cpus())) as pool:
        jobs = [pool.submit(_play, scene, choices[name], seeds) for scene, name in pairs]
        found = {}
        for (scene, name), job in zip(pairs, jobs, strict=True):
            found[scene.name, name] = job.result()
            say(f"{scene.name}, {name}: {found[scene.name, name]}")
    parts = []
    for title, text in FIGURES:
        rows = []
        for scene in scenes:
            results = [found[scene.name, name] for name in names]
            rows.append((scene.name, *("–" if isinstance(one, str) else text.format(one) for one in results)))
        parts.append(f"## {title}\n\n" + table(("scene", *names), rows))
    publish(
        "defaults-drawn" if given.drawn else "defaults", "Default systems", "\n\n".join(parts), write=not given.no_write
    )


if __name__ == "__main__":
    main()
