"""Which models may have requests that share a forward pass: graphs and Python stages,
with rows that meet or do not."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sloop.errors import InputError
from sloop.profile.examine import Declared, examine
from sloop.profile.joining import read_sample
from sloop.tensor import Port, Signature

onnx = pytest.importorskip("onnx")
parser = pytest.importorskip("onnx.parser")

HEAD = '<ir_version: 8, opset_import: ["" : %d, "ai.onnx.ml" : 3, "com.microsoft" : 1, "own" : 1]>\n'


def graph(folder: Path, text: str, opset: int = 17) -> Path:
    """A model from ONNX's text form."""
    path = folder / "m.onnx"
    onnx.save(parser.parse_model(HEAD % opset + text), str(path))
    return path


APART = {
    "all rows, as some exporters take them": """g (float[N, 3] x) => (float[N, 2] y)
        <int64[2] s = {0, 1}, int64[2] e = {1000000000, 1000000000}, int64[2] a = {0, 1}> { y = Slice(x, s, e, a) }""",
    "dense": """g (float[N, 3] x) => (float[N, 2] y) <float[3, 2] w = {1, 2, 3, 4, 5, 6}, float[2] b = {1, 2}>
        { y = Gemm(x, w, b) }""",
    "softmax over features": "g (float[N, 3] x) => (float[N, 3] y) { y = Softmax<axis = -1>(x) }",
    "layer normalisation in parts": """g (float[N, 4] x) => (float[N, 4] y) {
        m = ReduceMean<axes = [1]>(x)  d = Sub(x, m)  q = Mul(d, d)  v = ReduceMean<axes = [-1]>(q)
        s = Sqrt(v)  one = Constant<value_float = 1.0>()  t = Add(s, one)  y = Div(d, t) }""",
    "convolution and pooling": """g (float[N, 1, 4, 4] x) => (float[N, 1] y) <float[1, 1, 2, 2] w = {1, 2, 3, 4}> {
        c = Conv(x, w)  p = GlobalAveragePool(c)  y = Flatten(p) }""",
    "attention, whose shapes follow from the input's": """g (float[N, L, 4] x) => (float[N, L, 4] y)
        <int64 zero = {0}, int64 one = {1}, int64[1] heads = {2}, int64[1] wide = {2}, int64[1] rest = {-1},
        int64[1] at = {0}> {
        s = Shape(x)  n = Gather(s, zero)  l = Gather(s, one)  n1 = Unsqueeze(n, at)  l1 = Unsqueeze(l, at)
        to = Concat<axis = 0>(n1, l1, heads, wide)  h = Reshape(x, to)  q = Transpose<perm = [0, 2, 1, 3]>(h)
        k = Transpose<perm = [0, 2, 3, 1]>(h)  a = MatMul(q, k)  p = Softmax(a)  o = MatMul(p, q)
        t = Transpose<perm = [0, 2, 1, 3]>(o)  back = Concat<axis = 0>(n1, l1, rest)  y = Reshape(t, back) }""",
    "rows and tokens merged, and parted again": """g (float[N, L, 2] x) => (float[N, L, 3] y)
        <float[2, 3] w = {1, 2, 3, 4, 5, 6}, int64[2] flat = {-1, 2}, int64[1] last = {3}, int64[1] zero = {0},
        int64[1] two = {2}> {
        f = Reshape(x, flat)  m = MatMul(f, w)  s = Shape(x)  lead = Slice(s, zero, two)
        to = Concat<axis = 0>(lead, last)  y = Reshape(m, to) }""",
    "embeddings under a mask": """g (int64[N, L] ids, int64[N, L] mask) => (float[N, 2] y)
        <float[4, 2] table = {1, 2, 3, 4, 5, 6, 7, 8}, int64[1] last = {-1}> {
        e = Gather(table, ids)  f = Cast<to = 1>(mask)  u = Unsqueeze(f, last)  p = Mul(e, u)
        s = ReduceSum<keepdims = 0>(p, axes)  axes = Constant<value_ints = [1]>()  c = ReduceSum<keepdims = 0>(u,
        axes)
        y = Div(s, c) }""",
    "the last token of each row": """g (float[N, L, 2] x, int64[N, L] ids) => (float[N, 2] y)
        <int64 zero = {0}, int64 one = {1}, int64[1] last = {-1}> {
        s = Shape(x)  n = Gather(s, zero)  r = Range(zero, n, one)  e = ArgMax<axis = -1, keepdims = 0>(ids)
        r1 = Unsqueeze(r, last)  e1 = Unsqueeze(e, last)  at = Concat<axis = -1>(r1, e1)  y = GatherND(x, at) }""",
    "a class token for each row": """g (float[N, 2, 3] x) => (float[N, 3, 3] y)
        <float[1, 1, 3] token = {1, 2, 3}, int64 zero = {0}, int64[1] at = {0}, int64[2] tail = {1, 3}> {
        s = Shape(x)  n = Gather(s, zero)  n1 = Unsqueeze(n, at)  to = Concat<axis = 0>(n1, tail)
        t = Expand(token, to)  y = Concat<axis = 1>(t, x) }""",
    "a recurrent network with the batch in the middle": """g (float[N, 5, 1] x) => (float[N, 2] y)
        <float[1, 8, 1] w = {1, 2, 3, 4, 5, 6, 7, 8}, float[1, 8, 2] r = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,
        1, 1}, int64[1] at = {0}> {
        t = Transpose<perm = [1, 0, 2]>(x)  , h, = LSTM<hidden_size = 2>(t, w, r)  y = Squeeze(h, at) }""",
    "a sequence whose length each row says": """g (float[N, 5, 1] x, int64[N] l) => (float[N, 5, 1] y)
        { y = ReverseSequence<batch_axis = 0, time_axis = 1>(x, l) }""",
    "the best three features": """g (float[N, 6] x) => (float[N, 3] v, int64[N, 3] i) <int64[1] k = {3}>
        { v, i = TopK<axis = 1>(x, k) }""",
    "constant scales": """g (float[N, 4] x) => (float[N, 4] y) <float s = {0.1}, uint8 z = {3}>
        { q = QuantizeLinear(x, s, z)  y = DequantizeLinear(q, s, z) }""",
    "Einstein's sum over features": """g (float[N, 2, 3] a, float[N, 3, 2] b) => (float[N, 2, 2] y)
        { y = Einsum<equation = "nij,njk->nik">(a, b) }""",
    "a larger picture": """g (float[N, 1, 2, 2] x) => (float[N, 1, 4, 4] y) <float[4] s = {1, 1, 2, 2},
        float[0] none = {}>
        { y = Resize(x, none, s) }""",
    "a branch on a constant": """g (float[N, 3] x) => (float[N, 3] y) <bool yes = {1}> {
        y = If(yes)<then_branch = t () => (float[N, 3] a) { a = Relu(x) },
                    else_branch = e () => (float[N, 3] b) { m = ReduceMax<keepdims = 0>(x)  b = Sub(x, m) }> }""",
    "steps before rows, merged for a dense layer": """g (float[N, L, 2] x) => (float[N, L, 2] y)
        <float[2, 2] w = {1, 2, 3, 4}, int64[2] flat = {-1, 2}, float[2] b = {1, 2}> {
        t = Transpose<perm = [1, 0, 2]>(x)  s = Shape(t)  f = Reshape(t, flat)  m = Gemm(f, w, b)  n = Add(m, b)
        back = Reshape(n, s)  y = Transpose<perm = [1, 0, 2]>(back) }""",
    "a column that is replaced": """g (float[N, 3] x) => (float[N, 3] y) <int64[1, 1] at = {1}, int64[1] zero = {0},
        int64[1] one = {1}> {
        c = Slice(x, zero, one, one)  e = Exp(c)  u = Transpose(e)  t = Transpose(x)  r = ScatterND(t, at, u)
        y = Transpose(r) }""",
    "the name of the best class": """g (float[N, 3] x) => (int64[N] y) <int64[1, 3] names = {7, 8, 9},
        int64[1] flat = {-1}> {
        a = ArgMax<axis = 1, keepdims = 0>(x)  n = ai.onnx.ml.ArrayFeatureExtractor(names, a)
        y = Reshape(n, flat) }""",
    "codes of texts": """g (string[N, 1] x) => (float[N, 1, 2] y)
        { y = ai.onnx.ml.OneHotEncoder<cats_strings = ["a", "b"]>(x) }""",
    "a quantised dense layer": """g (float[N, 2] x) => (float[N, 2] y) <float s = {0.1}, uint8 z = {0},
        uint8[2, 2] w = {1, 2, 3, 4}> {
        q = QuantizeLinear(x, s, z)  m = com.microsoft.QGemm(q, s, z, w, s, z, , s, z)
        y = DequantizeLinear(m, s, z) }""",
    "what mixes rows, but is not used": """g (float[N, 3] x) => (float[N, 3] y)
        { m = ReduceMax<axes = [0]>(x)  unused = Sub(x, m)  y = Relu(x) }""",
    "a function of the file's own": """g (float[N, 3] x) => (float[N, 3] y) { y = own.twice(x) }
        <domain: "own", opset_import: ["" : 17]> twice (a) => (b) { b = Add(a, a) }""",
}
"""Rows never meet."""

