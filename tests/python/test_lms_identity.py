"""Decisions of torch and of programs by the identity of a saved tensor: large model support changes none.

A gradient that nothing else refers to becomes `.grad` without a copy. A custom function may return a tensor that it
saved, and reads attributes of those that it saved. Each test runs with LMS off first, and expects the same with it on,
also after everything that can has left the device.
"""

import gc

import pytest

torch = pytest.importorskip("torch")

from lms_functions import LIMITS, SIDE, Reads, ReturnsSaved, both_ways, seeded  # noqa: E402
from lms_model import SMALL, evict_all  # noqa: E402


@pytest.fixture(autouse=True)
def device(saver):
    return saver.device


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("kind", ["plain", "parameter", "intermediate"])
@pytest.mark.parametrize("change", ["accumulate", "clip", "unscale", "zero"])
def test_a_tensor_that_the_program_holds_is_no_gradient(lms, device, limit, kind, change):
    def run(leave):
        x = torch.zeros(SIDE, SIDE, device=device, requires_grad=True)
        saved = seeded(SIDE, SIDE, device=device)
        if kind == "parameter":
            saved = torch.nn.Parameter(saved)
        elif kind == "intermediate":
            saved = saved.requires_grad_() * 2
        before = saved.detach().clone()
        loss = ReturnsSaved.apply(x, saved).sum()
        leave()
        loss.backward()
        assert x.grad is not saved and x.grad.data_ptr() != saved.data_ptr()
        if change == "accumulate":
            x.sum().backward()
        with torch.no_grad():
            if change == "clip":
                torch.nn.utils.clip_grad_norm_([x], 1e-3)
            elif change == "unscale":
                x.grad.mul_(1 / 1024)
            elif change == "zero":
                x.grad.zero_()
        assert torch.equal(saved.detach(), before)
        return x.grad.clone()

    plain, within = both_ways(lms, limit, run)
    assert torch.equal(plain, within)


@pytest.mark.parametrize("limit", LIMITS)
def test_a_saved_tensor_returned_twice_from_a_kept_graph_is_whole_both_times(lms, device, limit):
    def run(leave):
        x = torch.zeros(SIDE, SIDE, device=device, requires_grad=True)
        loss = ReturnsSaved.apply(x, seeded(SIDE, SIDE, device=device)).sum()
        for _ in range(3):
            leave()
            loss.backward(retain_graph=True)
        return x.grad.clone()

    plain, within = both_ways(lms, limit, run)
    assert torch.equal(plain, within)


@pytest.mark.parametrize("limit", LIMITS)
def test_a_kept_graph_pins_nothing(lms, device, limit):
    with lms.enable(limit=limit, min_size=SMALL):
        x = torch.zeros(SIDE, SIDE, device=device, requires_grad=True)
        loss = ReturnsSaved.apply(x, seeded(SIDE, SIDE, device=device)).sum()
        for _ in range(2):
            loss.backward(retain_graph=True)
        evict_all()
        assert lms.stats()["host_bytes"] == SIDE * SIDE * 4


def count_copies(run):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
        run()
    return sum(event.count for event in profiled.key_averages() if event.key in ("aten::clone", "aten::copy_"))


@pytest.mark.parametrize("limit", LIMITS)
def test_ordinary_gradients_are_taken_without_a_copy(lms, device, limit):
    def run(leave):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(SIDE, SIDE) for _ in range(4))).to(device)
        rows = seeded(1024, SIDE, device=device)
        model(rows).sum().backward()  # adopts the weights, once
        model.zero_grad(set_to_none=True)
        loss = model(rows).pow(2).mean()
        return count_copies(loss.backward)

    plain, within = both_ways(lms, limit, run)
    assert plain == within


@pytest.mark.parametrize("limit", LIMITS)
def test_a_gradient_that_nothing_else_refers_to_is_taken_though_it_was_saved(lms, device, limit):
    """As of fused losses, which make gradients in forward and save them."""

    def run(leave):
        x = torch.zeros(SIDE, SIDE, device=device, requires_grad=True)
        loss = ReturnsSaved.apply(x, seeded(SIDE, SIDE, device=device)).sum()
        leave()
        return count_copies(loss.backward), x.grad.clone()

    plain, within = both_ways(lms, limit, run)
    assert plain[0] == 0 and torch.equal(plain[1], within[1])
    assert within[0] <= 1  # the profiler may see the load


# --- identity, attributes, classes ---


class OwnTensor(torch.Tensor):
    """A class of the program's, without a storage of its own kind."""


class OwnParameter(torch.nn.Parameter):
    pass


@pytest.mark.parametrize("limit", LIMITS)
def test_backward_gets_the_very_objects_that_the_program_holds(lms, device, limit):
    def run(leave):
        weight = torch.nn.Parameter(seeded(SIDE, SIDE, device=device))
        own_weight = OwnParameter(seeded(SIDE, SIDE, device=device))
        own = seeded(SIDE, SIDE, device=device).as_subclass(OwnTensor)
        frozen = torch.nn.Parameter(seeded(SIDE, SIDE, device=device), requires_grad=False)
        plain = seeded(SIDE, SIDE, device=device)
        intermediate = weight * 2
        small = torch.ones(3, device=device)
        elsewhere = torch.ones(SIDE, SIDE, device="meta")
        objects = [weight, own_weight, own, frozen, plain, intermediate, small, elsewhere, None, plain, plain[1:]]
        marks = [None if each is None else object() for each in objects]
        for each, mark in zip(objects, marks, strict=True):
            if each is not None and each is not plain:
                each.main_grad = mark
        x = torch.zeros(2, device=device, requires_grad=True)
        loss = Reads.apply(x, *objects).sum()
        leave()
        loss.backward()
        got, Reads.got = Reads.got, []
        assert [type(each) for each in got] == [type(each) for each in objects]
        for each, wanted, mark in zip(got, objects, marks, strict=True):
            assert each is wanted and (each is None or each is plain or each.main_grad is mark)
        assert [each._version for each in got if each is not None] == [
            each._version for each in objects if each is not None
        ]

    both_ways(lms, limit, run)


