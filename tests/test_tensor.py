import numpy as np

from sloop.tensor import ITEM_BYTES, NUMPY_TYPES, Port, Signature


def test_every_numpy_type_is_little_endian_and_as_long_as_it_says() -> None:
    for name, dtype in NUMPY_TYPES.items():
        assert np.ones(1, dtype).tobytes()[0] != 0 or name.startswith("FP"), name
        assert dtype.itemsize == ITEM_BYTES[name]
    assert np.array([1.0], NUMPY_TYPES["FP32"]).tobytes() == b"\x00\x00\x80\x3f"
    assert ITEM_BYTES.keys() - NUMPY_TYPES.keys() == {"BF16"}


def test_a_batch_is_fixed_where_an_inputs_first_dimension_is() -> None:
    open_one, fixed, scalar = Port("x", "FP32", (-1, 3)), Port("m", "FP32", (4, 3)), Port("k", "INT64", ())
    assert Signature((open_one, scalar), (fixed,)).fixed_batch is None
    assert Signature((open_one, scalar, fixed), ()).fixed_batch == 4
