"""What every command promises: with `--json` one object and nothing else on stdout; errors that say where and the fix.

A command's function returns an `Answer`, or says it with `say` and runs on; this module alone decides how an answer
reaches the terminal. Exit codes: 0 done, 1 failed, 2 wrong use (click's own).
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import click
import msgspec
from rich.console import Console, RenderableType

from sloop.errors import SloopError

JSON: Final = "sloop.cli.json"
"""Whether `--json` was given, in click's `meta`."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a command found: `value` for programs, `shown` for people."""

    value: Any
    """Anything msgspec can write as one JSON object."""
    shown: Sequence[RenderableType]
    exit_code: int = 0


def say(answer: Answer) -> None:
    """Print an answer in the form that was asked for."""
    if click.get_current_context().meta[JSON]:
        click.echo(msgspec.json.encode(answer.value))
    else:
        show(answer.shown)


class Command(click.Command):
    """A click command whose function returns an `Answer`, or None where it has said it already."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401  # click's own signature
        super().__init__(*args, **kwargs)
        self.params.append(
            click.Option(
                ["--json", "as_json"],
                is_flag=True,
                help="Print one JSON object on stdout; everything else goes to stderr.",
            )
        )

    def invoke(self, ctx: click.Context) -> None:
        ctx.meta[JSON] = ctx.params.pop("as_json")
        try:
            answer = super().invoke(ctx)
        except SloopError as error:
            what = str(error.args[0])
            click.echo(f"error: {what}", err=True)
            if error.help:
                click.echo(f"help: {error.help}", err=True)
            answer = Answer({"error": what, "help": error.help}, (), exit_code=1)
        if answer is not None:
            assert isinstance(answer, Answer), f"{self.name} returned {answer!r}"
            say(answer)
            if answer.exit_code:
                ctx.exit(answer.exit_code)


def command(name: str, *, example: str, more: str = "") -> Callable[[Callable[..., Answer | None]], Command]:
    """Make a function the command `name`; its docstring is the help, followed by what there is `more` and `example`."""

    def made(function: Callable[..., Answer | None]) -> Command:
        lines = "\n".join(f"  {line}" for line in example.strip().splitlines())
        epilog = f"{more}\n\n\b\nExample:\n{lines}".lstrip("\n")
        return click.command(name, cls=Command, epilog=epilog)(function)

    return made


def show(parts: Iterable[RenderableType]) -> None:
    """Print for people: as wide as the terminal, or unbroken lines where stdout is a file or a pipe."""
    console = Console() if sys.stdout.isatty() else Console(width=200, soft_wrap=False)
    for part in parts:
        console.print(part, highlight=False)
