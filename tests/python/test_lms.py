"""Large model support: what autograd saves leaves the device when memory is short, and comes back bit for bit."""

import pytest

torch = pytest.importorskip("torch")

from ebbtide import _core  # noqa: E402
from ebbtide import lms as module  # noqa: E402
from lms_model import MIB, SMALL, evict_all, make_model, peak_of_training, train, train_plainly  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

pytestmark = pytest.mark.sim_only  # tests/gpu/test_gpu_lms.py is for GPUs


# --- IBM's six: off is off, up to the limit, low limit, high limit, explicit reclaim, contents ---


def test_off_is_off(saver):
    assert not module.enabled
    before = module.stats()["evictions"]
    tensor = torch.ones(1000, 1000)
    assert _core.find(tensor.data_ptr()) is None
    train(1)
    assert module.stats()["evictions"] == before


def test_on_memory_is_used_up_to_the_limit_and_nothing_leaves(lms):
    plain = train_plainly()
    with lms.enable(limit="1GiB", min_size=SMALL):
        assert lms.enabled
        assert train() == plain
    numbers = lms.stats()
    assert numbers["evictions"] == 0
    assert numbers["peak_device_bytes"] > 16 * MIB


@pytest.mark.parametrize("share", [0.8, 0.6, 0.45])
def test_a_low_limit_holds_from_the_first_step_with_the_same_losses(lms, share):
    plain, needed = train_plainly(), peak_of_training()
    with lms.enable(limit=int(share * needed), min_size=SMALL):
        assert train() == plain
        numbers = lms.stats()
    assert numbers["evictions"] > 0
    assert numbers["peak_device_bytes"] <= share * needed
    assert numbers["evicted_bytes"] == numbers["loaded_bytes"]


def test_a_third_of_what_activations_need(lms):
    """Activations are most of what this model needs."""
    shape = {"depth": 16, "width": 64, "batch": 4096}
    plain = train(**shape)
    with lms.enable(limit="1GiB", min_size=SMALL):
        train(**shape)
        needed = lms.stats()["peak_device_bytes"]
    with lms.enable(limit=needed // 3, min_size=SMALL):
        assert train(**shape) == plain
        assert lms.stats()["peak_device_bytes"] <= needed // 3


def test_a_limit_of_zero_keeps_as_little_as_can_be(lms):
    plain, needed = train_plainly(), peak_of_training()
    with lms.enable(limit=0, min_size=SMALL):
        assert lms.limit == 0
        assert train() == plain
        numbers = lms.stats()
    assert numbers["evictions"] > 10
    assert numbers["peak_device_bytes"] < 0.8 * needed


def test_explicit_eviction_and_contents(lms):
    lms.enable(limit="1GiB", min_size=SMALL)
    inputs = [torch.randn(64 * 1024, requires_grad=True) for _ in range(4)]
    results = [(given * 1.0).exp() for given in inputs]  # exp saves its result
    wanted = [result.detach().cpu().clone() for result in results]
    assert evict_all() == 0, "the results are held here"
    total = sum(result.sum() for result in results)
    del results
    assert evict_all() == 4 * 256 * 1024
    assert lms.stats()["host_bytes"] == 4 * 256 * 1024
    total.backward()
    for given, result in zip(inputs, wanted, strict=True):
        assert torch.equal(given.grad, result)
    assert lms.stats()["loaded_bytes"] == 4 * 256 * 1024


# --- saved tensors ---


def test_views_share_one_copy(lms):
    lms.enable(limit="1GiB", min_size=SMALL)
    given = torch.randn(256, 96, requires_grad=True)
    q, k, v = (given * 1.0).chunk(3, dim=1)  # strided views of one storage
    loss = (q * k * v).sum() + (k @ v.T).sum()
    del q, k, v
    left = evict_all()
    numbers = lms.stats()
    assert numbers["evictions"] <= 3, numbers  # chunk's storage, and the products
    assert left == numbers["evicted_bytes"]
    loss.backward()
    found = given.grad.clone()
    lms.disable()
    plain = given.detach().clone().requires_grad_()
    q, k, v = (plain * 1.0).chunk(3, dim=1)
    ((q * k * v).sum() + (k @ v.T).sum()).backward()
    assert torch.equal(found, plain.grad)


@pytest.mark.parametrize("size", [8, 64 * 1024])
@pytest.mark.parametrize("on", [False, True])
def test_in_place_changes_after_saving_raise_as_in_plain_torch(lms, size, on):
    if on:
        lms.enable(limit="1GiB", min_size=SMALL)
    given = torch.randn(size, requires_grad=True)
    result = (given * 1.0).exp()
    loss = result.sum()
    with torch.no_grad():
        result.mul_(2)
    with pytest.raises(RuntimeError, match=rf"modified by an inplace operation: \[torch.FloatTensor \[{size}\]\]"):
        loss.backward()


def test_parameters_and_small_tensors_stay(lms):
    lms.enable(limit="1GiB", min_size="1MiB")
    layer = torch.nn.Linear(1024, 1024)  # 4 MiB of weight, which it saves
    given = torch.randn(8, 1024, requires_grad=True)  # 32 KiB
    loss = layer(given).exp().sum()
    assert evict_all() == 0
    loss.backward()
    assert lms.stats()["evictions"] == 0


def test_retain_graph_and_double_backward(lms):
    lms.enable(limit="1GiB", min_size=SMALL)
    given = torch.randn(64 * 1024, requires_grad=True)
    loss = ((given * 1.0).exp() ** 2).sum()
    grads = []
    for _ in range(3):
        evict_all()
        grads.append(torch.autograd.grad(loss, given, retain_graph=True)[0].clone())
    assert torch.equal(grads[0], grads[1]) and torch.equal(grads[0], grads[2])
    first = torch.autograd.grad(loss, given, create_graph=True)[0]
    penalty = first.pow(2).sum()
    del first
    assert evict_all() > 0
    found = torch.autograd.grad(penalty, given)[0]
    expected = 2 * (2 * torch.exp(2 * given.detach())) * (4 * torch.exp(2 * given.detach()))
    torch.testing.assert_close(found, expected)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, given):
        squared = given * given
        ctx.save_for_backward(given, squared)
        return squared * given

    @staticmethod
    def backward(ctx, grad):
        given, squared = ctx.saved_tensors
        again, _ = ctx.saved_tensors
        assert again.data_ptr() == given.data_ptr()
        return 3 * squared * grad


