"""How living tensors and what leads to them are found: other threads must not notice, and no tensor may break it."""

import gc
import threading

import pytest

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("question", ["survivors", "explain", "adopt"])
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
        for _ in range(8):
            ask()
    finally:
        is_over.set()
        thread.join()
        gc.freeze()  # as the fixture left it
    assert errors == [] and made and kept.numel() == 1000
