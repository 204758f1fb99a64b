"""Helpers for commands of one's own, in the style of sloop's: options, tables, progress, `--json`."""

from sloop.app.document import parse_yaml, read_yaml
from sloop.cli.command import FILE, CommandOutput, Number, command, facts, progress, table

__all__ = ["FILE", "CommandOutput", "Number", "command", "facts", "parse_yaml", "progress", "read_yaml", "table"]
