"""Helpers for commands of one's own, in the style of sloop's: options, tables, progress, `--json`."""

from sloop.app.document import parse_yaml, read_yaml
from sloop.cli.command import FILE, FOLDER, CommandOutput, Number, command, facts, progress, table
from sloop.plugins import Registry

__all__ = [
    "FILE",
    "FOLDER",
    "CommandOutput",
    "Number",
    "Registry",
    "command",
    "facts",
    "parse_yaml",
    "progress",
    "read_yaml",
    "table",
]