MEET = {
    "ReduceMax 'm' reduces over the rows": """g (float[N, 3] x) => (float[N, 3] y)
        { m = ReduceMax<axes = [0]>(x)  y = Sub(x, m) }""",
    "ReduceMin 'm' reduces over the rows": """g (float[N, 3] x) => (float[N, 3] y)
        { m = ReduceMin<keepdims = 0>(x)  y = Sub(x, m) }""",
    "Softmax 'y' normalises over the rows": "g (float[N, 3] x) => (float[N, 3] y) { y = Softmax<axis = 0>(x) }",
    "CumSum 'y' adds up over the rows": """g (float[N, 3] x) => (float[N, 3] y) <int64 a = {0}>
        { y = CumSum(x, a) }""",
    "ArgMax 'a' ranks the rows": """g (float[N, 3] x) => (float[N, 3] y)
        { a = ArgMax<axis = 0>(x)  f = Cast<to = 1>(a)  y = Add(x, f) }""",
    "DynamicQuantizeLinear 'q' has one scale for all rows": """g (float[N, 3] x) => (float[N, 3] y)
        { q, s, z = DynamicQuantizeLinear(x)  y = DequantizeLinear(q, s, z) }""",
    "NonZero 'n' returns a number of rows that depends on the data": """g (float[N, 3] x) => (int64[M, 2] y)
        { n = NonZero(x)  y = Transpose(n) }""",
    "Unique 'u' returns a number of rows that depends on the data": """g (float[N, 1] x) => (float[N, 1] y) {
        u = Unique(x)  s = Shape(u)  f = Cast<to = 1>(s)  y = Mul(x, f) }""",
    "NonMaxSuppression 'y' returns a number of rows that depends on the data": """g (float[N, 2, 4] b, float[N, 1, 2] s)
        => (int64[M, 3] y) { y = NonMaxSuppression(b, s) }""",
    "MatMul 'y' multiplies each row with all others": """g (float[N, 3] x) => (float[N, M] y)
        { t = Transpose(x)  y = MatMul(x, t) }""",
    "Transpose": "g (float[N, 4] x) => (float[M, N] y) { y = Transpose(x) }",
    "Div 'y' computes with the number of rows": """g (float[N, 3] x) => (float[N, 3] y) <int64 zero = {0}> {
        s = Shape(x)  n = Gather(s, zero)  f = Cast<to = 1>(n)  y = Div(x, f) }""",
    "Gather 'f' selects rows": """g (float[N, 3] x) => (float[N, 3] y) <int64[1] first = {0}>
        { f = Gather<axis = 0>(x, first)  y = Add(x, f) }""",
    "Slice 'r' takes some of the rows, or takes them in another order": """g (float[N, 3] x) => (float[N, 3] y)
        <int64[1] s = {-1}, int64[1] e = {-9223372036854775807}, int64[1] a = {0}, int64[1] p = {-1}>
        { r = Slice(x, s, e, a, p)  y = Relu(r) }""",
    "Reshape 'r'": """g (float[N, 4] x) => (float[N, 4] y) <int64[2] pairs = {4, -1}, int64[2] back = {-1, 4}>
        { r = Reshape(x, pairs)  s = Softmax<axis = 0>(r)  y = Reshape(s, back) }""",
    "LSTM 'h' uses the rows as steps of a sequence": """g (float[N, 1, 1] x) => (float[N, 1, 2] y)
        <float[1, 8, 1] w = {1, 2, 3, 4, 5, 6, 7, 8}, float[1, 8, 2] r = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,
        1, 1}, int64[1] at = {1}> {
        h, , = LSTM<hidden_size = 2>(x, w, r)  y = Squeeze(h, at) }""",
    "BatchNormalization 'y' normalises over the rows (training mode)": """g (float[N, 2] x) => (float[N, 2] y)
        <float[2] one = {1, 1}, float[2] nil = {0, 0}>
        { y, a, b = BatchNormalization<training_mode = 1>(x, one, nil, nil, one) }""",
    "RandomNormalLike 'e' draws random numbers": """g (float[N, 3] x) => (float[N, 3] y)
        { e = RandomNormalLike(x)  y = Add(x, e) }""",
    "Compress 'y'": """g (float[N, 3] x) => (float[M, 3] y) <float limit = {0.5}, int64[1] last = {1}> {
        m = ReduceMax<axes = [1], keepdims = 0>(x)  c = Greater(m, limit)  y = Compress<axis = 0>(x, c) }""",
    "ReduceMax 'l' reduces over the rows": """g (float[N, 8] x, int64[N, 8] mask) => (float[N, L] y)
        <int64[1] zero = {0}, int64[1] one = {1}, int64[1] shape = {1}> {
        axes = Constant<value_ints = [1]>()  n = ReduceSum<keepdims = 0>(mask, axes)  l = ReduceMax<keepdims = 0>(n)
        e = Reshape(l, shape)  y = Slice(x, zero, e, one) }""",
    "Einsum 'y' multiplies over the rows": """g (float[N, 3] a, float[N, 3] b) => (float[N, M] y)
        { y = Einsum<equation = "ni,mi->nm">(a, b) }""",
    "Greater 'g' computes with the number of rows": """g (float[N, 3] x) => (float[N, 3] y) <int64 zero = {0},
        int64 many = {16}> {
        s = Shape(x)  n = Gather(s, zero)  g = Greater(n, many)  f = Cast<to = 1>(g)  y = Add(x, f) }""",
    "If": """g (float[N, 3] x) => (float[N, 3] y) <float limit = {10000.0}> {
        m = ReduceMax<keepdims = 0>(x)  big = Greater(m, limit)
        y = If(big)<then_branch = t () => (float[N, 3] a) { a = Neg(x) }, else_branch = e () => (float[N,
        3] b) { b = Relu(x) }> }""",
    "MaxPool 'p' returns indices that count through the whole batch": """g (float[N, 1, 4] x) => (int64[N, 1, 2] y)
        { p, y = MaxPool<kernel_shape = [2], strides = [2]>(x) }""",
    "Softmax 's' reads rows that were merged with an axis in front of them": """g (float[N, 4, 2] x) => (float[N, 4,
        2] y) <int64[2] flat = {-1, 2}, int64[3] back = {4, -1, 2}> {
        t = Transpose<perm = [1, 0, 2]>(x)  f = Reshape(t, flat)  s = Softmax<axis = 0>(f)  b = Reshape(s, back)
        y = Transpose<perm = [1, 0, 2]>(b) }""",
    "ScatterND 'r' writes to some of the rows": """g (float[N, 3] x) => (float[N, 3] y)
        <int64[1, 1] at = {0}, float[1, 3] u = {1, 2, 3}> { r = ScatterND(x, at, u)  y = Relu(r) }""",
    "Concat 'c' concatenates along the rows, or rows of different axes": """g (float[N, 3] x) => (float[M, 3] y)
        { c = Concat<axis = 0>(x, x)  y = Relu(c) }""",
    "Add 'y' computes with the place of a row in the batch": """g (float[N, 3] x) => (float[N,
        3] y) <int64 zero = {0}, int64 one = {1}, int64[1] at = {0}, int64[1] three = {3}> {
        s = Shape(x)  n = Gather(s, zero)  r = Range(zero, n, one)  f = Cast<to = 1>(r)
        last = Constant<value_ints = [1]>()
        u = Unsqueeze(f, last)  n1 = Unsqueeze(n, at)  to = Concat<axis = 0>(n1, three)  e = Expand(u, to)
        y = Add(x, e) }""",
}
"""Rows meet, in the operator that the obstacle names."""


