import resource
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from sloop.load.child import allowed_connections, carry_out, main
from sloop.load.orders import RECORDS, Orders, Told, write_orders
from sloop.load.payload import Body
from sloop.load.record import read_records
from sloop.units import NS_PER_S, ms

pytestmark = pytest.mark.live

ORDERS = Orders("127.0.0.1", 1, False, "/v2/models/m/infer", "h", 100.0, (2,), 4, 2, NS_PER_S, ())


def test_carries_out_its_orders(tmp_path: Path, stub: Any, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    orders = msgspec.structs.replace(ORDERS, port=stub.port)
    write_orders(tmp_path, orders, [Body(b"{}", 2)], np.array([[0, 0], [ms(2), 0]], dtype=np.int64))
    carry_out(tmp_path)
    told = [msgspec.json.decode(line, type=Told) for line in capfdbinary.readouterr().out.splitlines()]
    assert told[-1] == Told(told[-1].at_s, finished=True, sent=2, ended=2, connections=2)
    assert sorted(read_records(tmp_path / RECORDS)["status"].tolist()) == [200, 200]


def test_cpus_that_are_not_there(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    orders = msgspec.structs.replace(ORDERS, cpus=(100_000,))
    write_orders(tmp_path, orders, [Body(b"{}", 2)], np.zeros((0, 2), dtype=np.int64))
    main(tmp_path)
    assert msgspec.json.decode(capfdbinary.readouterr().out, type=Told).error.startswith(
        "cannot run on the CPUs [100000]"
    )


def test_connections_stay_within_the_system_s_limit() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        assert allowed_connections(10) == 10
        resource.setrlimit(resource.RLIMIT_NOFILE, (128, limits[1]))
        assert allowed_connections(100) == 100
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 164
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
