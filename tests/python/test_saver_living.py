"""How living tensors and what leads to them are found: other threads must not notice, and no tensor may break it."""

import gc
import threading

import pytest

torch = pytest.importorskip("torch")


@pytest.mark.parametrize(
    ("question", "is_frozen"),
    [("survivors", False), ("survivors", True), ("explain", False), ("adopt", False), ("adopt", True)],
)
def test_threads_that_fill_tuples_go_on(saver, tag, tag2, question, is_frozen):
    """CPython raises SystemError in the thread that fills a tuple, if somebody else refers to it meanwhile."""
    with saver.region(tag):
        kept = torch.rand(1000, device=saver.device)
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

    ask = {
        "survivors": lambda: saver.survivors(tag),
        "explain": lambda: saver.explain(tag),
        "adopt": lambda: saver.adopt(loose, tag=tag2),
    }[question]
    thread = threading.Thread(target=fill)
    (gc.freeze if is_frozen else gc.unfreeze)()
    thread.start()
    try:
        for _ in range(3):
            ask()
    finally:
        is_over.set()
        thread.join()
        gc.freeze()  # as the fixture left it
    assert errors == [] and made and kept.numel() == 1000


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


UNUSUAL = {
    "nested": lambda device: torch.nested.nested_tensor([torch.ones(20), torch.ones(30)], device=device),
    "raising": lambda device: torch.rand(50, device=device).as_subclass(Raising),
}


@pytest.mark.parametrize("kind", UNUSUAL)
def test_a_tensor_that_cannot_be_asked_is_listed_all_the_same(saver, tag, kind):
    """Resident and away: the sizes of a nested tensor lie in the tag, too."""
    with saver.region(tag):
        kept = UNUSUAL[kind](saver.device)
    for _ in range(2):
        rows = [row for row in saver.survivors(tag) if row.held_by.startswith("kept in ")]
        assert [row.dtype for row in rows] == ["float32"] and rows[0].bytes >= 200
        if not saver.is_paused(tag):
            saver.pause(tag)
    assert any(tensor.name.startswith("kept in ") for tensor in saver.explain(tag).tensors)
    saver.resume(tag)
    assert type(kept).__name__ in ("Tensor", "Raising")


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
