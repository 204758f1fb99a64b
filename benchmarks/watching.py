"""The page, what-ifs and shadows beside a real load: what they cost a server, and whether what they show is so.

    python -m benchmarks.watching hour [--seconds 3600]
    python -m benchmarks.watching viewers [--pairs 6] [--seconds 20]
    python -m benchmarks.watching shadow [--seconds 600]

`hour`: four viewers of the page beside a light load under an autopilot with a shadow. At the end, all that they were
told, delta by delta, is compared with the server's log, and with what a new viewer is told. `viewers`: goodput of a
server at 80 % of what it can take, in turn with sixteen viewers and what-ifs one after the other, and without.
`shadow`: what shadows said of each minute of a trace, and what the same systems then had when they served it
themselves. Its model waits instead of computing, so that other work on the machine changes neither.
"""

import asyncio
import contextlib
import json
import multiprocessing
import os
import time
from argparse import Namespace
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.synchronize import Event
from pathlib import Path
from statistics import fmean, stdev
from threading import Thread
from typing import Any, Final
from urllib.parse import urlsplit
from urllib.request import Request as HttpRequest
from urllib.request import urlopen

import numpy as np

from benchmarks.attacks import own_memory_bytes
from benchmarks.models import perceptron, small
from benchmarks.notebook import arguments, children, publish, say, server_pid, table, workspace
from benchmarks.peers.load import closed_at_sloop
from benchmarks.watch import wait_ready
from sloop.actions import Decided, End, Rollout
from sloop.app.application import SystemChoice
from sloop.demo.live import serving
from sloop.demo.run import dump_yaml
from sloop.load import LoadPlan, LoadResult, run_load
from sloop.page.picture import COUNTS, DECISIONS, LEVELS
from sloop.runlog import read_log
from sloop.units import NS_PER_S, s, to_ms
from sloop.vocabulary import Request
from sloop.workload import Trace, trace_of

LOOKS: Final = 6
"""How often the hour's memory is measured after its beginning."""
SETTLE_S: Final = 6.0
"""After the load, for its last ends to be in the log and on the page."""
STREAMS, VIEWERS = 4, 16
HOUR_RPS: Final = 20.0
SHORT_SLO_SHARE: Final = 0.02
LOAD_SHARE: Final = 0.8
TRACE_SEED: Final = 417706
"""Drawn before the first run."""
RATES_RPS: Final = (10.0, 80.0)
"""Each minute's rate is drawn between these, on a logarithmic scale."""
WAITING_MODEL: Final = '''"""A model that waits as long as its profile says."""

import time

import numpy as np


class Model:
    inputs = {"x": ("FP32", (-1, 4))}
    outputs = {"y": ("FP32", (-1, 1))}
    joins_rows = True

    def run(self, x: np.ndarray) -> np.ndarray:
        time.sleep(0.020 + 0.015 * len(x))
        return x[:, :1]
'''
WAITING_PROFILE: Final[Mapping[str, Any]] = {
    "latency_ms": {"form": "amdahl", "gamma": 0.01, "epsilon": 0.01, "delta": 15, "eta": 21},
    "max_batch": 4,
    "max_cores": 1,
    "load_s": 1,
    "memory_bytes": 60_000_000,
}
SHADOWS: Final[Sequence[Mapping[str, Any]]] = (
    {"name": "hpa", "cores": 0.25, "target": 0.6, "stabilisation_s": 60},
    {"name": "kpa", "cores": 0.25, "concurrency": 2, "replicas_min": 1},
)


# Viewers


