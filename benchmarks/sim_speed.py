"""The simulator's speed: requests per second, compared with SimPy, salabim and a bare loop over a heap.

    python -m benchmarks.sim_speed [--quick] [--rounds 5]
    python -m benchmarks.sim_speed --command-only            # only `sloop simulate` as users run it against SimPy
    python -m benchmarks.sim_speed --scale-only [--quick]    # only 10,000 replicas on 1,000 nodes against SimPy
    python -m benchmarks.sim_speed --hour-only               # only Flashpoint's hour of the Twitter trace against SimPy

All simulators simulate two queues (`benchmarks.simulators`): M/M/8, and four servers with batches of up to 8 requests
of two priorities. Each run is a process that measures its own processor time, from building the model to the last
event, without starting the interpreter and importing modules. `sloop simulate` is also timed from outside, as a whole
process, with and without start-up. One round runs each simulator once, in turn, so that a slow minute of the machine
affects all; ratios are taken within a round. Before that, all simulators have to find the same mean waits.
"""

import argparse
import json
import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple

from msgspec import structs

from benchmarks.notebook import ROOT, arguments, publish, say, table
from benchmarks.peers.environments import python_of
from benchmarks.peers.peer import Environment
from benchmarks.simulators.ours import declared
from benchmarks.simulators.setting import BATCHING, LOAD, MANY_SERVERS, SERVICE_S, Case
from sloop.report.plots import Figure, Panel, Series
from sloop_systems.comparison import data_folder
from sloop_systems.flashpoint.experiments.results import LABELS, hour
from sloop_systems.flashpoint.experiments.runs import FlashpointTrial, Technique, trace_of
from sloop_systems.flashpoint.experiments.traces import MAIN
from tests.sim.theory.queues import wait_many_s

PEERS: Final = Environment("sim", ("simpy==4.1.2", "salabim==26.0.9"))
SERVERS: Final = {MANY_SERVERS: 8, BATCHING: 4}
CHECKED: Final = 500_000
"""Requests of the runs whose waits are compared."""
APART_MAX: Final = 0.15
"""How far mean waits may differ at that length; successive waits are far from independent."""
LONG: Final = 1_000_000
"""Runs of this many requests are made once."""
MIB: Final = 2**20
RUN_S_MAX: Final = 900
SCALE_RPS: Final = 500
SCALE_S: Final = 3_600.0
HOUR_TECHNIQUES: Final[tuple[Technique, ...]] = ("baseline", "lc+mc+mp", "cheapest-start")


class Simulator(NamedTuple):
    """A simulator, and the style in which the model is written in it."""

    name: str
    program: str
    style: str = "plain"
    weight: float = 1.0
    """The share of the requests that it is given: a slow simulator needs no long run to be timed well."""


class SpeedRun(NamedTuple):
    """One run."""

    requests: int
    taken_s: float
    begin_s: float
    """The part of it before the first request; 0 if that is not measured."""
    peak_bytes: int
    mean_ms: dict[str, float]

    @property
    def rps(self) -> float:
        """Simulated requests per second."""
        return self.requests / self.taken_s

    @property
    def each_us(self) -> float:
        """Microseconds per request, without start-up."""
        return 1e6 * (self.taken_s - self.begin_s) / self.requests


OURS: Final = Simulator("sloop, nothing counted or checked", "ours")
CHECKING: Final = Simulator("sloop, all records checked", "ours", "checked")
COUNTING: Final = Simulator("sloop, figures and first records checked (`sloop simulate`)", "ours", "counted")
LIMIT: Final = Simulator("bare heap loop", "bare")
RESOURCE: Final = Simulator("SimPy, Resource, a process per request", "simpy_models", "resource")
SALABIM: Final = Simulator("salabim, Resource, a component per request", "salabim_models", "resource", 0.05)
SIDES: Final = {
    MANY_SERVERS: (
        OURS,
        CHECKING,
        COUNTING,
        RESOURCE,
        Simulator("SimPy, Store, a process per server", "simpy_models", "store"),
        Simulator("SimPy, bare events, a process per server", "simpy_models", "by-hand"),
        SALABIM,
        Simulator("salabim, bare, a component per server", "salabim_models", "by-hand"),
        LIMIT,
    ),
    BATCHING: (
        OURS,
        CHECKING,
        COUNTING,
        Simulator("SimPy, bare events, a process per server", "simpy_models", "by-hand"),
        Simulator("salabim, bare, a component per server", "salabim_models", "by-hand"),
        LIMIT,
    ),
}