HIDDEN = {
    "Div 'd' divides the number of rows": """g (float[N, 3] x) => (float[N, 3] y) <int64[1] zero = {0},
        int64[1] one = {1}, int64[1] many = {100}, float[2] c = {1, 2}> {
        s = Shape(x)  n = Slice(s, zero, one)  d = Div(n, many)  k = Sub(one, d)  parts = Concat<axis = 0>(k, d, one)
        a, b, e = Split<axis = 0>(c, parts)  r = ReduceSum<keepdims = 0>(a)  y = Add(x, r) }""",
    "Sub 'd' computes with the number of rows": """g (float[N, 3] x) => (float[N, 3] y) <int64[1] zero = {0},
        int64[1] one = {1}, int64[1] many = {100}, int64[1] minus = {-1}, float[1] five = {5}> {
        s = Shape(x)  n = Slice(s, zero, one)  d = Sub(n, many)  e = Equal(d, minus)  i = Cast<to = 7>(e)
        k = Add(i, one)  f = Expand(five, k)  r = ReduceSum<keepdims = 0>(f)  y = Add(x, r) }""",
    "Mul 'd' computes numbers that are too large for their type with many rows": """g (float[N, 3] x) => (float[N, 3] y)
        <int64[1] zero = {0}, int32[1] factor = {600000000}, int32[1] wrapped = {-884901888}> {
        s = Shape(x)  n = Gather(s, zero)  i = Cast<to = 6>(n)  d = Mul(i, factor)  e = Equal(d, wrapped)
        t = Add(x, x)  y = Where(e, t, x) }""",
    "Slice 'k' computes with the number of rows": """g (float[N, 3] x) => (float[N, 3] y) <int64[1] zero = {0},
        int64[1] one = {1}, int64[1] two = {2}, int64[2] flip = {1, 0}, float many = {1000}> {
        s = Shape(x)  f = Gather(s, flip)  u = Unsqueeze(f, zero)  k = Slice(u, one, two, one)  e = Cast<to = 1>(k)
        d = Greater(e, many)  i = Cast<to = 1>(d)  y = Add(x, i) }""",
    "Split 'a' computes with the number of rows": """g (float[N, 3] x) => (float[N, 3] y) <int64[1] zero = {0},
        int64[2] flip = {1, 0}, float many = {1000}> {
        s = Shape(x)  f = Gather(s, flip)  u = Unsqueeze(f, zero)  a, k = Split<axis = 1>(u)  e = Cast<to = 1>(k)
        d = Greater(e, many)  i = Cast<to = 1>(d)  y = Add(x, i) }""",
    "Slice 'c' takes as many entries as there are rows": """g (float[N, 2] x) => (float[N, 1] y)
        <int64[1] zero = {0}, int64[1] one = {1}> {
        s = Shape(x)  n = Slice(s, zero, one)  c = Slice(x, zero, n, one)  y = ReduceSum(c, one) }""",
    "Slice 'c' takes some of the rows": """g (float[N, 3] x) => (float[M, 3] y) <int64[1] zero = {0},
        int64[1] many = {100}> { c = Slice(x, zero, many, zero)  y = Relu(c) }""",
    "GatherElements 'y' selects rows": """g (float[N, 4] x, int64[N, 2] i) => (float[N, 2] y)
        <int64[2] pairs = {-1, 2}, float many = {20000}> {
        b = Sub(x, many)  h = Relu(b)  r = Reshape(h, pairs)  y = GatherElements<axis = 1>(r, i) }""",
    "GatherND 'y' selects rows": """g (float[N, 4] x, int64[N, 2, 1] i) => (float[N, 2] y)
        <int64[2] pairs = {-1, 2}, float many = {20000}> {
        b = Sub(x, many)  h = Relu(b)  r = Reshape(h, pairs)  y = GatherND<batch_dims = 1>(r, i) }""",
    "ReverseSequence 'y' computes with the place of a row": """g (float[N, 100] x) => (float[N, 100] y)
        <int64 zero = {0}, int64 one = {1}, float many = {20000}> {
        b = Sub(x, many)  h = Relu(b)  s = Shape(x)  n = Gather(s, zero)  r = Range(zero, n, one)
        y = ReverseSequence<batch_axis = 0, time_axis = 1>(h, r) }""",
    "Cast 'c' computes with the place of a row": """g (float[N, 3] x) => (float[N, 1] y) <int64 zero = {0},
        int64 one = {1}, int64[1] last = {-1}> {
        s = Shape(x)  n = Gather(s, zero)  r = Range(zero, n, one)  c = Cast<to = 2>(r)  d = Cast<to = 7>(c)
        k = Unsqueeze(d, last)  a = ArgMax<axis = 1>(x)  at = Concat<axis = -1>(k, a)  v = GatherND(x, at)
        y = Unsqueeze(v, last) }""",
    "Squeeze 's' drops the axis of the rows": """g (float[N, 1, 3] x) => (float[N, 3] y) <int64[1] one = {1},
        int64[1] last = {-1}, int64[2] back = {-1, 3}, float many = {20000}> {
        b = Sub(x, many)  h = Relu(b)  s = Squeeze(h)  u = Unsqueeze(s, one)  v = ReduceSum(u, last)  w = Sub(u, v)
        y = Reshape(w, back) }""",
    "Resize 'y' interpolates over the rows": """g (float[N, 2] x) => (float[N, 4] y) <float[2] s = {1, 2},
        float[0] none = {}> { y = Resize<mode = "linear">(x, none, s) }""",
    "com.microsoft.EmbedLayerNormalization 'y' has an input 'w'": """g (int32[N, 2] i, float[N, 4] w) => (float[N, 2,
        4] y) <float[4] g = {1, 1, 1, 1}, float[2, 4] p = {0, 0, 0, 0, 0, 0, 0, 0}>
        { y, m = com.microsoft.EmbedLayerNormalization(i, , w, p, , g, g) }""",
    "com.microsoft.QLinearSoftmax 'u' normalises over the rows": """g (float[N, 3] x) => (float[N, 3] y)
        <float s = {0.1}, uint8 z = {0}, float f = {0.00390625}> {
        q = QuantizeLinear(x, s, z)  t = Transpose(q)
        u = com.microsoft.QLinearSoftmax<axis = 0, opset = 12>(t, s, z, f, z)  v = Transpose(u)
        y = DequantizeLinear(v, f, z) }""",
    "Reshape 'p' mixes rows when it changes the shape": """g (float[N, L] x) => (float[N, L] y)
        <int64[2] blocks = {-1, 8}, float many = {20000}> {
        b = Sub(x, many)  h = Relu(b)  p = Reshape(h, blocks)  q = Softmax(p)  s = Shape(x)  y = Reshape(q, s) }""",
    "CumSum 'y' depends on 'a', which is computed from the sizes": """g (float[N, L] x) => (float[N, L] y)
        <int64 one = {1}, int64 many = {1000}> {
        s = Shape(x)  l = Gather(s, one)  d = Div(l, many)  a = Sub(one, d)  y = CumSum(x, a) }""",
    "Dropout 'd' draws random numbers (training mode)": """g (float[N, 3] x) => (float[N, 3] y)
        <float[3] c = {1, 1, 1}, float half = {0.5}, bool yes = {1}> { d = Dropout(c, half, yes)  y = Mul(x, d) }""",
}
"""Rows meet only for other numbers of rows, lengths or values than the tried ones."""


