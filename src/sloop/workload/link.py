"""Client links: how long each request is on its way to the server.

A transfer takes `payload_bytes / bandwidth`, with the bandwidth of the second in which it begins, plus a constant round
trip. After its last second, the series of bandwidths starts again. Source: Sponge specification 4.2 and 4.3 (van der
Hooft's 4G log, the published remaining SLOs, and a synthetic link like them).
"""

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from math import exp, floor, sqrt
from pathlib import Path
from random import Random
from typing import Annotated, Final

from sloop.options import Declared, Range, Value, as_value, read_options
from sloop.streams import stream
from sloop.units import NS_PER_MS, NS_PER_S
from sloop.workload.parse import SourceText, column_place, csv_header, csv_rows, read_number, read_text, refuse
from sloop.workload.trace import NOT_NEGATIVE, POSITIVE

BYTES_PER_MS_PER_MBPS: Final = 125.0
BYTES_PER_MS_PER_MIB_S: Final = 1048.576
GHENT_COLUMNS: Final = "unix_ms ms_since_start latitude longitude bytes interval_ms"
RTT_MS: Final = Range(least=0, most=60_000.0)
MBPS: Final = Range(least=0, most=1e6)


@dataclass(frozen=True, slots=True)
class Link:
    """The bandwidth in each second, in bytes per ms. Transfers wait while it is 0."""

    name: str
    bytes_per_ms: Sequence[float]
    provenance: str
    rtt_ns: int = 0

    def __post_init__(self) -> None:
        if not any(rate > 0 for rate in self.bytes_per_ms):
            refuse(self.name, "the link has no second with a bandwidth above 0", "check the file, or give a bandwidth")

    def transfer_ns(self, sent_ns: int, payload_bytes: int) -> int:
        """The time in ns that a request of `payload_bytes` takes if it is sent `sent_ns` after the start."""
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
        """What the transfer leaves of an SLO, for each second of the series: whole ms, rounded down, at least 0."""
        return [max(0, floor(slo_ms - elapsed)) for elapsed in self.elapsed_ms(payload_bytes)]


@dataclass(frozen=True, slots=True)
class LinkFile:
    """A recorded link; the fields are the keys next to `file:`.

    A file whose first line has a comma is CSV: one row per second, and a column, such as 5Gophers' `throughput_mbps`,
    has the bandwidth in Mbit/s. Any other file is a Ghent log: one line per second, with the columns `GHENT_COLUMNS`.
    """

    file: Path
    member: str = ""
    column: str = "throughput_mbps"
    only: Mapping[str, str] = field(default_factory=dict)
    """For CSV: read only the rows with these values, such as `{carrier: VERIZON, run_num: 1}`."""
    start_s: Annotated[int, Range(least=0, most=1e8)] = 0
    rows_max: Annotated[int, Range(least=1, most=1e8)] = 10_000_000
    rtt_ms: Annotated[float, RTT_MS] = 0.0


@dataclass(frozen=True, slots=True)
class Constant:
    """The same bandwidth all the time."""

    mbps: Annotated[float, Range(above=0, most=1e6)]
    rtt_ms: Annotated[float, RTT_MS] = 0.0

    def link(self, seed: int) -> Link:
        rate = self.mbps * BYTES_PER_MS_PER_MBPS
        return Link("constant", (rate,), f"assumed: constant {self.mbps:g} Mbit/s", round(self.rtt_ms * NS_PER_MS))


@dataclass(frozen=True, slots=True)
class Lte:
    """A synthetic 4G link with the statistics of the Ghent bus log, in MiB/s. Source: Sponge specification 4.2.

    `ln bw = mu + sigma (√share·x + √(1 - share)·ε)`, where x is an AR(1) process of coefficient `phi` and variance 1,
    clipped to `[low, high]`. On average every `fade_every_s` seconds, the bandwidth fades to 15 to 40 % for 1 or 2 s.
    """

    seconds: Annotated[int, Range(least=1, most=1e7)] = 600
    mu: Annotated[float, Range(least=-20.0, most=20.0)] = 1.108
    sigma: Annotated[float, Range(least=0, most=5.0)] = 0.435
    share: Annotated[float, Range(least=0, most=1.0)] = 0.88
    phi: Annotated[float, Range(least=-0.999, most=0.999)] = 0.84
    low: Annotated[float, Range(above=0, most=1e5)] = 0.4
    high: Annotated[float, Range(above=0, most=1e5)] = 7.0
    fade_every_s: Annotated[float, POSITIVE] = 200.0
    rtt_ms: Annotated[float, RTT_MS] = 0.0

    def link(self, seed: int) -> Link:
        rng = stream(seed, "link")
        rates = array("d", (BYTES_PER_MS_PER_MIB_S * mib for mib in self._mib_per_s(rng)))
        return Link("lte", rates, f"assumed: synthetic 4G, seed {seed}", round(self.rtt_ms * NS_PER_MS))

    def _mib_per_s(self, rng: Random) -> Iterator[float]:
        state = rng.gauss(0.0, 1.0)
        fading_s, depth = 0, 1.0
        for _ in range(self.seconds):
            deviation = sqrt(self.share) * state + sqrt(1.0 - self.share) * rng.gauss(0.0, 1.0)
            bandwidth = min(max(exp(self.mu + self.sigma * deviation), self.low), self.high)
            if fading_s == 0 and rng.random() < 1.0 / self.fade_every_s:
                fading_s, depth = rng.choice((1, 2)), rng.uniform(0.15, 0.4)
            if fading_s:
                fading_s -= 1
                bandwidth *= depth
            yield max(bandwidth, self.low)
            state = self.phi * state + sqrt(1.0 - self.phi**2) * rng.gauss(0.0, 1.0)


