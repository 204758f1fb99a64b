"""Measurements of a run, as arrays of 8-byte integers."""

from array import array

Samples = array  # of signed 64-bit integers
"""Measurements in ns, in chronological order."""


def new_samples() -> "Samples[int]":
    return array("q")
