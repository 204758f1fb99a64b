"""Cold starts on hosts of their own, under Flashpoint's systems, compared with the simulator. Part of
`benchmarks.machines`, which says what it shows.

A model that is padded with unused weights starts on four nodes, from a store on a host of its own, while an excerpt of
the Twitter trace arrives, compressed in time and thinned. All systems scale alike (`atoll-rate`) and differ only in how
nodes get the weights. Starts are counted from the first request on. Each agent has a spare worker, as agents of
deployments do. Without one, starting Python and its libraries would take most of a start, and delay starts on other
hosts, because all hosts share the cores of one machine.

The links, the trace and the model are also simulated, in three ways. With the profile alone, the trace begins at
several phases of the planning period, because the phase of a live run cannot be known beforehand. With profile and
phase, it begins at that of the live run. With measured values, it also uses two things of that run that no profile has
on a machine that all hosts share: the durations of batches, and the mean time from the arrival of the weights until a
replica is ready.
"""

import hashlib
import json
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, median
from typing import Any, Final

from msgspec import Struct

from benchmarks.machines import PORT, SLOOP, sloop
from benchmarks.models import PADDING, padded, small
from benchmarks.notebook import say, table
from sloop.actions import StartWorker
from sloop.app.load import load_scenario
from sloop.demo.live import count_run, schedule_start_ns
from sloop.demo.run import dump_yaml
from sloop.errors import InputError
from sloop.events import WorkerCompleted, WorkerLost, WorkerProgressed, WorkerReady
from sloop.profile.onnx_cut import LayerGraph
from sloop.profile.profile import load_profile, path_beside
from sloop.report.plots import Figure, Panel, Series
from sloop.runlog import read_log
from sloop.serve.node.spares import SPARES_AFTER_S
from sloop.sim.scenarios import run_scenario
from sloop.sim.truth.recorded import NOT_RECORDED
from sloop.sim.world import World, recorded_in
from sloop.units import NS_PER_S, s
from sloop.vocabulary import ReplicaId, Request
from sloop_systems.comparison import data_folder
from sloop_systems.comparison.twitter import FILE
from tests.hosts import Host, Hosts
from tests.serve.fleet import Fleet, until

NODES: Final = 4
PER_NODE: Final = 2
CORES: Final = 0.15
"""The cores of a replica; few enough to leave some to server, agents, store and clients."""
PIXELS: Final = 64
PADDING_BYTES: Final = 40_000_000
STORE_BITS_S, NODE_BITS_S = 150e6, 200e6
"""The rates of the store's link and of each node's link. A copy of the model takes ten times as long as a request."""
STORE_PORT: Final = 8082
START_S, WINDOW_S, COMPRESS = 1_301_400, 600, 15
"""The excerpt of the trace that IPA calls fluctuating, compressed `COMPRESS` times: a burst of four to five times the
usual rate, for about 20 s."""
BUSY: Final = 0.8
"""The rate in the busiest second of the trace, as a fraction of what all replicas together serve."""
PEAK_RPS: Final = 274.0
DEADLINE: Final = 8
"""As a multiple of the duration of a request."""
SCALING: Final[Mapping[str, object]] = {
    "cores": CORES,
    "replicas_max": NODES * PER_NODE,
    "window_ms": 6000.0,
    "period_ms": 3000.0,
}
"""The window of `atoll-rate` is shortened as much as the trace, its period less, so that some replicas start
together."""
LEADS_S: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 2.5)
"""Phases that are simulated with the profile alone: the time from a plan to the beginning of the trace."""
SETTLED_S: Final = 9.0
"""The least time that the server has run before the trace; a multiple of the period, and longer than the window."""
SPARES: Final = 1
"""Spare workers of each agent."""
SYSTEMS: Final[Mapping[str, tuple[str, Mapping[str, object]]]] = {
    "baseline": ("baseline", {}),
    "locality": ("flashpoint", {"multicast": False}),
    "locality + chain": ("flashpoint", {}),
}
"""By its name in the tables, the system and the parameters of its `provision` policy."""
CHAIN, PARTS = "locality + chain", "locality + chain + parts"
IN_PARTS: Final[Mapping[str, tuple[str, Mapping[str, object]]]] = {
    CHAIN: SYSTEMS[CHAIN],
    PARTS: ("flashpoint", {"partition": True, "link_mbps": STORE_BITS_S / 1e6}),
}
"""The same for starts in parts, compared on a model whose padding is spread over its layers."""
PLACES: Final = 8
"""Where that model is padded, and into how many blocks it is cut."""
LIVE: Final = {**SYSTEMS, **IN_PARTS}
ORDERED: Final = tuple(LIVE)
"""The slowest first."""
SIMULATED: Final[Mapping[str, tuple[str, Mapping[str, object]]]] = {
    "gpu-faas": ("gpu-faas", {}),
    "atoll": ("atoll", {}),
}
"""Systems that no server can run as published: it cannot share loaded weights, and if it keeps files, it downloads them
once for each node, even if more transfers are ordered."""
KINDS: Final = {
    "live": "live",
    "foreseen": "simulated, profile",
    "phased": "simulated, profile and phase",
    "measured": "simulated, measured",
}
"""What is compared of a system, by field of `Compared`, with its name in the tables."""
SIMULATIONS: Final = tuple(KINDS)[1:]
"""Those that are divided by what was live."""
WITHIN: Final = 0.15
"""How far the simulator may be off."""
FETCHING: Final = "fetching"
STEPS: Final = (FETCHING, "spawning", "loading", "warming")
"""Of a start on CPU cores; to an accelerator, weights are also sent."""


