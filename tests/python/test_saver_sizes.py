"""Parsing of sizes in the forms that people write."""

import pytest
from ebbtide.sizes import format_size, parse_size
from hypothesis import given
from hypothesis import strategies as st


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("16GiB", 16 << 30),
        ("16 gib", 16 << 30),
        (" 1.5MiB ", 3 << 19),
        ("2KB", 2000),
        ("1TB", 10**12),
        ("4096", 4096),
        ("7B", 7),
        ("0", 0),
        (0, 0),
        (123, 123),
    ],
)
def test_parses(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "bad",
    [
        "",
        "GiB",
        "-1GiB",
        "1 2",
        "1e9",
        "16GiBs",
        "½GiB",
        "١GiB",
        "1_000",
        "16G",
        "9" * 40,
        "0x10",
        -1,
        2**63,
        "99999999TiB",
    ],
)
def test_refuses_with_the_name_of_what_it_is_for(bad):
    with pytest.raises(ValueError, match="device_limit"):
        parse_size(bad, "device_limit")


@pytest.mark.parametrize("bad", [None, 1.5, True, b"1GiB", ["1GiB"]])
def test_refuses_other_types(bad):
    with pytest.raises(TypeError, match="device_limit"):
        parse_size(bad, "device_limit")


def test_an_ambiguous_unit_says_what_to_write():
    with pytest.raises(ValueError, match="16GiB or 16GB"):
        parse_size("16G")


def test_a_long_text_is_not_echoed_whole():
    with pytest.raises(ValueError) as error:
        parse_size("x" * 1_000_000)
    assert len(str(error.value)) < 200


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1024**2 - 1, "1.0 MiB"),
        (16 << 30, "16.0 GiB"),
        (5 << 50, "5120.0 TiB"),
    ],
)
def test_formats(size, text):
    assert format_size(size) == text


@given(st.integers(min_value=0, max_value=2**62))
def test_an_int_and_its_text_are_the_same(size):
    assert parse_size(size) == parse_size(str(size)) == parse_size(f"{size} B") == size


def test_a_forgotten_unit_is_noticed():
    with pytest.raises(ValueError, match=r"limit has no unit: write 1\.5GiB"):
        parse_size("1.5", "limit")
    assert parse_size("1.5KiB") == 1536 and parse_size(16) == 16
    with pytest.raises(ValueError, match=r"write 16GiB or 16GB$"):
        parse_size("16g")


@given(st.integers(min_value=1, max_value=2**62))
def test_a_formatted_size_parses_back_nearly(size):
    assert abs(parse_size(format_size(size)) - size) <= 0.06 * size