@pytest.mark.parametrize("name", APART)
def test_rows_that_never_meet_are_joined(name: str, tmp_path: Path) -> None:
    found = examine(graph(tmp_path, APART[name]))
    assert found.obstacle == ""
    assert found.evidence == "its graph keeps rows apart, and no trial disagrees"


UNNAMED = ("If", "Transpose")
"""ONNX Runtime renames or replaces the operator, or the type of an output tells already."""


@pytest.mark.parametrize("why", [why for why in MEET if why not in UNNAMED])
def test_the_operator_in_which_rows_meet_is_named(why: str, tmp_path: Path) -> None:
    assert examine(graph(tmp_path, MEET[why])).obstacle.startswith(why)


@pytest.mark.parametrize("why", HIDDEN)
def test_trials_need_not_hit_upon_what_makes_rows_meet(why: str, tmp_path: Path) -> None:
    assert examine(graph(tmp_path, HIDDEN[why])).obstacle.startswith(why)


def test_an_aspect_ratio_could_be_kept_by_resizing_the_rows(tmp_path: Path) -> None:
    text = """g (float[N, 4] x) => (float[N, 4] y) <int64[2] s = {1000, 4}, float[0] none = {}>
        { y = Resize<keep_aspect_ratio_policy = "not_larger">(x, none, none, s) }"""
    assert examine(graph(tmp_path, text, 18)).obstacle == "Resize 'y' resizes the rows"