class ColdStart(Struct, frozen=True):
    """One start, in seconds, from its order to readiness."""

    total_s: float
    steps_s: dict[str, float] = {}  # msgspec copies it

    @property
    def rest_s(self) -> float:
        """From the arrival of the weights on."""
        return self.total_s - self.steps_s.get(FETCHING, 0.0)


class SystemResult(Struct, frozen=True):
    """What one run gave, or several: then the starts of all, and the means."""

    starts: tuple[ColdStart, ...]
    mean_ms: float
    attainment: float
    runs: int = 1

    @property
    def start_s(self) -> float:
        """The mean cold start; 0 without any."""
        return mean(each.total_s for each in self.starts) if self.starts else 0.0

    @classmethod
    def of(cls, results: "Sequence[SystemResult]") -> "SystemResult":
        """Several runs as one result."""
        return cls(
            tuple(start for each in results for start in each.starts),
            mean(each.mean_ms for each in results),
            mean(each.attainment for each in results),
            len(results),
        )


def starts_in(records: Iterable[tuple[int, object]]) -> tuple[ColdStart, ...]:
    """The starts that were ordered after the first request, and became ready, by readiness. Parts of a model are ready
    together, when each has its layers; those that are left of a pipeline when they have all layers."""
    counted = _Starts()
    for now_ns, record in records:
        counted.take(now_ns, record)
    return tuple(counted.found)


class _Starts:
    """Counts the starts in a log."""

    def __init__(self) -> None:
        self.found: list[ColdStart] = []
        self._ordered_ns: dict[ReplicaId, int] = {}
        self._step: dict[ReplicaId, tuple[str, int]] = {}
        self._steps_ns: dict[ReplicaId, Counter[str]] = {}
        self._pipelines: dict[ReplicaId, dict[ReplicaId, bool]] = {}
        """By pipeline, its parts, and whether each has its layers."""
        self._pipeline_of: dict[ReplicaId, ReplicaId] = {}
        self._is_open = False

    def take(self, now_ns: int, record: object) -> None:
        """Count one record."""
        match record:
            case Request():
                self._is_open = True
            case StartWorker():
                self._order(now_ns, record)
            case WorkerProgressed():
                self._end_step(now_ns, record.worker)
                self._step[record.worker] = record.step, now_ns
            case WorkerReady():
                self._end_step(now_ns, record.worker)
                self._note_ready(now_ns, record.worker)
            case WorkerCompleted():
                self._add(now_ns, record.worker)
            case WorkerLost():
                self._ordered_ns.pop(record.worker, None)

    def _order(self, now_ns: int, start: StartWorker) -> None:
        if self._is_open:
            self._ordered_ns[start.worker] = now_ns
        if start.pipeline is not None:
            self._pipeline_of[start.worker] = start.pipeline
            self._pipelines.setdefault(start.pipeline, {})[start.worker] = False

    def _end_step(self, now_ns: int, replica: ReplicaId) -> None:
        name, from_ns = self._step.pop(replica, ("", now_ns))
        self._steps_ns.setdefault(replica, Counter())[name] += now_ns - from_ns

    def _note_ready(self, now_ns: int, replica: ReplicaId) -> None:
        number = self._pipeline_of.get(replica)
        if number is None:
            self._add(now_ns, replica)
            return
        parts = self._pipelines[number]
        parts[replica] = True
        for each in parts if all(parts.values()) else ():
            self._add(now_ns, each)

    def _add(self, now_ns: int, replica: ReplicaId) -> None:
        from_ns = self._ordered_ns.pop(replica, None)
        if from_ns is not None:
            steps_s = {name: spent_ns / NS_PER_S for name, spent_ns in self._steps_ns[replica].items() if name}
            self.found.append(ColdStart((now_ns - from_ns) / NS_PER_S, steps_s))


