"""The example `digits`: what its application file says of accuracy is what its models do on held-out handwriting."""

from math import sqrt
from pathlib import Path

import msgspec
import numpy as np
import pytest

from examples.digits import read, restore
from examples.digits.make import APPLICATION, table, with_accuracies
from examples.digits.measured import PICTURES, READERS, RESTORERS, SEED, TABLE, Measured, path_of, right, run
from examples.digits.pictures import CELL, PLACES, WIDTH, cells_of, halves, held_out, joined, learned
from examples.digits.score import SLO_MS, body_of, is_right, said, score
from sloop.app.load import load_application
from sloop.demo.live import serving
from sloop.profile.model import read_signature
from sloop.serve.dataflow import wire
from sloop.workload import trace_from

ENOUGH = 120
"""Pictures, as the 2,000 that the accuracies stand on: what a few seconds allow."""
SURE = 4.0
"""Standard deviations that a part may be from the whole."""


def said_accuracies() -> Measured:
    return msgspec.json.decode(TABLE.read_bytes(), type=Measured)


def test_what_is_learned_from_and_what_is_held_out_share_no_handwriting() -> None:
    ours, theirs = halves()
    assert len(ours.labels) + len(theirs.labels) == 1797
    seen = {image.tobytes() for image in ours.images}
    assert not seen & {image.tobytes() for image in theirs.images}


def test_a_seed_draws_the_same_pictures() -> None:
    first, again, other = held_out(3, 5), held_out(3, 5), held_out(3, 6)
    assert first.damaged.tobytes() == again.damaged.tobytes() != other.damaged.tobytes()
    assert first.damaged.shape == first.clean.shape == (3, CELL, WIDTH)
    assert first.labels.shape == (3, PLACES)
    assert np.array_equal(joined(cells_of(first.clean)), first.clean)


def test_the_application_says_what_was_measured() -> None:
    found, app = said_accuracies(), load_application(APPLICATION)
    assert found.pictures == PICTURES
    assert {v.name: v.accuracy for v in app.by_name["restore"].variants} == found.restore
    assert {v.name: v.accuracy for v in app.by_name["read"].variants} == found.read
    assert with_accuracies(APPLICATION.read_text(), found) == APPLICATION.read_text()


def test_the_models_are_as_accurate_as_is_said() -> None:
    found, shown = said_accuracies(), held_out(ENOUGH, SEED)
    restored = {name: run(path_of("restore", name), shown.damaged) for name in RESTORERS}
    pairs = {(a, b): (restored[a], found.both[a][b]) for a in RESTORERS for b in READERS}
    alone = {("", b): (shown.clean, found.read[b]) for b in READERS}
    for (_, reader), (pictures, percent) in (pairs | alone).items():
        here = right(run(path_of("read", reader), pictures), shown.labels)
        assert abs(here - percent) <= SURE * sqrt(percent * (100 - percent) / ENOUGH)


def test_variants_differ_where_it_matters() -> None:
    found = said_accuracies()
    assert found.both["large"]["large"] - found.both["small"]["small"] >= 6
    for accuracies in (found.restore, found.read):
        assert accuracies["small"] < accuracies["medium"] < accuracies["large"]
    assert found.apart() <= 6, "the product of the stages' accuracies is no longer a fair account of a pair"
    assert f"apart at most {found.apart():.1f} points" in table(found)


def test_learning_is_reproducible() -> None:
    pictures = learned(60, 0)
    linear, deep = restore.Size(5, samples=2000), restore.Size(5, (8, 4), samples=2000)
    for size in (linear, deep):
        made = [restore.train(size, pictures, 0).SerializeToString(deterministic=True) for _ in range(2)]
        assert made[0] == made[1]
    readers = [read.train(read.Size(4, 300), pictures, 0).SerializeToString(deterministic=True) for _ in range(2)]
    assert readers[0] == readers[1]


def test_variants_stand_in_for_each_other() -> None:
    names = {"restore": RESTORERS, "read": READERS}
    models = {(stage, name): read_signature(path_of(stage, name)) for stage in names for name in names[stage]}
    signature = wire(load_application(APPLICATION).graph, models).signature
    assert [(port.name, port.datatype, port.shape) for port in signature.inputs] == [
        ("picture", "UINT8", (-1, 28, 168))
    ]
    assert [(port.name, port.datatype, port.shape) for port in signature.outputs] == [("digits", "INT64", (-1, 6))]


def test_an_answer_is_right_where_every_digit_is() -> None:
    answer = b'{"outputs": [{"name": "digits", "data": [1, 2, 3, 4, 5, 6]}]}'
    assert is_right(answer, np.array([1, 2, 3, 4, 5, 6]))
    assert not is_right(answer, np.array([1, 2, 3, 4, 5, 7]))
    body = body_of(held_out(1, 0).damaged[0])
    assert len(body.content) - body.json_bytes == CELL * WIDTH


@pytest.mark.live
def test_labelled_requests_are_scored_at_the_client(tmp_path: Path) -> None:
    trace = trace_from({"kind": "equal", "rate": 30}, seed=0, duration_s=2, folder=tmp_path)
    with serving(APPLICATION, tmp_path / "state") as where:
        scored = score(where.http, trace, slo_ms=20 * SLO_MS, pictures=60)
    assert scored.load.sent == scored.answered == 60
    assert scored.accuracy_percent is not None
    assert scored.accuracy_percent == scored.right_in_time_percent >= 50  # the first variants: some 71 %
    assert f"{scored.accuracy_percent:.1f} %" in said(scored)