def test_scales_of_blocks_are_no_scales_of_rows(tmp_path: Path) -> None:
    text = """g (int8[N, 4] x) => (float[N, 4] y) <float[1, 4] s = {1, 2, 3, 4}>
        { y = DequantizeLinear<axis = 0, block_size = 1000>(x, s) }"""
    found = examine(graph(tmp_path, text, 21)).obstacle
    assert found == "DequantizeLinear 'y' has scales for a fixed number of rows"


def test_positions_do_not_point_into_other_rows(tmp_path: Path) -> None:
    text = """g (float[N, 1, 1, 4] x, float[N, 2] c, int64[N, 1] p) => (float[N, 1, 1, 4] y)
        { y = RotaryEmbedding(x, c, c, p) }"""
    assert examine(graph(tmp_path, text, 23)).obstacle.startswith("RotaryEmbedding 'y' has an input 'c'")


@pytest.mark.parametrize("name", UNNAMED)
def test_rows_that_meet_run_alone(name: str, tmp_path: Path) -> None:
    assert examine(graph(tmp_path, MEET[name])).obstacle


def test_softmax_before_opset_13_normalises_over_all_axes_from_its_own(tmp_path: Path) -> None:
    text = "g (float[N, 3, 2] x) => (float[N, 3, 2] y) { y = Softmax<axis = %d>(x) }"
    assert examine(graph(tmp_path, text % 1, 11)).obstacle == ""
    assert examine(graph(tmp_path, text % 0, 11)).obstacle == "Softmax 'y' normalises over the rows"


