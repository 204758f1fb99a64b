"""How many kinds of messages the processes of a server have for each other.

A *kind* is a member of `FrameKind`, or a struct that `sloop.serve` declares to be sent (`array_like`, or with a tag),
alone or within another one. The core's own structs are no kinds, wherever they travel.
"""

import ast
from pathlib import Path
from typing import Final

from sloop import serve
from sloop.serve.transport import FrameKind

KINDS_MAX: Final = 51  # 98 before


def declared(file: Path) -> list[str]:
    """The structs of a module that are sent."""
    return [
        node.name
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ClassDef)
        and any(isinstance(base, ast.Name) and base.id == "Struct" for base in node.bases)
        and any(keyword.arg in ("array_like", "tag") for keyword in node.keywords)
    ]


def test_messages_are_of_few_kinds() -> None:
    (folder,) = map(Path, serve.__path__)
    kinds = {name for file in folder.rglob("*.py") for name in declared(file)} | set(FrameKind.__members__)
    assert {"Submit", "NodeOrder", "PlanRequest", "StageSetup", "RunBatch", "BYTES"} < kinds
    assert len(kinds) <= KINDS_MAX, sorted(kinds)
