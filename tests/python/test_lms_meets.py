"""Large model support beside what else moves, resizes, owns and hooks tensors: as in plain torch."""

import gc
import os
import threading

import pytest

torch = pytest.importorskip("torch")

from ebbtide import _core, torch_extension  # noqa: E402
from ebbtide.errors import StateError  # noqa: E402
from interrupts import interrupted_everywhere  # noqa: E402
from lms_model import MIB, SMALL, evict_all, train  # noqa: E402

pytestmark = pytest.mark.sim_only  # tests/gpu/test_gpu_lms.py is for GPUs

SIZE = 64 * 1024


def tag_of(tensor):
    info = _core.find(tensor.data_ptr())
    return None if info is None else info.tag


def test_what_comes_back_is_in_no_region_of_its_thread(lms, saver, tag):
    """A tag without backup would drop it at the next pause."""
    lms.enable(limit="1GiB", min_size=SMALL)
    given = torch.ones(SIZE, requires_grad=True)
    loss = (given * 1.0).exp().sum()
    assert evict_all() > 0
    with saver.region(tag, backup=None):
        first = torch.autograd.grad(loss, given, retain_graph=True)[0]
    saver.pause(tag)
    saver.resume(tag)
    second = torch.autograd.grad(loss, given)[0]
    assert torch.equal(second, given.detach().exp())
    del first


def test_memory_of_regions_stays_with_its_tag(lms, saver, tag):
    lms.enable(limit="96MiB", min_size=SMALL)
    given = torch.ones(SIZE, requires_grad=True)
    with saver.region(tag):
        hidden = given * 1.0
    loss = (hidden * hidden).sum()
    del hidden
    saver.pause(tag)
    kept = [torch.ones(4 * MIB) for _ in range(4)]  # makes LMS look for what can leave
    assert evict_all() == 0
    saver.resume(tag)
    loss.backward()
    assert torch.equal(given.grad, 2 * torch.ones(SIZE))
    assert len(kept) == 4


