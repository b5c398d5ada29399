"""Graphs that no backward ends, and switching LMS while other threads train: nothing is kept, and nothing raises."""

import functools
import gc
import threading
import time
import warnings

import pytest

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.sim_only, pytest.mark.usefixtures("no_states_left", "no_weights_left")]

MIB = 1 << 20


def tensors():
    gc.collect()
    return sum(type(each) is torch.Tensor for each in gc.get_objects())


def small_output():
    return torch.randn(MIB, requires_grad=True).mean().sigmoid()  # which saves its own output, of 4 bytes


def large_output():
    return torch.randn(MIB, requires_grad=True).exp()


def loss_of_a_model():
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))
    return torch.nn.functional.cross_entropy(model(torch.randn(2048, 256)), torch.zeros(2048, dtype=torch.long))


def kept_graph():
    loss = loss_of_a_model()
    loss.backward(retain_graph=True)
    return loss


def normalized_weight():
    return torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(768, 768))


@functools.cache
def scripted():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(
            torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))
        )


def output_of_torchscript():
    return scripted()(torch.randn(2048, 256).requires_grad_()).sum()


def in_a_region(saver):
    with saver.region("of the program"):
        return torch.randn(MIB, requires_grad=True).exp()


MAKERS = [small_output, large_output, loss_of_a_model, kept_graph, normalized_weight, output_of_torchscript]


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("limit", ["auto", "200MiB"])
def test_a_graph_dropped_without_backward_goes(lms, make, limit):
    scripted()  # it stays, so its weights are made outside large model support
    with lms.enable(limit=limit):
        for _ in range(3):  # TorchScript optimizes in its first calls
            make()
        before, held = tensors(), lms.stats()["device_bytes"]
        for _ in range(5):
            make()
        assert tensors() == before
        assert lms.stats()["device_bytes"] <= held + MIB
    assert lms.stats()["host_bytes"] == 0


def test_outputs_in_a_region_and_of_a_thread_after_the_end_go(saver, lms):
    with lms.enable(limit="200MiB"):
        in_a_region(saver)
        before = tensors()
        for _ in range(5):
            in_a_region(saver)
        assert tensors() == before
        goes, is_off = threading.Event(), threading.Event()
        counts = []

        def work():
            large_output()
            goes.set()
            is_off.wait(20)
            counts.append(tensors())
            for _ in range(5):
                large_output()
            counts.append(tensors())

        thread = threading.Thread(target=work)
        thread.start()
        goes.wait(20)
    is_off.set()
    thread.join()
    assert counts[0] == counts[1]
    saver.trim("of the program")


@pytest.mark.parametrize("function", [torch.exp, torch.tanh, torch.sigmoid, torch.sqrt, lambda x: torch.softmax(x, 0)])
@pytest.mark.parametrize("size", [8, MIB])
def test_outputs_that_nodes_save_are_themselves(lms, function, size):
    """Gradients of gradients pass through them, changes of them are noticed, and hooks are called."""

    def gradients(values):
        x = values.clone().requires_grad_()
        seen = []
        y = function(x)
        y.register_hook(lambda gradient: seen.append(True))  # a gradient kept here would keep its graph
        (first,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        return first.detach(), second, len(seen)

    values = torch.rand(size, generator=torch.Generator().manual_seed(3)) + 0.5
    plain = gradients(values)
    with lms.enable(limit="300MiB", min_size=0):
        found = gradients(values)
        changed = function(values.clone().requires_grad_())
        changed.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            changed.sum().backward()
    assert torch.equal(plain[0], found[0]) and torch.equal(plain[1], found[1]) and plain[2] == found[2]


def test_another_thread_may_switch_it_while_models_are_made_and_used(lms):
    lms.enable(limit="300MiB", min_size="64KiB")
    ends, problems = time.monotonic() + 2, []

    def toggle():
        while time.monotonic() < ends:
            lms.disable()
            lms.enabled = True
            time.sleep(0.002)

    thread = threading.Thread(target=toggle)
    thread.start()
    while time.monotonic() < ends:
        try:
            model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU(), torch.nn.Linear(256, 256))
            optimizer = torch.optim.AdamW(model.parameters())
            for _ in range(3):
                model(torch.randn(64, 256)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            with torch.no_grad():
                model(torch.randn(64, 256))
        except Exception as error:
            problems.append(repr(error))
    thread.join()
    assert not problems