@dataclass(eq=False)
class Viewer:
    """A viewer of the page, who reads it as the page's own code does."""

    counts: dict[str, dict[int, list[float]]] = field(default_factory=lambda: defaultdict(dict))
    levels: dict[str, dict[int, list[float]]] = field(default_factory=lambda: defaultdict(dict))
    totals: dict[str, dict[str, int]] = field(default_factory=dict)
    decisions: set[str] = field(default_factory=set)
    shadows: dict[str, dict[int, dict[str, Any]]] = field(default_factory=lambda: defaultdict(dict))
    """By label and second of the log, what it said of the only application."""
    events: int = 0
    wholes: int = 0
    longest_gap_s: float = 0.0
    ends: list[str] = field(default_factory=list)
    """Why its connection ended, each time."""

    async def follow(self, page: str, *, keep: bool = True) -> None:
        """Read until cancelled, and connect again if the connection ends."""
        while True:
            try:
                await self._read(page, keep=keep)
            except (OSError, EOFError) as error:
                self.ends.append(str(error))
            await asyncio.sleep(1)

    async def _read(self, page: str, *, keep: bool) -> None:
        where = urlsplit(page)
        reader, writer = await asyncio.open_connection(where.hostname, where.port)
        try:
            last, last_s = 0, time.monotonic()
            while True:
                writer.write(f"GET /events?after={last} HTTP/1.1\r\nhost: {where.netloc}\r\n\r\n".encode())
                head = await reader.readuntil(b"\r\n\r\n")
                size = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
                answer = json.loads(await reader.readexactly(size))
                last, now_s = answer["number"], time.monotonic()
                self.longest_gap_s, last_s = max(self.longest_gap_s, now_s - last_s), now_s
                self.events += len(answer["events"])
                for event in answer["events"] if keep else ():
                    self.take(event)
        finally:
            writer.close()

    def take(self, event: Mapping[str, Any]) -> None:
        """Take up an event."""
        picture = event["picture"]
        self.totals = picture.get("totals", self.totals)
        self.decisions |= {json.dumps(row, sort_keys=True) for row in picture.get("decisions", ())}
        for label, told in event["shadows"].items():
            for row in told.get("applications", {}).values():
                self.shadows[label][int(told["at_s"])] = row
        if event["kind"] == "whole":
            self.wholes += 1
            for name, series in picture.get("series", {}).items():
                self.counts[name].update({row[0]: row for row in series["counts"]})
                self.levels[name].update({row[0]: row for row in series["levels"]})
            return
        for name, rows in picture.get("counts", {}).items():
            self.counts[name].update({row[0]: row for row in rows.values()})
        for name, rows in picture.get("levels", {}).items():
            self.levels[name].update({row[0]: row for row in rows})


@contextlib.contextmanager
def watching(page: str, count: int) -> Iterator[list[Viewer]]:
    """Viewers of the page, in a thread, as long as the block runs."""
    viewers, loop = [Viewer() for _ in range(count)], asyncio.new_event_loop()

    async def follow() -> None:
        await asyncio.gather(*(viewer.follow(page) for viewer in viewers))

    def run() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            loop.run_until_complete(task)

    task = loop.create_task(follow())
    thread = Thread(target=run)
    thread.start()
    try:
        yield viewers
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join()
        loop.close()


def page_pid() -> int:
    """The process of the page of the server that this process has started."""
    return next(pid for pid, command in children(server_pid()) if "sloop.page.process" in command)


# An hour