def run(  # parameters in the order of the command line
    side: Simulator, queue: str, requests: int, *, servers: int = 0, busy: int = 0, seed: int = 1, waits: bool = False
) -> SpeedRun:
    """Simulate in a process of its own."""
    python = python_of(PEERS) if side.program.endswith("_models") else Path(sys.executable)
    command = [str(python), "-m", f"benchmarks.simulators.{side.program}", "--queue", queue, "--style", side.style]
    command += ["--requests", str(requests), "--servers", str(servers or SERVERS[queue]), "--busy", str(busy)]
    command += ["--seed", str(seed), *(["--waits"] if waits else [])]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True, timeout=RUN_S_MAX)
    return SpeedRun(requests, **json.loads(done.stdout))


class Command(NamedTuple):
    """A whole process: processor seconds for a run, and for one of a single request."""

    name: str
    total_s: float
    start_s: float

    @property
    def run_s(self) -> float:
        """Without start-up: the interpreter, modules, reading files, building the model."""
        return self.total_s - self.start_s


def commands(requests: int, seed: int) -> list[Command]:
    """`sloop simulate` with several options, and SimPy's Resource, on M/M/8, one after the other."""
    with TemporaryDirectory(prefix="sloop-bench-") as name:
        files = {}
        for count in (requests, 1):
            case = Case(MANY_SERVERS, count, SERVERS[MANY_SERVERS], SERVERS[MANY_SERVERS], seed, "", waits=False)
            files[count] = Path(name) / f"{count}.yaml"
            files[count].write_text(json.dumps(declared(case)))

        def ours(label: str, *options: str) -> Command:
            given = [sys.executable, "-m", "sloop", "simulate"]
            return Command(label, *(process_s([*given, str(files[count]), *options]) for count in (requests, 1)))

        def simpy() -> Command:
            given = [str(python_of(PEERS)), "-m", "benchmarks.simulators.simpy_models", "--style", "resource"]
            return Command(RESOURCE.name, *(process_s([*given, "--requests", str(n)]) for n in (requests, 1)))

        log = str(Path(name) / "log.jsonl")
        return [
            ours("`sloop simulate`", "--json"),
            ours("`sloop simulate --check`", "--json", "--check"),
            ours("`sloop simulate --log`", "--json", "--log", log),
            simpy(),
        ]


def scale_cases() -> dict[str, dict[str, Any]]:
    """Scenarios of `SCALE_RPS` requests per second, by name; all of one stage in batches of one."""

    def case(nodes: int, service_ms: float, **system: object) -> dict[str, Any]:
        latency_ms = {"form": "quadratic", "alpha": 0.0, "beta": 0.0, "gamma": service_ms}
        profile = {"latency_ms": latency_ms, "max_batch": 1, "max_cores": 1}
        return {
            "name": "scale",
            "slo_ms": 40 * service_ms,
            "stages": [{"name": "only", "variants": [{"name": "a", "profile": profile}]}],
            "system": system,
            "cluster": {"nodes": [{"hardware": "custom", "count": nodes, "cores": 10, "memory_bytes": 10**9}]},
            "trace": {"kind": "poisson", "rate": SCALE_RPS},
            "truth": {"service": {"ratio": 1.0, "shape": "exponential"}},
        }

    static = {"name": "static", "drop": "never", "order": "fifo", "batch_max": 1}
    return {
        "8 replicas": case(1, 10, **static, replicas=8),
        "10,000 replicas on 1,000 nodes, 5 of them busy": case(1_000, 10, **static, replicas=10_000),
        "10,000 replicas on 1,000 nodes, 8,000 of them busy": case(1_000, 16_000, **static, replicas=10_000),
        "fa2 on 1,000 nodes, which plans for some 14 replicas": case(1_000, 20, name="fa2"),
    }


