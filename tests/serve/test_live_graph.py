"""Requests that part: branches decided by what a model says, one text taken apart into letters and put together again,
through real worker processes."""

import asyncio
from pathlib import Path
from random import Random

import pytest

from sloop.actions import StartBatch
from sloop.app.load import load_application
from sloop.events import WorkerReady
from sloop.serve.control.servables import runs_alone, servables_of
from sloop.serve.dataflow import wire
from sloop.serve.protocols import RequestResult, Servable
from sloop.sim.checkers import Checkers, Rules
from sloop.systems.replay import replay_log
from sloop.systems.setup import Setup, set_up, with_lone_requests
from sloop.tensor import Tensor
from sloop.vocabulary import Outcome
from tests.serve.test_live import TWO_CORES, Live, check_each_ended_once, live_driver

pytestmark = pytest.mark.live

SPLIT = '''
import numpy as np

class Model:
    """The letters of a text, each with its place; 1 for digits, 2 for words, 0 for nothing."""
    inputs = {"text": ("UINT8", (1, -1))}
    outputs = {"letters": ("UINT8", (-1, 1)), "place": ("INT64", (-1,)), "kind": ("INT64", (1,))}
    joins_rows = False

    def __init__(self, threads): ...

    def run(self, text):
        letters = text[0][text[0] != ord(" ")]
        kind = 0 if not len(letters) else 1 if 48 <= letters[0] <= 57 else 2
        return letters[:, None], np.arange(len(letters)), np.array([kind])
'''
UPPER = """
import numpy as np

class Model:
    inputs = {"letters": ("UINT8", (-1, 1)), "place": ("INT64", (-1,))}
    outputs = {"upper": ("UINT8", (-1, 1)), "is_vowel": ("BOOL", (-1,))}
    joins_rows = True

    def __init__(self, threads): ...

    def run(self, letters, place):
        return np.where(letters > 96, letters - 32, letters), np.isin(letters[:, 0], list(b"aeiou"))
"""
STAR = """
import numpy as np

class Model:
    inputs = {"upper": ("UINT8", (-1, 1))}
    outputs = {"star": ("UINT8", (-1, 1))}
    joins_rows = True

    def __init__(self, threads): ...

    def run(self, upper):
        return np.full_like(upper, ord("*"))
"""
COUNT = """
import numpy as np

class Model:
    inputs = {"text": ("UINT8", (1, -1)), "upper": ("UINT8", (-1, 1)), "star": ("UINT8", (-1, 1))}
    outputs = {"word": ("UINT8", (1, -1)), "stars": ("INT64", (1,))}

    def __init__(self, threads): ...

    def run(self, text, upper, star):
        return upper[None, :, 0], np.array([len(star)])
"""
NUMBER = """
import numpy as np

class Model:
    inputs = {"text": ("UINT8", (1, -1))}
    outputs = {"value": ("INT64", (1,))}

    def __init__(self, threads): ...

    def run(self, text):
        return np.array([int(bytes(text[0]))])
"""


def setup_in(folder: Path) -> Setup:
    """split → (letters: upper → star where it is a vowel) → count; or, for digits, split → number."""
    stages = []
    graph: list[tuple[str, str, dict[str, object]]] = [
        ("split", SPLIT, {}),
        ("upper", UPPER, {"after": "split", "each": {"output": "letters", "mean": 4, "most": 9}}),
        ("star", STAR, {"after": "upper", "when": "is_vowel"}),
        ("count", COUNT, {"after": ["upper", "star"], "join": True}),
        ("number", NUMBER, {"after": "split", "when": {"output": "kind", "is": 1}}),
    ]
    form = {"form": "amdahl", "gamma": 1, "epsilon": 1, "delta": 0, "eta": 1}
    profile = {"latency_ms": form, "max_batch": 4, "max_cores": 1, "load_s": 1, "memory_bytes": 1_000_000}
    for name, source, edges in graph:
        (folder / f"{name}.py").write_text(source)
        variant = {"name": "v", "model": str(folder / f"{name}.py"), "profile": profile}
        stages.append({"name": name, "variants": [variant], **edges})
    system = {"name": "static", "replicas": 1, "cores": 0.25, "drop": "never"}
    return set_up(
        load_application({"name": "live", "slo_ms": 5000, "stages": stages, "system": system, "cluster": TWO_CORES})
    )


def said(ended: RequestResult) -> dict[str, object]:
    return {name: (bytes(tensor.data), tensor.shape) for name, tensor in ended.outputs.items()}


def number(value: int) -> tuple[bytes, tuple[int, ...]]:
    return value.to_bytes(8, "little"), (1,)


async def ask(live: Live, text: str) -> RequestResult:
    content = text.encode()
    answers: list[RequestResult] = []
    live.answers[len(live.answers)] = answers
    given = {"text": Tensor("UINT8", (1, len(content)), content)}
    live.sink.submit(given, application="live", on_end=answers.append)
    async with asyncio.timeout(20):
        while not answers:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
    return answers[0]


async def test_requests_part_and_meet_again(tmp_path: Path) -> None:
    given = setup_in(tmp_path)
    models: dict[tuple[str, str], Servable] = servables_of(given.application, tmp_path)
    setup = with_lone_requests(given, runs_alone(models))
    chance = Random(3)
    signatures = {key: model.signature for key, model in models.items()}
    async with live_driver(setup, models, wire(setup.application.graph, signatures)) as live:
        await live.until(WorkerReady, 5)
        assert said(await ask(live, "tea")) == {"word": (b"TEA", (1, 3)), "stars": number(2)}
        assert said(await ask(live, "42")) == {
            "word": (b"42", (1, 2)),
            "stars": number(0),
            "value": number(42),
        }
        # Nothing in it: no part, so nothing to join, and it ends after the first stage.
        nothing = await ask(live, "  ")
        assert (nothing.outcome, said(nothing)) == (Outcome.SERVED, {})
        failed = await ask(live, "incomprehensible")
        assert (failed.outcome, failed.why) == (
            Outcome.FAILED,
            "split sends 16 parts to upper, which takes at most 9 per request; request id 4",
        )
        words = ["".join(chance.choices("abcdefgh", k=chance.randint(1, 9))) for _ in range(60)]
        answered = await asyncio.gather(*(ask(live, word) for word in words))
        for word, ended in zip(words, answered, strict=True):
            stars = sum(word.count(vowel) for vowel in "aeiou")
            assert said(ended) == {"word": (word.upper().encode(), (1, len(word))), "stars": number(stars)}
        check_each_ended_once(live)
        sizes = [len(r.requests) for _, r in live.log if isinstance(r, StartBatch) and r.stage == "upper"]
        assert max(sizes) > 1, "parts of one request, or of several, share a batch"
        checkers = Checkers([Rules(setup.application, setup.system.policies.order)], setup.deployment.cluster)
        for now_ns, record in live.log:
            checkers.append(now_ns, record)
        replayed = replay_log(list(live.log), set_up(setup.application).core())
        assert replayed.difference is None
