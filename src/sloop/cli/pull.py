"""`sloop pull`: fetches the models that applications name by URL into the cache of this machine."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import click

from sloop.app.load import model_urls
from sloop.cli.command import CommandOutput, ProgressUpdate, command, facts, progress
from sloop.errors import SloopError
from sloop.options import Value
from sloop.profile.model import is_model, is_python
from sloop.serve.weights.cache import BYTES_VARIABLE, MODELS_BYTES, TOKENS_VARIABLE, WeightsCache, usual_cache
from sloop.serve.weights.folder import MODELS_VARIABLE
from sloop.serve.weights.sources import ModelSource
from sloop.text import counted

EXAMPLE = """
sloop pull app.yaml && sloop serve app.yaml
sloop pull https://models.example.org/resnet.onnx#sha256=…
sloop pull s3://bucket/models/resnet.onnx
"""
NOTES = f"""With #sha256=HEX at the end of a URL, or a file `NAME.onnx.sha256` beside the model, the content is
verified. The files of weights of an ONNX model are fetched with it. Requests do not go through a proxy. URLs with s3:,
gs: and az: need `pip install obstore`; credentials are those of the environment, or of this machine's role.

The environment says more, for all commands: {MODELS_VARIABLE}, the folder, which servers may share [default:
~/.cache/sloop/models]; {BYTES_VARIABLE}, the most bytes in it, beyond which unused models are deleted, the least
recently used first [default: {MODELS_BYTES}]; {TOKENS_VARIABLE}, a file with tokens of private stores: lines HOST TOKEN
(sent as a bearer token) or HOST NAME: VALUE; HOST may have a port."""


CACHE_OPTIONS: Final = {
    "--models-cache": f"name the folder in the environment as {MODELS_VARIABLE}",
    "--models-bytes": f"give the number in the environment as {BYTES_VARIABLE}",
    "--models-tokens": f"name the file in the environment as {TOKENS_VARIABLE}",
}
"""What to write instead of options that commands had."""


@command("pull", example=EXAMPLE, notes=NOTES, removed=CACHE_OPTIONS)
@click.argument("apps", nargs=-1, required=True, metavar="APP|URL...")
def pull(apps: tuple[str, ...]) -> CommandOutput:
    """Fetch the models that the files APP... name by URL, or those at URL..., and print where they are.

    `sloop serve` does the same before it serves. A model that is there is not fetched again unless the store has
    another version.
    """
    urls = model_urls(apps)
    found = fetched_models(urls)
    sources = {text: str(ModelSource.of(text)) for text in urls}
    rows = [{"source": sources[text], "path": str(path)} for text, path in found.items()]
    lines = [facts([(row["source"], row["path"]) for row in rows])] if rows else []
    return CommandOutput({"models": rows}, lines or ["no application names a model by URL: there is nothing to fetch"])


def fetched_models(urls: Mapping[str, Value]) -> dict[str, Path]:
    """By URL, the model on this machine, fetched now if it is not there; it stays as long as this process runs.
    InputError and MachineError as for `WeightsCache.fetch`, and InputError for what is no model."""
    sources = {text: _source(value) for text, value in urls.items()}
    if not sources:
        return {}
    with progress(f"fetching {counted(len(sources), 'model')}", total=1.0) as advance:
        return asyncio.run(_fetch(sources, usual_cache(), advance))


def _source(value: Value) -> ModelSource:
    text = value.text()
    try:
        source = ModelSource.of(text)
    except SloopError as error:
        value.fail(error.what, error.help)
    name = Path(source.name)
    if not is_model(name):
        value.fail(f"{source.name!r} is no name of a model", "give the URL of a file that ends in .onnx or .py")
    if is_python(name) and not source.sha256:
        what = f"{source.name!r} is Python code, which would be executed as the store sends it"
        value.fail(what, "add its checksum to the URL: #sha256=…")
    return source


async def _fetch(sources: Mapping[str, ModelSource], cache: WeightsCache, advance: ProgressUpdate) -> dict[str, Path]:
    come: dict[str, tuple[int, int]] = {}

    async def fetch(text: str, source: ModelSource) -> Path:
        def report(done_bytes: int, total_bytes: int | None) -> None:
            come[text] = (done_bytes, total_bytes or 0)
            done, total = (sum(sizes) for sizes in zip(*come.values(), strict=True))
            advance(done / max(done, total, 1), f"{done >> 20:,} of {total >> 20:,} MiB")

        return await cache.fetch(source, report, pin=True)

    paths = await asyncio.gather(*(fetch(text, source) for text, source in sources.items()))
    return dict(zip(sources, paths, strict=True))
