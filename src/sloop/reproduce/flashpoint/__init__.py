"""Flashpoint reproduced: its traces, autoscalers, plans of pieces, transfers and averages.

Source: San Juan, Flashpoint: A Low-latency Serverless Platform for DL Inference Serving (MMath thesis, Waterloo 2023).
"""

from pathlib import Path
from typing import Final

from sloop.report.plots import Figure, Panel, Series
from sloop.reproduce.flashpoint.offline import QUEUES, T5, atoll_targets, benefits, offline_rows
from sloop.reproduce.flashpoint.traces import AZURE, MAIN, requests_of
from sloop.reproduce.harness import Progress, Reproduction, silent

SOURCE: Final = "San Juan, Flashpoint, MMath thesis, Waterloo 2023"


def reproduce(*, quick: bool, data: Path | None, processes: int = 0, progress: Progress = silent) -> Reproduction:
    """All rows.

    `data` is the folder of public data. If the Twitter trace is missing there, rows of its windows are left out.
    """
    rows = offline_rows(data)
    progress(1.0, "offline")
    assumed = [
        "six models: size, and load and send of T5, as printed; the others calibrated to the printed means",
        "layers of the public architectures, all of a model equally slow; boundaries calibrated to the printed mean",
        f"requests: {requests_of(AZURE, data).provenance}",
    ]
    main = requests_of(MAIN, data)
    assumed += [] if main.is_measured else [f"requests: {main.provenance}"]
    return Reproduction("flashpoint", SOURCE, tuple(rows), (targets_figure(data), plans_figure()), tuple(assumed))


def targets_figure(data: Path | None) -> Figure:
    """Fig. 3.2: requests, and how many replicas Atoll's policy wants for them."""
    counts = requests_of(MAIN, data).counts
    targets = atoll_targets(counts)
    seconds = tuple(map(float, range(len(counts))))
    requests = Series("requests", seconds, tuple(map(float, counts)), "area")
    wanted = Series("wanted", tuple(15.0 * at for at in range(len(targets))), tuple(map(float, targets)), "steps")
    return Figure(
        name="targets",
        title=f"An hour of the Twitter trace, and Atoll's policy for {T5}",
        x_label="time, s",
        panels=(Panel(y_label="requests/s", series=(requests,)), Panel(y_label="replicas", series=(wanted,))),
        alt=f"Between {min(counts)} and {max(counts)} requests per second; between {min(targets)} and {max(targets)} "
        "replicas are wanted.",
    )


def plans_figure() -> Figure:
    """Fig. 8.1 for T5: what three plans save of the mean time of a queue."""
    places = tuple(map(float, QUEUES))
    found = [benefits(T5, requests) for requests in QUEUES]
    series = (
        Series("Flashpoint", places, tuple(100 * each.best for each in found)),
        Series("Gillis", places, tuple(100 * each.gillis for each in found)),
        Series("SerFer", places, tuple(100 * each.serfer for each in found)),
    )
    return Figure(
        name="plans",
        title=f"Plans of pieces for {T5} on 55 accelerators",
        x_label="waiting requests",
        panels=(Panel(y_label="time saved, %", series=series),),
        alt=f"With one waiting request all save {100 * found[0].best:.0f} %; with {QUEUES[-1]:,} Flashpoint's plan "
        f"saves {100 * found[-1].best:.0f} %, Gillis's {100 * found[-1].gillis:.0f} %.",
    )
