"""Tensors between stages: matching at load time, and splitting and joining per request."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from sloop.app.graph import Each, Graph, GraphStage, InputSource, OutputSource, When
from sloop.errors import InputError
from sloop.serve.dataflow import (
    APPLICATION,
    Decision,
    Passed,
    RequestTensors,
    Source,
    Wiring,
    wire,
)
from sloop.tensor import Port, Signature, Tensor, bytes_of
from tests.serve.graphs import graph_of


def port(name: str, width: int = 3, datatype: str = "FP32") -> Port:
    return Port(name, datatype, (-1, width))


def model(inputs: str, outputs: str) -> Signature:
    return Signature(tuple(map(port, inputs.split())), tuple(map(port, outputs.split())))


def test_one_stage_takes_and_gives_what_its_model_does() -> None:
    wiring = wire(graph_of({"only": ()}), {("only", "a"): model("x z", "y")}, rows_max=4)
    assert wiring.signature == Signature((port("x"), port("z")), (port("y"),), 4)
    assert wiring.inputs == {"only": ((Source("", 0),), (Source("", 1),))}
    assert wiring.outputs == ((Source("only", 0),),)


def test_stages_compute_what_later_stages_and_the_client_need() -> None:
    models = {("find", "v"): model("image", "boxes debug scores"), ("read", "v"): model("image boxes", "text marks")}
    wiring = wire(graph_of({"find": (), "read": ("find",)}), models)
    assert [port.name for port in wiring.signature.outputs] == ["text", "marks"]
    assert (wiring.of("find").outputs, wiring.of("read").outputs) == ((0,), ()), "nobody can ask for the others"
    assert (wiring.needed("find", [1]), wiring.needed("read", [1])) == ((0,), (1,))
    ends = wire(
        graph_of({"left": (), "right": ()}), {("left", "v"): model("x", "a b"), ("right", "v"): model("x", "c")}
    )
    assert (ends.needed("left", [2]), ends.needed("right", [2])) == ((0,), ()), "a stage runs also for nobody"


def test_a_stage_passes_on_what_rows_and_their_size_follow_from() -> None:
    """`read` runs for each row of the pictures, `rank` reads a text of the client as well, `sum` only numbers."""
    pictures, text = Port("pictures", "FP32", (-1, 3, -1)), Port("text", "INT64", (-1, -1))
    models = {
        ("find", "v"): Signature((port("image"), text), (pictures, port("n", 1))),
        ("read", "v"): Signature((structs.replace(pictures, name="pictures"),), (port("code"),)),
        ("rank", "v"): Signature((port("n", 1), text), (port("best"),)),
        ("sum", "v"): model("best", "all"),
    }
    steps = [
        GraphStage("find"),
        GraphStage("read", after=("find",), each=Each("find", "pictures")),
        GraphStage("rank", after=("find",)),
        GraphStage("sum", after=("rank",)),
        GraphStage("tell", after=("read",), join=True),
    ]
    wiring = wire(Graph(steps), models | {("tell", "v"): model("code", "words")}, whole=("tell",))
    assert wiring.of("find").passed == (Passed(opened=((0, (2,)),)), Passed(counting=1, from_client=True))
    assert wiring.of("read").passed == (Passed(counting=0, is_whole=True, is_joined=True),)
    assert (wiring.of("rank").passed, wiring.of("sum").passed) == ((Passed(counting=0),), ())


def test_clients_may_give_the_optional_inputs_of_all_stages() -> None:
    """Those with the name of another tensor of the client keep their values, and equal ones are given once."""
    own = {name: Port(name, "FP32", (1,), has_rows=False) for name in ("scale", "limit", "image")}
    find = structs.replace(model("image", "boxes"), optional=(own["scale"],))
    read = structs.replace(model("boxes", "text"), optional=(own["limit"], own["scale"], own["image"]))
    wiring = wire(graph_of({"find": (), "read": ("find",)}), {("find", "v"): find, ("read", "v"): read})
    assert wiring.signature.optional == (own["scale"], own["limit"])
    assert wiring.inputs["find"] == ((Source("", 0),), (Source("", 1),))
    assert wiring.inputs["read"] == ((Source("find", 0),), (Source("", 2),), (Source("", 1),))
    assert (wiring.of("find").optional, wiring.of("read").optional) == (("scale",), ("limit", "scale"))
    variants = {("only", "a"): find, ("only", "b"): model("image", "boxes")}
    assert not wire(graph_of({"only": ()}), variants).signature.optional, "one of them does not have it"


def test_outputs_that_decide_are_needed() -> None:
    wiring = wire(Graph([GraphStage("find"), EACH]), {("find", "v"): FIND, ("read", "v"): READ}, rows_max=8)
    decided = {place for each in wiring.decisions["find"] for place in (each.when, each.each) if place is not None}
    assert decided <= set(wiring.needed("find", []) or range(len(FIND.outputs)))


def test_a_chain_needs_no_names() -> None:
    """Even where the client's tensor has the name the second model uses for what the first one gives."""
    wiring = wire(graph_of({"a": (), "b": ("a",)}), {("a", "v"): model("x", "y"), ("b", "v"): model("x", "y")})
    assert wiring.inputs["b"] == ((Source("a", 0),),)
    assert wiring.signature == model("x", "y")


