"""The error classes: fields, pickling, and the conversion of OutOfMemoryError to torch's."""

import copy
import pickle
import sys

import pytest
from ebbtide import errors

EXAMPLES = [
    errors.Error("something"),
    errors.StateError("wrong time"),
    errors.OutOfMemoryError("no room", 10, 4, 20, 1),
    errors.StoreError("no host room", 10, 4, 20),
    errors.DriverError("failed", "cuMemMap", 201, "ptr=0x1"),
]


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("again", [lambda error: pickle.loads(pickle.dumps(error)), copy.copy, copy.deepcopy])
def test_errors_survive_pickling_and_copying(error, again):
    error.remark = "kept"
    other = again(error)
    assert type(other) is type(error)
    assert str(other) == str(error)
    assert other.__dict__ == error.__dict__


def test_hierarchy():
    for name in ("StateError", "OutOfMemoryError", "StoreError", "DriverError"):
        assert issubclass(getattr(errors, name), errors.Error)


def test_no_limit_is_none():
    assert errors.OutOfMemoryError("x", 1, 2, errors.UNLIMITED, 0).limit_bytes is None
    assert errors.StoreError("x", 1, 2, 3).limit_bytes == 3


def test_out_of_memory_is_torchs_once_torch_is_there():
    torch = pytest.importorskip("torch")
    assert issubclass(errors.OutOfMemoryError, torch.OutOfMemoryError)
    with pytest.raises(torch.OutOfMemoryError):
        raise errors.OutOfMemoryError("x")


@pytest.mark.parametrize("imports", ["import ebbtide, torch", "import torch, ebbtide"])
def test_a_handler_for_torchs_error_catches_ours_whichever_came_first(run_python, imports):
    pytest.importorskip("torch")
    result = run_python(
        f"""
        {imports}
        try:
            raise ebbtide.OutOfMemoryError("no room", 1, 2, 3, 0)
        except torch.OutOfMemoryError as error:
            assert error.requested_bytes == 1
    """
    )
    assert result.returncode == 0, result.stderr


def test_pickles_between_a_process_with_torch_and_one_without(run_python):
    pytest.importorskip("torch")
    error = errors.OutOfMemoryError("no room", 10, 4, 20, 1)
    there = run_python(
        f"""
        import pickle, sys
        error = pickle.loads({pickle.dumps(error)!r})
        assert "torch" not in sys.modules and not isinstance(error, RuntimeError)
        print(pickle.dumps(error).hex())
    """
    )
    assert there.returncode == 0, there.stderr
    back = pickle.loads(bytes.fromhex(there.stdout.strip()))
    assert isinstance(back, sys.modules["torch"].OutOfMemoryError)
    assert back.__dict__ == error.__dict__


def test_import_needs_no_torch_and_no_driver(run_python):
    result = run_python(
        """
        import sys
        class Refuse:
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] in ("torch", "numpy"):
                    raise ImportError(name, name=name)
        sys.meta_path.insert(0, Refuse())
        import ebbtide
        from ebbtide import saver
        saver.region("x")
        assert "torch" not in sys.modules
        print(ebbtide.__version__)
    """,
        EBBTIDE_DRIVER="cuda",
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()