@pytest.mark.parametrize("limit", LIMITS)
def test_what_the_program_forgot_keeps_its_class_and_attributes(lms, device, limit):
    def make(kind):
        plain = seeded(SIDE, SIDE, device=device)
        if kind == "parameter":
            return torch.nn.Parameter(plain, requires_grad=False)
        if kind == "own":
            return plain.as_subclass(OwnTensor)
        return plain.requires_grad_() * 2 if kind == "intermediate" else plain

    def run(leave):
        found = []
        for kind in ("plain", "parameter", "own", "intermediate"):
            x = torch.zeros(2, device=device, requires_grad=True)
            quantised = make(kind)
            quantised.quant_state = "scales"
            before = quantised.detach().clone()
            loss = Reads.apply(x, quantised).sum()
            del quantised
            gc.collect()
            leave()
            loss.backward()
            got, Reads.got = Reads.got, ()
            assert torch.equal(got[0].detach(), before)
            found.append((type(got[0]), got[0].quant_state))
        return found

    plain, within = both_ways(lms, limit, run)
    assert plain == within


def test_tensors_with_attributes_leave(lms, device):
    with lms.enable(limit=0, min_size=SMALL):
        x = torch.zeros(2, device=device, requires_grad=True)
        quantised = seeded(SIDE, SIDE, device=device)
        quantised.quant_state = "scales"
        loss = Reads.apply(x, quantised).sum()
        del quantised
        evict_all()
        assert lms.stats()["host_bytes"] == SIDE * SIDE * 4
        loss.backward()
        Reads.got = ()


@pytest.mark.parametrize("limit", LIMITS)
def test_a_sum_in_main_grad_is_kept(lms, device, limit):
    """As Transformer Engine and Megatron accumulate in fp32."""

    class Accumulates(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return x @ weight

        @staticmethod
        def backward(ctx, grad):
            x, weight = ctx.saved_tensors
            weight.main_grad.add_(x.t() @ grad)
            return grad @ weight.t(), None

    def run(leave):
        weight = torch.nn.Parameter(seeded(SIDE, SIDE, device=device))
        weight.main_grad = torch.zeros(SIDE, SIDE, device=device)
        for number in range(2):
            x = seeded(SIDE, SIDE, device=device, seed=number + 1).requires_grad_()
            loss = Accumulates.apply(x * 2, weight).sum()
            leave()
            loss.backward()
        return weight.main_grad

    plain, within = both_ways(lms, limit, run)
    assert torch.equal(plain, within)


@pytest.mark.parametrize("limit", LIMITS)
def test_an_output_that_is_saved_does_not_keep_its_graph(lms, device, limit):
    class SavesOutput(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            result = x.exp()
            ctx.save_for_backward(result)
            return result

        @staticmethod
        def backward(ctx, grad):
            (result,) = ctx.saved_tensors
            assert result.grad_fn is not None
            return grad * result

    def run(leave):
        import weakref

        x = seeded(SIDE, SIDE, device=device).requires_grad_()
        gc.collect()
        gc.disable()
        try:
            result = SavesOutput.apply(x)
            result.mark = "mine"
            gone = weakref.ref(result)
            leave()
            loss = result.sum()
            del result
            leave()
            loss.backward()
            del loss
            assert gone() is None
        finally:
            gc.enable()
        return x.grad.clone()

    plain, within = both_ways(lms, limit, run)
    assert torch.equal(plain, within)


@pytest.mark.parametrize("limit", LIMITS)
def test_second_derivatives_flow_through_the_objects_that_backward_gets(lms, device, limit):
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x**2

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return 2 * x * grad

    def run(leave):
        x = seeded(SIDE, SIDE, device=device).requires_grad_()
        (first,) = torch.autograd.grad(Square.apply(x.sin()).sum(), x, create_graph=True)
        leave()
        (second,) = torch.autograd.grad(first.sum(), x)
        return second

    plain, within = both_ways(lms, limit, run)
    assert torch.equal(plain, within)


@pytest.mark.parametrize("limit", LIMITS)
def test_an_in_place_change_is_still_an_error(lms, device, limit):
    with lms.enable(limit=limit, min_size=SMALL):
        x = torch.zeros(SIDE, SIDE, device=device, requires_grad=True)
        saved = seeded(SIDE, SIDE, device=device)
        loss = ReturnsSaved.apply(x, saved).sum()
        saved.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_graph_made_under_lms_gives_the_very_objects_after_it(lms, device):
    saved = seeded(SIDE, SIDE, device=device)
    with lms.enable(limit="1GiB", min_size=SMALL):
        x = torch.zeros(2, device=device, requires_grad=True)
        loss = Reads.apply(x, saved).sum()
    loss.backward()
    assert Reads.got[0] is saved
    Reads.got = []
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()
