"""Generated traces: one small class for each kind of arrival process, and the mapping from their names.

Promises that one seed gives the same arrivals on any machine, drawn in plain Python floats from the stream `arrivals`.
A kind's fields are its options in a scenario's `trace:`; rates are requests per second.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, fields
from random import Random
from types import MappingProxyType
from typing import Any, ClassVar, Final, Protocol

from sloop.options import Declared, Limits, as_value, limited, read_options
from sloop.streams import stream
from sloop.units import NS_PER_S
from sloop.workload.curves import Diurnal, Ramp, Square, Step
from sloop.workload.markov import Map, Mmpp, OnOff
from sloop.workload.spread import Spread, counts_at, poisson_ns, spread_counts
from sloop.workload.trace import BLOCK_ARRIVALS, RATE, RATE_ABOVE_0, Trace

STREAM: Final = "arrivals"


class Kind(Protocol):
    """An arrival process; its dataclass fields are its options."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    def blocks(self, rng: Random, duration_ns: int) -> Iterator[Sequence[int]]:
        """Sorted runs of arrival offsets in `[0, duration_ns)`, in ns."""
        ...


@dataclass(frozen=True, slots=True)
class Poisson:
    """Independent arrivals at a constant mean rate."""

    rate: float = limited(limits=RATE)

    def blocks(self, rng: Random, duration_ns: int) -> Iterator[Sequence[int]]:
        for start_ns in range(0, duration_ns, NS_PER_S):
            span_ns = min(NS_PER_S, duration_ns - start_ns)
            yield [start_ns + offset for offset in poisson_ns(rng, self.rate, span_ns)]


@dataclass(frozen=True, slots=True)
class Equal:
    """Equally spaced arrivals, the first at 0."""

    rate: float = limited(limits=RATE_ABOVE_0)

    def blocks(self, rng: Random, duration_ns: int) -> Iterator[Sequence[int]]:
        number, at_ns = 0, 0
        while at_ns < duration_ns:
            block: list[int] = []
            while at_ns < duration_ns and len(block) < BLOCK_ARRIVALS:
                block.append(at_ns)
                number += 1
                at_ns = round(number * NS_PER_S / self.rate)
            yield block


@dataclass(frozen=True, slots=True)
class Uniform:
    """Exactly `rate` arrivals in each second, at uniform offsets; a fractional rate alternates between two counts."""

    rate: float = limited(limits=RATE)

    def blocks(self, rng: Random, duration_ns: int) -> Iterator[Sequence[int]]:
        counts = counts_at(self.rate, duration_ns)
        return spread_counts(counts, Spread.UNIFORM, rng, mean_ms=0.0, duration_ns=duration_ns)


@dataclass(frozen=True, slots=True)
class Burst:
    """`rate` arrivals at the start of each second, each an exponential offset of mean `mean_ms`, then silence.

    Source: Sponge specification 4.1, the published load generator's "exponential" mode.
    """

    rate: float = limited(limits=RATE)
    mean_ms: float = limited(50.0, limits=Limits(above=0, most=60_000.0))

    def blocks(self, rng: Random, duration_ns: int) -> Iterator[Sequence[int]]:
        counts = counts_at(self.rate, duration_ns)
        return spread_counts(counts, Spread.BURST, rng, mean_ms=self.mean_ms, duration_ns=duration_ns)


@dataclass(frozen=True, slots=True)
class Gamma:
    """Independent gamma-distributed gaps with coefficient of variation `cv`: 1 is Poisson, more is burstier."""

    rate: float = limited(limits=RATE_ABOVE_0)
    cv: float = limited(limits=Limits(least=0.01, most=100.0))

    def blocks(self, rng: Random, duration_ns: int) -> Iterator[Sequence[int]]:
        shape = self.cv**-2.0
        scale_ns = NS_PER_S / (self.rate * shape)
        gap_ns = rng.gammavariate
        start_ns, into_ns = 0, gap_ns(shape, scale_ns)
        while start_ns < duration_ns:
            # Times are kept relative to their second so that floats stay exact to the nanosecond in long traces.
            end_ns = min(NS_PER_S, duration_ns - start_ns)
            block: list[int] = []
            while into_ns < end_ns:
                block.append(start_ns + int(into_ns))
                into_ns += gap_ns(shape, scale_ns)
            yield block
            start_ns += end_ns
            into_ns -= end_ns


KINDS: Final[Mapping[str, type[Kind]]] = MappingProxyType(
    {
        "poisson": Poisson,
        "equal": Equal,
        "uniform": Uniform,
        "burst": Burst,
        "gamma": Gamma,
        "mmpp": Mmpp,
        "map": Map,
        "onoff": OnOff,
        "step": Step,
        "ramp": Ramp,
        "diurnal": Diurnal,
        "square": Square,
    }
)


def kind_of(declared: Declared, *, also: Collection[str] = ()) -> Kind:
    """The arrival process that `kind:` names, with the options beside it; `also` are keys for other readers."""
    value = as_value(declared, "trace")
    kind = value.mapping(required=("kind",))["kind"].entry(KINDS, "kind of trace")
    return read_options(kind, value, also=("kind", *also))


def generated(kind: Kind, *, seed: int, duration_ns: int, name: str = STREAM) -> Trace:
    """The trace a process makes in the world `seed`; `name` is its stream, for worlds with several traces."""
    word = next((word for word, known in KINDS.items() if known is type(kind)), type(kind).__name__.lower())
    options = " ".join(f"{field.name}={getattr(kind, field.name)}" for field in fields(kind))

    def blocks() -> Iterator[Sequence[int]]:
        return kind.blocks(stream(seed, name), duration_ns)

    return Trace(word, duration_ns, f"assumed: generated, {word} {options}, seed {seed}", blocks)
