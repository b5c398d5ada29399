"""Large model support: gradients share no memory with one another, nor with what other nodes and graphs still need."""

import threading

import pytest

torch = pytest.importorskip("torch")

from lms_functions import LIMITS, SIDE, Cube, Reads, ReturnsSaved, both_ways, seeded  # noqa: E402
from lms_model import SMALL  # noqa: E402


@pytest.fixture(autouse=True)
def device(saver):
    return saver.device


class ReturnsAll(torch.autograd.Function):
    """Of one saved tensor, or of two: backward returns them, read once or twice."""

    @staticmethod
    def forward(ctx, x, other, *saved):
        ctx.save_for_backward(*saved)
        return x + other

    @staticmethod
    def backward(ctx, grad):
        first, second = ctx.saved_tensors[0], ctx.saved_tensors[-1]
        return first, second, *(None for _ in ctx.saved_tensors)


def zeros(device):
    return torch.zeros(SIDE, SIDE, device=device, requires_grad=True)


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("times", [1, 2])
def test_two_gradients_of_one_node_share_no_memory(lms, device, limit, times):
    def run(leave):
        x, other = zeros(device), zeros(device)
        saved = seeded(SIDE, SIDE, device=device)
        loss = ReturnsAll.apply(x, other, *[saved] * times).sum()
        del saved
        leave()
        loss.backward()
        x.grad.mul_(5)
        return other.grad.clone()

    plain, within = both_ways(lms, limit, run)
    assert torch.equal(plain, within)


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("kind", ["plain", "intermediate", "small"])
def test_two_nodes_that_saved_one_tensor_share_no_gradient(lms, device, limit, kind):
    def run(leave):
        side = 3 if kind == "small" else SIDE
        x, other = (torch.zeros(side, side, device=device, requires_grad=True) for _ in range(2))
        saved = seeded(side, side, device=device)
        if kind == "intermediate":
            saved = saved.requires_grad_() * 2
        loss = (ReturnsSaved.apply(x, saved) + ReturnsSaved.apply(other, saved)).sum()
        del saved
        leave()

        def zero(each):
            each.grad.data.zero_()

        x.register_post_accumulate_grad_hook(zero)
        loss.backward()
        x.grad.mul_(5)
        return x.grad.clone(), other.grad.clone()

    plain, within = both_ways(lms, limit, run)
    assert all(map(torch.equal, plain, within))


@pytest.mark.parametrize("limit", LIMITS)
def test_graphs_that_saved_one_tensor_all_get_it_whole(lms, device, limit):
    def run(leave):
        x, saved = zeros(device), seeded(SIDE, SIDE, device=device)
        losses = [ReturnsSaved.apply(x, saved).sum() for _ in range(3)]
        del saved
        for loss in losses:
            leave()
            loss.backward()
        return x.grad.clone()

    plain, within = both_ways(lms, limit, run)
    assert torch.equal(plain, within)


class ReturnsSavedFromGradMode(ReturnsSaved):
    """As functions that recompute."""

    @staticmethod
    def backward(ctx, grad):
        with torch.enable_grad():
            (saved,) = ctx.saved_tensors
        return saved, None


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("keeps_graph", [False, True])
def test_tensors_read_in_grad_mode_are_shared_no_more(lms, device, limit, keeps_graph):
    def run(leave):
        x, other = zeros(device), zeros(device)
        saved = seeded(SIDE, SIDE, device=device)
        loss = sum(ReturnsSavedFromGradMode.apply(each, saved).sum() for each in (x, other))
        del saved
        for _ in range(1 + keeps_graph):
            leave()
            loss.backward(retain_graph=keeps_graph)
            x.grad.mul_(5)
        return x.grad.clone(), other.grad.clone()

    plain, within = both_ways(lms, limit, run)
    assert all(map(torch.equal, plain, within))


@pytest.mark.parametrize("limit", LIMITS)
def test_threads_run_one_graph_that_is_kept(lms, device, limit):
    def run(leave):
        x = zeros(device)
        value = x
        for seed in range(10):
            value = ReturnsSaved.apply(value, seeded(SIDE, SIDE, device=device, seed=seed))
        loss, found = value.sum(), []
        leave()

        def work():
            for _ in range(10):
                found.append(torch.autograd.grad(loss, x, retain_graph=True)[0])

        threads = [threading.Thread(target=work) for _ in range(4)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        return found

    plain, within = both_ways(lms, limit, run)
    assert len(plain) == len(within) == 40 and all(map(torch.equal, plain, within))


class Slotted(torch.Tensor):
    __slots__ = ("scale",)


@pytest.mark.parametrize("limit", LIMITS)
def test_tensors_of_a_class_with_slots_are_read(lms, device, limit):
    def run(leave):
        saved = seeded(SIDE, SIDE, device=device).as_subclass(Slotted)
        saved.scale = 3
        loss = Reads.apply(torch.zeros(2, device=device, requires_grad=True), saved).sum()
        del saved
        leave()
        loss.backward()
        got, Reads.got = Reads.got, ()
        return type(got[0]), got[0].scale

    plain, within = both_ways(lms, limit, run)
    assert plain == within


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("is_reentrant", [False, True])
def test_custom_functions_in_checkpoints(lms, device, limit, is_reentrant):
    from torch.utils.checkpoint import checkpoint

    def run(leave):
        x = seeded(SIDE, SIDE, device=device).requires_grad_()
        loss = checkpoint(lambda each: Cube.apply(each + 1), x, use_reentrant=is_reentrant).sum()
        leave()
        loss.backward()
        return x.grad.clone()

    plain, within = both_ways(lms, limit, run)
    assert torch.equal(plain, within)


@pytest.mark.parametrize("limit", LIMITS)
def test_hooks_of_the_program_that_unpack_other_tensors(lms, device, limit):
    def run(leave):
        x = seeded(SIDE, SIDE, device=device).requires_grad_()
        other = x.detach().requires_grad_().exp()

        def unpack(tensor):
            assert other.grad_fn._saved_result is not None  # one that LMS packed
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
            loss = Cube.apply(x).sum()
        leave()
        loss.backward()
        return x.grad.clone()

    plain, within = both_ways(lms, limit, run)
    assert torch.equal(plain, within)


@pytest.mark.filterwarnings("ignore:'saved_variables' is deprecated:DeprecationWarning")
def test_the_deprecated_name_gives_the_same_objects(lms, device):
    class ReadsOld(Reads):
        @staticmethod
        def backward(ctx, grad):
            Reads.got = list(ctx.saved_variables)
            return grad, None

    with lms.enable(limit=0, min_size=SMALL):
        weight = torch.nn.Parameter(seeded(SIDE, SIDE, device=device))
        ReadsOld.apply(torch.zeros(2, device=device, requires_grad=True), weight).sum().backward()
    assert Reads.got[0] is weight
    Reads.got = ()
