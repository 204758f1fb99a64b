"""Published latencies of models on EC2 instances, as profiles: one for each kind of instance.

Ribbon (SC 2021) and Kairos (HPDC 2023) published the durations of about a hundred inferences for each of their models,
kind of instance and number of items: 10, 20, … items in one query. A query runs alone on an instance. Items are
pictures of 32 × 32 pixels (ResNet, VGG), samples of drug response (CANDLE), or pairs of user and article
(recommendation: DIEN, MT-WND, NCF, RM2, WND).

A request of sloop stands for a query of ten items, so that a batch of n requests is a measured query of 10 n items and
nothing is interpolated. The profile of a kind states the 99th percentile of the published durations on all cores of the
kind, and keeps the durations themselves, which the simulator draws from. Smaller numbers of cores were not measured.
The recommendation models were pinned to one core, so that further cores of their instances bring nothing. g4dn has one
T4 as accelerator.

The published lists are not complete, so the true 99th percentile is higher: CANDLE, ResNet and VGG lack the slowest 5 %
(warm-up), the recommendation models the slowest one, which was the first. Loading a model was not measured.

The figures are read from the artefacts (`data_folder()`), and no figure is copied into this project.
"""

import json
import re
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from operator import add
from pathlib import Path
from typing import Any, Final

from sloop.app.hardware import KINDS
from sloop.errors import InputError
from sloop.profile.profile import LatencyTable, Profile, Sample, sample_of
from sloop.units import NS_PER_MS

ITEMS: Final = 10
"""Items of one request: the step, and the smallest, of the published numbers of items."""

Durations = dict[str, dict[int, list[float]]]
"""By kind of instance and batch: durations in ms."""


@dataclass(frozen=True, slots=True)
class Artefact:
    """A publication's folder in the public data."""

    folder: str
    archive: str
    """The archive with one JSON list of durations in ms for each model, kind and number of items."""
    source: str
    software: str
    date: str


RIBBON: Final = Artefact(
    folder="boringlee24__SC21_Ribbon",
    archive="characterization/logs.tar.gz",
    source="Ribbon (SC 2021), artefact",
    software="TensorFlow; DIEN and MT-WND: Caffe2 on one core",
    date="2021-11-14",
)
KAIROS: Final = Artefact(
    folder="boringlee24__hpdc23-kairos",
    archive="data.tar.gz",
    source="Kairos (HPDC 2023), artefact",
    software="Caffe2 on one core",
    date="2023-06-16",
)
MEMBER: Final = re.compile(
    r"(?:logs|data)/(?P<load>logs_load/)?(?P<kind>[^/]+)/(?P<model>[a-z0-9]+)_(?P<items>\d+)_1\.json"
)
"""A list of durations in an archive. Kairos has two for each query, loading its input and inference, which add up."""


def is_there(data: Path | None, artefact: Artefact = RIBBON) -> bool:
    """Whether the folder of public data has this artefact."""
    return data is not None and (data / artefact.folder / artefact.archive).is_file()


def profiles(data: Path, model: str, artefact: Artefact = RIBBON) -> dict[str, Profile]:
    """The profile of `model` on each kind of instance that it was measured on.

    InputError if the artefact is not in `data`, or has no such model.
    """
    found = _durations(data / artefact.folder / artefact.archive)
    if model not in found:
        raise InputError(f"{artefact.source} has no model {model!r}", help=f"choose one of: {', '.join(sorted(found))}")
    return {kind: _profile(kind, cells, artefact) for kind, cells in sorted(found[model].items())}


def deadline_ms(data: Path, model: str) -> float:
    """Ribbon's deadline of a query: at least 99 % of all queries should be answered within it."""
    return float(_experiment(data, model)["qos"])


def pool(data: Path, model: str) -> tuple[str, ...]:
    """The three kinds that Ribbon mixes for this model."""
    return tuple(_experiment(data, model)["ins_types"])


def prices(data: Path, artefact: Artefact = RIBBON) -> dict[str, float]:
    """USD per hour on demand of each kind, as the artefact lists them."""
    [listed] = (data / artefact.folder).rglob("price.csv")
    rows = (line.split(",") for line in listed.read_text().splitlines()[1:] if line.strip())
    return {kind: float(usd) for kind, usd in rows}


def _experiment(data: Path, model: str) -> Mapping[str, Any]:
    path = data / RIBBON.folder / "query" / "configs" / f"{model}.json"
    if not path.is_file():
        raise InputError(f"Ribbon has no experiment with {model!r}", where=str(path), help="see the folder's files")
    found: Mapping[str, Any] = json.loads(path.read_text())
    return found


@cache
def _durations(archive: Path) -> dict[str, Durations]:
    """By model: what was measured."""
    if not archive.is_file():
        raise InputError("the artefact is not there", where=str(archive), help="give the folder of public data")
    lists: dict[tuple[str, str, int], list[list[float]]] = {}
    for found, values in _lists(archive):
        lists.setdefault((found["model"], found["kind"], int(found["items"]) // ITEMS), []).append(values)
    models: dict[str, Durations] = {}
    for (model, kind, batch), parts in lists.items():
        models.setdefault(model, {}).setdefault(kind, {})[batch] = parts[0] if len(parts) == 1 else _total(*parts)
    return models


def _lists(archive: Path) -> Iterator[tuple[re.Match[str], list[float]]]:
    with tarfile.open(archive) as files:
        for member in files:
            found = MEMBER.fullmatch(member.name)
            content = files.extractfile(member) if found else None
            if found and content:
                yield found, json.load(content)


def _total(first: list[float], second: list[float]) -> list[float]:
    """Loading and inference together, without the largest sum, as in Kairos' own simulation: the warm-up."""
    return sorted(map(add, first, second))[:-1]


def _profile(kind: str, cells: Mapping[int, list[float]], artefact: Artefact) -> Profile:
    hardware = KINDS[kind]
    samples = [_sample(batch, hardware.cores, durations_ms) for batch, durations_ms in sorted(cells.items())]
    rising_ms = accumulate((sample.p99_ms for sample in samples), max)
    device = hardware.devices[0].kind if hardware.devices else ""
    return Profile(
        latency_ms=LatencyTable(
            {sample.batch: {sample.cores: p99_ms} for sample, p99_ms in zip(samples, rising_ms, strict=True)}
        ),
        max_batch=samples[-1].batch,
        max_cores=hardware.cores,
        hardware=kind,
        accelerator=device,
        origin="published",
        source=artefact.source,
        software=artefact.software,
        date=artefact.date,
        samples=tuple(samples),
    )


def _sample(batch: int, cores: float, durations_ms: list[float]) -> Sample:
    return sample_of(batch, cores, [round(each * NS_PER_MS) for each in durations_ms])