def test_names_pick_among_many_and_reach_back_to_what_the_client_sent() -> None:
    models = {("find", "v"): model("image", "boxes scores"), ("read", "v"): model("image boxes", "text")}
    wiring = wire(graph_of({"find": (), "read": ("find",)}), models)
    assert wiring.inputs["read"] == ((Source("", 0),), (Source("find", 0),))


def test_after_names_the_one_choice_left_is_taken() -> None:
    models = {("a", "v"): model("image", "y"), ("b", "v"): model("image in", "z")}
    assert wire(graph_of({"a": (), "b": ("a",)}), models).inputs["b"] == ((Source("", 0),), (Source("a", 0),))


def declared(after: tuple[str, ...], **sources: str) -> dict[str, Any]:
    """A stage's `after`, and the sources of its inputs, `STAGE.OUTPUT` or the name of a client's tensor."""
    found = []
    for name, text in sources.items():
        stage, _, tensor = text.rpartition(".")
        found.append(InputSource(name, stage, tensor))
    return {"after": after, "inputs": tuple(found)}


def test_lengths_that_must_be_equal_are_those_of_the_clients_tensors() -> None:
    text = structs.replace(model("ids mask", "y"), equal=((("ids", 1), ("mask", 1)),))
    steps = [GraphStage("read", **declared((), ids="words")), GraphStage("rank", **declared(("read",), ids="read.y"))]
    wiring = wire(Graph(steps), {("read", "v"): text, ("rank", "v"): text})
    assert wiring.signature.equal == ((("words", 1), ("mask", 1)),)


def test_stages_say_where_their_inputs_come_from() -> None:
    """Two models whose input is called `x` after one stage with two outputs."""
    steps = {"page": {}, "lines": declared(("page",), x="page.image"), "marks": declared(("page",), x="page.scores")}
    models = {
        ("page", "v"): Signature((port("x"),), (port("image"), port("scores", 9))),
        ("lines", "v"): model("x", "text"),
        ("marks", "v"): Signature((port("x", 9),), (port("kind"),)),
    }
    wiring = wire(Graph([GraphStage(name, **step) for name, step in steps.items()]), models)
    assert [each.name for each in wiring.signature.inputs] == ["x"]
    assert wiring.inputs["lines"] == ((Source("page", 0),),)
    assert wiring.inputs["marks"] == ((Source("page", 1),),)


def test_declared_sources_leave_the_others_to_their_names() -> None:
    steps = [GraphStage("find"), GraphStage("read", **declared(("find",), picture="find.crop"))]
    models = {("find", "v"): model("image", "crop boxes"), ("read", "v"): model("boxes picture image", "text")}
    wiring = wire(Graph(steps), models)
    assert wiring.inputs["read"] == ((Source("find", 1),), (Source("find", 0),), (Source("", 0),))


