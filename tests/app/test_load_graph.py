"""Reading how stages hang together: every form that is allowed, and every mistake with its line and its fix."""

from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from sloop.app.application import Application, Stage
from sloop.app.document import parse_yaml
from sloop.app.graph import PARTS_MAX, Each, InputSource, OutputSource, When
from sloop.app.load import read_application
from sloop.errors import InputError
from sloop.profile.profile import Quadratic, SizeLatency
from sloop.profile.published import RESNET_T
from sloop.sizes import SizeClasses
from sloop.systems.setup import application_in, definition_of, set_up
from sloop.units import ms
from sloop.vocabulary import Path as Way
from tests.app.conftest import application_from_text


def read(*stages: str, more: str = "") -> Application:
    """An application of these stages, one in each line from the third on."""
    lines = "".join(f"  - {{{stage}, profile: ResNet-T}}\n" for stage in stages)
    return read_application(parse_yaml(f"# a graph\nstages:\n{lines}name: g\nslo_ms: 300\n{more}", "app.yaml"), Path())


def last(*stages: str) -> Stage:
    return read(*stages).stages[-1]


A, B = "name: a", "name: b, after: a"


@pytest.mark.parametrize(
    ("edges", "after"),
    [("after: a", ("a",)), ("after: [a]", ("a",)), ("after: [a, b]", ("a", "b")), ("after: []", ()), ("after:", ())],
)
def test_after_is_a_name_or_several(edges: str, after: tuple[str, ...]) -> None:
    assert last(A, B, f"name: c, {edges}").after == after


@pytest.mark.parametrize(
    ("inputs", "sources"),
    [
        ("{x: a.image}", (InputSource("x", "a", "image"),)),
        ("{x: a.b.c, y: picture}", (InputSource("x", "a.b", "c"), InputSource("y", "", "picture"))),
        ("{x: [a.y, a.b.y]}", (InputSource("x", "a", "y"), InputSource("x", "a.b", "y"))),
        ("{x: a.dot.ted}", (InputSource("x", "a", "dot.ted"),)),
        ("{x: my.tensor}", (InputSource("x", "", "my.tensor"),)),
        ("{}", ()),
    ],
)
def test_inputs_come_from_stages_before_or_from_clients(inputs: str, sources: tuple[InputSource, ...]) -> None:
    assert last(A, "name: a.b", f"name: c, after: [a, a.b], inputs: {inputs}").inputs == sources


def test_outputs_come_from_stages() -> None:
    app = read(A, B, "name: a.b, after: a", more="outputs: {x: b.image, y: [a.c, a.b.c]}")
    sources = (OutputSource("x", "b", "image"), OutputSource("y", "a", "c"), OutputSource("y", "a.b", "c"))
    assert app.outputs == app.graph.outputs == sources
    qualified = app.qualified("app")
    assert [source.stage for source in qualified.graph.outputs] == ["g@app/b", "g@app/a", "g@app/a.b"]
    assert application_in(definition_of(set_up(app).applications[0])).outputs == sources
    assert not read(A).outputs


@pytest.mark.parametrize(
    ("outputs", "place", "says"),
    [
        ("{x: image}", "outputs.x", "no stage is called 'image'"),
        ("{x: bb.image}", "outputs.x", "no stage is called 'bb'"),
        ("{x: a.}", "outputs.x", "must be STAGE.OUTPUT"),
        ("{x: [a.y, a.y]}", "outputs.x[1]", "'a.y' is named twice"),
        ("[x]", "outputs", "must be a mapping"),
    ],
)
def test_outputs_that_are_wrong(outputs: str, place: str, says: str) -> None:
    with pytest.raises(InputError) as caught:
        read(A, B, more=f"outputs: {outputs}")
    assert str(caught.value).startswith(f"app.yaml:7: {place}: {says}")
    assert caught.value.help or "must" in says


