"""Who uses weights, and whom that keeps from moving them: calls of modules, also interrupted ones."""

import contextlib
import threading

import pytest

torch = pytest.importorskip("torch")

from lms_model import MIB, SMALL, make_model  # noqa: E402
from lms_states import extension  # noqa: E402
from lms_weights import TAG, Own, evaluate, send_all_away, tag_of  # noqa: E402

pytestmark = [  # tests/gpu/test_gpu_lms.py is for GPUs
    pytest.mark.sim_only,
    pytest.mark.usefixtures("no_weights_left"),
]


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_no_use_stays_open_after_a_call_that_was_interrupted(lms, error):
    class Recursive(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.depths, self.fails = make_model(1, 512), [], False
            self.scale = torch.nn.Parameter(torch.ones(1))

        def forward(self, given, times=2):
            self.depths.append(extension().module_depth())
            if times:
                return self(given, times - 1)
            if self.fails:
                raise error
            return self.inner(given)

    lms.enable(limit="1GiB", min_size=SMALL)
    model = Recursive()
    send_all_away()  # or only the outermost use would count
    for model.fails in (True, True, False):
        with contextlib.suppress(error), torch.no_grad():
            model(torch.ones(1, 512))
    assert model.depths == 3 * [1, 2, 3]
    assert extension().module_depth() == 0


@pytest.mark.parametrize("is_own", [True, False])
def test_uses_inside_others_count_from_the_first_shortage_on(lms, is_own):
    """As long as no weight has to leave the outermost use is enough, which bars other threads. is_own: the thread that
    uses them finds memory short.
    """
    depths, freed = [], []

    class Probing(Own):
        is_short = False

        def forward(self, given):
            depths.append(extension().module_depth())
            if self.is_short:
                thread = threading.Thread(target=lambda: freed.append(send_all_away()))
                thread.run() if is_own else thread.start()
                is_own or thread.join()
            return super().forward(given)

    def make():
        torch.manual_seed(0)
        return torch.nn.Sequential(*(Probing(512, 512) for _ in range(2)))

    plain = evaluate(make(), 3)
    depths.clear()
    with lms.enable(limit="1GiB", min_size=SMALL):
        model = make()
        losses = evaluate(model, 2)
        assert depths == [2, 2, 1, 1], "a module is asked for its weights once"
        model[0].is_short = True
        assert evaluate(model, 3) == plain == [*losses, plain[2]]
        assert depths[4:6] == [1, 2] and all(depth == 2 for depth in depths[6:])
        assert [size > 0 for size in freed] == [is_own] * 3


def test_parameters_that_have_other_memory_are_asked_for_again(lms):
    """Or they could not leave where memory is short for the first time."""
    with lms.enable(limit="1GiB", min_size=SMALL), torch.no_grad():
        model = torch.nn.Sequential(*(Own(512, 512) for _ in range(2)))
        evaluate(model, 1)
        held = model[0].weight.data.clone()
        model[0].weight.data = torch.empty(0)
        model[0].weight.data = held  # in an object, perhaps, at the address of the one before
        del held
        model[1].weight = torch.nn.Parameter(model[1].weight.data.clone())
        evaluate(model, 1)
        assert {tag_of(layer.weight) for layer in model} == {TAG}
        assert send_all_away() >= 2 * MIB


@pytest.mark.parametrize("error", [KeyboardInterrupt, GeneratorExit])
def test_an_interrupted_call_bars_no_thread(lms, error):
    def fail(*_):
        raise error

    lms.enable(limit="1GiB", min_size=SMALL)
    model = make_model(2, 512)
    model[1].register_forward_hook(fail)
    with pytest.raises(error):
        model(torch.ones(1, 512))
    assert extension().module_depth() == 0
    freed = []
    thread = threading.Thread(target=lambda: freed.append(send_all_away()))
    thread.start()
    thread.join()
    assert freed[0] > 0
