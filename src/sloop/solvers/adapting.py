"""From a cluster view to IPA's program, and from its answer back to a plan: shared by the policies that solve it.

Promises that every candidate can be asked for: its cores are given, or the fewest of 1, 2, 4, … units that carry the
threshold and keep the stage's share of the deadline, no more than it has use for, and they stay what they are (base
allocation); batches are powers of two that its profile knows. Each way through a graph keeps its own deadline, whatever
its shape. Accuracy is that of all stages together, which on a graph with branches is less than that of any way: a bound
on the safe side. Decides nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Final, Literal

from msgspec import Struct

from sloop.core.views import Belief, ClusterView, StageView
from sloop.errors import InputError
from sloop.solvers import targets
from sloop.solvers.accuracy import Measure, fraction, scores
from sloop.solvers.base_allocation import Sizes, base, quickest_cores
from sloop.solvers.queueing import fill_ms, patience_ns
from sloop.solvers.variants import Answer, Candidate, Choices, Goal, Option
from sloop.units import to_ms
from sloop.vocabulary import Group, Plan, ReplicaSpec, StagePlan

Only = Literal["any", "lightest", "heaviest"]
"""Which variants of a stage may run: by the core-milliseconds of one request."""

UNITS: Final = (1, 2, 4, 8, 16, 32)
EPSILON: Final = 1e-9
"""Units add up as floats: so little above what there is will do."""


class StageTerms(Struct, frozen=True, forbid_unknown_fields=True):
    """What is given of one stage where it differs from the others."""

    variant: str = ""
    """The only one that may run."""
    cores: Mapping[str, float] = {}
    """Of each replica, by variant; what is left out follows from the profiles."""
    threshold_rps: float | None = None
    slo_ms: float | None = None
    """What its largest batch may take, for base allocation only."""
    replicas: int | None = None

    def __post_init__(self) -> None:
        """ValueError for a figure that cannot be."""
        for name, value in (("threshold_rps", self.threshold_rps), ("slo_ms", self.slo_ms), *self.cores.items()):
            if value is not None and not 0 < value < inf:
                raise ValueError(f"{name} = {value} is out of range: it must be above 0")
        if self.replicas is not None and self.replicas < 1:
            raise ValueError(f"replicas = {self.replicas} is out of range: it must be at least 1")


@dataclass(frozen=True, slots=True)
class Terms:
    """How a policy sees stages and variants. `replicas` 0: as many as needed."""

    system: str
    measure: Measure
    only: Only
    unit: float
    threshold_rps: float
    batch_max: int
    load_max: float
    """A replica is planned for this part of the throughput it is believed to have."""
    replicas: int
    stages: Mapping[str, StageTerms]

    def of(self, stage: StageView) -> StageTerms:
        """What is given of this stage."""
        return self.stages.get(stage.name, StageTerms())


@dataclass(frozen=True, slots=True)
class Member:
    """A variant that may run: its cores per replica, and what it contributes to accuracy."""

    variant: str
    cores: float
    score: float


Families = Mapping[str, tuple[Member, ...]]
"""By stage, in the order they are declared."""


def families(view: ClusterView, terms: Terms) -> Families:
    """Who may run where, on how many cores. `InputError` for a stage or variant that is not there, and for a variant
    whose accuracy is not known where it would have to be weighed against another's."""
    names = [stage.name for stage in view.stages]
    unknown = terms.stages.keys() - set(names)
    if unknown:
        message = f"system {terms.system}: no stage {min(unknown)!r}"
        raise InputError(message, help=f"the application's stages are {', '.join(names)}")
    limits_ms = _shares_ms(view, terms)
    return {stage.name: _family(view, stage, terms, limits_ms[stage.name]) for stage in view.stages}