def test_sources_follow_the_names_of_a_deployment() -> None:
    app = read(A, "name: b, after: a, inputs: {x: a.image, y: picture}").qualified("app")
    assert app.stages[1].inputs == (InputSource("x", "g@app/a", "image"), InputSource("y", "", "picture"))


@pytest.mark.parametrize(
    ("edges", "when"),
    [
        ("when: kind", (When("a", "kind"),)),
        ("when: {output: kind}", (When("a", "kind"),)),
        ("when: {of: a, output: kind, is: 2}", (When("a", "kind", (2,)),)),
        ("when: {output: kind, is: [2, -3, 2], share: 0.25}", (When("a", "kind", (-3, 2), 0.25),)),
        ("when: {share: 1}", (When("a", "", (), 1.0),)),
        ("when: {share: 0}", (When("a", "", (), 0.0),)),
        ("when: [kind]", (When("a", "kind"),)),
    ],
)
def test_when_names_an_output_or_a_share(edges: str, when: tuple[When, ...]) -> None:
    assert last(A, f"name: b, after: a, {edges}").when == when


def test_conditions_are_the_same_however_they_are_written() -> None:
    app = read(
        A,
        *(
            f"name: {name}, after: a, when: {{output: x, is: {values}}}"
            for name, values in (("b", "[1, 2]"), ("c", "[2, 1]"))
        ),
    )
    assert len({edge.condition for edge in app.graph.edges["a"]}) == 1


def test_each_edge_may_have_its_condition() -> None:
    stage = last(A, "name: b", "name: c, after: [a, b], when: [{of: b, output: x}, {of: a, output: y, is: 0}]")
    assert stage.when == (When("b", "x"), When("a", "y", (0,)))


@pytest.mark.parametrize(
    ("edges", "each"),
    [
        ("each: boxes", Each("a", "boxes")),
        ("each: {output: boxes}", Each("a", "boxes", 1.0, PARTS_MAX)),
        ("each: {of: a, output: boxes, mean: 2.5, most: 40}", Each("a", "boxes", 2.5, 40)),
        ("each: {mean: 0.1}", Each("a", "", 0.1)),
        ("each: {mean: 100000, most: 100000}", Each("a", "", 100_000, 100_000)),
        ("each: {most: 1}", Each("a", "", 1.0, 1)),
    ],
)
def test_each_names_an_output_whose_rows_are_parts(edges: str, each: Each) -> None:
    assert last(A, f"name: b, after: a, {edges}").each == each


def test_each_and_when_go_together() -> None:
    stage = last(A, "name: b, after: a, each: boxes, when: legible")
    assert (stage.each, stage.when) == (Each("a", "boxes"), (When("a", "legible"),))


def test_join_and_entry_are_said() -> None:
    app = read(A, "name: b, after: a, each: boxes", "name: c, after: [a, b], join: true, entry: true")
    assert [(stage.join, stage.entry) for stage in app.stages] == [(False, False), (False, False), (True, True)]
    assert app.graph.entries == ("a", "c")
    assert not last(A, "name: b, after: a, join: false, entry: false").join


def test_a_stage_may_declare_how_long_a_batch_may_run() -> None:
    app = read(A, "name: b, after: a, response_timeout_s: 2.5")
    assert [stage.response_timeout_s for stage in app.stages] == [0.0, 2.5]
    with pytest.raises(InputError, match=r"response_timeout_s: must be a number (.|\n)*0\.5"):
        read(A, "name: b, after: a, response_timeout_s: 0.5")


