"""The single rule for tags, over all of Unicode."""

import re
import sys
import unicodedata

import pytest
from ebbtide import _core
from ebbtide.errors import StateError
from ebbtide.launch import run_options
from ebbtide.saver.values.arguments import check_tag

UNSEEN = {"Cc", "Cf", "Cs", "Co", "Zl", "Zp", "Zs"}
# Invisible characters of other categories: Default_Ignorable_Code_Point, and the blank of Braille.
IGNORABLE = {
    *(0x34F, 0x115F, 0x1160, 0x17B4, 0x17B5, 0x2065, 0x3164, 0xFFA0, 0x2800),
    *(*range(0x180B, 0x1810), *range(0xFE00, 0xFE10), *range(0xFFF0, 0xFFF9), *range(0xE0000, 0xE1000)),
}


def is_refused(tag: str) -> bool:
    try:
        check_tag(tag)
    except ValueError:
        return True
    return False


def test_of_all_characters_those_are_refused_that_can_not_be_seen():
    for code in range(sys.maxunicode + 1):
        character = chr(code)
        category = unicodedata.category(character)
        expected = (category in UNSEEN and character != " ") or code in IGNORABLE or character in "*/"
        if category == "Cn" and code not in IGNORABLE:  # Python's Unicode version may lack it
            continue
        assert is_refused(f"a{character}b") == expected, (hex(code), category)
    assert all(is_refused(f"a{chr(plane << 16 | 0xFFFE | low)}") for plane in range(17) for low in (0, 1))


@pytest.mark.parametrize(
    "tag", [" a", "a ", " ", "a\u00a0b", "a\u3000b", "weights\u200b", "\u202eabc", "e\ufe0f", "\x85"]
)
def test_what_looks_like_another_tag_is_refused_everywhere(saver, tag):
    for use in (
        check_tag,
        saver.region,
        lambda tag: _core.bind_slot(tag, 0, 1),
        lambda tag: _core.Frame().open_lease(tag, "x"),
        lambda tag: run_options.to_variables({"pauseable": True, "tag": tag}, {}),
        lambda tag: run_options.to_variables({}, {"EBBTIDE_TAG": tag}),
    ):
        with pytest.raises(ValueError, match=r"a tag (has no characters that can't be seen|neither begins nor ends)"):
            use(tag)


@pytest.mark.parametrize("known", ["short", "long" * 14])
def test_an_unknown_tag_is_worded_in_one_way(saver, known):
    """However many tags there are, and however long: an error of the C API has 1,023 bytes."""
    for number in range(25):
        with saver.region(f"{known} {number}".strip()):
            pass
    said = set()
    for use in (saver.pause, saver.resume, saver.prepare, saver.trim, saver.promote, saver.demote):
        with pytest.raises(StateError, match="no region was ever named 'never'; known tags: ") as error:
            use("never")
        said.add(str(error.value))
    (sentence,) = said
    with pytest.raises(StateError) as error:
        saver.is_paused("never")
    assert sentence.startswith(str(error.value)), "less the advice on missing_ok, which it does not take"
    listed, others = re.fullmatch(r".*; known tags: ('.*'), and (\d+) more\. .*missing_ok", sentence).groups()
    assert 1 <= len(listed.split("', '")) <= 20
    assert len(listed.split("', '")) + int(others) == len(saver.tags())
