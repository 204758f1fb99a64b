"""Reads how stages hang together out of a document: `after`, `when`, `each`, `join`, `entry`, and `paths`.

Promises edges and paths that fit the stages there are, or an InputError that names file, line and key. Which outputs a
model has is seen when it is loaded.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from sloop.app.application import Stage
from sloop.app.document import Value, nearest
from sloop.app.graph import PARTS_MAX, Each, When, exclude
from sloop.units import ms
from sloop.vocabulary import Path

EDGE_KEYS: Final = ("after", "when", "each", "join", "entry")
MOST_MAX: Final = 100_000
SHARE_SLACK: Final = 1e-6
"""Shares are written with a few digits: they may sum up to so much more than 1."""


def with_edges(stage: Stage, fields: dict[str, Value]) -> Stage:
    """The stage, and what leads to it."""
    after = _after(fields)
    return replace(
        stage,
        after=after,
        when=_conditions(fields["when"], after) if "when" in fields else (),
        each=_each(fields["each"], after) if "each" in fields else None,
        join=fields["join"].boolean() if "join" in fields else False,
        entry=fields["entry"].boolean() if "entry" in fields else False,
    )


def _after(fields: dict[str, Value]) -> tuple[str, ...]:
    """The names under `after`, each once."""
    after: list[str] = []
    if "after" in fields and fields["after"].content is not None:
        for each in fields["after"].some():
            if each.text() in after:
                each.fail(f"{each.content!r} is named twice", "name it once")
            after.append(each.text())
    return tuple(after)


def read_paths(value: Value, stages: Sequence[Stage], slo_ms: float) -> tuple[Path, ...]:
    """The paths declared, their shares summing up to 1 at most; evenly shared where no share is given."""
    values = value.elements()
    if not values:
        value.wrong("at least one path", "for example [{stages: [detect, read], slo_ms: 300}]")
    paths = [_path(each, stages, slo_ms, 1.0 / len(values)) for each in values]
    told = ["share" in each.mapping() for each in values]
    if any(told) and not all(told):
        values[told.index(False)].fail("some paths have a share, this one has none", "give each path its share")
    if sum(path.share for path in paths) > 1.0 + SHARE_SLACK:
        value.fail("the shares sum up to more than 1", "they are the fractions of requests that take each path")
    left_out = next((stage.name for stage in stages if not any(stage.name in path.stages for path in paths)), None)
    if left_out is not None:
        value.fail(f"no path leads through stage {left_out!r}", "declare one that does, or remove the stage")
    return tuple(paths)


def check_conditions(values: Sequence[Value], stages: Sequence[Stage]) -> None:
    """InputError where conditions on one output overlap, are to be met by more than all, or have two shares."""
    told: dict[tuple[str, str], dict[object, float]] = {}
    seen: dict[tuple[str, str], list[When]] = {}
    for value, stage in zip(values, stages, strict=True):
        for when in stage.when:
            _check_overlap(value, stage, when, seen.setdefault((when.of, when.output), []))
            if when.share is None:
                continue
            shares = told.setdefault((when.of, when.output), {})
            first = shares.setdefault(when.values if when.output else stage.name, when.share)
            if first != when.share:
                value.mapping()["when"].fail(
                    f"two shares, {first:g} and {when.share:g}, of what meets one condition after {when.of!r}",
                    "give it once, or the same",
                )
            if sum(shares.values()) > 1.0 + SHARE_SLACK:
                value.mapping()["when"].fail(
                    f"the shares of the branches after {when.of!r} sum up to more than 1",
                    "alternatives told apart by one output exclude each other; name another `output` for branches that "
                    "do not",
                )


def _check_overlap(value: Value, stage: Stage, when: When, others: list[When]) -> None:
    """Conditions on one output are the same, or exclude each other: otherwise no shares could be told for them."""
    if not when.output:
        return
    for other in others:
        if other.values != when.values and not exclude(other, when):
            value.mapping()["when"].fail(
                f"stage {stage.name!r} and another stage may both be meant by one value of output {when.output!r} of "
                f"{when.of!r}",
                "let their values be the same or have none in common; without `is`, every value but 0 is meant",
            )
    others.append(when)


def _conditions(value: Value, after: tuple[str, ...]) -> tuple[When, ...]:
    """One condition for each stage before, at most."""
    found: dict[str, When] = {}
    for each in value.some():
        when = _when(each, after)
        if when.of in found:
            each.fail(
                f"two conditions on what comes from {when.of!r}", "let it come after a stage that asks one of them"
            )
        found[when.of] = when
    return tuple(found.values())


def _when(value: Value, after: tuple[str, ...]) -> When:
    if not isinstance(value.content, dict):
        return When(_source(value, None, after), value.text())
    fields = value.mapping(("of", "output", "is", "share"))
    values = tuple(sorted({each.integer() for each in fields["is"].some()})) if "is" in fields else ()
    if "is" in fields and not values:
        fields["is"].wrong("at least one number")
    if values and "output" not in fields:
        fields["is"].fail("nothing says which output is to be this", "add 'output: NAME'")
    if not fields.keys() & {"output", "share"}:
        value.fail("neither an 'output' nor a 'share'", "name the output that decides, for example `when: is_text`")
    return When(
        _source(value, fields.get("of"), after),
        fields["output"].text() if "output" in fields else "",
        values,
        fields["share"].number(least=0, most=1) if "share" in fields else None,
    )


def _each(value: Value, after: tuple[str, ...]) -> Each:
    if not isinstance(value.content, dict):
        return Each(_source(value, None, after), value.text())
    fields = value.mapping(("of", "output", "mean", "most"))
    most = fields["most"].integer(least=1, most=MOST_MAX) if "most" in fields else PARTS_MAX
    return Each(
        _source(value, fields.get("of"), after),
        fields["output"].text() if "output" in fields else "",
        fields["mean"].number(above=0, most=most) if "mean" in fields else 1.0,
        most,
    )


def _source(value: Value, of: Value | None, after: tuple[str, ...]) -> str:
    """The stage before whose output is meant: the one named, or the only one there is."""
    if of is not None:
        if of.content not in after:
            help = nearest(str(of.content), after) if after else f"add 'after: {of.content}'"
            of.fail(f"{of.content!r} is not in `after`", help)
        return of.text()
    if len(after) != 1:
        if not after:
            value.fail("there is no output to look at: this stage comes after none", "add 'after: STAGE'")
        many = f"and this one comes after {len(after)}"
        value.fail(f"the stage whose output is meant is not said, {many}", "add 'of: STAGE'")
    return after[0]


def _path(value: Value, stages: Sequence[Stage], slo_ms: float, share: float) -> Path:
    fields = value.mapping(("stages", "slo_ms", "share"), required=("stages",))
    names = fields["stages"].elements()
    if not names:
        fields["stages"].wrong("at least one stage")
    by_name = {stage.name: stage for stage in stages}
    before = ""
    for each in names:
        stage = by_name.get(each.text())
        if stage is None:
            each.fail(f"no stage is called {each.content!r}", nearest(str(each.content), tuple(by_name)))
        if not before and stage.after and not stage.entry:
            each.fail(f"no request begins at {stage.name!r}", "add `entry: true` to it, or begin with a first stage")
        if before and before not in stage.after:
            each.fail(f"{stage.name!r} does not come after {before!r}", f"add {before!r} to its `after`")
        before = stage.name
    return Path(
        tuple(each.text() for each in names),
        ms(fields["slo_ms"].number(above=0, most=1e9) if "slo_ms" in fields else slo_ms),
        fields["share"].number(above=0, most=1) if "share" in fields else share,
    )
