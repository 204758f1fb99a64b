"""Ours against PALDIA: `mixed` on the same six kinds of nodes, at the same prices, under the same loads.

Three loads, each with two kinds of arrivals: all requests of a second at once, as PALDIA's results need them, and a
Poisson process. `mixed` is told which of them to expect, and that nodes come within a second; PALDIA, where
requests come one by one, gets two sizes of the group that it plans for: a second, and the deadline. The Twitter load is
recorded if the public data is there.

Headroom and `calm_ms` of the first kind of arrivals were chosen on the load of ResNet50 on Azure, and are the same for
all loads.

What differs: `mixed` uses several nodes at once, plans with the largest forecast of the last seconds instead of half of
a deadline, starts the first time that the forecast asks for it, and lets as many batches run on a GPU as serve most.
"""

from collections.abc import Mapping
from statistics import fmean
from typing import Final, NamedTuple

from msgspec import structs

from sloop.reproduce.harness import Results, Wanted
from sloop.reproduce.paldia.runs import Options, PaldiaResult, PaldiaTrial
from sloop.reproduce.paldia.traces import RECORDED
from sloop.reproduce.rows import Claim, Row, difference, directed

SCENES: Final[Mapping[str, tuple[str, str]]] = {
    "Azure-like, ResNet50": ("ResNet50", "azure"),
    "Azure-like, VGG19": ("VGG19", "azure"),
    "Wikipedia-like, ResNet50": ("ResNet50 on Wikipedia", "wiki"),
    "Twitter, DPN92": ("DPN92 on Twitter", RECORDED),
}
"""Model and load of each."""
QUICK: Final = ("Azure-like, ResNet50",)
GROUPS_MS: Final = (1000, 200)
"""What PALDIA may take to arrive at once."""
SEEDS: Final = 3


class Arrivals(NamedTuple):
    """How requests arrive, and what `mixed` is told about it."""

    label: str
    even: bool
    options: Options


ARRIVALS: Final = (
    Arrivals(
        "at once",
        False,
        (
            ("group_ms", 1000),
            ("forecast.window_s", 1),
            ("calm_ms", 5_000),
            ("release_after_ms", 0),
            ("headroom", 0.0),
        ),
    ),
    Arrivals("Poisson", True, (("calm_ms", 10_000), ("release_after_ms", 0))),
)


def trial(scene: str, arrivals: Arrivals, system: str, options: Options = ()) -> PaldiaTrial:
    """A system on one of the scenes."""
    model, load = SCENES[scene]
    made = PaldiaTrial(model=model, system=system, options=options, load=load)
    return structs.replace(made, arrivals="even" if arrivals.even else "clumps")


def rivals(scene: str, arrivals: Arrivals) -> dict[int, PaldiaTrial]:
    """PALDIA, by the group that it plans for. One is enough where requests come at once."""
    groups = GROUPS_MS if arrivals.even else GROUPS_MS[:1]
    return {group_ms: trial(scene, arrivals, "paldia", (("group_ms", group_ms),)) for group_ms in groups}


def ours_wanted(*, quick: bool) -> Wanted[PaldiaTrial]:
    """All trials; `quick` plays one scene with one seed."""
    trials = []
    for scene in QUICK if quick else SCENES:
        for arrivals in ARRIVALS:
            trials += [trial(scene, arrivals, "mixed", arrivals.options), *rivals(scene, arrivals).values()]
    return [(each, 1 if quick else SEEDS) for each in trials]


def ours_rows(found: Results[PaldiaResult], *, quick: bool) -> list[Row]:
    """For each scene and each group of PALDIA: how much cheaper ours is, and how many more requests are in time."""
    rows, counts = list[Row](), list[Row]()
    for arrivals in ARRIVALS:
        wins = []
        for scene in QUICK if quick else SCENES:
            own = trial(scene, arrivals, "mixed", arrivals.options)
            for group_ms, rival in rivals(scene, arrivals).items():
                pair, is_better = _against(found, scene, arrivals, own, group_ms, rival)
                rows += pair
                wins += [scene] if is_better else []
        loads = list(dict.fromkeys(win.partition(",")[0] for win in wins))
        wanted = 1 if quick else 3
        claim = Claim("ours", f"loads on which ours is cheaper with no fewer in time, {arrivals.label}", "",
                      note=", ".join(dict.fromkeys(wins)) or "none")  # fmt: skip
        counts.append(
            directed(claim, [float(len(loads))], holds=len(loads) >= wanted, expect=f"at least {wanted} of 3")
        )
    return [*counts, *rows]


def _against(
    found: Results[PaldiaResult], scene: str, arrivals: Arrivals, own: PaldiaTrial, group_ms: int, rival: PaldiaTrial
) -> tuple[list[Row], bool]:
    """Two rows, and whether ours costs less than this PALDIA and has no fewer requests in time."""
    what = f"{scene}, {arrivals.label}, beside PALDIA with groups of {group_ms} ms"
    usd, usd_rival = (found.each(each, "usd_per_h") for each in (own, rival))
    in_time, in_time_rival = (found.each(each, "compliance") for each in (own, rival))
    costs = [100.0 * (a / b - 1.0) for a, b in zip(usd, usd_rival, strict=True)]
    points = difference(in_time, in_time_rival)
    note = f"{fmean(usd):.3f} and {fmean(usd_rival):.3f} $/h"
    cost = directed(Claim("ours", f"cost, {what}", "%", note=note), costs, holds=fmean(costs) < 0, expect="cheaper")
    note = f"{fmean(in_time):.2f} and {fmean(in_time_rival):.2f} %; {points}"
    claim = Claim("ours", f"compliance, {what}", "points", note=note)
    samples = [a - b for a, b in zip(in_time, in_time_rival, strict=True)]
    compliance = directed(claim, samples, holds=points.is_at_least(0.0), expect="no fewer in time")
    return [cost, compliance], fmean(costs) < 0 <= fmean(samples)
