"""Our systems against PALDIA: `mixed` and `harbor` on the same six kinds of nodes, at the same prices, under the same
loads.

Each load has two kinds of arrivals: all requests of a second at once, as PALDIA's results need them, and a Poisson
process. The parameters of our systems say which of the two to expect, and that nodes are ready within a second. For
Poisson arrivals, PALDIA is simulated with two sizes of the group that it plans for: a second, and the deadline. The
Twitter loads are recorded if the public data is available.

The parameters of our systems were chosen on the load of ResNet50 on Azure, with the first seeds. All runs here have
other seeds, and the same parameters on all loads.

Our systems differ from PALDIA as follows. `mixed` uses several nodes at once, plans for the largest forecast of the
last seconds instead of for half of a deadline, acts on a forecast at once, and runs as many batches together on a GPU
as serve the most requests. `harbor` plans for Poisson arrivals only. If requests arrive at once, it plans for five
times the rate, because all requests of a second have to be served within the deadline, which is a fifth of a second.
"""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Final, NamedTuple

from msgspec import structs

from sloop.api.reports import Figure, Panel, Series
from sloop_systems.comparison.harness import UNSEEN, Results, Wanted
from sloop_systems.comparison.rows import Claim, Row, difference, directed, minus, over
from sloop_systems.paldia.experiments.runs import Options, PaldiaResult, PaldiaTrial
from sloop_systems.paldia.experiments.traces import RECORDED, RECORDED_LATER

SCENES: Final[Mapping[str, tuple[str, str]]] = {
    "Azure-like, ResNet50": ("ResNet50", "azure"),
    "Azure-like, VGG19": ("VGG19", "azure"),
    "Azure-like, BERT": ("BERT", "azure"),
    "Wikipedia-like, ResNet50": ("ResNet50 on Wikipedia", "wiki"),
    "Twitter, DPN92": ("DPN92 on Twitter", RECORDED),
    "Twitter later, DPN92": ("DPN92 on Twitter", RECORDED_LATER),
}
"""Model and load of each."""
QUICK: Final = ("Azure-like, ResNet50",)
GROUPS_MS: Final = (1000, 200)
"""The groups that PALDIA plans for as if they arrived at once, in ms."""
WITH_HARBOR: Final = ("Azure-like, ResNet50", "Azure-like, BERT")
"""The loads on which `harbor` is simulated; few, because it solves an integer program at each change of the rate."""
SEEDS: Final = 3
TRACES_WON: Final = 3
"""On how many traces each of our systems should be cheaper with at least as many requests in time."""

LATE_SHOWN: Final = 0.01
"""The fewest late requests that a figure shows, in percent, because a logarithmic axis has no 0."""


class Arrivals(NamedTuple):
    """How requests arrive, and the corresponding parameters of our systems."""

    label: str
    poisson: bool
    options: Mapping[str, Options]
    """By system."""


ALONE: Final[Options] = (("period_ms", 1000), ("slower", 1.0), ("transport_ms", 0.0))
"""What `harbor` is told of a machine that does nothing else."""
ARRIVALS: Final = (
    Arrivals(
        "at once",
        False,
        {
            "mixed": (
                ("group_ms", 1000),
                ("forecast.window_s", 1),
                ("calm_ms", 5_000),
                ("release_after_ms", 0),
                ("headroom", 0.0),
            ),
            "harbor": (*ALONE, ("wait_ms", 1), ("headroom", 4.0)),
        },
    ),
    Arrivals(
        "Poisson",
        True,
        {"mixed": (("calm_ms", 10_000), ("release_after_ms", 0)), "harbor": (*ALONE, ("wait_ms", 10))},
    ),
)


def trial(scene: str, arrivals: Arrivals, system: str, options: Options = ()) -> PaldiaTrial:
    """A system on one of the scenes."""
    model, load = SCENES[scene]
    made = PaldiaTrial(model=model, system=system, options=options, load=load, first_seed=UNSEEN)
    return structs.replace(made, arrivals="poisson" if arrivals.poisson else "clumps")


def own_trials(scene: str, arrivals: Arrivals) -> dict[str, PaldiaTrial]:
    """Our systems, by name."""
    return {
        name: trial(scene, arrivals, name, options)
        for name, options in arrivals.options.items()
        if name != "harbor" or scene in WITH_HARBOR
    }


def rivals(scene: str, arrivals: Arrivals) -> dict[int, PaldiaTrial]:
    """PALDIA, by the group that it plans for; only one group if requests arrive at once."""
    groups = GROUPS_MS if arrivals.poisson else GROUPS_MS[:1]
    return {group_ms: trial(scene, arrivals, "paldia", (("group_ms", group_ms),)) for group_ms in groups}


def scenes(*, quick: bool) -> Sequence[str]:
    """The loads that are simulated."""
    return QUICK if quick else tuple(SCENES)