def test_the_tensors_of_clients_have_the_declared_names() -> None:
    """Also one that only a later stage takes; first stages whose inputs are alike in name differ in what they get."""
    steps = [
        GraphStage("look", **declared((), x="image")),
        GraphStage("read", **declared((), x="title")),
        GraphStage("rank", **declared(("look", "read"), limit="threshold", a="look.y", b="read.y")),
    ]
    models = {
        ("look", "v"): Signature((port("x", 5),), (port("y"),)),
        ("read", "v"): model("x", "y"),
        ("rank", "v"): model("a limit b", "order"),
    }
    wiring = wire(Graph(steps), models)
    assert wiring.signature.inputs == (port("image", 5), port("title"), port("threshold"))
    assert wiring.inputs["read"] == ((Source("", 1),),)
    assert wiring.inputs["rank"] == ((Source("look", 0),), (Source("", 2),), (Source("read", 0),))


@pytest.mark.parametrize(
    ("sources", "says"),
    [
        ({"x": "page.imag"}, "input 'x' of stage 'read' is declared to come from stage 'page', which has no 'imag'"),
        ({"x": "picture"}, "stage 'read' is FP32"),
        ({"y": "page.image"}, "stage 'read' has a source for input 'y', which its model does not have"),
        ({"x": "page.scores"}, "input 'x' of stage 'read' is FP32[-1, 3], but 'scores' of stage 'page' is FP32[-1, 9]"),
    ],
)
def test_declared_sources_that_do_not_fit_are_refused(sources: dict[str, str], says: str) -> None:
    models = {
        ("page", "v"): Signature((port("picture", 7),), (port("image"), port("scores", 9))),
        ("read", "v"): model("x", "text"),
    }
    steps = [GraphStage("page"), GraphStage("read", **declared(("page",), **sources))]
    with pytest.raises(InputError) as caught:
        wire(Graph(steps), models, where="app.yaml")
    assert says in caught.value.what


def test_an_optional_input_has_no_declared_source() -> None:
    own = Port("scale", "FP32", (1,), has_rows=False)
    read = structs.replace(model("boxes", "text"), optional=(own,))
    steps = [GraphStage("read", **declared((), scale="limit"))]
    with pytest.raises(InputError, match="input 'scale', which is optional for its model") as caught:
        wire(Graph(steps), {("read", "v"): read})
    assert "clients may send it as 'scale'" in caught.value.help


@pytest.mark.parametrize("after", [(), ("look",)])
def test_an_input_takes_one_tensor_of_the_client(after: tuple[str, ...]) -> None:
    sources = (InputSource("x", "", "left"), InputSource("x", "", "right"))
    steps = [GraphStage("look"), GraphStage("read", after=after, inputs=sources)]
    models = {("look", "v"): model("image", "y"), ("read", "v"): model("x", "text")}
    with pytest.raises(InputError, match="'read' has several tensors of the client as its sources: 'left' and 'right'"):
        wire(Graph(steps), models)


def test_branches_share_inputs_join_again_and_may_end_alike() -> None:
    models = {("left", "v"): model("x", "l"), ("right", "v"): model("x", "r"), ("join", "v"): model("r l", "y")}
    wiring = wire(graph_of({"left": (), "right": (), "join": ("left", "right")}), models)
    assert wiring.signature == model("x", "y")
    assert wiring.inputs["join"] == ((Source("right", 0),), (Source("left", 0),))
    ends = wire(graph_of({"left": (), "right": ()}), {("left", "v"): model("x", "y"), ("right", "v"): model("x", "y")})
    assert [p.name for p in ends.signature.outputs] == ["left.y", "right.y"]
    assert ends.outputs == ((Source("left", 0),), (Source("right", 0),))


@pytest.mark.parametrize("datatype", ["BYTES", "BF16"])
def test_text_and_bfloats_travel_but_decide_nothing(datatype: str) -> None:
    kind = Port("kind", datatype, (-1,))
    models = {
        ("look", "v"): Signature((port("words", datatype=datatype),), (kind,)),
        ("cats", "v"): Signature((kind,), (port("y"),)),
    }
    assert wire(graph_of({"look": (), "cats": ("look",)}), models).inputs["cats"] == ((Source("look", 0),),)
    graph = Graph([GraphStage("look"), after("cats", "look", when=(When("look", "kind", (1,)),))])
    with pytest.raises(InputError, match=rf"'kind' of stage 'look' is {datatype}\[-1\]; `when` of 'cats' needs one"):
        wire(graph, models)


