"""A number on the command line: as click's, and finite. `nan` is within every range, and nothing lasts for `inf`."""

from math import isfinite
from typing import Any

import click


class Number(click.FloatRange):
    """A finite float in a range; anything else is wrong use."""

    def convert(
        self,
        value: Any,  # noqa: ANN401  # text, or a default
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> float:
        number = float(super().convert(value, param, ctx))
        if not isfinite(number):
            self.fail(f"{value!r} is not a finite number.", param, ctx)
        return number

    def _describe_range(self) -> str:
        """For `--help`: nothing where there are no bounds, which click would show as `x<=None`."""
        return "" if self.min is None and self.max is None else super()._describe_range()