def test_a_stage_may_declare_its_classes_of_sizes() -> None:
    app = read(A, "name: b, after: a, sizes: [16, 64]")
    assert [stage.size_classes for stage in app.stages] == [SizeClasses(), SizeClasses((16, 64))]
    assert last(A, "name: b, after: a, sizes: 128").sizes == (128,)
    for wrong, message in (
        ("[]", "0 sizes; a stage has 1 to 64"),
        ('"16,64"', "must be a size, or a list of sizes, not '16,64'"),
        ("[64, 16]", "the size 16 comes after 64; sizes ascend"),
        ("[16, 16]", "the size 16 is given twice"),
        ("[0, 16]", r"sizes\[0\]: must be a whole number"),
        ("[16, 1.5]", r"sizes\[1\]: must be a whole number"),
    ):
        with pytest.raises(InputError, match=message):
            read(A, f"name: b, after: a, sizes: {wrong}")


def test_a_profile_that_knows_sizes_chooses_the_classes() -> None:
    latencies = tuple(SizeLatency(size, Quadratic(0, size / 8, 1)) for size in (16, 64))
    stage = read(A).by_name["a"]
    knows = replace(stage.variants[0], profile=structs.replace(RESNET_T, sizes=latencies))
    stage = replace(stage, variants=(knows,))
    assert stage.size_classes.bounds[-1] == 64
    assert stage.size_max == 256
    assert replace(stage, sizes=(100,)).size_classes == SizeClasses((100,))
    assert read(A).by_name["a"].size_max == 0


def test_stages_may_be_written_in_any_order() -> None:
    app = read("name: c, after: b, join: true", "name: b, after: a, each: boxes", A)
    assert [stage.name for stage in app.order] == ["a", "b", "c"]
    assert app.graph.scopes == {"a": "", "b": "b", "c": ""}


def test_paths_have_deadlines_and_shares_of_their_own() -> None:
    stages = (A, B, "name: c, after: [a, b], entry: true")
    told = "paths: [{stages: [a, b, c], slo_ms: 100, share: 0.75}, {stages: [c], slo_ms: 20, share: 0.25}]"
    app = read(*stages, more=told)
    assert app.paths == (Way(("a", "b", "c"), ms(100), 0.75), Way(("c",), ms(20), 0.25))
    assert app.visits == {"a": 0.75, "b": 0.75, "c": 1.0}
    app = read(*stages, more="paths: [{stages: [a, b]}, {stages: [a, c]}]")
    assert app.paths == (Way(("a", "b"), ms(300), 0.5), Way(("a", "c"), ms(300), 0.5)), "evenly, all by the same time"


def test_where_paths_say_who_begins_there_an_entry_may_have_a_condition() -> None:
    paths = "paths: [{stages: [a, b]}, {stages: [b]}]"
    application = read(A, "name: b, after: a, when: kind, entry: true", more=paths)
    assert application.graph.entries == ("a", "b")


def test_shares_rounded_up_are_not_refused() -> None:
    paths = ", ".join("{stages: [a], share: 0.3333334}" for _ in range(3))
    assert len(read(A, more=f"paths: [{paths}]").paths) == 3


