"""Triton's model repository: clients load and end applications of a folder."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from sloop.errors import InputError, SloopError
from sloop.events import Removed
from sloop.serve.control.deployer import Deployer
from sloop.serve.control.orders import (
    ORDERS_MAX,
    Deploy,
)
from sloop.serve.edge.refusal import Refusal
from sloop.serve.edge.service import NAMES_MAX
from sloop.serve.insight import LEAVING
from sloop.serve.protocols import ModelState
from sloop.text import listed, quoted

APPLICATION_FILE: Final = ".yaml"
TRITON_STATES: Final = {
    "": "UNLOADING",
    ModelState.READY: "READY",
    ModelState.RESTING: "READY",
    ModelState.WAKING: "READY",
    ModelState.STARTING: "LOADING",
    ModelState.FAILING: "UNAVAILABLE",
    ModelState.WAITING: "UNAVAILABLE",
    ModelState.STOPPING: "UNLOADING",
}
"""Triton's words for the states of models; a version without one has ended, or ends."""
_log: Final = logging.getLogger("sloop.deploy")


class ModelRepository:
    """Loads and ends models as clients order, as Triton's model repository extension has it.

    The model NAME is the application in the file `NAME.yaml` of `folder`; without a folder, models can only be listed.
    """

    def __init__(self, deployer: Deployer, folder: Path | None) -> None:
        self._deployer, self._folder = deployer, folder
        self._open: set[asyncio.Task[None]] = set()

    def index(self) -> bytes:
        """See `sloop.serve.messages.Topic.INDEX`."""
        serving = self._deployer.statuses()
        found = [
            {"name": each.application, "version": each.version, "state": TRITON_STATES[each.model], "reason": each.why}
            for each in serving
        ]
        names = {each.application for each in serving} | self._deployer.refused.keys()
        found += [
            {"name": name, "version": "", "state": "UNAVAILABLE", "reason": each.why}
            for name, each in self._deployer.refused.items()
        ]
        found += [
            {"name": name, "version": "", "state": "UNAVAILABLE", "reason": "not loaded"}
            for name in self._files()
            if name not in names
        ]
        return msgspec.json.encode(found)

    def change(self, name: str, is_loaded: bool, then: Callable[[bytes], None]) -> None:
        """See `sloop.serve.messages.Topic.LOAD`."""
        try:
            if self._folder is None:
                fix = "start it with --repository DIR and a key with the role admin, or use `sloop deploy`"
                raise Refusal(403, "clients may not load or end models of this server", fix)
            if len(self._open) >= ORDERS_MAX:
                raise Refusal(503, f"{len(self._open)} orders are carried out", "try again later", retry_after_s=10)
            if is_loaded and name not in self._files():
                what = f"the repository has no model {quoted(name)}"
                raise Refusal(404, what, f"it has {listed(self._files()[:NAMES_MAX]) or 'no files NAME.yaml'}")
        except Refusal as refusal:
            then(_answer_of(refusal))
            return
        file = str((self._folder / f"{name}{APPLICATION_FILE}").absolute())
        order = Deploy(file, application=name) if is_loaded else Removed(name)
        work = asyncio.get_running_loop().create_task(self._carry_out(order, then))
        self._open.add(work)
        work.add_done_callback(self._open.discard)

    async def close(self) -> None:
        """Drop all orders."""
        for work in self._open:
            work.cancel()
        if self._open:
            await asyncio.wait(self._open)

    def _files(self) -> list[str]:
        """The names of the models that could be loaded."""
        if self._folder is None:
            return []
        return sorted(path.name.removesuffix(APPLICATION_FILE) for path in self._folder.glob(f"*{APPLICATION_FILE}"))

    async def _carry_out(self, order: Deploy | Removed, then: Callable[[bytes], None]) -> None:
        answer = b""
        try:
            done = await self._deployer.handle(order, lambda _: None)
            if not done.is_good:
                why = "; ".join(each.why for each in done.versions)
                answer = _answer_of(Refusal(500, f"the model was given up: {why}", "see /v2/sloop/decisions"))
        except asyncio.CancelledError:
            then(_answer_of(Refusal(503, f"dropped: {LEAVING}", "send it to another server, or when this one is back")))
            raise
        except SloopError as error:
            is_wrong = isinstance(error, InputError)
            answer = _answer_of(Refusal(400 if is_wrong else 500, str(error.args[0]), error.help))
        except Exception as error:
            _log.exception("an order of a client failed")
            answer = _answer_of(Refusal(500, f"the server failed on this order: {error!r}", "see its messages"))
        then(answer)


def _answer_of(refusal: Refusal) -> bytes:
    return msgspec.json.encode(refusal.fields)
