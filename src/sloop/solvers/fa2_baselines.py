"""What FA2 is compared with, as arithmetic: DS2, InferLine and GrandSLAm on the values of `sloop.solvers.fa2`.

The definitions are those of the FA2 evaluation (Razavi et al., RTAS 2022) with the specification's readings (§5.2); of
InferLine (Crankshaw et al., SoCC 2020) also a planner nearer to its own paper. All of them know only equal replicas of
one kind. Units as there: milliseconds and requests per second.
"""

from collections.abc import Sequence

from sloop.solvers.fa2 import SLACK_MS, Choice, Stage, choices_of, keeps
from sloop.solvers.graph import Chains, Way
from sloop.solvers.queueing import fill_ms


def ds2(stages: Sequence[Stage]) -> tuple[Choice, ...]:
    """No batches, n = ⌈λ d(1)⌉; deadlines are not looked at (Kalavri et al., OSDI 2018, for stream processing)."""
    return tuple(choices_of(stage)[0] for stage in stages)


def inferline(stages: Sequence[Stage], ways: Sequence[Way]) -> tuple[Choice, ...]:
    """From batches of 1, each stage in turn grows its batch by 1 while all paths still hold; no stage twice.

    The order of `stages` decides who takes the time: the early ones all of it.
    """
    chosen = list(ds2(stages))
    chains = Chains([way.stages for way in ways], [way.slo_ms for way in ways], len(stages))
    if not keeps(chosen, ways):
        return tuple(chosen)
    for place, stage in enumerate(stages):
        most_ms = chosen[place].total_ms + chains.room([choice.total_ms for choice in chosen])[place] + SLACK_MS
        for option in _by_batch(stage)[1:]:
            if option.total_ms > most_ms:
                break
            chosen[place] = option
    return tuple(chosen)


def inferline_full(stages: Sequence[Stage], ways: Sequence[Way]) -> tuple[Choice, ...]:
    """From batches of 1, the doubling of one stage's batch that saves most replicas, until none saves any.

    A batch may double several times at once, because a single step need not save yet; replicas that are no longer
    needed go with it. Of equal savings the smaller batch, then the earlier stage.
    """
    chosen = list(ds2(stages))
    while True:
        moves = [
            (option.replicas - chosen[place].replicas, option.batch, place, option)
            for place, stage in enumerate(stages)
            for option in _by_batch(stage)
            if _is_doubling(chosen[place].batch, option.batch)
            and option.replicas < chosen[place].replicas
            and keeps([*chosen[:place], option, *chosen[place + 1 :]], ways)
        ]
        if not moves:
            return tuple(chosen)
        _, _, place, option = min(moves, key=lambda move: move[:3])
        chosen[place] = option


def grandslam(stages: Sequence[Stage], ways: Sequence[Way], replicas: Sequence[int]) -> tuple[Choice, ...]:
    """The largest batch whose d(b) fits the stage's fixed share of the deadline, in proportion to d(1).

    Of several paths the one that leaves the stage least. It sizes no pools: `replicas` are somebody else's, per stage
    (Kannan et al., EuroSys 2019).
    """
    chosen = []
    for place, (stage, count) in enumerate(zip(stages, replicas, strict=True)):
        alone = stage.latency_ms[0]
        share_ms = min(
            way.slo_ms * alone / sum(stages[other].latency_ms[0] for other in way.stages)
            for way in ways
            if place in way.stages
        )
        fitting = [batch for batch, own_ms in enumerate(stage.latency_ms, start=1) if own_ms <= share_ms]
        batch = max(fitting, default=1) if stage.rate_rps > 0 else 1
        turns = max(1, -(-stage.parts // (batch * count)))
        wait_ms = fill_ms(-(-batch // stage.parts), stage.rate_rps / stage.parts)
        chosen.append(Choice(batch, count, stage.latency_ms[batch - 1], wait_ms, turns))
    return tuple(chosen)


def _by_batch(stage: Stage) -> list[Choice]:
    """The option with the fewest replicas for each batch, ascending."""
    cheapest: dict[int, Choice] = {}
    for option in choices_of(stage):
        there = cheapest.get(option.batch)
        if there is None or option.replicas < there.replicas:
            cheapest[option.batch] = option
    return list(cheapest.values())


def _is_doubling(before: int, after: int) -> bool:
    return after > before and after % before == 0 and (after // before).bit_count() == 1