def test_the_standard_operators_have_two_domains(tmp_path: Path) -> None:
    text = """g (float[N, 2] x) => (float[N, 4] y) <float[2] s = {1.00001, 2}, float[0] none = {}>
        { y = Resize(x, none, s) }"""
    for domain in ("", "ai.onnx"):
        model = parser.parse_model(HEAD % 13 + text)
        model.opset_import[0].domain = model.graph.node[0].domain = domain
        onnx.save(model, str(tmp_path / "m.onnx"))
        assert examine(tmp_path / "m.onnx").obstacle == "Resize 'y' resizes the rows"


def test_an_operator_without_a_rule_ends_the_proof(tmp_path: Path) -> None:
    text = """g (float[N, 3, 3] x) => (float[N] y) { y = Det(x) }"""
    assert examine(graph(tmp_path, text)).obstacle == "Det 'y' is not known to keep rows apart"


def test_a_classifier_of_tables_is_joined(tmp_path: Path) -> None:
    text = """g (float[N, 2] x) => (float[N, 1] y)
        { y = ai.onnx.ml.LinearRegressor<coefficients = [1.0, 2.0], intercepts = [0.5]>(x) }"""
    assert examine(graph(tmp_path, text)).obstacle == ""


def test_several_outputs_for_each_row_are_no_rows(tmp_path: Path) -> None:
    text = "g (float[N, 4] x) => (float[M, 2] y) <int64[2] to = {-1, 2}> { y = Reshape(x, to) }"
    assert examine(graph(tmp_path, text)).obstacle == "output 'y' has several rows for each row of the inputs"


