"""A stage in Python, run by real worker processes."""

from pathlib import Path

import numpy as np
import pytest

from sloop.events import BatchFailed, Finished, ReplicaLost, ReplicaReady, Resized
from sloop.profile.examine import examine
from sloop.serve.backends import Servable
from sloop.serve.backends.local import LocalBackend
from sloop.serve.runtimes import open_runtime
from sloop.tensor import Tensor
from sloop.vocabulary import BatchId, ReplicaId, ReplicaSpec
from tests.serve.backends.test_local import Ear, play

pytestmark = pytest.mark.live
A = ReplicaId(1)
SPEC = ReplicaSpec("stage", "text", 1, "here")

CROPS = '''
"""Takes texts apart: one row per word."""
import numpy as np

class Model:
    inputs = {"text": ("UINT8", (1, -1))}
    outputs = {"words": ("UINT8", (-1, -1)), "threads": ("INT64", (1,))}

    def __init__(self, threads):
        self.threads = threads

    def run(self, text):
        words = text.tobytes().split()
        if b"boom" in words:
            raise RuntimeError("no such word")
        rows = np.zeros((len(words), max(map(len, words), default=0)), np.uint8)
        for row, word in zip(rows, words):
            row[:len(word)] = np.frombuffer(word, np.uint8)
        return rows, np.array([self.threads])

    def example(self, rows):
        return np.frombuffer(b"an example", np.uint8)[None]
'''


def crops(folder: Path, text: str = CROPS) -> Path:
    path = folder / "crops.py"
    path.write_text(text, encoding="utf-8")
    return path


def said(text: bytes) -> list[Tensor]:
    return [Tensor("UINT8", (1, len(text)), text)]


def test_is_opened_by_its_ending_and_warmed_with_its_example(tmp_path: Path) -> None:
    runtime = open_runtime(str(crops(tmp_path)))
    assert runtime.load(2)
    assert not runtime.load(2)
    runtime.warm(2)
    [words, threads], ran = runtime.run([np.frombuffer(b"to be", np.uint8)[None]], 1)
    assert (words.tobytes(), threads.tolist(), ran) == (b"tobe", [2], 2)


def test_workers_answer_with_any_number_of_rows_and_a_failure_is_the_batchs_own(tmp_path: Path) -> None:
    path = crops(tmp_path)

    async def scene(backend: LocalBackend, ear: Ear) -> None:
        backend.start(A, SPEC)
        await ear.hear(ReplicaReady)
        backend.run(BatchId(1), A, [said(b"to be or"), said(b""), said(b"not")])
        await ear.hear(Finished)
        assert [(words.shape, bytes(words.data)) for words, _ in ear.outputs[BatchId(1)]] == [
            ((3, 2), b"tobeor"),
            ((0, 0), b""),
            ((1, 3), b"not"),
        ]
        backend.run(BatchId(2), A, [said(b"boom")])
        failed = await ear.hear(BatchFailed)
        assert isinstance(failed, BatchFailed)
        assert failed.error == "RuntimeError: no such word"
        backend.resize(A, 2)
        await ear.hear(Resized)
        for batch in range(3, 50):  # until the object for two threads is made
            backend.run(BatchId(batch), A, [said(b"x")])
            await ear.hear(Finished, count=batch - 1)
            if bytes(ear.outputs[BatchId(batch)][0][1].data)[0] == 2:
                return
        raise AssertionError("it never had two threads")

    play(scene, {"text": Servable(str(path), *examine(path))})


def test_one_that_cannot_be_made_is_refused_with_the_reason(tmp_path: Path) -> None:
    path = crops(tmp_path)
    servable = Servable(str(path), *examine(path))
    crops(tmp_path, CROPS.replace("self.threads = threads", "raise MemoryError('too large')"))

    async def scene(backend: LocalBackend, ear: Ear) -> None:
        backend.start(A, SPEC)
        lost = await ear.hear(ReplicaLost)
        assert isinstance(lost, ReplicaLost)
        assert "crops.py:10: its class 'Model' cannot be made: MemoryError: too large" in lost.error

    play(scene, {"text": servable})