@pytest.mark.parametrize(
    ("stages", "where", "what", "help"),
    [
        ((A, "name: b, after: [a, a]"), "4: stages[1].after[1]", "'a' is named twice", "name it once"),
        ((A, "name: b, after: c"), "4: stages[1].after", "no stage is called 'c'", "known here: a, b"),
        ((A, "name: b, after: 7"), "4: stages[1].after", "must be text, not 7", "put it in quotes"),
        ((A, "name: b, when: kind"), "4: stages[1].when", "this stage has no `after`", "add 'after: STAGE'"),
        ((A, "name: b, each: kind"), "4: stages[1].each", "this stage has no `after`", "add 'after: STAGE'"),
        ((A, "name: b, when: {of: a, output: x}"), "4: stages[1].when.of", "'a' is not in `after`", "add 'after: a'"),
        (
            (A, "name: b, after: a, when: kind, entry: true"),
            "4: stages[1]",
            "stage 'b' has `entry`, so that every request begins there, whatever `when` says",
            "remove one of them, or declare the `paths` there are",
        ),
        (
            (A, B, "name: c, after: [a, b], when: kind"),
            "5: stages[2].when",
            "this stage comes after 2 stages: say which one has the output",
            "add 'of: STAGE'",
        ),
        (
            (A, B, "name: c, after: [a, b], when: {output: kind}"),
            "5: stages[2].when",
            "this stage comes after 2 stages",
            "add 'of: STAGE'",
        ),
        ((A, B, "name: c, after: b, when: {of: a, output: x}"), "5: stages[2].when.of", "'a' is not in `after`", "b"),
        (
            (A, B, "name: c, after: b, each: {of: bb}"),
            "5: stages[2].each.of",
            "'bb' is not in `after`",
            "did you mean 'b'?",
        ),
        ((A, B, "name: c, after: bat"), "5: stages[2].after", "no stage is called 'bat'", "known here: a, b, c"),
        (
            (A, "name: b, after: a, when: {is: 2, share: 0.1}"),
            "4: stages[1].when.is",
            "there is no 'output' to compare with",
            "add 'output: NAME'",
        ),
        (
            (A, "name: b, after: a, when: {}"),
            "4: stages[1].when",
            "neither an 'output' nor a 'share'",
            "`when: is_text`",
        ),
        ((A, "name: b, after: a, when: {of: a}"), "4: stages[1].when", "neither an 'output' nor a 'share'", "is_text"),
        ((A, "name: b, after: a, when: true"), "4: stages[1].when", "must be text, not true", "quotes"),
        ((A, "name: b, after: a, when: ''"), "4: stages[1].when", "must be text that is not empty", ""),
        ((A, "name: b, after: a, when: {output: x, is: 1.5}"), "4: stages[1].when.is", "must be a whole number", ""),
        ((A, "name: b, after: a, when: {output: x, is: cat}"), "4: stages[1].when.is", "whole number, not 'cat'", ""),
        (
            (A, "name: b, after: a, when: {share: 1.5}"),
            "4: stages[1].when.share",
            "at least 0 and at most 1, not 1.5",
            "",
        ),
        (
            (A, "name: b, after: a, when: {share: -0.1}"),
            "4: stages[1].when.share",
            "must be a number of at least 0",
            "",
        ),
        ((A, "name: b, after: a, when: {outptu: x}"), "4: stages[1].when.outptu", "unknown key 'outptu'", "'output'"),
        (
            (A, "name: b, after: a, when: [x, {output: y}]"),
            "4: stages[1].when[1]",
            "two conditions on the outputs of 'a'",
            "put a stage with the first condition between them",
        ),
        (
            (A, "name: b, after: a, each: {most: 0}"),
            "4: stages[1].each.most",
            "at least 1 and at most 100,000, not 0",
            "",
        ),
        ((A, "name: b, after: a, each: {most: 100001}"), "4: stages[1].each.most", "at most 100,000, not 100001", ""),
        ((A, "name: b, after: a, each: {most: 2.5}"), "4: stages[1].each.most", "must be a whole number", ""),
        ((A, "name: b, after: a, each: {mean: 0}"), "4: stages[1].each.mean", "must be a number above 0", ""),
        (
            (A, "name: b, after: a, each: {mean: 9, most: 8}"),
            "4: stages[1].each.mean",
            "above 0 and at most 8, not 9",
            "",
        ),
        ((A, "name: b, after: a, each: [boxes]"), "4: stages[1].each", "must be text, not a list", ""),
        (
            (A, "name: b, after: a, each: {share: 1}"),
            "4: stages[1].each.share",
            "unknown key 'share'",
            "known here: of",
        ),
        ((A, "name: b, after: a, join: 1"), "4: stages[1].join", "must be true or false, not 1", ""),
        ((A, "name: b, after: a, entry: maybe"), "4: stages[1].entry", "must be true or false, not 'maybe'", ""),
        (
            (A, "name: b, after: a, each: x", "name: c, after: b, each: y"),
            "5: stages[2]",
            "stage 'c' has `each`, and 'b' before it already runs for parts",
            "join the parts first: `join: true` at a stage between",
        ),
        (
            (A, "name: b", "name: c, after: [a, b], each: {of: a, output: x}"),
            "5: stages[2]",
            "stage 'c' has `each` and comes after 2 stages",
            "keep in `after` only the stage whose output it fans out",
        ),
        (
            (A, "name: b, after: a, each: x", "name: c, after: [a, b]"),
            "5: stages[2]",
            "stage 'c' comes after stages that run for different parts: a (whole requests), b (b)",
            "add `join: true`, so that it waits for all parts",
        ),
        (
            (A, "name: b, after: a, join: true"),
            "4: stages[1]",
            "no stage before it runs for parts",
            "`each`",
        ),
        (
            (A, "name: b, after: a, each: x, entry: true"),
            "4: stages[1]",
            "stage 'b' runs for parts, and no request can begin with one",
            "remove `entry`",
        ),
        (
            (
                A,
                "name: b, after: a, when: {output: x, is: 1, share: 0.6}",
                "name: c, after: a, when: {output: x, is: 2, share: 0.5}",
            ),
            "5: stages[2].when",
            "the shares of the branches after 'a' sum to more than 1",
            "name another `output` for branches that do not",
        ),
        (
            (A, "name: b, after: a, when: {share: 0.6}", "name: c, after: a, when: {share: 0.5}"),
            "5: stages[2].when",
            "the shares of the branches after 'a' sum to more than 1",
            "exclude each other",
        ),
        (
            (A, "name: b, after: a, when: {output: x, share: 0.6}", "name: c, after: a, when: {output: x, share: 0.5}"),
            "5: stages[2].when",
            "two shares, 0.6 and 0.5, for one condition on the output of 'a'",
            "give one of them, or the same share twice",
        ),
        (
            (A, B, "name: c, after: b, inputs: {x: a.image}"),
            "5: stages[2].inputs.x",
            "stage 'a' does not come right before 'c'",
            "add 'a' to `after`",
        ),
        (
            (A, "name: b, after: a, inputs: {x: [a.y, a.y]}"),
            "4: stages[1].inputs.x[1]",
            "'a.y' is named twice",
            "name it once",
        ),
        ((A, "name: b, after: a, inputs: {x: a.}"), "4: stages[1].inputs.x", "must be STAGE.OUTPUT", ""),
        ((A, "name: b, after: a, inputs: [x]"), "4: stages[1].inputs", "must be a mapping", ""),
        (
            ("name: a, after: b", B),
            "3: stages[0].after",
            "the stages form a cycle: a → b → a",
            "`after`",
        ),
    ],
)
def test_what_does_not_fit_is_named_with_its_line(stages: tuple[str, ...], where: str, what: str, help: str) -> None:
    with pytest.raises(InputError) as caught:
        read(*stages)
    assert caught.value.where == f"app.yaml:{where}"
    assert what in caught.value.what
    assert help in caught.value.help
    assert not caught.value.what.startswith(tuple(f"app.yaml:{where}: {name}:" for name in "abc")), "said once"


