"""A Pending runs the after-hooks of those tags only that were not paused again meanwhile."""

import pytest

torch = pytest.importorskip("torch")

from ebbtide.errors import StateError  # noqa: E402
from test_saver_pending import noise  # noqa: E402


@pytest.fixture
def hooked(saver):
    """Adds hooks of a tag on every event. Returns the list to which they add the events."""
    removers = []

    def add(tag):
        ran = []
        for event in ("before_pause", "after_pause", "before_resume", "after_resume"):
            removers.append(saver.on(event, tag, lambda _, event=event: ran.append(event)))
        return ran

    yield add
    for remove in removers:
        remove()


def test_hooks_of_what_was_paused_again_do_not_run(saver, hooked, tag, tag2):
    """The hooks of the new pause ran. after_resume would wrongly say that the tag is resident."""
    data, other = noise(saver, tag, 4), noise(saver, tag2, 4)
    saver.pause(tag, tag2)
    ran, others = hooked(tag), hooked(tag2)
    going = saver.resume(tag, tag2, wait=False)
    assert ran == others == ["before_resume"]
    saver.pause(tag)
    going.wait()
    assert ran == ["before_resume", "before_pause", "after_pause"]
    assert others == ["before_resume", "after_resume"]
    saver.resume(tag)
    going.wait()
    assert ran == ["before_resume", "before_pause", "after_pause", "before_resume", "after_resume"]
    assert data.numel() == other.numel()


def test_hooks_of_what_was_paused_and_resumed_again_run_once(saver, hooked, tag):
    data = noise(saver, tag, 4)
    saver.pause(tag)
    ran = hooked(tag)
    going = saver.resume(tag, wait=False)
    saver.pause(tag)
    saver.resume(tag)
    going.wait()
    assert ran == ["before_resume", "before_pause", "after_pause", "before_resume", "after_resume"]
    assert data.numel()


def test_a_trim_or_a_pause_that_moves_nothing_does_not_count(saver, hooked, tag):
    data, gone = noise(saver, tag, 4), noise(saver, tag, 30)
    saver.pause(tag)
    ran = hooked(tag)
    going = saver.resume(tag, wait=False)
    del gone
    saver.trim(tag)
    with pytest.raises(StateError):
        with saver.region(tag):
            saver.pause(tag)
    going.wait()
    assert ran == ["before_resume", "after_resume"]
    assert data.numel()


@pytest.mark.sim_only
def test_a_failed_resume_that_another_one_finished_is_not_answered_again(run_python, root):
    result = run_python(
        f"""
        import sys; sys.path.insert(0, {str(root / "tests/python")!r})
        import torch
        from core_sim import UNKNOWN, Sim
        from ebbtide import saver
        from ebbtide.errors import DriverError
        with saver.region("w"):
            data = torch.randn(4 << 20, device=saver.device)
        saver.pause("w")
        ran = []
        for event in ("before_pause", "after_pause", "before_resume", "after_resume"):
            saver.on(event, "w", lambda _, event=event: ran.append(event))
        sim = Sim()
        sim.fail("cuStreamQuery", 1, UNKNOWN, 1000)
        going = saver.resume("w", wait=False)
        sim.clear_failures()
        saver.resume("w")
        assert ran == ["before_resume", "before_resume", "after_resume"], ran
        try:
            going.wait()
        except DriverError:
            pass
        else:
            raise AssertionError("no error")
        assert ran == ["before_resume", "before_resume", "after_resume"], ran
        """
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_a_pause_that_comes_while_the_resume_is_handed_out_counts(saver, hooked, tag, monkeypatch):
    """Its hooks ran. after_resume would wrongly say that the tag is resident."""
    from ebbtide.saver.operations import pending

    data = noise(saver, tag, 4)
    saver.pause(tag)
    ran = hooked(tag)

    def pause_at_once(core, names):
        monkeypatch.undo()
        core.wait()
        saver.pause(tag)

    monkeypatch.setattr(pending, "watch_pending", pause_at_once)
    going = saver.resume(tag, wait=False)
    going.wait()
    assert ran == ["before_resume", "before_pause", "after_pause"]
    saver.resume(tag)
    assert data.numel()


def test_an_interrupt_after_a_background_resume_answers_its_hooks(saver, hooked, tag, monkeypatch):
    from ebbtide.saver.copying import keeper

    def interrupt(names):
        raise KeyboardInterrupt

    data = noise(saver, tag, 4)
    saver.pause(tag)
    ran = hooked(tag)
    monkeypatch.setattr(keeper, "keep_if_wanted", interrupt)
    with pytest.raises(KeyboardInterrupt):
        saver.resume(tag, wait=False)
    assert ran == ["before_resume", "after_resume"]
    assert data.numel()
