import click
import pytest

from sloop.cli.lists import counts, numbers, shape


def test_lists_are_read() -> None:
    assert numbers("0.5,1,2") == (0.5, 1.0, 2.0)
    assert counts("1,2,4") == (1, 2, 4)
    assert shape("data=3,224,224") == ("data", (3, 224, 224))


def test_numbers_are_finite() -> None:
    for text in ("nan", "1,inf"):
        with pytest.raises(click.BadParameter, match="write"):
            numbers(text)


@pytest.mark.parametrize("text", ["", "1,", "1,x", "1;2"])
def test_what_is_no_list_is_refused_with_an_example(text: str) -> None:
    for read in (numbers, counts, shape):
        with pytest.raises(click.BadParameter, match="write"):
            read(text)