class Scene(Struct, frozen=True):
    """What all runs share."""

    folder: Path
    model: Path
    digest: str
    slo_ms: int
    trace: dict[str, object]
    duration_s: int
    seed: int
    process_s: float = 0.0
    """What the start of a process takes, by the profile."""

    def application(self, name: str, provision: Mapping[str, object], model: Mapping[str, object]) -> dict[str, Any]:
        """The application under a system, on the nodes."""
        system: dict[str, object] = {"name": name, **SCALING}
        if provision:
            system["provision"] = dict(provision)
        return {
            "name": "padded",
            "slo_ms": self.slo_ms,
            "stages": [{"name": "classify", **model, "profile": str(path_beside(self.model))}],
            "system": system,
            "cluster": {"nodes": [{"hardware": "local", "count": NODES, "cores": PER_NODE * CORES}]},
        }

    def world(self, name: str, provision: Mapping[str, object], truth: Mapping[str, object]) -> dict[str, Any]:
        """The same as a scenario."""
        application = self.application(name, provision, {"model": str(self.model)})
        return {**application, "trace": self.trace, "duration_s": self.duration_s, "truth": dict(truth)}


def prepared(folder: Path, given: Namespace, places: int = 1) -> Scene:
    """The model with its profile, and a trace that keeps its replicas busy. With several `places`, its padding is
    spread over them, and its layers are measured in as many blocks. InputError without the trace."""
    data = data_folder()
    if data is None or not (data / FILE).is_file():
        raise InputError("there is no trace", where=str(FILE), help="set SLOOP_SHARED to the folder of public data")
    model = padded(small(folder, given.cold_model, PIXELS), folder / "padded.onnx", PADDING_BYTES, places=places)
    say("profiling the model")
    passes = 2 if places == 1 else 1
    measured = ["--cores", f"{CORES},1", "--batches", 1, "--passes", passes, "--seconds", passes]
    profile = sloop("profile", model, *measured)
    own = [each for each in profile["samples"] if each["cores"] == CORES]
    batch_ms = median(each["p50_ms"] for each in own)
    thin = BUSY * NODES * PER_NODE * 1000 / batch_ms / PEAK_RPS / COMPRESS
    if thin > 1:
        raise InputError(f"a request takes only {batch_ms:.3g} ms", help="choose a larger model")
    window = {"file": str(data / FILE), "start_s": START_S, "duration_s": WINDOW_S}
    trace: dict[str, object] = {**window, "compress": COMPRESS, "thin": round(thin, 5), "repeat": given.bursts}
    duration_s = given.bursts * WINDOW_S // COMPRESS
    digest = hashlib.sha256(model.read_bytes()).hexdigest()
    if places > 1:
        sloop(
            "profile",
            model,
            *measured,
            "--layers",
            *(word for cut in cuts_of(model) for word in ("--cut", cut)),
        )
    startup = load_profile(path_beside(model)).startup
    process_s = startup.process_s if startup is not None else 0.0
    return Scene(folder, model, digest, round(DEADLINE * batch_ms), trace, duration_s, given.seed, process_s)