@pytest.mark.parametrize(
    ("after", "models", "says"),
    [
        (
            {"a": ()},
            {("a", "small"): model("x", "y"), ("a", "large"): model("x", "y y2")},
            "variants 'small' and 'large' of stage 'a' differ in their outputs",
        ),
        (
            {"a": (), "b": ()},
            {("a", "v"): model("x", "y"), ("b", "v"): Signature((port("x", 5),), (port("y"),))},
            r"input 'x' is FP32\[-1, 5\] for stage 'b' and FP32\[-1, 3\] for another first stage",
        ),
        (
            {"a": (), "b": (), "c": ("a", "b")},
            {("a", "v"): model("x", "y"), ("b", "v"): model("x", "y"), ("c", "v"): model("y", "z")},
            r"input 'y' of stage 'c' is an output of several stages that run for one request: \['a', 'b'\]",
        ),
        (
            {"a": (), "b": ("a",)},
            {("a", "v"): model("x", "y1 y2"), ("b", "v"): model("q", "z")},
            r"input 'q' of stage 'b' has no source.*\['y1', 'y2'\], and the client sends \['x'\]",
        ),
        (
            {"a": (), "b": ("a",)},
            {("a", "v"): model("x", "y"), ("b", "v"): Signature((port("x", 3, "FP64"),), (port("y"),))},
            r"input 'x' of stage 'b' is FP64\[-1, 3\], but 'y' of stage 'a' is FP32\[-1, 3\]",
        ),
    ],
)
def test_what_does_not_fit_is_refused_beforehand(
    after: dict[str, tuple[str, ...]], models: dict[tuple[str, str], Signature], says: str
) -> None:
    with pytest.raises(InputError, match=rf"(?s)^app\.yaml:3: {says}.*\nhelp: "):
        wire(graph_of(after), models, where="app.yaml:3")


def after(name: str, before: str, **edges: object) -> GraphStage:
    return GraphStage(name, (before,), **edges)  # type: ignore[arg-type]


CROPS, NUMBER = Port("crops", "UINT8", (-1, 32, 100)), Port("kind", "INT64", (1,))
FIND = Signature((port("x"),), (CROPS, Port("widths", "INT64", (-1,)), Port("page", "FP32", (1, 9)), NUMBER))
READ = Signature(
    (Port("crops", "UINT8", (-1, 32, 100)), Port("widths", "INT64", (-1,))), (Port("text", "UINT8", (-1, 8)),)
)
EACH = after("read", "find", each=Each("find", "crops"))


def test_parts_get_rows_of_every_output_that_has_as_many() -> None:
    wiring = wire(Graph([GraphStage("find"), EACH]), {("find", "v"): FIND, ("read", "v"): READ}, rows_max=8)
    assert wiring.inputs["read"] == ((Source("find", 0, "row", "read"),), (Source("find", 1, "row", "read"),))
    (decision,) = wiring.decisions["find"]
    assert (decision.each, [place for place, _ in decision.sliced]) == (0, [0, 1])
    assert wiring.signature.rows_max == 1, "a request of several rows has no one way to go"
    assert [(p.name, p.shape) for p in wiring.signature.outputs] == [("text", (-1, 8))]
    assert wiring.outputs == ((Source("read", 0, "joined", "read", READ.outputs[0]),),)


def test_a_join_gets_all_rows() -> None:
    graph = Graph([GraphStage("find"), EACH, after("tell", "read", join=True)])
    tell = Signature((Port("text", "UINT8", (-1, 8)),), (port("y"),))
    models = {("find", "v"): FIND, ("read", "v"): READ, ("tell", "v"): tell}
    assert wire(graph, models).inputs["tell"] == ((Source("read", 0, "joined", "read", READ.outputs[0]),),)


def cascade(*, exclusive: bool) -> Graph:
    """A first look; then one of two others, or perhaps both."""
    second = When("look", "kind", (2,)) if exclusive else When("look", "sure")
    return Graph(
        [
            GraphStage("look"),
            after("cats", "look", when=(When("look", "kind", (1,)),)),
            after("dogs", "look", when=(second,)),
        ]
    )


