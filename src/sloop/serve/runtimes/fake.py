"""A model without weights, for tests and demonstrations: it takes known CPU time and gives its inputs back.

`fake:burn:FIXED_MS:ROW_MS` computes for FIXED_MS + rows × ROW_MS of one core's time, `fake:sleep:…` only waits that
long. Add `:fail` to raise on every batch. Thread counts change nothing.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from sloop.errors import InputError
from sloop.serve.runtimes import Array
from sloop.units import ms

_FORM = "write fake:burn:FIXED_MS:ROW_MS, fake:sleep:FIXED_MS:ROW_MS, or either with :fail at its end"


@dataclass(frozen=True, slots=True)
class FakeRuntime:
    """Burns or sleeps, then echoes."""

    burns: bool
    fixed_ns: int
    row_ns: int
    fails: bool = False

    @classmethod
    def parse(cls, model: str) -> "FakeRuntime":
        """Read `fake:…`; raise `InputError` for anything else."""
        parts = model.split(":")
        try:
            _, mode, fixed_ms, row_ms, *end = parts
            if mode not in ("burn", "sleep") or end not in ([], ["fail"]):
                raise ValueError(model)
            return cls(mode == "burn", ms(float(fixed_ms)), ms(float(row_ms)), fails=bool(end))
        except ValueError as error:
            raise InputError(f"{model!r} is no fake model", help=_FORM) from error

    def load(self, threads: int) -> bool:
        """Nothing to load."""
        return False

    def warm(self, threads: int) -> None:
        """Nothing to warm."""

    def run(self, inputs: Sequence[Array], threads: int) -> tuple[Sequence[Array], int]:
        """Take the time the name tells, then answer with the inputs."""
        if self.fails:
            raise ValueError("this model fails on purpose")
        rows = len(inputs[0]) if inputs and inputs[0].ndim else 1
        duration_ns = self.fixed_ns + rows * self.row_ns
        if self.burns:
            end_ns = time.thread_time_ns() + duration_ns
            while time.thread_time_ns() < end_ns:
                pass
        else:
            time.sleep(duration_ns / 1e9)
        return inputs, threads
