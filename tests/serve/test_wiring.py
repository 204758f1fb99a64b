import pytest

from sloop.errors import InputError
from sloop.serve.wiring import Source, wire
from sloop.tensor import Port, Signature
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


def test_branches_share_inputs_join_again_and_may_end_alike() -> None:
    models = {("left", "v"): model("x", "l"), ("right", "v"): model("x", "r"), ("join", "v"): model("r l", "y")}
    wiring = wire(graph_of({"left": (), "right": (), "join": ("left", "right")}), models)
    assert wiring.signature == model("x", "y")
    assert wiring.inputs["join"] == ((Source("right", 0),), (Source("left", 0),))
    ends = wire(graph_of({"left": (), "right": ()}), {("left", "v"): model("x", "y"), ("right", "v"): model("x", "y")})
    assert [p.name for p in ends.signature.outputs] == ["left.y", "right.y"]
    assert ends.outputs == ((Source("left", 0),), (Source("right", 0),))


def test_what_cannot_travel_to_a_worker_is_refused() -> None:
    texts = Signature((port("words", datatype="BYTES"),), (port("y"),))
    with pytest.raises(InputError, match=r"(?s)'words' of stage 'a' is of type BYTES.*help: use one of BOOL"):
        wire(graph_of({"a": ()}), {("a", "v"): texts})


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
            r"input 'x' of stage 'b' is FP32\[-1, 5\], of another first stage FP32\[-1, 3\]",
        ),
        (
            {"a": (), "b": (), "c": ("a", "b")},
            {("a", "v"): model("x", "y"), ("b", "v"): model("x", "y"), ("c", "v"): model("y", "z")},
            r"input 'y' of stage 'c' is an output of \['a', 'b'\]",
        ),
        (
            {"a": (), "b": ("a",)},
            {("a", "v"): model("x", "y1 y2"), ("b", "v"): model("q", "z")},
            r"input 'q' of stage 'b' comes from nowhere.*\['y1', 'y2'\], the client sends \['x'\]",
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
