"""Large model support where a thread, or its work, ends with an error."""

import threading
from queue import SimpleQueue

import pytest

torch = pytest.importorskip("torch")

from ebbtide import _core  # noqa: E402
from lms_model import MIB, SMALL, evict_all, make_model  # noqa: E402
from lms_weights import evaluate, send_all_away  # noqa: E402

pytestmark = [pytest.mark.sim_only, pytest.mark.usefixtures("no_weights_left")]


class Parked:
    """A thread that runs one function, tells its end, and lives until the block ends."""

    def __init__(self, function):
        self._ended, self._may_end = SimpleQueue(), threading.Event()
        self._thread = threading.Thread(target=self._run, args=(function,))

    def _run(self, function):
        try:
            function()
        except BaseException as error:  # an interrupt as well
            self._ended.put(error)
        else:
            self._ended.put(None)
        self._may_end.wait()

    def __enter__(self):
        self._thread.start()
        return self._ended.get(timeout=60)

    def __exit__(self, *_):
        self._may_end.set()
        self._thread.join()


def in_thread(function):
    with Parked(function) as error:
        assert error is None


def test_it_is_on_after_the_thread_that_enabled_it(lms):
    in_thread(lambda: lms.enable(limit="1GiB", min_size=SMALL))
    assert lms.enabled and _core.find(torch.empty(MIB).data_ptr()).tag == "lms"
    kept = make_model()(torch.randn(2048, 128)).sum()
    assert evict_all() > 0
    kept.backward()
    found = []
    in_thread(lambda: found.append(_core.find(torch.empty(MIB).data_ptr()).tag))
    assert found == ["lms"]
    in_thread(lms.disable)
    assert not lms.enabled and _core.find(torch.empty(MIB).data_ptr()) is None


def test_a_region_that_was_open_for_all_threads_goes_first(lms, saver, tag):
    with saver.region(tag, threads="all"):
        lms.enable(limit="1GiB")
        assert _core.find(torch.empty(MIB).data_ptr()).tag == tag
    assert _core.find(torch.empty(MIB).data_ptr()).tag == "lms"


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ValueError("as a backward that fails")


def test_a_backward_that_failed_pins_no_weights(lms):
    lms.enable(limit="1GiB", min_size=SMALL)
    model = make_model(2, 512)
    first = torch.zeros(2, 512, requires_grad=True)

    def fail():
        model(Fails.apply(first)).sum().backward()

    with Parked(fail) as error:
        assert isinstance(error, ValueError)
        assert send_all_away() > 0


def test_a_backward_that_runs_pins_weights_until_it_ends(lms):
    lms.enable(limit="1GiB", min_size=SMALL)
    model = make_model(2, 512)
    first = torch.zeros(2, 512, requires_grad=True)
    freed = []
    first.register_hook(lambda _: in_thread(lambda: freed.append(send_all_away())))
    model(first).sum().backward()
    assert freed == [0]
    in_thread(lambda: freed.append(send_all_away()))
    assert freed[1] > 0


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ValueError])
def test_a_forward_that_was_ended_pins_no_weights(lms, error):
    lms.enable(limit="1GiB", min_size=SMALL)
    model = make_model(2, 512)

    def fail(*_):
        raise error

    model[1].register_forward_hook(fail)
    with Parked(lambda: model(torch.ones(1, 512))) as raised:
        assert isinstance(raised, error)
        assert send_all_away() > 0


def test_a_forward_that_another_thread_is_in_goes_on_to_pin_its_weights(lms):
    lms.enable(limit="1GiB", min_size=SMALL)
    one, other = make_model(2, 512), make_model(2, 512)
    is_inside, may_go = threading.Event(), threading.Event()

    def wait(*_):
        is_inside.set()
        assert may_go.wait(60)

    one[1].register_forward_hook(wait)
    thread = threading.Thread(target=lambda: one(torch.ones(1, 512)))
    thread.start()
    assert is_inside.wait(60)
    try:
        evaluate(other, 1)
        assert send_all_away() == 0
    finally:
        may_go.set()
        thread.join()