def test_sizes_that_a_model_refuses_are_replaced_by_smaller_ones(tmp_path: Path) -> None:
    """Its table has 16 places, fewer than texts usually have tokens."""
    text = """g (int64[N, L] mask) => (float[N, L, 1] y) <int64 one = {1}, float[16, 1] table = {TABLE}>
        { c = CumSum(mask, one)  p = Mul(c, mask)  y = Gather(table, p) }"""
    text = text.replace("TABLE", ", ".join(map(str, range(16))))
    assert examine(graph(tmp_path, text)).obstacle == ""


def test_a_length_that_divides_by_chance_proves_nothing(tmp_path: Path) -> None:
    """Texts of 64 tokens are one block each; two shorter ones share a block."""
    text = """g (float[N, L] x) => (float[M, 64] y) <int64[2] blocks = {-1, 64}> { p = Reshape(x, blocks)
        y = Relu(p) }"""
    assert examine(graph(tmp_path, text), {"x": (64,)}).obstacle.startswith("Reshape 'p' mixes rows")
    assert examine(graph(tmp_path, text), {"x": (256,)}).obstacle.startswith("Reshape 'p' mixes rows")
    text = text.replace(", 64", ", 7")
    assert examine(graph(tmp_path, text), {"x": (56,)}).obstacle.startswith("Reshape 'p' mixes rows")


def test_what_cannot_be_tried_runs_alone(tmp_path: Path) -> None:
    text = """g (int64[N, 2] x) => (int64[N, 2] y) <int64[1] table = {5}, int64 more = {7}>
        { i = Add(x, more)  y = Gather(table, i) }"""
    assert "nothing could be tried" in examine(graph(tmp_path, text)).obstacle
    text = """g (float[N, 4] x) => (float[N, 4] y) <int64[2] one = {1, 4}>
        { r = Reshape(x, one)  s = Shape(x)  y = Expand(r, s) }"""
    assert examine(graph(tmp_path, text)).obstacle.startswith("several rows at once fail: ")


# Python stages

STAGE = """
import numpy as np
class Model:
    inputs = {"x": ("%s", (-1, %d))}; outputs = {"y": ("%s", (-1, %d))}
    joins_rows = True
    def __init__(self, threads): self.calls, self.known = 0, {}
    def run(self, x):
%s
"""


