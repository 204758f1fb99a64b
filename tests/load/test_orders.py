from pathlib import Path

import numpy as np

from sloop.load.orders import Closed, Orders, open_schedule, read_orders, write_orders
from sloop.load.payload import Body

ORDERS = Orders("h", 80, False, "/v2/models/m/infer", "h:80", 100.0, (2, 1), 4, 2, 10**9, (0,), Closed(1, 2, 3))


def test_what_is_ordered_is_read(tmp_path: Path) -> None:
    schedule = np.array([[1, 2], [3, 4]], dtype=np.int64)
    write_orders(tmp_path, ORDERS, [Body(b"{}", 2), Body(b"abc", 1)], schedule)
    assert read_orders(tmp_path) == (ORDERS, [b"{}", b"abc"])
    with open_schedule(tmp_path) as times:
        assert list(times) == [1, 2, 3, 4]


def test_an_empty_schedule(tmp_path: Path) -> None:
    write_orders(tmp_path, ORDERS, [], np.zeros((0, 2), dtype=np.int64))
    assert len(open_schedule(tmp_path)) == 0
