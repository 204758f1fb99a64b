"""Model files, tensors, models that are opened, and the machine that computes them."""

from sloop.machine import capacity, hardware_name, usable_cpus
from sloop.onnx_file import FLOAT, INT64, array_in, parse_onnx, read_onnx, write_onnx
from sloop.profile.blocks import block_costs
from sloop.profile.examine import free_batch
from sloop.profile.model import open_model
from sloop.tensor import Port, Signature

__all__ = [
    "FLOAT",
    "INT64",
    "Port",
    "Signature",
    "array_in",
    "block_costs",
    "capacity",
    "free_batch",
    "hardware_name",
    "open_model",
    "parse_onnx",
    "read_onnx",
    "usable_cpus",
    "write_onnx",
]