LOOK = Signature((port("x"),), (port("y"), NUMBER, Port("sure", "BOOL", (1,))))
LABEL = Signature((port("y"),), (port("label"),))


def test_alternatives_share_an_output_and_others_do_not() -> None:
    models = {("look", "v"): LOOK, ("cats", "v"): LABEL, ("dogs", "v"): LABEL}
    shared = wire(cascade(exclusive=True), models)
    assert [p.name for p in shared.signature.outputs] == ["y", "kind", "sure", "label"]
    assert shared.outputs[-1] == (Source("dogs", 0), Source("cats", 0))
    apart = wire(cascade(exclusive=False), models)
    assert [p.name for p in apart.signature.outputs] == ["y", "kind", "sure", "cats.label", "dogs.label"]


def test_a_stage_that_follows_supersedes_what_was_said_before() -> None:
    first = Signature((port("x"),), (port("label"), NUMBER))
    second = Signature((port("x"),), (port("label"),))
    graph = Graph([GraphStage("small"), after("large", "small", when=(When("small", "kind", (0,)),))])
    wiring = wire(graph, {("small", "v"): first, ("large", "v"): second})
    assert [p.name for p in wiring.signature.outputs] == ["label", "kind"]
    assert wiring.outputs[0] == (Source("large", 0), Source("small", 0))


def test_declared_outputs_have_names_of_their_own_and_may_come_from_any_stage() -> None:
    models = {("find", "v"): model("image", "boxes debug scores"), ("read", "v"): model("image boxes", "text marks")}
    outputs = [OutputSource("words", "read", "text"), OutputSource("where", "find", "boxes")]
    wiring = wire(Graph([GraphStage("find"), after("read", "find")], outputs=outputs), models)
    assert wiring.signature == Signature((port("image"),), (port("words"), port("where")), 1)
    assert wiring.outputs == ((Source("read", 0),), (Source("find", 0),))
    assert (wiring.of("find").outputs, wiring.of("read").outputs) == ((0,), (0,)), "nobody needs the others"
    assert {need.stage for need in wiring.answer.needs} == {"find", "read"}


def test_declared_outputs_of_alternatives_and_of_parts() -> None:
    steps = list(cascade(exclusive=True).stages.values())
    models = {("look", "v"): LOOK, ("cats", "v"): LABEL, ("dogs", "v"): LABEL}
    outputs = [OutputSource("kind", stage, "label") for stage in ("cats", "dogs")]
    assert wire(Graph(steps, outputs=outputs), models).outputs == ((Source("dogs", 0), Source("cats", 0)),)
    parts = {("find", "v"): FIND, ("read", "v"): READ}
    plain = wire(Graph([GraphStage("find"), EACH]), parts)
    first = plain.signature.outputs[0]
    declared = Graph([GraphStage("find"), EACH], outputs=[OutputSource("mine", "read", first.name)])
    assert wire(declared, parts).outputs == plain.outputs[:1]


@pytest.mark.parametrize(
    ("outputs", "says"),
    [
        (
            [OutputSource("y", "read", "words")],
            "app.yaml: output 'y' of the application is declared to come from stage 'read', which has no 'words'\n"
            "help: it has text",
        ),
        (
            [OutputSource("y", "left", "boxes"), OutputSource("y", "read", "text")],
            r"app.yaml: output 'y' of the application comes from several stages .*: \['left', 'read'\]",
        ),
    ],
)
def test_declared_outputs_that_do_not_fit(outputs: list[OutputSource], says: str) -> None:
    models = {("left", "v"): model("image", "boxes"), ("read", "v"): model("image", "text")}
    with pytest.raises(InputError, match=says):
        wire(Graph([GraphStage("left"), GraphStage("read")], outputs=outputs), models, where="app.yaml")


def test_after_alternatives_comes_whichever_was_taken() -> None:
    steps = [*cascade(exclusive=True).stages.values(), GraphStage("end", ("cats", "dogs"))]
    end = Signature((port("label"),), (port("z"),))
    models = {("look", "v"): LOOK, ("cats", "v"): LABEL, ("dogs", "v"): LABEL, ("end", "v"): end}
    assert wire(Graph(steps), models).inputs["end"] == ((Source("cats", 0), Source("dogs", 0)),)