def stage(
    folder: Path, lines: str, inputs: tuple[str, int] = ("FP32", 3), outputs: tuple[str, int] = ("FP32", 3)
) -> Path:
    body = "\n".join(f"        {line.strip()}" for line in lines.strip().splitlines())
    (folder / "m.py").write_text(STAGE % (*inputs, *outputs, body))
    return folder / "m.py"


@pytest.mark.parametrize(
    ("lines", "inputs", "outputs"),
    [
        ("return np.tanh(x) @ np.ones((3, 3), np.float32)", ("FP32", 3), ("FP32", 3)),
        ("return x.argmax(1, keepdims=True)", ("FP32", 3), ("INT64", 1)),
        ("return np.array([[len(t)] for t in x[:, 0]])", ("BYTES", 1), ("INT64", 1)),
        ("if not x.all(): raise type('PanicException', (BaseException,), {})\nreturn x", ("FP32", 3), ("FP32", 3)),
    ],
)
def test_a_stage_that_says_so_is_joined(
    lines: str, inputs: tuple[str, int], outputs: tuple[str, int], tmp_path: Path
) -> None:
    found = examine(stage(tmp_path, lines, inputs, outputs))
    assert (found.obstacle, found.evidence) == ("", "its author says so (`joins_rows = True`), and no trial disagrees")


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ("return x - x.min()", "of a row beside 6 others differs"),
        ("return x / max(1, np.abs(x).max() / 1000)", "of a row beside 6 others differs"),  # tame up to 1,000
        ("return np.unique(x, axis=0)", "rows at once fail: 'run' returns"),
        ("return x[np.abs(x).sum(1) > 0]", "one row alone fails: 'run' returns 0 rows"),
        ("return np.sort(x, axis=0)", "of a row beside 6 others differs"),
        ("return x if len(x) < 9 else x * 0", "of a row beside 27 others differs"),
        ("self.calls += 1; return x + np.float32(self.calls)", "of a row beside 6 others differs"),
        ("return np.array([self.known.setdefault(float(r[0]), r) for r in x])", "depends on the calls before it"),
    ],
)
def test_a_stage_that_says_so_wrongly_is_found_out(lines: str, why: str, tmp_path: Path) -> None:
    assert why in examine(stage(tmp_path, lines)).obstacle


def test_a_tokenizer_that_pads_to_the_longest_text_is_found_out(tmp_path: Path) -> None:
    lines = """n = max(map(len, x[:, 0]))
        return np.array([list(t.ljust(n)) for t in x[:, 0]], np.int64).reshape(len(x), n)"""
    assert "differs" in examine(stage(tmp_path, lines, ("BYTES", 1), ("INT64", -1))).obstacle


def test_a_stage_that_says_nothing_runs_alone(tmp_path: Path) -> None:
    path = stage(tmp_path, "return x")
    path.write_text(path.read_text().replace("    joins_rows = True\n", ""))
    assert examine(path).obstacle == "its class does not say that rows may be joined (`joins_rows = True`)"


# Samples


def test_samples_may_show_what_made_up_inputs_do_not(tmp_path: Path) -> None:
    path = stage(tmp_path, "return x * (1 if 42.5 in x else 2)")
    assert examine(path).obstacle == ""
    np.save(tmp_path / "real.npy", np.array([[42.5, 1, 2], [3, 4, 5]], np.float32))
    found = examine(path, declared=Declared(sample=str(tmp_path / "real.npy")))
    assert "differs from that of the row alone" in found.obstacle


def test_samples_must_fit_the_inputs(tmp_path: Path) -> None:
    signature = Signature((Port("x", "FP32", (-1, 2)), Port("t", "BYTES", (-1, 1))), ())
    np.savez(tmp_path / "a.npz", x=np.ones((3, 2)), t=np.array([["a"], ["bc"], ["ü"]]))
    found = read_sample(tmp_path / "a.npz", signature)
    assert found["x"].dtype == np.float32
    assert found["t"].ravel().tolist() == [b"a", b"bc", "ü".encode()]
    arrays: dict[str, Any] = {"x": np.ones((3, 2)), "z": np.ones(3)}
    np.savez(tmp_path / "b.npz", **arrays)
    with pytest.raises(InputError, match="the inputs are"):
        read_sample(tmp_path / "b.npz", signature)
    (tmp_path / "c.npz").write_bytes(b"nothing")
    with pytest.raises(InputError, match="cannot be read"):
        read_sample(tmp_path / "c.npz", signature)