def test_stages_without_dashes_are_refused_with_the_remedy() -> None:
    with pytest.raises(InputError, match="stages: must be a list, not a mapping") as caught:
        read_application(
            parse_yaml("name: g\nslo_ms: 300\nstages:\n  name: a\n  profile: ResNet-T\n", "a.yaml"), Path()
        )
    assert caught.value.help == "begin each stage with `- `"


def test_independent_branches_and_equal_conditions_may_sum_up_to_more_than_one() -> None:
    def branch(name: str, output: str, share: float) -> str:
        return f"name: {name}, after: a, when: {{output: {output}, share: {share}}}"

    assert read(A, branch("b", "x", 0.9), branch("c", "y", 0.9), branch("d", "x", 0.9)).visits["d"] == 0.9


@pytest.mark.parametrize(
    ("paths", "where", "what", "help"),
    [
        ("[]", "paths", "must be at least one path", "[{stages: [detect, read], slo_ms: 300}]"),
        ("a", "paths", "must be a list", ""),
        ("[{slo_ms: 3}]", "paths[0]", "the key 'stages' is missing", "add 'stages:' here"),
        ("[{stages: []}]", "paths[0].stages", "must be at least one stage", ""),
        ("[{stages: a}]", "paths[0].stages", "must be a list", ""),
        ("[{stages: [a, bb]}]", "paths[0].stages[1]", "no stage is called 'bb'", "did you mean 'b'?"),
        ("[{stages: [b]}]", "paths[0].stages[0]", "no request begins at 'b'", "add `entry: true` to it"),
        ("[{stages: [a, c]}]", "paths[0].stages[1]", "'c' does not come after 'a'", "add 'a' to its `after`"),
        ("[{stages: [a, b], slo_ms: 0}]", "paths[0].slo_ms", "must be a number above 0", ""),
        ("[{stages: [a, b], share: 0}]", "paths[0].share", "must be a number above 0 and at most 1", ""),
        ("[{stages: [a, b], slo: 3}]", "paths[0].slo", "unknown key 'slo'", "did you mean 'slo_ms'?"),
        (
            "[{stages: [a, b]}]",
            "paths",
            "no path leads through stage 'c'",
            "add a path through it, or remove the stage",
        ),
        (
            "[{stages: [a, b, c], share: 0.5}, {stages: [a]}]",
            "paths[1]",
            "some paths have a share, this one has none",
            "give each path its share",
        ),
        (
            "[{stages: [a, b, c], share: 0.8}, {stages: [a, b], share: 0.3}]",
            "paths",
            "the shares sum to more than 1",
            "the fractions of requests that take each path",
        ),
    ],
)
def test_paths_that_do_not_fit_are_named(paths: str, where: str, what: str, help: str) -> None:
    with pytest.raises(InputError) as caught:
        read(A, B, "name: c, after: b", more=f"paths: {paths}")
    assert caught.value.where == f"app.yaml:8: {where}"
    assert what in caught.value.what
    assert help in caught.value.help