@pytest.mark.parametrize(
    ("step", "source", "says"),
    [
        (
            after("read", "find", each=Each("find", "boxes")),
            FIND,
            "stage 'read' has `each: boxes`, which is not an output of 'find'\n"
            "help: the outputs of 'find' are crops, widths, page",
        ),
        (after("read", "find", each=Each("find")), FIND, "`each` of stage 'read' names no output of 'find'"),
        (
            after("read", "find", each=Each("find", "page")),
            FIND,
            r"'page' of stage 'find' is FP32\[1, 9\] with a fixed number of rows",
        ),
        (
            after("read", "find", when=(When("find", "page"),)),
            FIND,
            r"'page' of stage 'find' is FP32\[1, 9\]; `when` of 'read' needs one number per row",
        ),
        (
            EACH,
            Signature(FIND.inputs, (Port("crops", "UINT8", (-1, 48, 100)), Port("widths", "INT64", (-1,)))),
            r"'crops' of stage 'read' is UINT8\[-1, 32, 100\], but 'crops' of stage 'find' is UINT8\[1, 48, 100\]",
        ),
    ],
)
def test_edges_that_fit_no_output_are_refused_beforehand(step: GraphStage, source: Signature, says: str) -> None:
    with pytest.raises(InputError, match=rf"^app\.yaml: .*{says}"):
        wire(Graph([GraphStage("find"), step]), {("find", "v"): source, ("read", "v"): READ}, where="app.yaml")


MERGE = Signature((port("y"), port("text")), (port("z"),))
TEXT = Signature((port("y"),), (port("text"),))
KIND = (When("look", "kind"),)


def merged(read: GraphStage, tell: GraphStage) -> Wiring:
    models = {("look", "v"): LOOK, ("read", "v"): TEXT, ("tell", "v"): MERGE}
    return wire(Graph([GraphStage("look"), read, tell]), models, where="app.yaml")


def test_what_needs_the_output_of_a_branch_that_may_be_left_out_is_refused() -> None:
    read = after("read", "look", when=KIND)
    with pytest.raises(InputError) as caught:
        merged(read, GraphStage("tell", ("look", "read")))
    what = "input 'text' of stage 'tell' comes from 'read', but a request can reach 'tell' without passing 'read'"
    assert what in str(caught.value)
    assert "let 'tell' come after 'read' only, give its other edges the same `when`" in str(caught.value)
    same = merged(read, GraphStage("tell", ("look", "read"), KIND))
    assert same.inputs["tell"] == ((Source("look", 0),), (Source("read", 0),))
    certain = (When("look", "kind", share=1.0),)
    always = merged(after("read", "look", when=certain), GraphStage("tell", ("look", "read")))
    assert always.inputs == same.inputs, "it is told that no request leaves it out"


def test_of_two_alternatives_nothing_can_need_both() -> None:
    steps = [*cascade(exclusive=True).stages.values(), GraphStage("end", ("cats", "dogs"))]
    models = {("look", "v"): LOOK, ("cats", "v"): Signature((port("y"),), (port("cat"),)), ("dogs", "v"): LABEL}
    needs = {("end", "v"): Signature((port("cat"), port("label")), (port("z"),))}
    with pytest.raises(
        InputError, match="input 'cat' of stage 'end' comes from 'cats', but a request can reach 'end' without"
    ):
        wire(Graph(steps), models | needs)


def test_alternatives_must_cover_every_way_to_the_stage_that_needs_one() -> None:
    label = Signature((port("y"), port("label")), (port("z"),))
    models = {("look", "v"): LOOK, ("cats", "v"): LABEL, ("dogs", "v"): LABEL, ("end", "v"): label}
    two = [*cascade(exclusive=True).stages.values(), GraphStage("end", ("look", "cats", "dogs"))]
    with pytest.raises(InputError, match="comes from 'cats' or 'dogs', but a request can reach 'end' without"):
        wire(Graph(two), models)
    covering = [
        GraphStage("look"),
        after("cats", "look", when=KIND),
        after("dogs", "look", when=(When("look", "kind", (0,)),)),
    ]
    wiring = wire(Graph([*covering, two[-1]]), models)
    assert wiring.inputs["end"][1] == (Source("cats", 0), Source("dogs", 0))


