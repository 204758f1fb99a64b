"""The autopilot on traces that nothing was chosen with, against each of its systems alone.

    python -m benchmarks.autopilot [--traces level] [--seeds 2] [--development]

Three kinds of traffic, each with five seeds that were drawn before the first run: a level that changes twice, bursts at
random times, and a calm one. `--development` takes five other seeds, with which the autopilot may be changed. A run
lasts four hours, because an autopilot with its defaults looks back for one. All is simulated, the autopilot's own
simulations for real; they take the time that a tenth of a core would need, by the model of `sloop.sim.foretell`. The
best system in hindsight is the cheapest that keeps the target alone, or the one with the highest attainment if none
does.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from statistics import fmean
from typing import Any, Final

from benchmarks.notebook import arguments, publish, say, table
from sloop.app.load import load_scenario
from sloop.machine import usable_cpus
from sloop.sim.scenarios import chosen_systems, run_scenario

Runs = list[tuple[str, float, float]]
"""Label, attainment and cost of each system with one trace: the autopilot's first, then those of its systems alone."""

TARGET: Final = 0.99
LENGTH_S: Final = 14_400
WITHIN: Final = 1.1
"""The cost may be so many times that of the best system in hindsight."""
AMONG: Final[tuple[Any, ...]] = ({"name": "static", "replicas": 4, "cores": 1}, "hpa", {"name": "hpa", "target": 0.4})
AUTOPILOT: Final = {"name": "autopilot", "among": list(AMONG), "target": TARGET}
PROFILE: Final = {
    "latency_ms": {"form": "amdahl", "gamma": 360, "epsilon": 30, "delta": 15, "eta": 45},
    "max_batch": 8,
    "max_cores": 8,
    "load_s": 4.0,
}
TRACES: Final[Mapping[str, Mapping[str, Any]]] = {
    "level": {"kind": "step", "rates": [2.0, 5.0, 3.0], "each_s": LENGTH_S / 3},
    "bursts": {"kind": "mmpp", "rates": [1.8, 6.5], "mean_s": [360, 60]},
    "calm": {"kind": "poisson", "rate": 3.2},
}
SEEDS: Final[Mapping[str, tuple[int, ...]]] = {
    "level": (314392, 817143, 316562, 24973, 986753),
    "bursts": (273708, 998574, 528051, 120514, 374741),
    "calm": (960989, 681029, 521337, 587185, 202458),
}
"""Drawn from the system's source of randomness on 30 November 2026, before the first run."""
DEVELOPMENT: Final = (1, 2, 3, 4, 5)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--traces", default=",".join(TRACES), help="which kinds of traffic")
    parser.add_argument("--seeds", type=int, default=5, help="how many of the drawn seeds")
    parser.add_argument("--development", action="store_true", help="other seeds, and nothing is written")
    options = parser.parse_args()
    drawn = dict.fromkeys(TRACES, DEVELOPMENT) if options.development else SEEDS
    names = options.traces.split(",")
    jobs = {(name, seed): None for name in names for seed in drawn[name][: options.seeds]}
    with ProcessPoolExecutor(len(usable_cpus())) as pool:
        found = dict(zip(jobs, pool.map(_runs, *zip(*jobs, strict=True)), strict=True))
    details = [
        (name, seed, label, 100 * attainment, usd)
        for (name, seed), runs in found.items()
        for label, attainment, usd in runs
    ]
    verdicts = [_verdict(name, [runs for (other, _), runs in found.items() if other == name]) for name in names]
    columns = ("traffic", "target kept where a system keeps it", "cost / best, mean", "worst", "within 10 %", "best")
    text = [
        f"Target {100 * TARGET:g} %, {LENGTH_S:,} s each, deadline 3 s, two c5.4xlarge, {AUTOPILOT}.",
        "## Against the best system in hindsight",
        table(columns, verdicts),
        "## Each run",
        table(("traffic", "seed", "system", "in time %", "USD"), details),
    ]
    publish("autopilot", "Autopilot", "\n\n".join(text), write=not (options.no_write or options.development))


def _verdict(name: str, runs: Sequence[Runs]) -> tuple[object, ...]:
    """How the autopilot did with one kind of traffic."""
    kept, ratios, best_of_all = 0, list[float](), set[str]()
    for pilot, *alone in runs:
        keeping = [run for run in alone if run[1] >= TARGET]
        best = min(keeping, key=lambda run: run[2]) if keeping else max(alone, key=lambda run: run[1])
        kept += pilot[1] >= TARGET or not keeping
        ratios.append(pilot[2] / best[2])
        best_of_all.add(best[0])
    within = f"{sum(ratio <= WITHIN for ratio in ratios)} of {len(ratios)}"
    return name, f"{kept} of {len(ratios)}", fmean(ratios), max(ratios), within, ", ".join(sorted(best_of_all))


def _runs(name: str, seed: int) -> Runs:
    """Simulate one trace under all of them."""
    scenario = load_scenario(
        {
            "name": name,
            "slo_ms": 3000,
            "stages": [{"name": "only", "profile": PROFILE}],
            "cluster": {"nodes": [{"hardware": "c5.4xlarge", "count": 2}]},
            "trace": TRACES[name],
            "duration_s": LENGTH_S,
            "seed": seed,
        }
    )
    found: Runs = []
    for choice in chosen_systems(scenario, [AUTOPILOT, *AMONG]):
        row = run_scenario(scenario, choice, check_first=0).row
        label = choice.label if choice.label == "autopilot" else choice.text
        found.append((label, row.attainment, row.usd))
        say(f"{name} {seed}: {label} {100 * row.attainment:.2f} % {row.usd:.4f} USD")
    return found


if __name__ == "__main__":
    main()
