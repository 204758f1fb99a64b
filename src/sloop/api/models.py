"""Model files, tensors, models that are opened, and the machine that computes them."""

from sloop.machine import usable_cpus
from sloop.onnx_file import FLOAT, INT64, array_in, parse_onnx, read_onnx, write_onnx
from sloop.profile.model import open_model
from sloop.tensor import Port, Signature

__all__ = [
    "FLOAT",
    "INT64",
    "Port",
    "Signature",
    "array_in",
    "open_model",
    "parse_onnx",
    "read_onnx",
    "usable_cpus",
    "write_onnx",
]
