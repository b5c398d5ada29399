"""Programs that are pauseable, and programs that are not and stay unchanged."""

import pytest

torch = pytest.importorskip("torch")

from ebbtide.saver.pools import bypass  # noqa: E402
from ebbtide.saver.state import program  # noqa: E402

PRELOADED = "/x/libebbtide_preload.so"
ON = {"EBBTIDE_PAUSEABLE": "1"}


@pytest.mark.parametrize(
    ("environment", "library", "expected"),
    [
        (ON, PRELOADED, ("default", 1)),
        ({**ON, "EBBTIDE_TAG": "job", "EBBTIDE_BACKUP": "disk"}, PRELOADED, ("job", 3)),
        ({**ON, "EBBTIDE_TAG": "a/b", "EBBTIDE_BACKUP": "tape"}, PRELOADED, ("default", 1)),
        ({**ON, "EBBTIDE_BACKUP": "none"}, PRELOADED, ("default", 0)),
        (ON, "/x/libebbtide.so", None),
        ({**ON, "EBBTIDE_PRELOAD": "0"}, PRELOADED, None),
        ({**ON, "EBBTIDE_DRIVER": "off"}, PRELOADED, None),
        ({**ON, "EBBTIDE_DRIVER": "sim"}, PRELOADED, None),
        ({"EBBTIDE_PAUSEABLE": "0"}, PRELOADED, None),
        ({}, PRELOADED, None),
    ],
)
def test_which_programs_are_pauseable(environment, library, expected):
    read = program.read(environment, library)
    assert (None if read is None else (read.tag, read.backup)) == expected


def test_a_program_that_is_not_pauseable_is_not_touched(saver, tag, monkeypatch):
    if saver.device != "cuda":
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(bypass, "_BypassPools", None)
    assert program.own() is None
    with saver.region(tag):
        tensor = torch.ones(1000, device=saver.device)
    saver.pause(tag)
    saver.resume(tag)
    assert float(tensor.sum()) == 1000
    bypass.renew()
    bypass.close_if_resident([])
    assert bypass.idle_segments() == []