@dataclass(slots=True)
class Told:
    """What a log says of its only application, counted here record by record."""

    counts: dict[int, list[int]]
    """By the second of the arrival, from the first record on."""
    latencies_ms: dict[int, list[float]]
    """By the second of the end."""
    decisions: int

    @classmethod
    def of(cls, log: Path) -> "Told":
        """Count the records of a log."""
        counts, latencies, decisions = dict[int, list[int]](), defaultdict[int, list[float]](list), 0
        second_of, sent_ns, begun_ns = dict[int, int](), dict[int, int](), -1
        for now_ns, record in read_log(log):
            begun_ns = now_ns if begun_ns < 0 else begun_ns
            if isinstance(record, Request):
                second = (now_ns - begun_ns) // NS_PER_S
                second_of[record.id], sent_ns[record.id] = second, record.sent_ns
                counts.setdefault(second, [second, *(0 for _ in COUNTS[1:])])[1] += 1
            elif isinstance(record, End):
                counts[second_of.pop(record.request)][COUNTS.index(record.outcome.value)] += 1
                took_ms = to_ms(now_ns - sent_ns.pop(record.request))
                if record.outcome.value in ("served", "late"):
                    latencies[now_ns // NS_PER_S].append(took_ms)
            elif isinstance(record, Decided | Rollout):
                decisions += 1
        return cls(counts, latencies, decisions)

    def differences(self, counts: Mapping[int, Sequence[float]], levels: Mapping[int, Sequence[float]]) -> int:
        """How many seconds are shown with other counts or percentiles."""
        wrong = {at for at, row in counts.items() if list(row) != self.counts.get(at, [at, *(0 for _ in COUNTS[1:])])}
        wrong |= {at for at in self.counts if at not in counts and at >= min(counts)}
        for at, row in levels.items():
            took = self.latencies_ms.get(at, [])
            seen = np.percentile(took, (50, 99), method="higher").round(3).tolist() if took else [None] * 2
            if list(row[1:3]) != seen:
                wrong.add(at)
        return len(wrong)


def hour(folder: Path, given: Namespace) -> str:
    """Watch a server under a light load."""
    seconds = given.seconds or 3_600.0
    app = {
        "name": "watched",
        "slo_ms": 150,
        "stages": [{"name": "only", "model": str(perceptron(folder, width=256, layers=2))}],
        "system": {"name": "autopilot", "among": [{"name": "static", "cores": 0.5}, "elastic"], "every_s": 300},
        "shadow": ["hpa"],
    }
    dump_yaml(folder / "app.yaml", app)
    with serving(folder / "app.yaml", folder / "state") as server, watching(server.page, STREAMS) as viewers:
        page, looks = page_pid(), list[tuple[object, ...]]()

        def look() -> None:
            found = own_memory_bytes(page), own_memory_bytes(server_pid())
            looks.append((round(time.monotonic() - begun_s), *(each / 2**20 for each in found)))
            say(f"after {looks[-1][0]} s: page {looks[-1][1]:.1f} MiB, deciding process {looks[-1][2]:.1f} MiB")

        begun_s = time.monotonic()
        look()
        sending = Thread(target=_send, args=(server.http, seconds, given.seed))
        sending.start()
        for number in range(LOOKS):
            time.sleep(max(0.0, begun_s + (number + 1) * seconds / LOOKS - time.monotonic()))
            look()
        sending.join()
        time.sleep(SETTLE_S)
        has_one_page, lasted_s = page == page_pid(), time.monotonic() - begun_s
        with watching(server.page, 1) as (late,):
            time.sleep(3)
    told = Told.of(Path(server.log).parent if Path(server.log).is_file() else Path(server.log))
    return _hour_text(viewers, late, told, looks, lasted_s=lasted_s, has_one_page=has_one_page)


def _send(url: str, seconds: float, seed: int) -> None:
    """The load: one request in fifty has less time than any batch takes."""
    steady = _poisson([HOUR_RPS * (1 - SHORT_SLO_SHARE)] * round(seconds / 60 + 1), seed, seconds)
    short = _poisson([HOUR_RPS * SHORT_SLO_SHARE] * round(seconds / 60 + 1), seed + 1, seconds)
    plans = [LoadPlan(url, "watched", steady, slo_ms=150.0), LoadPlan(url, "watched", short, slo_ms=0.5)]
    threads = [Thread(target=run_load, args=(plan,)) for plan in plans]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _poisson(rates_rps: Sequence[float], seed: int, seconds: float) -> Trace:
    """Arrivals with a rate for each minute."""
    random, times_ns = np.random.default_rng(seed), list[int]()
    for minute, rate_rps in enumerate(rates_rps):
        length_s = min(60.0, seconds - 60 * minute)
        if length_s > 0:
            places = np.sort(random.random(random.poisson(rate_rps * length_s))) * length_s + 60 * minute
            times_ns += [int(place * NS_PER_S) for place in places]
    return trace_of(times_ns, duration_ns=s(seconds), name="drawn", provenance="assumed: a rate for each minute")


def _hour_text(
    viewers: Sequence[Viewer],
    late: Viewer,
    told: Told,
    looks: Sequence[Sequence[object]],
    *,
    lasted_s: float,
    has_one_page: bool,
) -> str:
    rows = []
    for number, viewer in enumerate([*viewers, late], 1):
        (counts,), (levels,) = viewer.counts.values(), viewer.levels.values()
        sums = {name: sum(row[place] for row in told.counts.values()) for place, name in enumerate(COUNTS) if place}
        (totals,) = viewer.totals.values()
        rows.append(
            (
                *("a new one" if viewer is late else number, viewer.events, viewer.wholes, viewer.longest_gap_s),
                *(len(viewer.ends), len(counts), told.differences(counts, levels), totals == sums),
                f"{len(viewer.decisions)} of {min(told.decisions, DECISIONS if viewer is late else told.decisions)}",
            )
        )
    columns = ("viewer", "events", "whole pictures", "longest gap, s", "ends", "seconds", "differ", "totals equal")
    requests = sum(row[1] for row in told.counts.values())
    return "\n\n".join(
        [
            f"{lasted_s:,.0f} s, {requests:,} requests, four viewers; the page's process is "
            f"{'the same at the end' if has_one_page else '**another one at the end**'}. `differ`: seconds whose "
            f"counts ({', '.join(COUNTS[1:])}) or percentiles ({', '.join(LEVELS[1:3])}) are not those counted from "
            "the log.",
            table((*columns, "decisions"), rows),
            table(("after, s", "page, MiB", "deciding process, MiB"), looks),
        ]
    )


# Viewers and what-ifs at 80 % load


def _disturb(page: str, begun: Event, over: Event, found: "multiprocessing.Queue[tuple[int, int, int]]") -> None:
    """Sixteen viewers and what-ifs one after the other, at the lowest priority: others' computers."""
    os.nice(19)
    viewers, answers = [Viewer() for _ in range(VIEWERS)], list[bool]()
    body = json.dumps({"kind": "what-if", "last_s": 60, "systems": ["static", "elastic"]}).encode()
    head = {"content-type": "application/json", "origin": page.rstrip("/")}

    def ask() -> None:
        while not over.is_set():
            with urlopen(HttpRequest(f"{page}/ask", body, head), timeout=100) as answer:
                answers.append("runs" in json.loads(answer.read()))

    async def run() -> None:
        following = [asyncio.create_task(viewer.follow(page, keep=False)) for viewer in viewers]
        asking = asyncio.create_task(asyncio.to_thread(ask))
        while not all(viewer.events > 1 for viewer in viewers):  # noqa: ASYNC110  # once, at the beginning
            await asyncio.sleep(0.05)
        begun.set()
        await asyncio.to_thread(over.wait)
        for task in following:
            task.cancel()
        await asking

    asyncio.run(run())
    found.put((sum(viewer.events for viewer in viewers), sum(len(viewer.ends) for viewer in viewers), sum(answers)))


def viewers(folder: Path, given: Namespace) -> str:
    """Goodput with and without them, in pairs."""
    seconds, slo_ms = given.seconds or 20.0, 250.0
    app = {
        "name": "busy",
        "slo_ms": slo_ms,
        "stages": [{"name": "only", "model": str(small(folder, "squeezenet", 96))}],
        "system": {"name": "static", "cores": 1, "replicas": 1},
    }
    dump_yaml(folder / "app.yaml", app)
    rows: list[tuple[object, ...]] = []
    with serving(folder / "app.yaml", folder / "state") as server:
        wait_ready(server.http, 1)
        most = closed_at_sloop(server.http, "busy", 16, seconds, slo_ms=slo_ms)
        rate_rps = LOAD_SHARE * most.goodput_rps
        say(f"it can take {most.goodput_rps:.1f}/s; the load is {rate_rps:.1f}/s")
        for number in range(given.pairs):
            trace = _poisson([rate_rps] * round(seconds / 60 + 1), given.seed + number, seconds)
            plan = LoadPlan(server.http, "busy", trace, slo_ms=slo_ms)
            both: dict[bool, tuple[LoadResult, tuple[int, int, int]]] = {}
            for has_viewers in (False, True) if number % 2 else (True, False):
                both[has_viewers] = _disturbed(server.page, plan) if has_viewers else (run_load(plan), (0, 0, 0))
            (without, _), (beside, (events, ends, answers)) = both[False], both[True]
            ratio = beside.goodput_rps / without.goodput_rps
            rows.append(
                (
                    *(number + 1, without.goodput_rps, beside.goodput_rps, ratio, 100 * (without.attainment or 0.0)),
                    *(100 * (beside.attainment or 0.0), without.p99_ms, beside.p99_ms, events, ends, answers),
                )
            )
            say(f"pair {number + 1}: {without.goodput_rps:.2f} and {beside.goodput_rps:.2f}/s, {ratio:.4f}")
    ratios = [float(str(row[3])) for row in rows]
    within = 1.96 * stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else float("inf")
    columns = ("pair", "goodput without, 1/s", "with", "ratio", "in time without, %", "with", "p99 without, ms", "with")
    return "\n\n".join(
        [
            f"SqueezeNet on images of 96 × 96, one replica with one core, deadline {slo_ms:g} ms, {rate_rps:.1f} "
            f"requests/s: {100 * LOAD_SHARE:g} % of the {most.goodput_rps:.1f}/s that sixteen connections got. "
            f"{seconds:g} s each, the same arrivals within a pair. With: {VIEWERS} viewers and what-ifs of the last "
            "minute under three systems one after the other, all on the same two cores.",
            f"**Ratio of goodputs: {fmean(ratios):.4f} ± {within:.4f}** (mean, 95 %).",
            table((*columns, "events", "connections that ended", "what-ifs"), rows),
        ]
    )


def _disturbed(page: str, plan: LoadPlan) -> tuple[LoadResult, tuple[int, int, int]]:
    """The result beside viewers; their events, how many connections ended, and answers to what-ifs."""
    spawned = multiprocessing.get_context("spawn")
    begun, over, found = spawned.Event(), spawned.Event(), spawned.Queue()
    process = spawned.Process(target=_disturb, args=(page, begun, over, found))
    process.start()
    begun.wait()
    result = run_load(plan)
    over.set()
    said: tuple[int, int, int] = found.get()
    process.join()
    return result, said


# Shadows


Minutes = dict[int, tuple[tuple[float, float], float]]
"""By minute of the trace: the pair of replicas and cores that held longest, and the mean of the cores."""


def shadow(folder: Path, given: Namespace) -> str:
    """What shadows say of a trace, and what their systems then do with it."""
    seconds = given.seconds or 600.0
    (folder / "wait.py").write_text(WAITING_MODEL)
    random = np.random.default_rng(TRACE_SEED)
    low, high = np.log(RATES_RPS)
    rates = np.exp(random.uniform(low, high, int(seconds // 60) + 1)).round(1).tolist()
    trace, rows = _poisson(rates, TRACE_SEED + 1, seconds), list[tuple[object, ...]]()
    stages = [{"name": "only", "model": "./wait.py", "profile": WAITING_PROFILE}]
    app = {"name": "shown", "slo_ms": 500, "stages": stages}
    foretold = _minutes_under(folder, {**app, "system": {"name": "static"}, "shadow": list(SHADOWS)}, trace)
    verdicts = []
    for system in SHADOWS:
        (done,) = _minutes_under(folder, {**app, "system": system}, trace).values()
        label = SystemChoice(str(system["name"]), {key: each for key, each in system.items() if key != "name"}).text
        said, same = foretold[label], 0
        for minute in range(round(seconds / 60)):
            (they, mean), (it, own_mean) = said[minute], done[minute]
            same += they == it
            rows.append((system["name"], minute + 1, rates[minute], *they, *it, mean, own_mean, they == it))
        verdicts.append((label, f"{same} of {round(seconds / 60)}"))
    columns = ("system", "minute", "requests/s", "replicas foretold", "cores", "replicas then", "cores", "mean cores")
    return "\n\n".join(
        [
            f"A model that waits 20 ms and 15 ms a row, deadline 500 ms, `static` serves; {seconds:g} s, each minute "
            f"at a rate between {RATES_RPS[0]:g} and {RATES_RPS[1]:g} requests/s. A minute is the same if the replicas "
            "(ready and starting) and cores that held for most of its seconds are.",
            table(("system", "minutes that are the same"), verdicts),
            table((*columns, "mean then", "same"), rows),
        ]
    )


def _minutes_under(folder: Path, app: Mapping[str, Any], trace: Trace) -> dict[str, Minutes]:
    """What a server had in each minute of a trace, and what each of its shadows said."""
    dump_yaml(folder / "app.yaml", dict(app))
    state = folder / f"state-{time.time_ns()}"
    with serving(folder / "app.yaml", state) as server, watching(server.page, 1) as (viewer,):
        say(f"{app['system']}")
        time.sleep(10)
        result = run_load(LoadPlan(server.http, str(app["name"]), trace, slo_ms=500.0))
        say(f"{result.attainment:.4f} in time")
        time.sleep(SETTLE_S)
    from_s = next(now_ns for now_ns, record in read_log(Path(server.log)) if isinstance(record, Request)) / NS_PER_S
    (levels,) = viewer.levels.values()
    own = {at: dict(zip(LEVELS, row, strict=True)) for at, row in levels.items()}
    return {"": _minutes(own, from_s)} | {label: _minutes(told, from_s) for label, told in viewer.shadows.items()}


def _minutes(told: Mapping[int, Mapping[str, Any]], from_s: float) -> Minutes:
    by_minute: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for at, row in told.items():
        by_minute[int((at - from_s) // 60)].append((row["ready"] + row["starting"], round(row["cores"], 3)))
    return {
        minute: (Counter(pairs).most_common(1)[0][0], fmean(cores for _, cores in pairs))
        for minute, pairs in by_minute.items()
    }


PARTS: Final = {
    "hour": (hour, "The page beside a load"),
    "viewers": (viewers, "Goodput with viewers and what-ifs"),
    "shadow": (shadow, "What shadows foretell"),
}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--seconds", type=float, default=0.0, help="of each run, instead of its usual length")
    parser.add_argument("--pairs", type=int, default=6)
    given = parser.parse_args()
    measure, title = PARTS[given.part]
    with workspace(given.keep) as folder:
        text = measure(folder, given)
    publish(f"watching-{given.part}", title, text, write=not given.no_write)


if __name__ == "__main__":
    main()
