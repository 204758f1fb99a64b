"""Hardware kinds: sound figures with a source, and the machine we are on."""

from sloop.app.hardware import CUSTOM, GIB, KINDS, LOCAL, known, local
from sloop.vocabulary import Node


def test_every_kind_has_a_price_with_a_source() -> None:
    for name, kind in KINDS.items():
        assert kind.name == name
        assert kind.cores >= 2
        assert kind.memory_bytes >= GIB
        assert 0.1 < kind.usd_per_h < 5
        assert "EC2" in kind.source


def test_a_node_of_a_kind() -> None:
    assert KINDS["g4dn.xlarge"].node("n") == Node("n", "g4dn.xlarge", 4, 16 * GIB, ("T4",), 0.526)


def test_this_machine() -> None:
    assert local() is local()
    assert local().cores >= 1
    assert local().usd_per_h == 0


def test_names() -> None:
    assert known()[:2] == (LOCAL, CUSTOM)
    assert "p3.2xlarge" in known()
