"""How living tensors and what leads to them are found: other threads must not notice, and no tensor may break it."""

import gc
import threading

import pytest

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.usefixtures("quick_scans")


@pytest.mark.parametrize("is_frozen", [False, True])
def test_threads_that_fill_tuples_go_on(saver, tag, tag2, is_frozen):
    """CPython raises SystemError in the thread that fills a tuple, if somebody else refers to it meanwhile."""
    with saver.region(tag):
        kept = {"a": torch.rand(1000, device=saver.device)}
    saver.pause(tag)
    saver.resume(tag)
    loose = torch.rand(10, device=saver.device)
    is_over, errors, made = threading.Event(), [], []

    def fill():
        while not is_over.is_set():
            try:
                made.append(len(tuple(number for number in range(20_000))))
            except SystemError as error:
                errors.append(error)

    thread = threading.Thread(target=fill)
    if is_frozen:
        gc.freeze()
    thread.start()
    try:
        rows = saver.survivors(tag)  # at any time a tuple is being filled
        saver.adopt(loose, tag=tag2)
        if not is_frozen:  # hidden objects take longer to find
            saver.explain(tag)
    finally:
        is_over.set()
        thread.join()
        gc.unfreeze()  # as the fixture left it
    assert errors == [] and made
    assert [row.address for row in rows] == [kept["a"].data_ptr()]


class Raising(torch.Tensor):
    """A subclass whose own attributes fail."""

    @property
    def shape(self):
        raise KeyError("shape")

    @property
    def is_leaf(self):
        raise KeyError("is_leaf")

    def numel(self):
        raise KeyError("numel")

    def untyped_storage(self):
        raise KeyError("untyped_storage")


def test_tensors_that_cannot_be_asked_are_listed_all_the_same(saver, tag):
    """Resident and away: the sizes of a nested tensor lie in the tag, too."""
    with saver.region(tag):
        nested = torch.nested.nested_tensor([torch.ones(20), torch.ones(30)], device=saver.device)
        raising = torch.rand(50, device=saver.device).as_subclass(Raising)
    for _ in range(2):
        rows = {row.held_by.partition(" in ")[0]: row for row in saver.survivors(tag)}
        for name in ("nested", "raising"):
            assert rows[name].dtype == "float32" and rows[name].bytes >= 200
        if not saver.is_paused(tag):
            saver.pause(tag)
    named = {tensor.name.partition(" in ")[0] for tensor in saver.explain(tag).tensors}
    assert {"nested", "raising"} <= named
    saver.resume(tag)
    assert [type(kept).__name__ for kept in (nested, raising)] == ["Tensor", "Raising"]


class Wrapper(torch.Tensor):
    """As DTensor is: the bytes are those of an inner tensor."""

    @staticmethod
    def __new__(cls, inner):
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)
        made.inner = inner
        return made

    def __tensor_flatten__(self):
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner, meta, size, stride):
        return Wrapper(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return func(*(each.inner if isinstance(each, Wrapper) else each for each in args), **(kwargs or {}))


def test_what_a_wrapper_holds_has_the_name_of_the_wrapper(saver, tag):
    model = torch.nn.Module()
    with saver.region(tag):
        flat = torch.rand(64 * 64, device=saver.device)
        model.register_buffer("weight", Wrapper(flat.view(64, 64)))
    held = {frozenset(): flat}  # a key that nobody shows
    del flat
    (row,) = saver.survivors(tag)
    assert row.held_by == "Module.weight" and len(held) == 1
