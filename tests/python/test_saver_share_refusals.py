"""What `saver.share` refuses, and what it costs where nobody shares."""

import pytest

torch = pytest.importorskip("torch")

from ebbtide.errors import StateError  # noqa: E402
from ebbtide.saver import Shared  # noqa: E402


def test_what_can_not_be_shared_says_why(saver, tag):
    outside = torch.ones(10, device=saver.device)
    with saver.region(tag):
        plain = torch.ones(10, device=saver.device)
    with pytest.raises(StateError, match=r"lies in no region: saver.region"):
        saver.share(outside)
    with pytest.raises(StateError, match=f"in tag '{tag}' can't be shared.*exportable=True"):
        saver.share(plain)
    for thing in (1, torch.ones(3).to_sparse(), [plain]):
        with pytest.raises(TypeError, match="share takes a plain strided tensor"):
            saver.share(thing)
    with pytest.raises(TypeError, match=r"attach takes the result of saver.share, not str"):
        saver.attach("x")
    with pytest.raises(TypeError, match="pauseable"):
        saver.attach(Shared("1-0", "0", 0, "torch.int32", (1,), (1,), 0), pauseable=1)
    with pytest.raises(TypeError, match=r"no torch\.nothing"):
        saver.attach(Shared("1-0", "0", 0, "torch.nothing", (1,), (1,), 0))


def test_exportable_does_not_go_with_overflow(saver, tag):
    with pytest.raises(ValueError, match="leave overflow or exportable out"):
        saver.region(tag, exportable=True, overflow="split")
    with pytest.raises(TypeError, match="exportable is True or False"):
        saver.region(tag, exportable="yes")
    assert "exportable=True" in repr(saver.region(tag, exportable=True))


def test_without_the_folder_nothing_is_shared(run_python, tmp_path):
    (tmp_path / "file").touch()
    done = run_python(
        """
        import torch
        from ebbtide import saver
        with saver.region("w", exportable=True):
            tensor = torch.ones(10, device=saver.device)
        try:
            saver.share(tensor)
        except Exception as error:
            print(type(error).__name__, error)
        saver.pause("w"), saver.resume("w")
        print(tensor.sum())
        """,
        EBBTIDE_SHARED_FOLDER=str(tmp_path / "file"),
    )
    assert "StateError this process shares nothing, since it could not join the others" in done.stdout
    assert "tensor(10.)" in done.stdout and "can't see this one" in done.stderr


def test_nothing_is_shared_where_ebbtide_is_off(run_python):
    done = run_python(
        """
        import torch
        from ebbtide import saver
        with saver.region("w", exportable=True):
            tensor = torch.ones(10)
        for call in (saver.share, saver.keep):
            try:
                call(tensor)
            except Exception as error:
                print(type(error).__name__, error)
        """,
        EBBTIDE_DRIVER="off",
    )
    assert done.stdout.count("StateError") == 2 and "ebbtide is off" in done.stdout


def test_without_sharing_there_is_no_thread_and_no_file(run_python, tmp_path):
    done = run_python(
        """
        import threading, torch
        from ebbtide import saver
        with saver.region("w"):
            tensor = torch.ones(10, device=saver.device)
        saver.pause("w"), saver.resume("w")
        print([each.name for each in threading.enumerate()])
        """,
        EBBTIDE_SHARED_FOLDER=str(tmp_path / "place"),
    )
    assert done.stdout.strip() == "['MainThread']" and not (tmp_path / "place").exists()
