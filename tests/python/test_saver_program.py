"""Programs that are pauseable, and programs that are not and stay unchanged."""

import pytest

torch = pytest.importorskip("torch")

from ebbtide.saver.pools import bypass  # noqa: E402
from ebbtide.saver.state import program  # noqa: E402


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