def test_custom_functions(lms):
    lms.enable(limit="1GiB", min_size=SMALL)
    given = torch.randn(64 * 1024, requires_grad=True)
    loss = Cube.apply(given * 1.0).sum()
    assert evict_all() == 2 * 256 * 1024
    loss.backward()
    torch.testing.assert_close(given.grad, 3 * given.detach() ** 2)


@pytest.mark.parametrize("kind", ["user hooks", "save_on_cpu", "checkpoint", "reentrant checkpoint"])
def test_other_hooks_inside_ours(lms, kind):
    def forward(given):
        hidden = (given * 1.0).exp()
        if kind == "user hooks":
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t / 2):
                return hidden.exp()
        if kind == "save_on_cpu":
            with torch.autograd.graph.save_on_cpu():
                return hidden.exp()
        return checkpoint(torch.exp, hidden, use_reentrant=kind.startswith("reentrant"))

    def run():
        torch.manual_seed(1)
        given = (torch.randn(64 * 1024) / 10).requires_grad_()
        loss = forward(given).sum()
        if module.enabled:
            assert evict_all() > 0
        loss.backward()
        return given.grad.clone()

    plain = run()
    lms.enable(limit="1GiB", min_size=SMALL)
    assert torch.equal(run(), plain)


def test_mixed_precision_and_accumulation(lms):
    def run():
        model = make_model(4)
        scaled = []
        for _ in range(3):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(torch.randn(512, 128)).float().pow(2).mean()
            if module.enabled:
                evict_all()
            loss.backward()
            scaled.append(loss.item())
        return scaled, [parameter.grad.clone() for parameter in model.parameters()]

    plain_losses, plain_grads = run()
    lms.enable(limit="1GiB", min_size=SMALL)
    losses, grads = run()
    assert losses == plain_losses
    assert all(torch.equal(left, right) for left, right in zip(grads, plain_grads, strict=True))
    assert lms.stats()["evictions"] > 0


def test_conjugates_expands_and_scalars(lms):
    lms.enable(limit="1GiB", min_size=SMALL)
    given = torch.randn(32 * 1024, dtype=torch.complex64, requires_grad=True)
    one = torch.randn((), requires_grad=True)
    other = (given * 1.0).conj()
    loss = (other * other * one.expand(32 * 1024)).abs().sum()
    del other
    assert evict_all() > 0
    loss.backward()
    found = given.grad.clone(), one.grad.clone()
    lms.disable()
    given.grad = one.grad = None
    other = (given * 1.0).conj()
    (other * other * one.expand(32 * 1024)).abs().sum().backward()
    assert torch.equal(found[0], given.grad) and torch.equal(found[1], one.grad)


def test_memory_of_others_stays(lms):
    """What numpy owns may be reached without torch's knowledge."""
    numpy = pytest.importorskip("numpy")
    lms.enable(limit="1GiB", min_size=SMALL)
    array = numpy.ones(64 * 1024, dtype=numpy.float32)
    weight = torch.ones(64 * 1024, requires_grad=True)
    loss = (torch.from_numpy(array) * weight).sum()
    assert evict_all() == 0
    loss.backward()
    assert torch.equal(weight.grad, torch.ones(64 * 1024))