def ours_wanted(*, quick: bool, kinds: Sequence[Arrivals] = ARRIVALS) -> Wanted[PaldiaTrial]:
    """All trials with these kinds of arrivals; `quick` plays one scene with one seed."""
    trials = []
    for scene in scenes(quick=quick):
        for arrivals in kinds:
            trials += [*own_trials(scene, arrivals).values(), *rivals(scene, arrivals).values()]
    return [(each, 1 if quick else SEEDS) for each in trials]


def ours_rows(found: Results[PaldiaResult], *, quick: bool, kinds: Sequence[Arrivals] = ARRIVALS) -> list[Row]:
    """For each of our systems, each group of PALDIA and each load: the difference in cost, and the difference in
    requests in time; before these, the number of traces on which ours is cheaper with at least as many requests in
    time."""
    rows, counts = list[Row](), list[Row]()
    for arrivals in kinds:
        for system in arrivals.options:
            played = [scene for scene in scenes(quick=quick) if system in own_trials(scene, arrivals)]
            least = TRACES_WON if system == "mixed" and not quick else 1
            for group_ms in rivals(played[0], arrivals):
                what, wins = f"{arrivals.label}, {system} beside PALDIA with groups of {group_ms} ms", []
                for scene in played:
                    own, rival = own_trials(scene, arrivals)[system], rivals(scene, arrivals)[group_ms]
                    pair, is_better = _against(found, f"{scene}, {what}", own, rival)
                    rows += pair
                    wins += [scene] if is_better else []
                traces = dict.fromkeys(win.partition(",")[0] for win in wins)
                claim = Claim("ours", f"traces on which it is cheaper with no fewer in time, {what}", "",
                              note="; ".join(wins) or "none")  # fmt: skip
                counts.append(directed(claim, [float(len(traces))], at_least=least))
    return [*counts, *rows]


def _against(found: Results[PaldiaResult], what: str, own: PaldiaTrial, rival: PaldiaTrial) -> tuple[list[Row], bool]:
    """Two rows, or none if both chose the same plans; and whether our system costs less than PALDIA with these groups,
    by the whole 95 % interval, and has at least as many requests in time."""
    usd, usd_rival = (found.each(each, "usd_per_h") for each in (own, rival))
    in_time, in_time_rival = (found.each(each, "compliance") for each in (own, rival))
    if usd == usd_rival and in_time == in_time_rival:  # the same plans
        return [], False
    costs = [100.0 * (ratio - 1.0) for ratio in over(usd, usd_rival)]
    dearer, points = difference(costs, [0.0] * len(costs), "%"), difference(in_time, in_time_rival)
    is_cheaper = dearer.mean + (dearer.half or 0.0) < 0
    note = f"{fmean(usd):.3f} and {fmean(usd_rival):.3f} $/h"
    cost = directed(Claim("ours", f"cost, {what}", "%", note=note), costs, "cheaper", below=0, of="interval")
    note = f"{fmean(in_time):.2f} and {fmean(in_time_rival):.2f} %; {points}"
    claim = Claim("ours", f"compliance, {what}", "points", note=note)
    compliance = directed(claim, minus(in_time, in_time_rival), "no fewer in time", at_least=0)
    return [cost, compliance], is_cheaper and points.mean >= 0


def price_figures(found: Results[PaldiaResult], *, quick: bool, kinds: Sequence[Arrivals] = ARRIVALS) -> list[Figure]:
    """Late requests by price: for each kind of arrivals a panel for each scene, with a point for each seed."""
    return [_price_figure(found, arrivals, scenes(quick=quick)) for arrivals in kinds]


def _price_figure(found: Results[PaldiaResult], arrivals: Arrivals, names: Sequence[str]) -> Figure:
    panels, spoken = [], []
    for scene in names:
        trials = own_trials(scene, arrivals)
        trials |= {f"PALDIA, groups of {group_ms} ms": each for group_ms, each in rivals(scene, arrivals).items()}
        series = []
        for name, each in trials.items():
            usd, in_time = (found.each(each, field) for field in ("usd_per_h", "compliance"))
            late = tuple(max(LATE_SHOWN, 100.0 - value) for value in in_time)
            series.append(Series(name, tuple(usd), late, "points"))
            spoken.append(f"{scene}: {name} {100 - fmean(in_time):.2f} % for {fmean(usd):.2f} $/h")
        load, _, model = scene.partition(", ")
        panels.append(Panel(y_label=f"{load}\n{model}, %", series=tuple(series), log=True))
    return Figure(
        name="price-poisson" if arrivals.poisson else "price-at-once",
        title=f"Late requests by price, {arrivals.label}: one point for each seed",
        x_label="USD per hour",
        panels=tuple(panels),
        alt=f"Late requests by price: {'; '.join(spoken)}.",
    )