def cuts_of(model: Path) -> list[str]:
    """After which layers to cut a model that is padded at several places: after each place but the last, where the
    fewest tensors cross."""
    graph = LayerGraph.read(model)
    padded_at = [place for place, layer in enumerate(graph.layers) if any(map(PADDING.match, layer.reads))]
    ends = [next((end for end in graph.boundaries() if end > place), None) for place in padded_at[:-1]]
    return [graph.layers[end - 1].name for end in dict.fromkeys(ends) if end is not None]


# Live


class LiveRun(Struct, frozen=True):
    """A run under a system."""

    result: SystemResult
    log: Path
    lead_ns: int
    """How long the server had run when the trace began."""
    mbps: float
    """The payload rate of the store's link, measured before the trace."""


def live(scene: Scene, label: str) -> LiveRun:
    """A run under a system."""
    name, provision = LIVE[label]
    folder = scene.folder / label.replace(" ", "-")
    folder.mkdir()
    with Hosts(2 + NODES) as hosts:
        server, store, *nodes = hosts
        argv = [sys.executable, "-m", "http.server", str(STORE_PORT), "--directory", str(scene.folder)]
        with (folder / "store.log").open("wb") as written:
            store.run(argv, stdout=written, stderr=written)
        location = f"http://{store.address}:{STORE_PORT}/{scene.model.name}"
        in_parts = bool(provision.get("partition"))
        # The blocks of a model come from the server, which has cut it: its link stands for that of the store.
        model = str(scene.model) if in_parts else f"{location}#sha256={scene.digest}"
        application = scene.application(name, provision, {"model": model})
        env = {"SLOOP_MODELS_CACHE": "/dev/shm/models"}
        fleet = Fleet(list(hosts), folder, json.dumps(application), env=env, spares=SPARES)
        try:
            for source in (store, server) if in_parts else (store,):
                source.slow(STORE_BITS_S, is_fair=True)
            fleet.start_server()
            for number, node in enumerate(nodes):
                node.slow(NODE_BITS_S, is_fair=True)
                fleet.start_agent(f"local-{number}", node)
            fleet.until_ready(1)
            until(lambda: fleet.metric("sloop_spare_workers") == SPARES * NODES, "spare workers")
            mbps = _payload_mbps(nodes[0], location)
            world = folder / "world.yaml"
            dump_yaml(world, scene.world(name, provision, {}))
            load = ["load", f"http://127.0.0.1:{PORT}", "--trace", str(world), "--slo-ms", str(scene.slo_ms)]
            server.output([*SLOOP, *load, "--seed", str(scene.seed), "--json"], timeout_s=scene.duration_s + 120)
        finally:
            fleet.stop()
    log = folder / "state" / "log"
    (clients,) = World.from_scenario(replace(load_scenario(world), seed=scene.seed)).clients.values()
    first_ns = next(clients.trace.times_ns())
    row = count_run(log, first_ns=first_ns, duration_s=scene.duration_s).row
    result = SystemResult(starts_in(read_log(log)), row.mean_ms or 0.0, row.attainment)
    return LiveRun(result, log, schedule_start_ns(log, first_ns=first_ns), mbps)


def _payload_mbps(host: Host, location: str) -> float:
    """What a host receives of a file on its link, in Mbit/s."""
    code = f"""
import time, urllib.request
began_s = time.monotonic()
size = len(urllib.request.urlopen({location!r}).read())
print(8 * size / (time.monotonic() - began_s) / 1e6)
"""
    return float(host.output([sys.executable, "-I", "-S", "-c", code]))


# Simulated


def simulated(
    scene: Scene,
    label: str,
    mbps: float,
    *,
    lead_ns: int = 0,
    start_s: float | None = None,
    recorded: Path | None = None,
) -> SystemResult:
    """The same run in the simulator, whose store's link has this rate, if the server has run for `lead_ns` when the
    trace begins. With `start_s`, each start takes so long from the arrival of its weights on, and with `recorded`,
    batches take what they took in a log."""
    name, provision = LIVE.get(label) or SIMULATED[label]
    topology = {"store_mbps": mbps, "node_mbps": mbps * NODE_BITS_S / STORE_BITS_S}
    cold_start: dict[str, object] = {"spare_workers": SPARES, "spare_s": SPARES_AFTER_S + scene.process_s}
    if start_s is not None:
        cold_start = {"spare_workers": 0, "start_s": start_s}
    world, log = scene.folder / "simulated.yaml", scene.folder / "simulated.jsonl"
    dump_yaml(world, scene.world(name, provision, {"network": {"topology": topology}, "cold_start": cold_start}))
    scenario = replace(load_scenario(world), seed=scene.seed)
    durations = recorded_in(recorded, scenario.deployment) if recorded is not None else NOT_RECORDED
    row = run_scenario(scenario, scenario.systems[0], log=log, lead_ns=lead_ns, recorded=durations).row
    return SystemResult(starts_in(read_log(log)), row.mean_ms or 0.0, row.attainment)