def scale(duration_s: float, rounds: int, seed: int) -> str:
    """A table of whole processes: `sloop simulate` of many replicas, and SimPy's M/M/8 with as many requests. The
    smallest run, of a second, tells what it takes to start."""
    requests, found = round(duration_s * SCALE_RPS), dict[str, list[Command]]()
    with TemporaryDirectory(prefix="sloop-bench-") as name:
        file = Path(name) / "scale.yaml"

        def ours(case: dict[str, Any], length_s: float, seed: int) -> float:
            file.write_text(json.dumps(case | {"duration_s": length_s, "seed": seed}))
            return process_s([sys.executable, "-m", "sloop", "simulate", str(file), "--json"])

        simpy = [str(python_of(PEERS)), "-m", "benchmarks.simulators.simpy_models", "--style", "resource"]
        for number in range(rounds):
            for label, case in scale_cases().items():
                say(f"round {number + 1} of {rounds}: {label}")
                made = Command(label, *(ours(case, length_s, seed + number) for length_s in (duration_s, 1.0)))
                found.setdefault(label, []).append(made)
            say(f"round {number + 1} of {rounds}: SimPy")
            theirs = Command(
                RESOURCE.name, *(process_s([*simpy, "--requests", str(count)]) for count in (requests, SCALE_RPS))
            )
            found.setdefault(RESOURCE.name, []).append(theirs)
    rows: list[tuple[object, ...]] = []
    for label, runs in found.items():
        ratios = [run.total_s / theirs.total_s for run, theirs in zip(runs, found[RESOURCE.name], strict=True)]
        total_s, start_s = median(run.total_s for run in runs), median(run.start_s for run in runs)
        spread = f"{min(ratios):.2f} … {max(ratios):.2f}"
        rows.append((label, total_s, start_s, 1e6 * (total_s - start_s) / requests, median(ratios), spread))
    columns = ("command", "processor s", "of it for the first second", "µs a request", "times SimPy's", "in the rounds")
    return (
        f"Many replicas: {duration_s:,.0f} s of a trace of {SCALE_RPS} requests/s, {requests:,} requests, and SimPy's "
        f"M/M/8 with as many. Whole processes, start included, medians of {rounds} rounds in which each ran once; "
        "10,000 replicas are asked to take at most 3 times as long as SimPy:\n\n" + table(columns, rows)
    )


def hour_of_twitter(rounds: int, seed: int) -> str:
    """A table of whole processes: Flashpoint's hour of the Twitter trace over 1,600 accelerators, and SimPy's M/M/8
    with as many requests. Where the public data are missing, a generated trace replaces it."""
    requests, found = sum(trace_of(hour_trial("baseline")).counts_per_s()), dict[str, list[float]]()
    for number in range(rounds):
        for technique in HOUR_TECHNIQUES:
            say(f"round {number + 1} of {rounds}: {LABELS[technique]}")
            trial = structs.replace(hour_trial(technique), seed=seed + number)
            play = f"from sloop_systems.flashpoint.experiments.runs import FlashpointTrial; {trial!r}.play()"
            found.setdefault(LABELS[technique], []).append(process_s([sys.executable, "-c", play]))
        say(f"round {number + 1} of {rounds}: SimPy")
        simpy = [str(python_of(PEERS)), "-m", "benchmarks.simulators.simpy_models", "--style", "resource"]
        found.setdefault(RESOURCE.name, []).append(process_s([*simpy, "--requests", str(requests)]))
    rows: list[tuple[object, ...]] = []
    for label, runs_s in found.items():
        ratios = [own_s / theirs_s for own_s, theirs_s in zip(runs_s, found[RESOURCE.name], strict=True)]
        taken_s = median(runs_s)
        rows.append(
            (label, taken_s, 1e6 * taken_s / requests, median(ratios), f"{min(ratios):.2f} … {max(ratios):.2f}")
        )
    return (
        f"An hour of the Twitter trace (from {MAIN} s on, {requests:,} requests) over 1,600 accelerators on 200 hosts, "
        "under Atoll's policy, with the transfers of the weights over the network, by technique for cold starts; and "
        "SimPy's M/M/8 with as many requests. Whole processes, start and reading of the trace included, medians of "
        f"{rounds} rounds in which each ran once; asked is at most twice as long as SimPy:\n\n"
        + table(("run", "processor s", "µs a request", "times SimPy's", "in the rounds"), rows)
    )


