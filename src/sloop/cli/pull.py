"""`sloop pull`: fetches the models that applications name by URL into the cache of this machine."""

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import click

from sloop.app.load import model_urls
from sloop.cli.command import (
    FILE,
    FOLDER,
    CommandOutput,
    ProgressUpdate,
    command,
    facts,
    progress,
)
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
sloop pull app.yaml --models-tokens /etc/sloop/tokens
sloop pull s3://bucket/models/resnet.onnx
"""
NOTES = """With #sha256=HEX at the end of a URL, or a file `NAME.onnx.sha256` beside the model, the content is verified.
The files of weights of an ONNX model are fetched with it. Requests do not go through a proxy. URLs with
s3:, gs: and az: need `pip install obstore`; credentials are those of the environment, or of this machine's role."""


def models_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options about models at URLs; `cache_of` reads them."""
    options = (
        click.option(
            "--models-cache",
            type=FOLDER,
            help="Folder for models that applications name by URL; several servers may share it "
            f"[env: {MODELS_VARIABLE}; default: ~/.cache/sloop/models].",
        ),
        click.option(
            "--models-bytes",
            type=click.IntRange(min=1),
            help="Most bytes in that folder. Beyond it, unused models are deleted, the least recently used first. "
            f"[env: {BYTES_VARIABLE}; default: {MODELS_BYTES}]",
        ),
        click.option(
            "--models-tokens",
            type=FILE,
            metavar="FILE",
            help="File with tokens of private stores: lines HOST TOKEN (sent as a bearer token) or HOST NAME: VALUE; "
            f"HOST may have a port. [env: {TOKENS_VARIABLE}]",
        ),
    )
    for option in reversed(options):
        function = option(function)
    return function


def cache_of(given: Mapping[str, Any]) -> Callable[[], WeightsCache]:
    """What makes the cache of `models_options`; its folder is made with it."""
    return partial(usual_cache, given["models_cache"], given["models_bytes"], given["models_tokens"])


@command("pull", example=EXAMPLE, notes=NOTES)
@click.argument("apps", nargs=-1, required=True, metavar="APP|URL...")
@models_options
def pull(apps: tuple[str, ...], **models: Any) -> CommandOutput:  # noqa: ANN401  # see cache_of
    """Fetch the models that the files APP... name by URL, or those at URL..., and print where they are.

    `sloop serve` does the same before it serves. A model that is there is not fetched again unless the store has
    another version.
    """
    urls = model_urls(apps)
    found = fetched_models(urls, cache_of(models))
    sources = {text: str(ModelSource.of(text)) for text in urls}
    rows = [{"source": sources[text], "path": str(path)} for text, path in found.items()]
    lines = [facts([(row["source"], row["path"]) for row in rows])] if rows else []
    return CommandOutput({"models": rows}, lines or ["no application names a model by URL: there is nothing to fetch"])


def fetched_models(urls: Mapping[str, Value], make_cache: Callable[[], WeightsCache]) -> dict[str, Path]:
    """By URL, the model on this machine, fetched now if it is not there; it stays as long as this process runs.
    InputError and MachineError as for `WeightsCache.fetch`, and InputError for what is no model."""
    sources = {text: _source(value) for text, value in urls.items()}
    if not sources:
        return {}
    with progress(f"fetching {counted(len(sources), 'model')}", total=1.0) as advance:
        return asyncio.run(_fetch(sources, make_cache(), advance))


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
