"""Lists on the command line: `1,2,4` and `NAME=3,224,224`."""

from math import isfinite

import click


def numbers(text: str) -> tuple[float, ...]:
    """Numbers separated by commas."""
    try:
        found = tuple(float(part) for part in text.split(","))
        if not all(map(isfinite, found)):
            raise ValueError
        return found
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a list of numbers; write 0.5,1,2") from None


def counts(text: str) -> tuple[int, ...]:
    """Whole numbers separated by commas."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a list of whole numbers; write 1,2,4") from None


def shape(text: str) -> tuple[str, tuple[int, ...]]:
    """An input's name and the shape of one row of it."""
    name, _, sizes = text.partition("=")
    try:
        return name, tuple(int(size) for size in sizes.split(","))
    except ValueError:
        raise click.BadParameter(f"{text!r} is not NAME=SIZES; write data=3,224,224") from None