def repeated(scene: Scene, label: str, mbps: float, run: LiveRun) -> SystemResult:
    """What the simulator makes of what was measured in a live run."""
    starts = run.result.starts
    start_s = mean(each.rest_s for each in starts) if starts else None
    return simulated(scene, label, mbps, lead_ns=run.lead_ns, start_s=start_s, recorded=run.log)


def foreseen(scene: Scene, label: str, mbps: float) -> SystemResult:
    """What the simulator foresees, whenever the trace begins."""
    return SystemResult.of([simulated(scene, label, mbps, lead_ns=s(SETTLED_S + lead_s)) for lead_s in LEADS_S])


# Results


class Compared(Struct, frozen=True):
    """One system: live (None if no server can), and simulated, with the profile alone, with the phase of the live run,
    and with all that was measured in it."""

    live: SystemResult | None
    foreseen: SystemResult
    phased: SystemResult | None
    measured: SystemResult | None


def cold_starts(folder: Path, given: Namespace) -> tuple[str, tuple[Figure, ...]]:
    """The tables of all systems, and a figure."""
    return compared(prepared(folder, given), SYSTEMS, SIMULATED)


def starts_in_parts(folder: Path, given: Namespace) -> tuple[str, tuple[Figure, ...]]:
    """The same of starts in parts, and of whole models along chains."""
    return compared(prepared(folder, given, PLACES), IN_PARTS)


def compared(
    scene: Scene, systems: Iterable[str], only_simulated: Iterable[str] = ()
) -> tuple[str, tuple[Figure, ...]]:
    """The tables of these systems, and a figure."""
    lived: dict[str, LiveRun] = {}
    for label in systems:
        lived[label] = run = live(scene, label)
        say(f"{label}: {len(run.result.starts)} starts of {run.result.start_s:.3g} s, {run.result.mean_ms:.4g} ms")
    mbps = median(run.mbps for run in lived.values())
    found: dict[str, Compared] = {}
    for label in (*only_simulated, *lived):
        seen = lived.get(label)
        found[label] = Compared(
            seen.result if seen is not None else None,
            foreseen(scene, label, mbps),
            simulated(scene, label, mbps, lead_ns=seen.lead_ns) if seen is not None else None,
            repeated(scene, label, mbps, seen) if seen is not None else None,
        )
    return text_of(scene, found, mbps), (figure_of(found),)


def text_of(scene: Scene, found: Mapping[str, Compared], mbps: float) -> str:
    """The page."""
    only_simulated = (
        "`gpu-faas` and `atoll` are simulated only: no server shares loaded weights among replicas, or downloads files "
        "that it keeps more than once for a node. "
    )
    in_parts = (
        f"The unused weights are spread over {PLACES} places, and the model is cut into {PLACES} blocks. The server "
        "sends the blocks to the nodes, over a link with the rate of the store's. Parts are ready when each part of "
        "their pipeline has its layers. "
    )
    about = (
        f"{scene.model.name} ({scene.model.stat().st_size / 1e6:.1f} MB) on {NODES} nodes with room for {PER_NODE} "
        f"replicas of {CORES} cores each; links of {STORE_BITS_S / 1e6:g} Mbit/s (store) and {NODE_BITS_S / 1e6:g} "
        f"(nodes). A second of the run has {COMPRESS} s of the Twitter trace (from {START_S} on, {WINDOW_S} s, "
        f"{scene.trace['repeat']} times), thinned to {scene.trace['thin']}; {scene.duration_s} s and a deadline of "
        f"{scene.slo_ms} ms. The store's link carried {mbps:.4g} Mbit/s of payload. "
        f"{in_parts if PARTS in found else only_simulated}Connections share a host's link fairly. "
        f"Each agent has {SPARES} spare worker. "
        f"`simulated, profile`: with the profile alone (mean of {len(LEADS_S)} runs, in which the trace begins at "
        f"different phases of the planning period). `simulated, profile and phase`: with the profile, and the phase of "
        f"the live run. `simulated, measured`: also with the durations of batches and the mean start (without the "
        f"fetch) of the live run."
    )
    rows = [
        (label, where, len(run.starts) / run.runs, *_starts_s(run), run.mean_ms, 100 * run.attainment)
        for label, each in found.items()
        for kind, where in KINDS.items()
        if (run := getattr(each, kind)) is not None
    ]
    steps = tuple(f"{step} s" for step in STEPS)
    columns = ("system", "", "cold starts", "p50 s", "mean s", *steps, "mean latency ms", "in time, %")
    return "\n\n".join([about, table(columns, rows), table(RATIOS, ratios(found)), order(found)])