def _family(view: ClusterView, stage: StageView, terms: Terms, slo_ms: float) -> tuple[Member, ...]:
    own = terms.of(stage)
    if not own.variant and terms.only == "any" and len(stage.variants) > 1:
        for variant in stage.variants:  # all of them: also those that get no cores
            _accuracy(stage, variant, terms.system)
    cores = _cores(view, stage, terms, slo_ms)
    weight = {v: count * stage.variants[v].latency_ms(1, count) for v, count in cores.items()}
    if own.variant:
        allowed = [targets.variant_of(stage, own.variant)]
    elif terms.only == "any":
        allowed = list(cores)
    else:
        allowed = [(min if terms.only == "lightest" else max)(cores, key=weight.__getitem__)]
    if len(allowed) == 1:  # nothing to weigh
        known = stage.variants[allowed[0]].accuracy
        return (Member(allowed[0], cores[allowed[0]], 1.0 if known is None else fraction(known)),)
    accuracies = [_accuracy(stage, variant, terms.system) for variant in allowed]
    found = scores(terms.measure, accuracies, [cores[variant] for variant in allowed], allowed)
    return tuple(Member(v, cores[v], score) for v, score in zip(allowed, found, strict=True))


def _accuracy(stage: StageView, variant: str, system: str) -> float:
    accuracy = stage.variants[variant].accuracy
    if accuracy is None:
        raise InputError(
            f"stage {stage.name}: variant {variant!r} has no accuracy, which system {system} weighs against cores",
            help=f"write `accuracy:` beside {variant!r}, or allow one variant only: "
            f"`stages: {{{stage.name}: {{variant: {variant}}}}}`",
        )
    return fraction(accuracy)


def _cores(view: ClusterView, stage: StageView, terms: Terms, slo_ms: float) -> dict[str, float]:
    """Cores per replica of each variant that has them. Where the largest batch of none keeps its share, of those that
    keep it one by one; where none does, which need not be the end of the whole way, the lightest is made as quick as
    can be."""
    own = terms.of(stage)
    sizes = {variant: _sizes(view, belief, terms.unit) for variant, belief in stage.variants.items()}
    threshold_rps = own.threshold_rps or terms.threshold_rps
    wanted = targets.variant_of(stage, own.variant) if own.variant else ""
    # Least accurate first; where that is not known, the quickest.
    order = sorted(sizes, key=lambda variant: (stage.variants[variant].accuracy or 0.0, _one_ms(sizes[variant])))
    known: dict[str, float] = {}
    for batch_max in (terms.batch_max, 1):
        variants = [sizes[variant] for variant in order]
        found = base(variants, threshold_rps=threshold_rps, batch_max=batch_max, slo_ms=slo_ms)
        for variant, count in zip(order, found.cores, strict=True):
            if count is not None:
                known.setdefault(variant, count)
        known |= own.cores
        if wanted in known or (known and not wanted):
            break
    else:
        lightest = wanted or min(order, key=lambda variant: _one_ms(sizes[variant]))
        known[lightest] = quickest_cores(sizes[lightest])
    for variant in known:
        targets.variant_of(stage, variant)
    return {variant: known[variant] for variant in stage.variants if variant in known}


def _one_ms(sizes: Sizes) -> float:
    """Of a request by itself, on the fewest cores."""
    return sizes.latency_ms(1, sizes.choices[0])


def _sizes(view: ClusterView, belief: Belief, unit: float) -> Sizes:
    """1, 2, 4, … units, as far as a node has them and the variant has use for them; all of a node that has less. Its
    latency is that of its own largest batch for what is larger."""

    def latency_ms(batch: int, cores: float) -> float:
        return belief.latency_ms(min(batch, belief.batch_max), cores)

    most = targets.node_cores_max(view)
    choices = [unit * count for count in UNITS if unit * count <= most + EPSILON] or [most]
    return Sizes(latency_ms, [cores for cores in choices if cores <= belief.cores_max + EPSILON] or choices[:1])