def test_rows_of_no_parts_can_be_joined() -> None:
    tell = Signature((Port("text", "UINT8", (-1, 8)), Port("page", "FP32", (1, 9))), (port("y"),))
    models = {("find", "v"): FIND, ("read", "v"): READ, ("tell", "v"): tell}
    wiring = wire(Graph([GraphStage("find"), EACH, GraphStage("tell", ("find", "read"), join=True)]), models)
    assert [source.kind for (source,) in wiring.inputs["tell"]] == ["joined", "whole"]


def test_two_outputs_of_one_name_are_refused() -> None:
    models = {
        ("r", "v"): model("x", "f"),
        ("a", "v"): model("f", "y b.y"),
        ("b", "v"): model("f", "y"),
    }
    with pytest.raises(InputError, match=r"would be named 'b\.y': one of stage 'b' and one of stage 'a'"):
        wire(Graph([GraphStage("r"), after("a", "r"), after("b", "r")]), models)


BOXES, KIND_parts, SURE = Port("boxes", "INT64", (-1, 2)), Port("kind", "INT64", (1,)), Port("sure", "FP32", (-1,))


def tensor(array: object, datatype: str = "INT64") -> Tensor:
    values = np.asarray(array, {"INT64": np.int64, "FP32": np.float32, "BOOL": bool}[datatype])
    return Tensor(datatype, values.shape, bytes_of(values))


def numbers(found: Tensor) -> object:
    return np.frombuffer(found.data, np.int64).reshape(found.shape).tolist()


def held() -> RequestTensors:
    return RequestTensors({APPLICATION: [tensor([[7]])]})


@pytest.mark.parametrize(
    ("values", "kind", "count"), [((1,), 1, 1), ((2, 3), 1, 0), ((2, 3), 3, 1), ((), 0, 0), ((), -4, 1)]
)
def test_a_branch_is_taken_where_the_output_says_so(values: tuple[int, ...], kind: int, count: int) -> None:
    assert held().edge_counts("a", [Decision("b", when=0, values=values)], [tensor([kind])]) == (count,)


def test_edges_without_a_condition_are_always_taken() -> None:
    assert held().edge_counts("a", [Decision("b"), Decision("c", when=0)], [tensor([0])]) == (1, 0)


def test_a_part_is_a_row_and_shares_its_memory() -> None:
    request, boxes = held(), tensor([[1, 2], [3, 4], [5, 6]])
    request.whole["a"] = [boxes]
    assert request.edge_counts("a", [Decision("b", each=0, sliced=((0, BOXES),))], [boxes]) == (3,)
    (row,) = request.inputs("b", 1, [(Source("a", 0, "row", "b"),)])
    assert (numbers(row), row.shape) == ([[3, 4]], (1, 2))
    assert isinstance(row.data, memoryview)
    assert row.data.obj is boxes.data.obj if isinstance(boxes.data, memoryview) else True


def test_rows_can_be_chosen() -> None:
    request, outputs = held(), [tensor([[1, 2], [3, 4], [5, 6]]), tensor([0.0, 1.0, 1.0], "FP32")]
    request.whole["a"] = outputs
    decision = Decision("b", when=1, each=0, sliced=((0, BOXES),))
    assert request.edge_counts("a", [decision], outputs) == (2,)
    wires = [(Source("a", 0, "row", "b"),)]
    assert [numbers(request.inputs("b", part, wires)[0]) for part in (0, 1)] == [[[3, 4]], [[5, 6]]]


@pytest.mark.parametrize(("kind", "count"), [(1, 2), (0, 0)])
def test_one_number_decides_for_all_rows(kind: int, count: int) -> None:
    decision = Decision("b", when=1, each=0, sliced=((0, BOXES),))
    assert held().edge_counts("a", [decision], [tensor([[1, 2], [3, 4]]), tensor([kind])]) == (count,)