def test_too_many_paths_are_refused_where_the_stages_are() -> None:
    stages = ["name: s0", "name: t0"]
    for number in range(1, 20):
        after = f"after: [s{number - 1}, t{number - 1}]"
        stages += [f"name: s{number}, {after}", f"name: t{number}, {after}"]
    with pytest.raises(InputError, match="more than 10000 paths lead through the stages") as caught:
        read(*stages)
    assert (caught.value.where, caught.value.help) == ("app.yaml:2: stages", "join some of them")


@pytest.mark.parametrize(
    ("one", "other", "fits"),
    [
        ("{output: kind, is: [1, 2]}", "{output: kind, is: [2, 3]}", False),
        ("kind", "{output: kind, is: 1}", False),
        ("{output: kind, is: [0, 1]}", "kind", False),
        ("{output: kind, is: 0}", "kind", True),
        ("{output: kind, is: [2, 1]}", "{output: kind, is: [1, 2]}", True),
        ("{output: kind, is: 1}", "{output: size, is: 1}", True),
        ("{share: 0.2}", "{share: 0.3}", True),
    ],
)
def test_conditions_on_one_output_are_the_same_or_exclude_each_other(one: str, other: str, fits: bool) -> None:
    stages = "\n".join(
        f"  - {{name: {name}, profile: ResNet-T, after: a, when: {when}}}" for name, when in (("b", one), ("c", other))
    )
    text = f"name: x\nslo_ms: 300\nsystem: hpa\nstages:\n  - {{name: a, profile: ResNet-T}}\n{stages}\n"
    if fits:
        application_from_text(text)
        return
    with pytest.raises(
        InputError,
        match=r":7: stages\[2\]\.when: one value of output 'kind' of 'a' would lead to stage 'c' and to another",
    ):
        application_from_text(text)