@pytest.mark.parametrize("operation", ["resume", "swap"])
def test_saved_tensors_leave_for_a_tag_that_comes_back(lms, saver, tag, tag2, operation):
    with saver.region(tag):
        kept = torch.arange(4 * MIB // 8)
    with saver.region(tag2):
        other = torch.ones(MIB, dtype=torch.uint8)
    lms.enable(limit=_core.query_device(0).held_bytes + 4 * MIB, min_size=SMALL)
    size = saver.pause(tag).bytes
    given = torch.ones(SIZE, requires_grad=True)
    out, held = given, []  # held: so that no plan for another test's step makes them leave before
    for _ in range(50):  # 12.5 MiB
        out = (out * 1.01).tanh()
        held.append(out)
    assert _core.query_device(0).room_bytes < size
    held.clear()
    if operation == "resume":
        saver.resume(tag)
    else:
        saver.swap(pause=tag2, resume=tag)
    assert lms.stats()["evictions"] > 0
    assert kept.numpy().sum() == sum(range(len(kept)))  # which needs no memory of the device
    [found] = torch.autograd.grad(out.sum(), given)
    lms.disable()
    saver.resume(missing_ok=True)
    plain = torch.ones(SIZE, requires_grad=True)
    out = plain
    for _ in range(50):
        out = (out * 1.01).tanh()
    assert torch.equal(found, torch.autograd.grad(out.sum(), plain)[0]) and other.all()


def test_paused_tensors_do_not_leave(lms, saver):
    lms.enable(limit="1GiB", min_size=SMALL)
    given = torch.ones(SIZE, requires_grad=True)
    loss = (given * 1.0).exp().sum()
    lms.disable()
    saver.pause("lms")
    lms.enable(limit="1GiB", min_size=SMALL)
    assert evict_all() == 0
    lms.disable()
    saver.resume("lms")
    loss.backward()
    assert torch.equal(given.grad, given.detach().exp())


def test_a_storage_that_was_resized_stays(lms):
    lms.enable(limit="1GiB", min_size=0)
    given = torch.zeros(SIZE)
    weight = torch.ones(SIZE, requires_grad=True)
    other = torch.ones(4 * SIZE, requires_grad=True)
    loss = (given * weight).sum()
    loss = loss + (given.data.resize_(4 * SIZE).fill_(7) * other).sum()
    del given
    evict_all()
    loss.backward()
    assert torch.equal(other.grad, torch.full((4 * SIZE,), 7.0))
    assert torch.equal(weight.grad, torch.full((SIZE,), 7.0))


def test_other_owners_of_our_memory_keep_it(lms):
    pytest.importorskip("numpy")
    lms.enable(limit="1GiB", min_size=SMALL)
    held = torch.ones(SIZE)
    weight = torch.ones(SIZE, requires_grad=True)
    loss = (torch.from_dlpack(held) * weight).sum() + (torch.from_numpy(held.numpy()) * weight).sum()
    assert evict_all() == 0
    held.fill_(5)
    loss.backward()
    assert torch.equal(weight.grad, torch.full((SIZE,), 10.0))


def test_a_change_of_what_backward_got_is_noticed(lms):
    class Careless(torch.autograd.Function):
        @staticmethod
        def forward(ctx, given):
            ctx.save_for_backward(given)
            return given * 2

        @staticmethod
        def backward(ctx, grad):
            (given,) = ctx.saved_tensors
            given.mul_(2)
            return grad * given

    lms.enable(limit="1GiB", min_size=SMALL)
    given = torch.ones(SIZE, requires_grad=True)
    loss = Careless.apply(given * 1.0).sum()
    evict_all()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_thread_that_runs_already_is_covered(lms):
    results, go = [], threading.Event()

    def work():
        assert go.wait(30)
        given = torch.ones(SIZE, requires_grad=True)
        loss = (given * 1.0).exp().sum()
        results.append(evict_all())
        loss.backward()
        results.append(float(given.grad[0]))

    thread = threading.Thread(target=work)
    thread.start()
    lms.enable(limit="1GiB", min_size=SMALL)
    go.set()
    thread.join()
    assert results == [SIZE * 4, float(torch.ones(1).exp())]


def test_transforms_of_torch_func_keep_what_they_save(lms):
    def curve(x):
        return (x * 1.0).exp().sum()

    lms.enable(limit="1GiB", min_size=SMALL)
    given = torch.randn(SIZE)
    assert torch.equal(torch.func.grad(curve)(given), given.exp())
    assert torch.equal(torch.func.jvp(curve, (given,), (torch.ones(SIZE),))[1], given.exp().sum())
    outer = given.clone().requires_grad_()
    loss = torch.func.grad(curve)(outer).pow(2).sum()  # its graph goes on outside
    loss.backward()
    torch.testing.assert_close(outer.grad, 2 * given.exp() ** 2)


def test_enable_inside_a_transform_is_refused(lms):
    def curve(x):
        with pytest.raises(StateError, match="enable it outside"):
            lms.enable(limit="1GiB", min_size=SMALL)
        return (x * 1.0).exp().sum()

    given = torch.randn(SIZE)
    assert torch.equal(torch.func.grad(curve)(given), given.exp())
    assert not lms.enabled


def test_a_system_that_keeps_tables_as_they_are_is_named(lms, monkeypatch):
    monkeypatch.setattr(torch_extension.load("_lms"), "follow_saved_tensors", lambda: False)
    with pytest.raises(StateError, match="mprotect"):
        lms.enable(limit="1GiB")
    assert not lms.enabled
    assert tag_of(torch.ones(300)) is None


def test_a_problem_of_the_host_that_is_over_is_not_told(lms, saver):
    lms.enable(limit="64MiB", min_size=SMALL, overflow=False)
    given = torch.ones(SIZE, requires_grad=True)
    loss = (given * 1.0).exp().sum()
    saver.configure(host_limit=1)
    assert evict_all() == 0
    saver.configure(host_limit=None)
    loss.backward()
    del loss
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.ones(64 * MIB)
    assert "could not leave" not in str(caught.value)


def test_a_thread_object_dies_with_its_last_reference(lms):
    lms.enable(limit="1GiB")
    gc.disable()
    try:
        thread = threading.Thread(target=lambda: None)
        thread.tensor = torch.ones(SIZE)
        thread.start()
        thread.join()
        held = torch.ones(1).untyped_storage()
        del thread
        assert held.nbytes() == 4
        assert not [one for one in gc.get_objects() if isinstance(one, torch.Tensor) and one.numel() == SIZE]
    finally:
        gc.enable()


@pytest.mark.timeout(300)
def test_interrupts_leave_it_on_or_off(lms):
    """Whatever is cut short, `disable` ends it."""

    def work():
        with lms.enable(limit="1GiB", min_size=SMALL):
            pass

    def check():
        lms.disable()
        assert not lms.enabled
        assert tag_of(torch.ones(300)) is None
        assert _core.query_device(0).limit_bytes == _core.UNLIMITED

    work()
    assert interrupted_everywhere(work, check) > 20


def test_a_fork_beside_a_thread_that_evicts(lms):
    lms.enable(limit="1GiB", min_size=SMALL)
    stop = threading.Event()

    def evict():
        while not stop.is_set():
            given = torch.ones(SIZE, requires_grad=True)
            loss = (given * 1.0).exp().sum()
            evict_all()
            loss.backward()

    thread = threading.Thread(target=evict)
    thread.start()
    try:
        for _ in range(20):
            child = os.fork()
            if child == 0:
                os._exit(0 if evict_all() == 0 else 1)
            assert os.waitpid(child, 0)[1] == 0
    finally:
        stop.set()
        thread.join()
    assert train(1)