def hour_trial(technique: Technique) -> FlashpointTrial:
    """The hour with this technique."""
    data = data_folder()
    return structs.replace(hour(MAIN, technique), data="" if data is None else str(data))


def process_s(command: Sequence[str]) -> float:
    """Processor seconds, in user and system mode, of a whole process and what it starts."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=True, timeout=RUN_S_MAX)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def as_users_run_it(requests: int, rounds: int, seed: int) -> tuple[str, dict[str, tuple[float, float]]]:
    """A table of whole processes, and the speed of each relative to SimPy, without and with start-up."""
    found: dict[str, list[Command]] = {}
    for number in range(rounds):
        say(f"whole processes: round {number + 1} of {rounds}")
        for command in commands(requests, seed + number):
            found.setdefault(command.name, []).append(command)
    simpy = found[RESOURCE.name]
    rows: list[tuple[object, ...]] = []
    ratios: dict[str, tuple[float, float]] = {}
    for name, runs in found.items():
        pairs = list(zip(simpy, runs, strict=True))
        ratios[name] = (
            median(theirs.run_s / ours.run_s for theirs, ours in pairs),
            median(theirs.total_s / ours.total_s for theirs, ours in pairs),
        )
        total_s, start_s = median(run.total_s for run in runs), median(run.start_s for run in runs)
        each_us = 1e6 * median(run.run_s for run in runs) / requests
        rows.append((name, total_s, start_s, each_us, *ratios[name]))
    columns = ("command", "processor s", "of it to start", "µs a request", "times as fast as SimPy", "start included")
    return table(columns, rows), ratios


def agreement(seed: int) -> list[tuple[object, ...]]:
    """The mean waits of all simulators: a row for each queue and class. SystemExit if they do not simulate one
    queue."""
    rows: list[tuple[object, ...]] = []
    for queue, classes in ((MANY_SERVERS, ("all",)), (BATCHING, ("urgent", "patient"))):
        sides = [side for side in SIDES[queue] if side.style in ("plain", "by-hand")]
        say(f"{queue}: do {len(sides)} sides find the same waits?")
        seen = [run(side, queue, CHECKED, seed=seed, waits=True) for side in sides]
        for kind in classes:
            found = [run.mean_ms[kind] for run in seen]
            theory_ms = 1e3 * wait_many_s(SERVERS[queue], LOAD) if queue == MANY_SERVERS else None
            centre = theory_ms or median(found)
            if max(abs(value / centre - 1) for value in found) > APART_MAX:
                raise SystemExit(f"{queue}, {kind}: mean waits {found} ms are not those of one queue")
            rows.append((f"{queue}, {kind}", theory_ms, *found))
    return rows


def compared(queue: str, requests: int, rounds: int, seed: int) -> list[tuple[object, ...]]:
    """The speed of each simulator, and its ratio to ours in the same round."""
    sides = SIDES[queue]
    seen: dict[Simulator, list[SpeedRun]] = {side: [] for side in sides}
    for number in range(rounds):
        say(f"{queue}: round {number + 1} of {rounds}")
        for side in sides:
            seen[side].append(run(side, queue, round(requests * side.weight), seed=seed + number))
    rows: list[tuple[object, ...]] = []
    for side in sides:
        ratios = [ours.rps / theirs.rps for ours, theirs in zip(seen[OURS], seen[side], strict=True)]
        speed_rps, peak_bytes = median(run.rps for run in seen[side]), max(run.peak_bytes for run in seen[side])
        spread = f"{min(ratios):.2f} … {max(ratios):.2f}"
        rows.append((side.name, round(speed_rps), 1e6 / speed_rps, median(ratios), spread, peak_bytes / MIB))
    return rows


def median_runs(side: Simulator, cases: Sequence[tuple[int, int, int]], seed: int, rounds: int) -> list[SpeedRun]:
    """The run of median speed for each case (requests, servers, servers that the load is for)."""
    found: list[SpeedRun] = []
    for requests, servers, busy in cases:
        say(f"{side.name}: {requests:,} requests, {servers:,} servers, {busy:,} busy")
        runs = [
            run(side, MANY_SERVERS, requests, servers=servers, busy=busy, seed=seed + number)
            for number in range(rounds if requests < LONG else 1)
        ]
        found.append(sorted(runs, key=lambda run: run.each_us)[len(runs) // 2])
    return found


def against_requests(quick: bool, seed: int, rounds: int) -> tuple[str, Figure, list[SpeedRun]]:
    counts = (10_000, 100_000) if quick else (10_000, 100_000, 1_000_000, 10_000_000)
    servers = SERVERS[MANY_SERVERS]
    sides = {OURS: counts, CHECKING: counts[:3], RESOURCE: counts[:3], LIMIT: counts}
    seen = {
        side: median_runs(side, [(count, servers, servers) for count in of], seed, rounds) for side, of in sides.items()
    }
    rows = [
        (run.requests, side.name, round(run.rps), 1e6 / run.rps, run.peak_bytes / MIB)
        for place, _ in enumerate(counts)
        for side, runs in seen.items()
        for run in runs[place : place + 1]
    ]
    columns = ("requests", "side", "requests/s", "µs each", "peak memory, MiB")
    figure = _figure("requests", "Cost against length: M/M/8", "requests", [f"{count:,}" for count in counts], seen)
    return table(columns, rows), figure, seen[OURS]


def against_replicas(quick: bool, seed: int, rounds: int) -> tuple[str, Figure, list[SpeedRun]]:
    """Runs with more and more replicas: once all loaded, once with the load of ten and the others idle."""
    counts = (1, 10, 100, 1_000) if quick else (1, 10, 100, 1_000, 10_000)
    requests = 50_000 if quick else 500_000
    idle = Simulator("sloop, load for ten of them", OURS.program)
    loaded = [(max(requests, 100 * count), count, count) for count in counts]
    few = [(requests // 5, count, min(count, 10)) for count in counts]
    seen = {
        OURS: median_runs(OURS, loaded, seed, rounds),
        idle: median_runs(idle, few, seed, rounds),
        RESOURCE: median_runs(RESOURCE, [(requests // 5, count, count) for _, count, _ in loaded], seed, 1),
    }
    rows = [
        (count, seen[OURS][place].begin_s, *(runs[place].each_us for runs in seen.values()))
        for place, count in enumerate(counts)
    ]
    columns = ("replicas", "to start them, s", *(f"{side.name}: µs a request" for side in seen))
    figure = _figure("replicas", "Cost against replicas: M/M/c", "replicas", [f"{count:,}" for count in counts], seen)
    return table(columns, rows), figure, seen[OURS]


def _figure(name: str, title: str, x_label: str, ticks: Sequence[str], seen: dict[Simulator, list[SpeedRun]]) -> Figure:
    """A plot of requests per second with two logarithmic axes."""
    series = tuple(
        Series(side.name, tuple(range(len(runs))), tuple(1e6 / run.each_us for run in runs))
        for side, runs in seen.items()
    )
    says = "; ".join(f"{line.name}: {', '.join(f'{value:,.0f}' for value in line.y)}" for line in series)
    return Figure(
        name=name,
        title=title,
        x_label=x_label,
        panels=(Panel(y_label="requests/s", series=series, ticks=tuple(ticks), log=True),),
        alt=f"Requests simulated per second against {x_label} ({', '.join(ticks)}). {says}.",
    )


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="rounds, of which medians are taken (default 5)")
    parser.add_argument("--requests", type=int, default=200_000, help="requests in each compared run (default 200,000)")
    parser.add_argument("--quick", action="store_true", help="two rounds of short runs, up to 100,000 requests")
    parser.add_argument(
        "--command-only", action="store_true", help="only print how fast `sloop simulate` is as users run it"
    )
    parser.add_argument("--scale-only", action="store_true", help="only print how fast it is with 10,000 replicas")
    parser.add_argument("--hour-only", action="store_true", help="only print how fast an hour of the Twitter trace is")
    given = parser.parse_args()
    if given.scale_only:
        sys.stdout.write(scale(SCALE_S / 30 if given.quick else SCALE_S, min(given.rounds, 3), given.seed) + "\n")
        return
    if given.hour_only:
        sys.stdout.write(hour_of_twitter(min(given.rounds, 3), given.seed) + "\n")
        return
    if given.command_only:
        sys.stdout.write(as_users_run_it(given.requests, 2 if given.quick else given.rounds, given.seed)[0] + "\n")
        return
    text, figures = measured(given)
    publish("sim-speed", "The simulator's speed", text, figures, write=not given.no_write)


def requirements(ratio: float, command: tuple[float, float], long: Sequence[SpeedRun], wide: Sequence[SpeedRun]) -> str:
    """The required speeds and the measured ones.

    `ratio` compares the core alone with SimPy, `command` the whole of `sloop simulate`; `long` are runs of growing
    length, `wide` runs with a growing number of replicas.
    """
    peak_bytes, by_length = long[-1].peak_bytes, long[-1].each_us / long[1].each_us
    by_replicas = wide[-1].each_us / wide[1].each_us
    rows = [
        ("M/M/8 in SimPy's Resource, times as fast: the core alone", "≥ 2", ratio, ratio >= 2),
        ("M/M/8 in SimPy's Resource, times as fast: `sloop simulate`", "≥ 1", command[0], command[0] >= 1),
        ("the same with the start of both processes", "", command[1], None),
        (f"µs a request: {long[-1].requests:,} over {long[1].requests:,}", "≤ 1.1", by_length, by_length <= 1.1),
        (f"memory of {long[-1].requests:,} requests, MiB", "≤ 2,048", peak_bytes / MIB, peak_bytes <= 2048 * MIB),
        ("µs a request: most replicas over ten", "≤ 2", by_replicas, by_replicas <= 2),
    ]
    return table(("", "asked", "measured", "met"), rows)


def measured(given: argparse.Namespace) -> tuple[str, list[Figure]]:
    """Measure; the text and the figures of the page."""
    rounds, requests = (2, 50_000) if given.quick else (given.rounds, given.requests)
    waits = agreement(given.seed)
    columns = ("side", "requests/s", "µs each", "sloop is times as fast", "in the rounds", "peak memory, MiB")
    parts = [
        f"Two queues at a load of {LOAD:g}. M/M/8: exponential service of mean {1e3 * SERVICE_S:g} ms, first come "
        "first served. Batching: four servers that take what waits, up to 8, urgent requests before patient ones, a "
        "batch of b in (10 + 2b) ms × an exponential factor; in sloop, two deadlines under earliest deadline first. "
        "sloop runs the core and the policies that a live server runs, a decision for each event; the others run "
        "the two queues written for the purpose, in the styles named. Each run is a process; processor seconds "
        f"from building the model to its end, medians of {rounds} rounds in which every side ran once; the same "
        "interpreter for all.",
        "All sides simulate the same queue, mean waits in ms:",
        table(
            ("queue", "theory", "sloop", "SimPy", "salabim", "heap loop"),
            waits,
        ),
    ]
    ratios: dict[tuple[str, object], object] = {}
    for queue, title in ((MANY_SERVERS, "M/M/8"), (BATCHING, "Batches of two priorities")):
        rows = compared(queue, requests, rounds, given.seed)
        ratios |= {(queue, row[0]): row[3] for row in rows}
        parts += [f"{title}, {requests:,} requests (salabim's manual style: a twentieth):", table(columns, rows)]
    long, long_figure, ours_long = against_requests(given.quick, given.seed, min(rounds, 2))
    wide, wide_figure, ours_wide = against_replicas(given.quick, given.seed, min(rounds, 2))
    parts += ["Cost against the number of requests:", long, "Cost against the number of replicas:", wide]
    whole, as_commands = as_users_run_it(requests, rounds, given.seed)
    parts += [
        f"Whole processes, M/M/8, {requests:,} requests; a run of one request tells what it takes to start:",
        whole,
    ]
    parts.append(scale(SCALE_S / 30 if given.quick else SCALE_S, min(rounds, 2), given.seed))
    ratio = ratios[MANY_SERVERS, RESOURCE.name]
    assert isinstance(ratio, float)
    parts.insert(1, requirements(ratio, as_commands["`sloop simulate`"], ours_long, ours_wide))
    return "\n\n".join(parts), [long_figure, wide_figure]


if __name__ == "__main__":
    main()
