from click.testing import CliRunner

from sloop.cli import main


def test_its_length_is_bounded() -> None:
    """The whole of it is what `make demo` is for; here only that wrong use is refused before anything begins."""
    result = CliRunner().invoke(main, ["demo", "--seconds", "5"])
    assert result.exit_code == 2
    assert "10<=x<=600" in result.stderr
