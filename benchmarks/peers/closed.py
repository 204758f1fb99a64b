"""Closed loops with one model: throughput, latency, CPU and memory of all servers in one run."""

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Final

from msgspec import Struct

from benchmarks.notebook import say, table
from benchmarks.peers.load import closed
from benchmarks.peers.peer import Case, Encoding, Model, Peer, PeerFailed
from benchmarks.peers.serving import label, serving
from sloop.report.plots import Figure, Panel, Series

WARM_S: Final = 1.0
SLO_MS: Final = 1000.0
MEBI: Final = 2**20
WORD_ENDS: Final = re.compile(r", | |(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
"""Where the names of servers are broken below narrow bars."""


class Plan(Struct, frozen=True):
    """One comparison."""

    model: Model
    encodings: tuple[Encoding, ...]
    connections: tuple[int, ...]
    batch_max: int
    seconds: float
    rounds: int
    seed: int
    folder: Path


class Sample(Struct, frozen=True):
    """The result of one closed loop."""

    label: str
    tuning: str
    connections: int
    rps: float
    p50_ms: float
    p99_ms: float
    cpu_s: float
    """Of the server's whole process tree, for 1,000 answers."""
    memory_bytes: int
    """At its end: proportional shares of all its processes."""
    wrong: int


class ClosedLoopResults(Struct, frozen=True):
    """The results of a comparison."""

    samples: list[Sample]
    failed: dict[tuple[str, str], str]
    """By label and tuning, why there are no samples."""

    def labels(self) -> list[str]:
        return list(dict.fromkeys(sample.label for sample in self.samples))

    def tried(self, name: str, connections: int) -> dict[str, list[Sample]]:
        """By tuning, the samples of all rounds."""
        found: dict[str, list[Sample]] = {}
        for one in self.samples:
            if one.label == name and one.connections == connections:
                found.setdefault(one.tuning, []).append(one)
        return found

    def of(self, name: str, connections: int) -> list[Sample]:
        """Those with the tuning that answers the most requests, by the median of all rounds."""
        return max(self.tried(name, connections).values(), key=median_rps, default=[])

    def rps(self, name: str, connections: int) -> float | None:
        """The median throughput of all rounds, with the best tuning."""
        samples = self.of(name, connections)
        return median_rps(samples) if samples else None


def median_rps(samples: Sequence[Sample]) -> float:
    return median(one.rps for one in samples)


def compare(plan: Plan, peers: Iterable[Peer]) -> ClosedLoopResults:
    """Measure all peers with each of their tunings, in all encodings with all numbers of connections, in each round."""
    found = ClosedLoopResults([], {})
    rows = [
        (peer, encoding, tuning)
        for encoding in plan.encodings
        for peer in peers
        if encoding in peer.encodings
        for tuning in peer.tunings
    ]
    for number in range(plan.rounds):
        for peer, encoding, tuning in rows:
            name = label(peer, encoding)
            if (name, tuning) in found.failed:
                continue
            folder = plan.folder / re.sub(r"[^a-z0-9]+", "-", f"{name} {tuning}".lower())
            case = Case(plan.model, encoding, plan.batch_max, SLO_MS, folder, peer.tunings[tuning])
            say(f"{plan.model.path.stem}, round {number + 1} of {plan.rounds}: {name}, {tuning}")
            try:
                found.samples.extend(_samples(plan, peer, case, name, tuning))
            except PeerFailed as error:
                say(f"{name}, {tuning}: {error}")
                found.failed[name, tuning] = str(error)
    return found


def _samples(plan: Plan, peer: Peer, case: Case, name: str, tuning: str) -> list[Sample]:
    samples: list[Sample] = []
    with serving(peer, case, plan.seed) as served:
        port, tree = served.server.port, served.server.tree
        for connections in plan.connections:
            closed(port, served.ask, connections, WARM_S)
            before = tree.used()
            loop = closed(port, served.ask, connections, plan.seconds)
            after = tree.used()
            if not loop.answers:
                raise PeerFailed(f"no answer at {connections} connections, {loop.wrong} wrong")
            cpu_s = (after.cpu_s - before.cpu_s) / loop.answers * 1000
            seen = (loop.rps, loop.p50_ms, loop.p99_ms, cpu_s, after.memory_bytes, loop.wrong)
            samples.append(Sample(name, tuning, connections, *seen))
    return samples


def tables(found: ClosedLoopResults, plan: Plan, first: str) -> str:
    """A table for each number of connections, with throughputs relative to that of `first`."""
    return "\n\n".join(f"{_count(count)}:\n\n{_table(found, count, first)}" for count in plan.connections)


def _count(connections: int) -> str:
    return "1 connection" if connections == 1 else f"{connections} connections"


def _table(found: ClosedLoopResults, connections: int, first: str) -> str:
    base = found.rps(first, connections)
    columns = (
        "server",
        "its best setting",
        "answers/s",
        f"over {first}",
        "p50 ms",
        "p99 ms",
        "CPU s / 1,000",
        "memory MiB",
        "wrong",
    )
    rows: list[Sequence[object]] = []
    for name in found.labels():
        samples = found.of(name, connections)
        if not samples:
            continue
        rps = median_rps(samples)
        spread = [round(one.rps) for one in samples]
        shown = f"{rps:,.0f}" if len(spread) == 1 else f"{rps:,.0f} ({min(spread):,}–{max(spread):,})"
        rows.append(
            (
                *(name, samples[0].tuning, shown, rps / base if base else None),
                *(median(one.p50_ms for one in samples), median(one.p99_ms for one in samples)),
                *(median(one.cpu_s for one in samples), max(one.memory_bytes for one in samples) / MEBI),
                sum(one.wrong for one in samples),
            )
        )
    return table(columns, rows)


def sweep(found: ClosedLoopResults, plan: Plan) -> str:
    """What each server does with each of its tunings, and what failed."""
    rows: list[Sequence[object]] = []
    for name in found.labels():
        by_count = {count: found.tried(name, count) for count in plan.connections}
        for tuning in by_count[plan.connections[0]]:
            rates = {count: median_rps(tried[tuning]) for count, tried in by_count.items()}
            best = {count: rate == found.rps(name, count) for count, rate in rates.items()}
            cells = (f"**{rate:,.0f}**" if best[count] else f"{rate:,.0f}" for count, rate in rates.items())
            rows.append((name, tuning, *cells))
    parts = ["Answers/s with each setting:", table(("server", "setting", *map(_count, plan.connections)), rows)]
    if found.failed:
        failed = [(name, tuning, why) for (name, tuning), why in found.failed.items()]
        parts.append(table(("did not serve", "setting", "its last words"), failed))
    return "\n\n".join(parts)


def orders(found: ClosedLoopResults, plan: Plan) -> str:
    """Whether the order of the servers by throughput is the same in all rounds."""
    if plan.rounds < 2:
        return "One round: `--repeat 3` shows whether the order stays."
    lines: list[Sequence[object]] = []
    for count in plan.connections:
        names = [name for name in found.labels() if found.of(name, count)]
        ranked = [tuple(sorted(names, key=partial(_minus_rps, found, count, number))) for number in range(plan.rounds)]
        lines.append((count, len(set(ranked)) == 1, " > ".join(ranked[0])))
    return "Order by throughput in each round:\n\n" + table(("connections", "the same", "in the first"), lines)


def _minus_rps(found: ClosedLoopResults, connections: int, number: int, name: str) -> float:
    samples = found.of(name, connections)
    return -samples[number].rps if number < len(samples) else 0.0


def bars(found: ClosedLoopResults, plan: Plan, *, name: str, title: str) -> Figure:
    """A plot of throughput with a panel for each number of connections."""
    labels = found.labels()
    places = tuple(float(place) for place in range(len(labels)))
    panels = tuple(
        Panel(
            y_label=f"answers/s, {count} conn.",
            ticks=tuple(WORD_ENDS.sub("\n", one) for one in labels),
            series=(Series(_count(count), places, tuple(found.rps(one, count) or 0.0 for one in labels), "bars"),),
        )
        for count in plan.connections
    )
    last = plan.connections[-1]
    said = "; ".join(f"{one} {found.rps(one, last) or 0:,.0f}" for one in labels)
    return Figure(
        name=name, title=title, x_label="", panels=panels, alt=f"Answers per second at {_count(last)}: {said}."
    )


def settings(peers: Iterable[Peer]) -> str:
    """The settings of all servers."""
    rows: Mapping[str, str] = {
        peer.name: f"{', '.join(peer.environment.packages) or 'this project'}; {peer.how}" for peer in peers
    }
    return "\n".join(f"- **{name}**: {how}." for name, how in rows.items())