LINKS: Final[Mapping[str, type[Constant | Lte]]] = {"constant": Constant, "lte": Lte}


def link_options(value: Value) -> LinkFile | Constant | Lte:
    """The options in `value`. InputError for a mistake in them; no file is opened."""
    fields = value.mapping()
    if ("kind" in fields) == ("file" in fields):
        value.fail("a link has either `kind` or `file`", f"kinds: {', '.join(LINKS)}; or `file:` and a path to read")
    if "file" in fields:
        return read_options(LinkFile, value, readers={"only": _wanted_cells})
    return read_options(fields["kind"].entry(LINKS, "kind of link"), value, also=("kind",))


def _wanted_cells(value: Value) -> dict[str, str]:
    """Cells of a CSV file are text, also those that YAML reads as numbers."""
    return {key: str(each.content) for key, each in value.mapping().items()}


def link_from(spec: Declared, *, seed: int, folder: Path) -> Link:
    """The declared link: `{kind: constant, mbps: 20}`, `{kind: lte}` or `{file: report_bus_0001.log}`.

    Relative file names start at `folder`; `seed` generates a synthetic link. InputError for a mistake.
    """
    options = link_options(as_value(spec, "link"))
    if isinstance(options, LinkFile):
        return read_link(replace(options, file=folder / options.file))
    return options.link(seed)


def read_link(source: LinkFile | Path | str) -> Link:
    """Read a recorded link. InputError if the file cannot be read or holds something else."""
    recorded = source if isinstance(source, LinkFile) else LinkFile(Path(source))
    text = read_text(recorded.file, member=recorded.member)
    first = text.text.partition("\n")[0]
    rates = array("d", _csv_rates(text, recorded) if "," in first else _ghent_rates(text))
    chosen = rates[recorded.start_s : recorded.start_s + recorded.rows_max]
    if not chosen:
        what = f"start_s {recorded.start_s} is after the last of {len(rates)} rows" if rates else "no bandwidth to read"
        refuse(text.where, what, "check the file, `only` and `start_s`")
    name = recorded.file.name
    return Link(name, chosen, f"measured: {name}, {len(chosen)} s", round(recorded.rtt_ms * NS_PER_MS))


def _ghent_rates(text: SourceText) -> Iterator[float]:
    """The whole bytes per ms of each line, ⌊bytes / interval_ms⌋: Sponge rounds them down too."""
    for line, content in enumerate(text.text.splitlines(), start=1):
        cells = content.split()
        if not cells:
            continue
        if len(cells) != 6:
            refuse(text.where, f"{len(cells)} entries instead of 6", f"a line is: {GHENT_COLUMNS}", line)
        where = f"{text.where}:{line}"
        carried = read_number(cells[4], NOT_NEGATIVE, f"{where} bytes")
        yield float(carried // read_number(cells[5], POSITIVE, f"{where} interval_ms"))


def _csv_rates(text: SourceText, recorded: LinkFile) -> Iterator[float]:
    """The bytes per ms of the rows that `only` selects and whose bandwidth is not empty."""
    columns = csv_header(text)
    place, *others = (column_place(columns, name, (), text.where) for name in (recorded.column, *recorded.only))
    wanted = tuple(zip(others, recorded.only.values(), strict=True))
    for line, row in islice(csv_rows(text), 1, None):
        cells = [*row, *[""] * (len(columns) - len(row))]
        if cells[place] and all(cells[other] == value for other, value in wanted):
            yield read_number(cells[place], MBPS, f"{text.where}:{line}") * BYTES_PER_MS_PER_MBPS
