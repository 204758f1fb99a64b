"""Header compression against the examples of RFC 7541, and against blocks made to harm."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sloop.serve.edge.hpack import HEAD_BYTES_MAX, Decoder, HpackError, encode, unpacked

REQUESTS = [
    ("828684418cf1e3c2e5f23a6ba0ab90f4ff", []),
    ("828684be5886a8eb10649cbf", [("cache-control", "no-cache")]),
    ("828785bf408825a849e95ba97d7f8925a849e95bb8e8b4bf", [("custom-key", "custom-value")]),
]
RESPONSES = [
    "488264025885aec3771a4b6196d07abe941054d444a8200595040b8166e082a62d1bff6e919d29ad171863c78f0b97c8e9ae82ae43d3",
    "4883640effc1c0bf",
    "88c16196d07abe941054d444a8200595040b8166e084a62d1bffc05a839bd9ab77ad94e7821dd7f2e6c7b335dfdfcd5b3960d5af27087f3672"
    "c1ab270fb5291f9587316065c003ed4ee5b1063d5007",
]
TABLES = ["20", "3fe11f"]
"""Blocks that change the size of the table: to 0, and back to 4096."""


def test_decodes_the_requests_of_the_standard() -> None:
    decoder = Decoder()
    for block, more in REQUESTS:
        fields = decoder.decode(bytes.fromhex(block))
        assert fields[:1] == [(":method", "GET")]
        assert (":authority", "www.example.com") in fields
        assert fields[4:] == more
    with pytest.raises(HpackError, match="no entry 65"):
        decoder.decode(b"\xc1")


def test_a_full_table_forgets_its_oldest_entries() -> None:
    decoder = Decoder()
    decoder.decode(bytes.fromhex("3fe101"))  # 256 bytes, as in the standard
    for block in RESPONSES:
        fields = decoder.decode(bytes.fromhex(block))
    assert fields[0] == (":status", "200")
    assert fields[-1] == ("set-cookie", "foo=ASDJKHQKBZXOQWEOPIUAXQWEOIU; max-age=3600; version=1")
    assert decoder.decode(b"\xbe\xbf\xc0") == [fields[-1], ("content-encoding", "gzip"), fields[2]]
    with pytest.raises(HpackError, match="no entry 65"):
        decoder.decode(b"\xc1")


@given(st.lists(st.tuples(st.text("abc-", min_size=1, max_size=200), st.text(max_size=300).map(ascii)), max_size=8))
def test_decodes_what_it_encodes(fields: list[tuple[str, str]]) -> None:
    decoder = Decoder()
    for _ in range(2):  # the second time from those kept
        assert decoder.decode(encode(*fields)) == fields


@given(st.lists(st.binary(max_size=60), max_size=4))
def test_any_bytes_are_decoded_or_refused(blocks: list[bytes]) -> None:
    decoder = Decoder()
    try:
        for block in blocks:
            decoder.decode(block)
    except HpackError:
        pass


@pytest.mark.parametrize(
    ("block", "why"),
    [
        ("80", "no entry 0"),
        ("ff808080808001", "more than 28 bits"),
        ("ff", "ends within a number"),
        ("0005616263", "ends within a string"),
        ("00", "ends before a string"),
        ("8220", "within a block"),
        ("3fe21f", "a table of 4097 bytes"),
        ("202020", "more than 2 times"),
        ("20" * 16_000, "more than 2 times"),
        ("008130" + "00", "padded"),
        ("0084ffffffff" + "00", "code of its end"),
    ],
)
def test_a_malformed_block_is_refused(block: str, why: str) -> None:
    with pytest.raises(HpackError, match=why):
        Decoder().decode(bytes.fromhex(block))


def test_a_small_block_that_expands_to_much_is_refused() -> None:
    decoder = Decoder()
    assert decoder.decode(b"\x40\x01a\x7f\xa1\x1e" + b"v" * 4000)[0][1] == "v" * 4000
    assert len(decoder.decode(b"\xbe" * 4)) == 4
    with pytest.raises(HpackError, match=f"a head of more than {HEAD_BYTES_MAX} bytes"):
        decoder.decode(b"\xbe" * 5)


def test_the_table_may_be_emptied_and_grow_again_before_a_block() -> None:
    decoder = Decoder()
    assert decoder.decode(bytes.fromhex("".join(TABLES)) + b"\x82") == [(":method", "GET")]
    assert decoder.decode(bytes.fromhex("".join(TABLES)) + b"\x83") == [(":method", "POST")]


def test_strings_may_hold_any_byte() -> None:
    assert unpacked(bytes.fromhex("f1e3c2e5f23a6ba0ab90f4ff")) == b"www.example.com"
    ((_, value),) = Decoder().decode(b"\x00\x01a\x03\xff\x00\xe9")
    assert value == "\xff\x00é"
