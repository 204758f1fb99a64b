"""Memory of requests: how many bytes of bodies are held, by all requests together and by those of each model.

Room is taken as bytes arrive, never as a client announces them, and given back when the request has been answered.
"""

from collections import Counter
from typing import Final

from sloop.app.limits import BODIES_BYTES_MAX, ServerLimits, setting
from sloop.serve.edge.refusal import Refusal
from sloop.text import counted

MODELS: Final = "/v2/models/"
INFER: Final = "/infer"
V1_MODELS: Final = "/v1/models/"
PREDICT: Final = ":predict"


class Quota:
    """Limits the open requests of one model and the bytes of their bodies. 0 stands for no limit."""

    __slots__ = ("bytes_max", "held_bytes", "model", "refused", "requests", "requests_max")

    def __init__(self, model: str, requests_max: int, bytes_max: int) -> None:
        self.model, self.requests_max, self.bytes_max = model, requests_max, bytes_max
        self.requests = self.held_bytes = 0
        self.refused: Counter[str] = Counter()
        """The number of refused requests, by the limit they exceeded."""

    def has_room(self, requests: int, size: int) -> bool:
        """Whether so many more requests and bytes of bodies stay within the limits."""
        if self.requests_max and self.requests + requests > self.requests_max:
            return False
        return not self.bytes_max or self.held_bytes + size <= self.bytes_max

    def full(self, held_bytes: int, size: int) -> Refusal:
        """Count and return the refusal of a request that holds `held_bytes` and needs `size` more."""
        is_large = self.bytes_max and self.held_bytes + size > self.bytes_max
        limit, most = ("bytes", self.bytes_max) if is_large else ("requests", self.requests_max)
        self.refused[limit] += 1
        fix = f"`limits: {{{limit}: {most}}}` of the application sets the limit"
        if is_large and held_bytes + size > most:
            what = f"the body has at least {held_bytes + size} bytes; the limit of model {self.model!r} is {most}"
            return Refusal(413, what, f"send fewer rows; {fix}")
        held = f"{self.held_bytes} bytes of open requests" if is_large else counted(self.requests, "open request")
        what = f"rejected: model {self.model!r} has {held}; its limit is {most}"
        return Refusal(503, what, f"try again in 1 s; {fix}", retry_after_s=1)


class BodyMemory:
    """Limits the memory for request bodies: `each_bytes_max` for one body, `all_bytes_max` for all open requests, and
    the quotas of single models."""

    def __init__(
        self,
        each_bytes_max: int,
        all_bytes_max: int = BODIES_BYTES_MAX,
        json_bytes_max: int = ServerLimits().json_body_bytes,
    ) -> None:
        self.each_bytes_max, self.all_bytes_max = min(each_bytes_max, all_bytes_max), all_bytes_max
        self.json_bytes_max = min(json_bytes_max, self.each_bytes_max)
        """Of the JSON in a body. JSON is bounded more tightly than binary tensors: it costs some fifty times the CPU a
        byte, and twenty times its size in memory while it is read."""
        self.held_bytes = 0
        self.refused: Counter[str] = Counter()
        """The number of requests that were refused before they were read whole, by the limit they exceeded."""
        self.quotas: dict[str, Quota] = {}
        """By model; only models with limits have one."""

    def set_quota(self, model: str, requests_max: int, bytes_max: int) -> None:
        """Limit the open requests of a model and the bytes of their bodies; 0 stands for no limit."""
        if not (requests_max or bytes_max):
            self.quotas.pop(model, None)
        elif model in self.quotas:  # a new version: the open requests of the one before count
            self.quotas[model].requests_max, self.quotas[model].bytes_max = requests_max, bytes_max
        else:
            self.quotas[model] = Quota(model, requests_max, bytes_max)

    def quota_of(self, path: str) -> Quota | None:
        """The quota of the model that a request to this path infers with, if any."""
        return self.quotas.get(inferred(path))

    def too_large(self, size: int, limit: int, *, at_least: bool = False) -> Refusal:
        """Count and return the refusal of a body of more than `limit` bytes, which is one of the two bounds."""
        is_json = limit < self.each_bytes_max
        self.refused["json" if is_json else "each"] += 1
        key = "json_body_bytes" if is_json else "body_bytes"
        what = "JSON of the body has" if is_json else "body has"
        return Refusal(
            413,
            f"the {what} {'at least ' if at_least else ''}{size} bytes; the limit is {limit}",
            f"send fewer rows, or binary tensors instead of JSON; {setting(key)}",
        )

    def full(self) -> Refusal:
        """Count and return the refusal of a body that would exceed `all_bytes_max`."""
        self.refused["all"] += 1
        return Refusal(
            503,
            f"rejected: the server holds {self.held_bytes} bytes of requests; the limit is {self.all_bytes_max}",
            f"try again in 1 s; {setting('bytes')}",
            retry_after_s=1,
        )


class BodyReservation:
    """The memory that one request's body has reserved, of the server and of its model's quota; released when the
    context ends."""

    __slots__ = ("_bodies", "_is_counted", "_quota", "size")
    _is_counted: bool
    """Whether the quota counts this request; set only if there is one."""

    def __init__(self, bodies: BodyMemory) -> None:
        self._bodies = bodies
        self._quota: Quota | None = None
        self.size = 0

    def limit(self, quota: Quota | None) -> None:
        """Reserve what follows also from the quota of a model, if it has one."""
        self._quota, self._is_counted = quota, False

    def __enter__(self) -> "BodyReservation":
        return self

    def __exit__(self, *_: object) -> None:
        self.drop()

    def take(self, size: int) -> None:
        """Reserve `size` more bytes. Raises a `Refusal` (503) if they are not available."""
        bodies = self._bodies
        if bodies.held_bytes + size > bodies.all_bytes_max:
            raise bodies.full()
        if self._quota is not None and not self._has_counted(self._quota, size):
            raise self._quota.full(self.size, size)
        bodies.held_bytes += size
        self.size += size

    def drop(self) -> None:
        """Release all reserved bytes."""
        self._bodies.held_bytes -= self.size
        if self._quota is not None and self._is_counted:
            self._quota.held_bytes -= self.size
            self._quota.requests -= 1
            self._is_counted = False
        self.size = 0

    def _has_counted(self, quota: Quota, size: int) -> bool:
        """Count the request, once, and `size` more bytes of its body; returns whether the quota has room for them."""
        is_new = not self._is_counted
        if not quota.has_room(is_new, size):
            return False
        quota.requests += is_new
        quota.held_bytes += size
        self._is_counted = True
        return True


def inferred(path: str) -> str:
    """The name of the model that a request to this path infers with; empty if the path is another one."""
    if path.startswith(MODELS) and path.endswith(INFER):
        return path[len(MODELS) :].partition("/")[0]
    if path.startswith(V1_MODELS) and path.endswith(PREDICT):
        return path[len(V1_MODELS) : -len(PREDICT)].partition("/")[0]
    return ""