def _shares_ms(view: ClusterView, terms: Terms) -> dict[str, float]:
    """What a batch of each stage may take: as given, or a share of the deadline of its tightest way, in proportion to
    the deadlines that base allocation would derive."""
    derived = {}
    for stage in view.stages:
        own = terms.of(stage)
        derived[stage.name] = (
            own.slo_ms
            or base(
                [_sizes(view, belief, terms.unit) for belief in stage.variants.values()],
                threshold_rps=own.threshold_rps or terms.threshold_rps,
                batch_max=terms.batch_max,
            ).slo_ms
        )
    factor = dict.fromkeys(derived, inf)
    for path in view.paths:
        own_ms = to_ms(path.slo_ns) / sum(derived[name] for name in path.stages)
        for name in path.stages:
            factor[name] = min(factor[name], own_ms)
    return {s.name: terms.of(s).slo_ms or derived[s.name] * factor[s.name] for s in view.stages}


def program(view: ClusterView, found: Families, terms: Terms, headroom: float) -> list[Choices]:
    """What may be chosen, for 1 + `headroom` times the rates expected."""
    rates = {name: rate_rps * (1 + headroom) for name, rate_rps in view.demand_rps.items()}
    return [_choices(stage, found[stage.name], terms, rates[stage.name]) for stage in view.stages]


def _choices(stage: StageView, members: Sequence[Member], terms: Terms, rate_rps: float) -> Choices:
    most = min(terms.batch_max, max(stage.variants[member.variant].batch_max for member in members))
    batches = tuple(1 << power for power in range(most.bit_length()))
    candidates = []
    for member in members:
        costs_ns = stage.variants[member.variant].costs_ns(member.cores)
        latency_ms = tuple(to_ms(costs_ns[batch]) if batch < len(costs_ns) else inf for batch in batches)
        busy_ms = () if terms.load_max == 1.0 else tuple(taken_ms / terms.load_max for taken_ms in latency_ms)
        candidates.append(Candidate(member.score, member.cores, latency_ms, busy_ms))
    return Choices(rate_rps, batches, tuple(candidates), terms.of(stage).replicas or terms.replicas)


def restricted(stages: Sequence[Choices], candidates: Sequence[int]) -> list[Choices]:
    """The same program with one candidate for each stage."""
    return [
        Choices(own.rate_rps, own.batches, (own.candidates[index],), own.replicas)
        for own, index in zip(stages, candidates, strict=True)
    ]


def stage_plans(
    view: ClusterView, found: Families, stages: Sequence[Choices], options: Sequence[Option]
) -> tuple[StagePlan, ...]:
    """One kind of replica for each stage; a batch waits twice as long as it should take to fill."""
    made = []
    for stage, own, option in zip(view.stages, stages, options, strict=True):
        member = found[stage.name][option.candidate]
        group = Group(ReplicaSpec(stage.name, member.variant, member.cores), option.replicas)
        wait_ns = patience_ns(fill_ms(option.batch, own.rate_rps), stage.slo_ns)
        made.append(StagePlan(stage.name, (group,), option.batch, in_place=False, wait_ns=wait_ns))
    return tuple(made)


def variants_in(plan: Plan | None, view: ClusterView, found: Families) -> tuple[int, ...] | None:
    """The candidate that the plan runs at each stage; None where it is no plan of one candidate for each."""
    if plan is None or [target.stage for target in plan.stages] != [stage.name for stage in view.stages]:
        return None
    running = []
    for target in plan.stages:
        names = [member.variant for member in found[target.stage]]
        if len(target.groups) != 1 or target.groups[0].spec.variant not in names:
            return None
        running.append(names.index(target.groups[0].spec.variant))
    return tuple(running)


def words(view: ClusterView, found: Families, goal: Goal, answer: Answer) -> str:
    """An answer in one line: what runs, and how much of the tightest way's deadline it is believed to need."""
    parts = [
        f"{stage.name} {option.replicas} × {found[stage.name][option.candidate].variant}, batch {option.batch}"
        for stage, option in zip(view.stages, answer.options, strict=True)
    ]
    needed = [(way.slo_ms, sum(answer.options[stage].latency_ms for stage in way.stages)) for way in goal.ways]
    slo_ms, latency_ms = min(needed, key=lambda pair: pair[0] - pair[1])
    said = f"{'; '.join(parts)}: {targets.amount(answer.cores, 'core')}, {latency_ms:.4g} of {slo_ms:.4g} ms"
    return f"{said}; at most {answer.gap:.3g} from the best" if answer.gap else said
