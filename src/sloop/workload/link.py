"""Client links: how long a request is on its way to the server, second by second.

A transfer takes `payload_bytes / bandwidth`, at the bandwidth of the second in which sending begins, plus a constant
round trip; the series of bandwidths repeats. Source: Sponge specification 4.2 and 4.3 (van der Hooft's 4G log, the
published remaining SLOs) and its synthetic replacement.
"""

import csv
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import exp, floor, sqrt
from pathlib import Path
from random import Random
from typing import Final

from sloop.errors import InputError
from sloop.options import Declared, Limits, Value, as_value, limited, nearest, read_options
from sloop.streams import stream
from sloop.units import NS_PER_MS, NS_PER_S
from sloop.workload.parse import SourceText, read_text
from sloop.workload.trace import NOT_NEGATIVE, POSITIVE

BYTES_PER_MS_PER_MBPS: Final = 125.0
MIB_PER_S: Final = 1048.576
"""1 MiB/s in bytes per ms."""
KIB: Final = 1024


@dataclass(frozen=True, slots=True)
class Link:
    """Bandwidth per second in bytes per ms; a second of bandwidth 0 is an outage that a transfer waits out."""

    name: str
    bytes_per_ms: Sequence[float]
    provenance: str
    rtt_ns: int = 0

    def __post_init__(self) -> None:
        if not any(rate > 0 for rate in self.bytes_per_ms):
            raise InputError("the link never has a bandwidth above 0", where=self.name, help="give it a bandwidth")

    def transfer_ns(self, sent_ns: int, payload_bytes: int) -> int:
        """The time in ns that a request of `payload_bytes` takes if sent at `sent_ns` from the start."""
        second = sent_ns // NS_PER_S
        waited_ns = 0
        while (rate := self.bytes_per_ms[second % len(self.bytes_per_ms)]) <= 0:
            second += 1
            waited_ns = second * NS_PER_S - sent_ns
        return waited_ns + self.rtt_ns + round(payload_bytes * NS_PER_MS / rate)

    def elapsed_ms(self, payload_bytes: int) -> list[float]:
        """The transfer time in ms for each second of one round of the series."""
        seconds = range(len(self.bytes_per_ms))
        return [self.transfer_ns(second * NS_PER_S, payload_bytes) / NS_PER_MS for second in seconds]

    def remaining_ms(self, payload_bytes: int, slo_ms: float) -> list[int]:
        """The rest of an SLO after the transfer, per second of the series: whole ms, rounded down, at least 0."""
        return [max(0, floor(slo_ms - elapsed)) for elapsed in self.elapsed_ms(payload_bytes)]


class LinkFormat(StrEnum):
    """What a bandwidth file holds."""

    AUTO = "auto"
    """CSV if the first line has a comma, else a Ghent log."""
    GHENT = "ghent"
    """`unix_ms ms_since_start latitude longitude bytes interval_ms`, a line a second."""
    CSV = "csv"
    """A column of Mbit/s with a header, such as 5Gophers' `throughput_mbps`, a row a second."""


@dataclass(frozen=True, slots=True)
class LinkFile:
    """A recorded link; the fields are the keys beside `file:`."""

    file: Path
    format: LinkFormat = LinkFormat.AUTO
    member: str = ""
    column: str = "throughput_mbps"
    only: Mapping[str, str] = field(default_factory=dict)
    """For CSV: rows whose columns have these values, such as `{carrier: VERIZON, run_num: 1}`."""
    start_s: int = limited(0, limits=Limits(least=0, most=1e8))
    rows_max: int = limited(10_000_000, limits=Limits(least=1, most=1e8))
    rtt_ms: float = limited(0.0, limits=Limits(least=0, most=60_000.0))


@dataclass(frozen=True, slots=True)
class Constant:
    """The same bandwidth all the time."""

    mbps: float = limited(limits=Limits(above=0, most=1e6))
    rtt_ms: float = limited(0.0, limits=Limits(least=0, most=60_000.0))

    def link(self, seed: int) -> Link:
        rate = self.mbps * BYTES_PER_MS_PER_MBPS
        return Link("constant", (rate,), f"assumed: constant {self.mbps:g} Mbit/s", round(self.rtt_ms * NS_PER_MS))


