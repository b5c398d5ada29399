"""Large model support on a GPU: weights on the host are copied while the device computes earlier layers."""

import textwrap

import pytest

pytest.importorskip("torch")

pytestmark = pytest.mark.device_memory

PRELUDE = """
import weakref

from ebbtide import torch_extension
from ebbtide.lms import weights as of_lms
from ebbtide.lms.streaming import forward_copies

DEPTH, WIDTH = 16, 2048
filled, slots = [], weakref.WeakSet()
plain_fill = forward_copies.Slot.fill

def fill(slot, weight, side):
    filled.append(weight.data_ptr())
    slots.add(slot)
    plain_fill(slot, weight, side)

forward_copies.Slot.fill = fill

def make(kind=torch.nn.Linear):
    torch.manual_seed(0)
    return torch.nn.Sequential(*(kind(WIDTH, WIDTH) for _ in range(DEPTH))).cuda()

def passes(model, times=3):
    '''The device is far behind when each pass begins.'''
    sums = []
    with torch.no_grad():
        given = torch.full((512, WIDTH), 0.5, device="cuda")
        load = torch.randn(8192, 8192, device="cuda")
        for number in range(times):
            for _ in range(4):
                load = load @ load
                load /= load.norm()
            sums.append(model(given + number))
    return [each.sum().item() for each in sums]

def away(model):
    of_lms._now.may_return = False
    extension = torch_extension.load("_lms")
    assert extension.make_room_of_weights(0, 2**62) > 0
    assert all(extension.is_on_host(each) for each in model.parameters() if each.ndim == 2)
    return model

def compare(use, make=make, at_least=DEPTH):
    want = use(make())
    torch.cuda.empty_cache()
    with lms.enable(limit="2GiB", min_size=SMALL):
        model = away(make())
        filled.clear()
        assert use(model) == want
        assert len(filled) >= at_least, filled
        assert not slots, "slots were not given back"
        assert lms.stats()["slow_reads"] == 0, lms.stats()
"""


@pytest.fixture
def forward(trial):
    return lambda code: trial(textwrap.dedent(PRELUDE) + textwrap.dedent(code))


def test_passes_one_after_the_other(forward):
    forward("compare(lambda model: passes(model, 5), at_least=5 * DEPTH)")


def test_writes_in_a_pass_are_read(forward):
    forward("""
        class Writing(torch.nn.Linear):
            def forward(self, given):
                self.weight.data.mul_(1.01)
                return super().forward(given)

        def write(model, how):
            later = list(model)[1:] + [model[0]]
            for one, other in zip(model, later):
                one.register_forward_hook(lambda *_, other=other: how(other.weight))
            return passes(model)

        side = torch.cuda.Stream()

        def elsewhere(weight):
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                weight.data.mul_(0.99)
            torch.cuda.current_stream().wait_stream(side)

        compare(lambda model: passes(model), make=lambda: make(Writing), at_least=0)
        compare(lambda model: write(model, lambda weight: weight.mul_(0.99)))
        compare(lambda model: write(model, lambda weight: weight.data.mul_(0.99)))
        compare(lambda model: write(model, lambda weight: weight.data[5].fill_(0.5)))
        compare(lambda model: write(model, elsewhere))
    """)


def test_weights_that_are_written_between_passes(forward):
    forward("""
        def use(model):
            sums = []
            for _ in range(4):
                sums += passes(model, 1)
                for each in model.parameters():
                    each.data.mul_(0.99)
            return sums

        compare(use)
    """)


def test_copies_with_another_holder(forward):
    forward("""
        from torch.overrides import TorchFunctionMode

        class Keeping(TorchFunctionMode):
            def __init__(self):
                super().__init__()
                self.kept = []

            def __torch_function__(self, function, types, arguments=(), options=None):
                if function is torch.nn.functional.linear:
                    self.kept.append(arguments[1])
                return function(*arguments, **(options or {}))

        def use(model):
            with Keeping() as mode:
                sums = passes(model, 1)
            return sums, [each.sum().item() for each in mode.kept]

        want = use(make())
        with lms.enable(limit="2GiB", min_size=SMALL):
            assert use(away(make())) == want
    """)


def test_errors_and_interrupts_in_a_pass(forward):
    forward("""
        def use(model):
            sums = []
            for error in (ValueError, KeyboardInterrupt):
                def fail(*_):
                    raise error
                hook = model[9].register_forward_hook(fail)
                try:
                    passes(model)
                except error:
                    pass
                hook.remove()
                for each in model.parameters():
                    each.data.mul_(0.99)
                sums += passes(model)
            return sums

        compare(use)
    """)


def test_streams_of_the_program_and_threads(forward):
    forward("""
        class Streams(torch.nn.Module):
            def __init__(self, layers):
                super().__init__()
                self.layers, self.stream = layers, torch.cuda.Stream()

            def forward(self, given):
                for number, layer in enumerate(self.layers):
                    if number % 3 == 1:
                        self.stream.wait_stream(torch.cuda.current_stream())
                        with torch.cuda.stream(self.stream):
                            given = layer(given)
                        torch.cuda.current_stream().wait_stream(self.stream)
                    else:
                        given = layer(given)
                return given

        def use(model):
            return passes(Streams(model))

        def in_threads(model):
            sums = {}

            def work(number):
                with torch.cuda.stream(torch.cuda.Stream()):
                    sums[number] = passes(model)

            threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
            [each.start() for each in threads]
            [each.join() for each in threads]
            return sums

        compare(use)
        compare(in_threads)
    """)


def test_layers_of_many_sizes_and_one_that_is_too_large(forward):
    forward("""
        def make():
            torch.manual_seed(0)
            widths = [2048, 512, 4096, 1024, 8192, 2048, 2048]
            layers = [torch.nn.Linear(a, b) for a, b in zip(widths, widths[1:])]
            return torch.nn.Sequential(*layers, torch.nn.Linear(2048, 32768)).cuda()

        compare(lambda model: passes(model, 4), make=make, at_least=4 * 6)
    """)
