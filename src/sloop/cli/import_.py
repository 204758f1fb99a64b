"""`sloop import`: writes the application file for a Triton model repository."""

import os
from pathlib import Path
from shlex import quote
from typing import Any

import click
import yaml

from sloop.app.load import name_from
from sloop.app.stages import SLO_MS_MAX
from sloop.app.triton import TritonRepository, is_repository, read_repository
from sloop.cli.command import FILE, FOLDER, CommandOutput, Number, command
from sloop.errors import InputError
from sloop.text import counted, listed

EXAMPLE = """
sloop import /srv/models && sloop serve app.yaml
sloop import /srv/models/resnet -o resnet.yaml --slo-ms 200
"""
NOTES = """What sloop does not take, or does in another way, is printed line by line on stderr, and is in the file as
comments. `sloop serve FOLDER` serves the same without a file."""
SLO_NOTE = "Triton has no deadlines: choose slo_ms, the time from the request to the answer, for your users"


@command("import", example=EXAMPLE, notes=NOTES)
@click.argument("folder", type=FOLDER)
@click.option(
    "-o", "--out", type=FILE, default=Path("app.yaml"), show_default=True, help="File to write; it must not exist yet."
)
@click.option(
    "--slo-ms",
    type=Number(min=0, min_open=True, max=SLO_MS_MAX),
    default=1000.0,
    show_default=True,
    help="Deadline to write for each application.",
)
def import_(folder: Path, out: Path, slo_ms: float) -> CommandOutput:
    """Read FOLDER, a Triton model repository or the folder of one of its models, and write an application file, or a
    deployment file if there are several models. Nothing is measured or started.

    Exit code 1 if no model in it can be served.
    """
    if not folder.is_dir() or not is_repository(folder):
        help = "it needs a folder for each model, with config.pbtxt, or with the model as 1/model.onnx"
        raise InputError("not a Triton model repository", where=str(folder), help=help)
    found = read_repository(folder, int(slo_ms) if slo_ms.is_integer() else slo_ms, compares=True)
    for note in found.notes:
        click.echo(note, err=True)
    names = [str(each.mapping()["name"].content) for each in found.applications]
    value: dict[str, Any] = {"file": str(out) if names else None, "applications": names, "notes": list(found.notes)}
    if not names:
        return CommandOutput(value, [f"no model in {folder} can be served; nothing was written"], exit_code=1)
    try:
        with out.open("x", encoding="utf-8") as file:
            file.write(written(found, folder, out.absolute().parent))
    except OSError as error:
        help = (
            "remove it, or name another file with -o" if isinstance(error, FileExistsError) else "name another, with -o"
        )
        raise InputError(f"cannot write it: {error.strerror}", where=str(out), help=help) from error
    what = f"wrote {out}: {counted(len(names), 'application')} ({listed(names)})"
    return CommandOutput(value, [what, f"next: choose slo_ms there, then `sloop serve {quote(str(out))}`"])


def written(found: TritonRepository, folder: Path, beside: Path) -> str:
    """The file for what was found in `folder`, with paths that start at the folder `beside`."""
    documents = [_with_paths(each.content, beside) for each in found.applications]
    document = documents[0]
    if len(documents) > 1:
        document = {"name": name_from(folder.resolve().name), "applications": documents}
    comments = [f"From {folder}, by `sloop import`.", SLO_NOTE, *found.notes]
    lines = [f"# {' '.join(each.split())}\n" for each in comments]
    return "".join(lines) + yaml.safe_dump(
        document, sort_keys=False, default_flow_style=None, allow_unicode=True, width=110
    )


def _with_paths(content: Any, beside: Path) -> dict[str, Any]:  # noqa: ANN401  # a YAML document
    """The document of an application with relative paths instead of absolute ones."""

    def relative(path: str) -> str:
        found = os.path.relpath(path, beside)
        return found if found.startswith("..") else f"./{found}"

    stages = [
        stage
        | {"model": relative(stage["model"])}
        | ({"operators": [relative(each) for each in stage["operators"]]} if "operators" in stage else {})
        for stage in content["stages"]
    ]
    labels = {name: relative(file) for name, file in content.get("labels", {}).items()}
    return {**content, "stages": stages, **({"labels": labels} if labels else {})}