@dataclass(frozen=True, slots=True)
class Lte:
    """A synthetic 4G link like the Ghent bus log, in MiB/s. Source: Sponge specification 4.2.

    `ln bw = mu + sigma (√share·x + √(1 - share)·ε)`, x an AR(1) process of coefficient `phi` and variance 1, clipped to
    `[low, high]`, then fades: one in `fade_every_s` seconds on average, of 1 or 2 s, to 15 to 40 % of the bandwidth.
    """

    seconds: int = limited(600, limits=Limits(least=1, most=1e7))
    mu: float = limited(1.108, limits=Limits(least=-20.0, most=20.0))
    sigma: float = limited(0.435, limits=Limits(least=0, most=5.0))
    share: float = limited(0.88, limits=Limits(least=0, most=1.0))
    phi: float = limited(0.84, limits=Limits(least=-0.999, most=0.999))
    low: float = limited(0.4, limits=Limits(above=0, most=1e5))
    high: float = limited(7.0, limits=Limits(above=0, most=1e5))
    fade_every_s: float = limited(200.0, limits=POSITIVE)
    rtt_ms: float = limited(0.0, limits=Limits(least=0, most=60_000.0))

    def link(self, seed: int) -> Link:
        rng = stream(seed, "link")
        rates = array("d", (MIB_PER_S * mib for mib in self._walk(rng)))
        return Link("lte", rates, f"assumed: synthetic 4G, seed {seed}", round(self.rtt_ms * NS_PER_MS))

    def _walk(self, rng: Random) -> Iterator[float]:
        state = rng.gauss(0.0, 1.0)
        fading_s, depth = 0, 1.0
        for _ in range(self.seconds):
            blurred = sqrt(self.share) * state + sqrt(1.0 - self.share) * rng.gauss(0.0, 1.0)
            bandwidth = min(max(exp(self.mu + self.sigma * blurred), self.low), self.high)
            if fading_s == 0 and rng.random() < 1.0 / self.fade_every_s:
                fading_s, depth = rng.choice((1, 2)), rng.uniform(0.15, 0.4)
            if fading_s:
                fading_s -= 1
                bandwidth *= depth
            yield max(bandwidth, self.low)
            state = self.phi * state + sqrt(1.0 - self.phi**2) * rng.gauss(0.0, 1.0)


LINKS: Final[Mapping[str, type[Constant | Lte]]] = {"constant": Constant, "lte": Lte}


def link_options(value: Value) -> LinkFile | Constant | Lte:
    """The options in `value`. InputError for what is wrong with them; no file is looked at."""
    fields = value.mapping()
    if ("kind" in fields) == ("file" in fields):
        value.fail("a link has either `kind` or `file`", f"kinds: {', '.join(LINKS)}; or `file:` and a path to read")
    if "file" in fields:
        return read_options(LinkFile, value, readers={"only": _wanted_cells})
    return read_options(fields["kind"].entry(LINKS, "kind of link"), value, also=("kind",))


def _wanted_cells(value: Value) -> dict[str, str]:
    """Cells are text, also where YAML reads a number."""
    return {key: str(each.content) for key, each in value.mapping().items()}


def link_from(spec: Declared, *, seed: int, folder: Path) -> Link:
    """The link a user declares: `{kind: constant, mbps: 20}`, `{kind: lte}` or `{file: report_bus_0001.log}`."""
    options = link_options(as_value(spec, "link"))
    if isinstance(options, LinkFile):
        return read_link(replace(options, file=folder / options.file))
    return options.link(seed)


def read_link(source: LinkFile | Path | str) -> Link:
    """Read a recorded link."""
    recorded = source if isinstance(source, LinkFile) else LinkFile(Path(source))
    text = read_text(recorded.file, member=recorded.member)
    first = text.text.partition("\n")[0]
    is_csv = recorded.format == LinkFormat.CSV or (recorded.format == LinkFormat.AUTO and "," in first)
    rates = array("d", _csv_rates(text, recorded) if is_csv else _ghent_rates(text))
    chosen = rates[recorded.start_s : recorded.start_s + recorded.rows_max]
    if not chosen:
        raise InputError(
            "no bandwidth to read" if not rates else f"start_s {recorded.start_s} is beyond the {len(rates)} rows",
            where=text.where,
            help="check the file, `only` and `start_s`",
        )
    name = recorded.file.name
    return Link(name, chosen, f"measured: {name}, {len(chosen)} s", round(recorded.rtt_ms * NS_PER_MS))


def _ghent_rates(text: SourceText) -> Iterator[float]:
    """Whole bytes per ms of each line: ⌊bytes / interval_ms⌋, as Sponge rounds."""
    for line, content in enumerate(text.text.splitlines(), start=1):
        cells = content.split()
        if not cells:
            continue
        where = f"{text.where}:{line}"
        if len(cells) != 6:
            raise InputError(
                f"{len(cells)} entries instead of 6",
                where=where,
                help="a line is: unix_ms ms_since_start latitude longitude bytes interval_ms",
            )
        carried = NOT_NEGATIVE.check(_read_number(cells[4], f"{where} bytes"), f"{where} bytes")
        interval_ms = POSITIVE.check(_read_number(cells[5], f"{where} interval_ms"), f"{where} interval_ms")
        yield float(carried // interval_ms)


def _csv_rates(text: SourceText, recorded: LinkFile) -> Iterator[float]:
    """Bytes per ms of the rows that `only` chooses and whose bandwidth is not empty."""
    rows = csv.DictReader(text.text.splitlines(keepends=True))
    try:
        columns = list(rows.fieldnames or [])
        for name in (recorded.column, *recorded.only):
            if name not in columns:
                raise InputError(f"no column {name!r}", where=f"{text.where}:1", help=nearest(name, columns))
        for row in rows:
            cell = row[recorded.column]
            if cell and all(row[name] == value for name, value in recorded.only.items()):
                where = f"{text.where}:{rows.line_num}"
                mbps = Limits(least=0, most=1e6).check(_read_number(cell, where), where)
                yield mbps * BYTES_PER_MS_PER_MBPS
    except csv.Error as error:
        raise InputError(f"not CSV: {error}", where=f"{text.where}:{rows.line_num}", help="check that line") from None


def _read_number(text: str, where: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InputError(f"{text[:40]!r} is not a number", where=where, help="bandwidth files hold numbers") from None
