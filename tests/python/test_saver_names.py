"""Bad input to the public functions is refused at once, with one sentence, and nothing changes."""

import re
from pathlib import Path

import ebbtide
import pytest
from ebbtide import _core
from ebbtide.saver.values import arguments

BAD_TAGS = [
    "",
    "a/b",
    "*",
    "a*",
    "tab\there",
    "line\nbreak",
    "nul\0",
    "\x7f",
    "\x85",
    "\ud800",
    "x" * 256,
    "ä" * 128,
    "x" * 1_000_000,
]
NOT_TAGS = [None, 1, b"weights", [1], Ellipsis]
GOOD_TAGS = [
    "w",
    "under_score",
    "x" * 255,
    "ä" * 127,
    "重み",
    "🙂",
    "with space",
    "a.b:c-d",
    "None",
    "'quoted'",
    "%s {}",
]


def all_uses(saver):
    return [
        lambda tag: saver.region(tag),
        lambda tag: saver.pause(tag),
        lambda tag: saver.pause("fine", tag),
        lambda tag: saver.resume(tag),
        lambda tag: saver.paused(tag).__enter__(),
        lambda tag: saver.is_paused(tag),
        lambda tag: (
            saver.on("before_pause", tag, print) if tag != "*" else arguments.check_tag(tag)
        ),  # "*" means every tag there
        lambda tag: saver.adopt(tag=tag),
        lambda tag: saver.cuda_graph(None, tag).__enter__(),
        lambda tag: saver.graph_pool(tag),
    ]


@pytest.mark.parametrize("tag", BAD_TAGS, ids=lambda tag: repr(tag)[:20])
def test_a_malformed_tag_is_a_value_error(saver, tag):
    for use in all_uses(saver):
        with pytest.raises(ValueError) as error:
            use(tag)
        assert len(str(error.value)) < 300


@pytest.mark.parametrize("tag", NOT_TAGS, ids=repr)
def test_what_is_no_text_is_a_type_error(saver, tag):
    for use in all_uses(saver):
        with pytest.raises(TypeError):
            use(tag)


@pytest.mark.parametrize("tag", GOOD_TAGS, ids=lambda tag: tag[:8])
def test_other_tags_work_and_come_back_as_they_were(saver, tag):
    with saver.region(tag):
        pass
    assert tag in saver.tags()
    assert saver.pause(tag).bytes == 0
    assert not saver.is_paused(tag)


@pytest.mark.parametrize("tag", GOOD_TAGS + BAD_TAGS, ids=lambda tag: repr(tag)[:20])
def test_python_and_the_core_agree_about_tags(saver, tag):
    try:
        arguments.check_tag(tag)
        is_good = True
    except ValueError:
        is_good = False
    if tag in ("\ud800", "nul\0"):  # a tag that a C string cannot hold never reaches the core
        assert not is_good
        return
    try:
        _core.bind_slot(tag, 0, 1)
        core_takes_it = True
    except ValueError:
        core_takes_it = False
    assert core_takes_it == is_good


def test_backup_codes_agree_with_the_core():
    header = Path(ebbtide.__file__).with_name("include") / "ebbtide.h"
    codes = {name: int(code) for name, code in re.findall(r"EBBTIDE_BACKUP_(\w+) = (-?\d+)", header.read_text())}
    assert codes == {
        "AS_ALLOCATED": arguments.operation_backup_code(arguments.AS_ALLOCATED),
        "NONE": arguments.backup_code(None),
        "RAM": arguments.backup_code("ram"),
        "PINNED": arguments.backup_code("pinned"),
        "DISK": arguments.backup_code("disk"),
    }


@pytest.mark.parametrize("backup", ["", "RAM", "tape", 1, True, Ellipsis, b"ram", ["ram"]], ids=repr)
def test_an_unknown_backup_is_a_value_error(saver, backup):
    for use in (
        saver.region,
        lambda tag, backup: saver.pause(tag, backup=backup),
        lambda tag, backup: saver.adopt(tag=tag, backup=backup),
    ):
        with pytest.raises(ValueError, match="backup must be"):
            use("x", backup=backup)


@pytest.mark.parametrize("threads", ["", "ALL", None, 2])
def test_unknown_threads(saver, threads):
    with pytest.raises(ValueError, match="threads must be"):
        saver.region("x", threads=threads)


@pytest.mark.parametrize(
    ("timeout", "kind"), [(-1, ValueError), (float("nan"), ValueError), ("5", TypeError), (True, TypeError)]
)
def test_bad_timeouts(saver, timeout, kind):
    with pytest.raises(kind, match="timeout"):
        saver.resume(timeout=timeout)


def test_unknown_hook_event(saver, tag):
    with pytest.raises(ValueError, match="before_pause"):
        saver.on("during_pause", tag, print)
    with pytest.raises(TypeError, match="callable"):
        saver.on("before_pause", tag, "print")


@pytest.mark.parametrize("limit", ["device_limit", "host_limit", "host_margin"])
def test_bad_limits_name_the_limit_and_set_nothing(saver, limit):
    before = _core.get_setting("device_limit")
    for bad, kind in (
        (-1, ValueError),
        ("1Gib?", ValueError),
        (2**63, ValueError),
        (1.5, TypeError),
        (True, TypeError),
    ):
        with pytest.raises(kind, match=limit):
            saver.configure(**{"device_limit": 12345678, limit: bad})
    assert _core.get_setting("device_limit") == before


def test_a_margin_is_a_size(saver):
    with pytest.raises(TypeError, match="host_margin"):
        saver.configure(host_margin=None)


def test_limits_reach_the_core(saver):
    margin = int(_core.get_setting("host_margin"))
    saver.configure(device_limit="100MiB", host_limit=12345, host_margin="1MiB")
    try:
        assert (
            _core.get_setting("device_limit"),
            _core.get_setting("host_limit"),
            _core.get_setting("host_margin"),
        ) == (
            b"104857600",
            b"12345",
            b"1048576",
        )
        saver.configure(host_limit=None)
        assert (_core.get_setting("device_limit"), _core.get_setting("host_limit")) == (b"104857600", b"")
    finally:
        saver.configure(host_margin=margin)


def test_an_unknown_name_of_the_module(saver):
    with pytest.raises(AttributeError, match="no attribute 'swop'"):
        saver.swop  # noqa: B018
    assert set(saver.__all__) <= set(dir(saver))
    for name in saver.__all__:
        getattr(saver, name)