@pytest.mark.parametrize(
    ("outputs", "says"),
    [
        (
            [tensor([[1, 2]]), tensor([1.0, 2.0], "FP32")],
            r"outputs of stage 'a' differ in rows: 'sure' has 2, but the output that 'b' .* has 1",
        ),
        ([tensor([[1, 2], [1, 2], [1, 2]]), tensor([1.0, 2.0], "FP32")], r"'sure' has 2, but .* has 3"),
    ],
)
def test_outputs_that_are_taken_apart_together_have_equally_many_rows(outputs: Sequence[Tensor], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        held().edge_counts("a", [Decision("b", each=0, sliced=((0, BOXES), (1, SURE)))], outputs)


def test_a_decision_is_one_number() -> None:
    with pytest.raises(
        ValueError, match=r"stage 'a' returned 2 numbers \(shape \[2\]\) to decide about 'b'; expected 1"
    ):
        held().edge_counts("a", [Decision("b", when=0)], [tensor([1, 2])])


def joined(request: RequestTensors) -> Tensor:
    return request.inputs("c", 0, [(Source("b", 0, "joined", "b", BOXES),)])[0]


def test_what_parts_gave_is_joined_in_their_order() -> None:
    request = held()
    request.rows["b"] = range(3)
    for part in (2, 0):  # part 1 took another branch
        request.parts.setdefault("b", {})[part] = [tensor([[part, part]])]
    assert numbers(joined(request)) == [[0, 0], [2, 2]]


def test_without_parts_there_are_no_rows() -> None:
    request = held()
    request.rows["b"] = ()
    assert joined(request) == Tensor("INT64", (0, 2), b"")


def test_parts_of_different_shapes_cannot_be_joined() -> None:
    request = held()
    request.rows["b"] = range(2)
    request.parts.setdefault("b", {})[0] = [tensor([[1, 2]])]
    request.parts.setdefault("b", {})[1] = [tensor([[1, 2, 3]])]
    with pytest.raises(
        ValueError, match=r"'boxes' of stage 'b' cannot be joined: their rows have the shapes \[2\], \[3\]"
    ):
        joined(request)
    assert request.outputs([("boxes", (Source("b", 0, "joined", "b", BOXES),))]) == {}


def test_a_part_goes_on_with_what_it_gave_and_with_what_its_request_has() -> None:
    request = held()
    request.parts.setdefault("b", {})[1] = [tensor([[5, 6]])]
    found = request.inputs("c", 1, [(Source("b", 0, "part"),), (Source(APPLICATION, 0),)])
    assert list(map(numbers, found)) == [[[5, 6]], [[7]]]


def test_the_first_source_there_is_counts() -> None:
    request, sources = held(), (Source("large", 0), Source("small", 0))
    request.whole["small"] = [tensor([1])]
    assert numbers(request.inputs("d", 0, [sources])[0]) == [1]
    assert numbers(request.outputs([("label", sources)])["label"]) == [1]
    request.whole["large"] = [tensor([2])]
    assert numbers(request.inputs("d", 0, [sources])[0]) == [2]


def test_what_a_request_did_not_pass_it_cannot_be_given() -> None:
    with pytest.raises(ValueError, match="stage 'd' needs an output of 'b' or 'c', which did not run"):
        held().inputs("d", 0, [(Source("b", 0), Source("c", 0))])
    assert held().outputs([("y", (Source("b", 0),)), ("x", (Source(APPLICATION, 0),))]).keys() == {"x"}


def test_where_parts_went_different_ways_each_gives_what_it_passed_last() -> None:
    text = Port("text", "INT64", (-1, 1))
    request = held()
    request.rows["read"] = range(4)
    for part in range(4):
        request.parts.setdefault("read", {})[part] = [tensor([[part]])]
    for part in (1, 3):
        request.parts.setdefault("polish", {})[part] = [tensor([0]), tensor([[10 * part]])]
    both = (Source("polish", 1, "joined", "read", text), Source("read", 0, "joined", "read", text))
    assert numbers(request.inputs("tell", 0, [both])[0]) == [[0], [10], [2], [30]]
    found = request.outputs([("text", both), ("polished", both[:1])])
    assert {name: numbers(found) for name, found in found.items()} == {
        "text": [[0], [10], [2], [30]],
        "polished": [[10], [30]],
    }
