"""What no range of click's refuses."""

import importlib

import click
import pytest

from sloop.cli import COMMANDS
from sloop.cli.number import Number


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "1e999", "x", "-1"])
def test_is_finite_and_in_its_range(text: str) -> None:
    with pytest.raises(click.BadParameter):
        Number(min=0).convert(text, None, None)
    assert Number(min=0).convert("0.5", None, None) == 0.5


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_option_with_a_range_is_finite(name: str) -> None:
    command = getattr(importlib.import_module(COMMANDS[name][0]), name)
    floats = [param for param in command.params if isinstance(param.type, click.types.FloatParamType)]
    assert [param.name for param in floats if not isinstance(param.type, Number)] == []