def _starts_s(run: SystemResult) -> tuple[float | None, ...]:
    """Median and mean of the cold starts, and means of their steps, in seconds."""
    if not run.starts:
        return (None,) * (2 + len(STEPS))
    return (
        median(each.total_s for each in run.starts),
        run.start_s,
        *(mean(each.steps_s.get(step, 0.0) for each in run.starts) for step in STEPS),
    )


RATIOS: Final = (
    "simulated over live",
    *(f"{what}, {KINDS[kind].partition(', ')[2]}" for what in ("cold start", "latency") for kind in SIMULATIONS),
    f"profile and phase within {WITHIN:.0%}",
    f"measured within {WITHIN:.0%}",
)


def ratios(found: Mapping[str, Compared]) -> list[tuple[object, ...]]:
    """For each live system, the simulated means over the live ones."""
    rows: list[tuple[object, ...]] = []
    for label, each in found.items():
        if each.live is None or not each.live.start_s or not each.live.mean_ms:
            continue
        runs = [getattr(each, kind) for kind in SIMULATIONS]
        starts = [run.start_s / each.live.start_s for run in runs]
        latencies = [run.mean_ms / each.live.mean_ms for run in runs]
        within = [max(abs(pair[0] - 1), abs(pair[1] - 1)) <= WITHIN for pair in zip(starts, latencies, strict=True)]
        rows.append((label, *starts, *latencies, *within[1:]))
    return rows


def order(found: Mapping[str, Compared]) -> str:
    """Whether cold starts and latencies have the published order, live and simulated."""
    labels, lines = [label for label in ORDERED if label in found], []
    for where, name in KINDS.items():
        runs = [run for label in labels if (run := getattr(found[label], where)) is not None]
        for what, values in (
            ("cold start", [run.start_s for run in runs]),
            ("latency", [run.mean_ms for run in runs]),
        ):
            holds = len(values) == len(labels) and values == sorted(values, reverse=True) and len(set(values)) > 1
            lines.append(f"- mean {what}, {name}: {'yes' if holds else '**no**'}")
    return f"In the order {' > '.join(labels)}:\n\n" + "\n".join(lines)


def figure_of(found: Mapping[str, Compared]) -> Figure:
    """Bars of cold starts and latencies."""
    names = tuple(found)

    def series(value: str, factor: float) -> tuple[Series, ...]:
        rows = {
            name: [(place, run) for place, each in enumerate(found.values()) if (run := getattr(each, where))]
            for where, name in KINDS.items()
        }
        return tuple(
            Series(
                name,
                tuple(float(place) for place, _ in row),
                tuple(factor * getattr(run, value) for _, run in row),
                kind="bars",
            )
            for name, row in rows.items()
        )

    panels = (
        Panel(y_label="mean cold start, s", series=series("start_s", 1.0), ticks=names),
        Panel(y_label="mean latency, s", series=series("mean_ms", 1e-3), ticks=names),
    )
    alt = "; ".join(
        f"{label}: {each.live.start_s:.2g} s live, {each.foreseen.start_s:.2g} s simulated"
        for label, each in found.items()
        if each.live is not None
    )
    return Figure(
        name="systems",
        title="Cold starts on hosts, live and simulated",
        x_label="",
        panels=panels,
        alt=f"Mean cold starts. {alt}.",
    )
