"""Large model support where something else happens: errors, early ends, threads, processes, budgets that are gone."""

import gc
import os
import subprocess
import sys
import threading

import pytest

torch = pytest.importorskip("torch")

from ebbtide import _core  # noqa: E402
from ebbtide import lms as module  # noqa: E402
from ebbtide.errors import StateError  # noqa: E402
from lms_model import MIB, SMALL, evict_all, make_model, train  # noqa: E402

pytestmark = pytest.mark.sim_only  # tests/gpu/test_gpu_lms.py is for GPUs


def test_a_backward_that_never_comes_gives_host_memory_back(lms):
    lms.enable(limit="1GiB", min_size=SMALL)
    held = _core.stats()["host_held_bytes"]
    given = torch.randn(256 * 1024, requires_grad=True)
    loss = (given * 1.0).exp().sum()
    assert evict_all() == MIB
    assert _core.stats()["host_held_bytes"] >= held + MIB
    del loss
    assert lms.stats()["host_bytes"] == 0
    kept = _core.stats()["host_held_bytes"]
    again = (given * 1.0).exp().sum()
    assert evict_all() == MIB
    assert _core.stats()["host_held_bytes"] == kept, "memory kept for the next step serves it"
    lms.disable()
    del again
    assert _core.stats()["host_held_bytes"] == held


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_exceptions(lms, where):
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, given):
            ctx.save_for_backward(given)
            if where == "forward":
                raise ValueError("planted")
            return given * 2

        @staticmethod
        def backward(ctx, grad):
            assert ctx.saved_tensors[0].numel()
            raise ValueError("planted")

    plain = train()
    with lms.enable(limit="1GiB", min_size=SMALL):
        given = torch.randn(64 * 1024, requires_grad=True)
        with pytest.raises(ValueError, match="planted"):
            loss = Fails.apply((given * 1.0).exp()).sum()
            evict_all()
            loss.backward()
        loss = None
        assert train() == plain


def test_no_grad_evaluation_between_steps(lms):
    model = make_model(width=64)

    def evaluate(_step):
        with torch.no_grad():
            model(torch.zeros(512, 64))
        with torch.inference_mode():
            model(torch.zeros(512, 64))

    plain = train(3, before_step=evaluate)
    with lms.enable(limit="1GiB", min_size=SMALL):
        train(3, before_step=evaluate)
        needed = lms.stats()["peak_device_bytes"]
    with lms.enable(limit=needed // 2, min_size=SMALL):
        assert train(3, before_step=evaluate) == plain
        assert lms.stats()["evictions"] > 0


def test_threads_train_at_once(lms):
    def work(results, index):
        generator = torch.Generator().manual_seed(index)
        weight = torch.randn(128, 128, generator=generator).requires_grad_()
        total = []
        for _ in range(5):
            hidden = torch.randn(1024, 128, generator=generator)
            for _ in range(6):
                hidden = torch.tanh(hidden @ weight)
            loss = hidden.pow(2).sum()
            loss.backward()
            total.append(loss.item())
        results[index] = total

    def run():
        results = [None] * 3
        threads = [threading.Thread(target=work, args=(results, index)) for index in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results

    plain = run()
    with lms.enable(limit="1GiB", min_size=SMALL):
        run()
        needed = lms.stats()["peak_device_bytes"]
    with lms.enable(limit=int(0.7 * needed), min_size=SMALL):
        assert run() == plain
        assert lms.stats()["evictions"] > 0


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        return torch.full((128,), float(index))


def test_data_loader_workers(lms):
    def run():
        model = make_model(4)
        losses = []
        for batch in torch.utils.data.DataLoader(Numbers(), batch_size=8, num_workers=2):
            loss = model(batch.expand(64, 8, 128)).pow(2).mean()
            loss.backward()
            losses.append(loss.item())
        return losses

    plain = run()
    lms.enable(limit="1GiB", min_size=SMALL)
    assert run() == plain


def test_a_forked_child_may_free_graphs_and_train_no_further(lms):
    lms.enable(limit="1GiB", min_size=SMALL)
    given = torch.randn(64 * 1024, requires_grad=True)
    loss = (given * 1.0).exp().sum()
    evict_all()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            del loss
            try:
                module.enable(limit="1GiB")
            except StateError:
                status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    loss.backward()


def test_training_goes_on_from_a_checkpoint(lms, tmp_path):
    def run():
        model = make_model(4)
        optimizer = torch.optim.AdamW(model.parameters())
        losses = []
        for step in range(4):
            if step == 2:
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "saved.pt")
                saved = torch.load(tmp_path / "saved.pt")
                model = make_model(4)
                model.load_state_dict(saved["model"])
                optimizer = torch.optim.AdamW(model.parameters())
                optimizer.load_state_dict(saved["optimizer"])
            torch.manual_seed(step)
            optimizer.zero_grad()
            loss = model(torch.randn(1024, 128)).pow(2).mean()
            if module.enabled:
                evict_all()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    plain = run()
    lms.enable(limit="1GiB", min_size=SMALL)
    assert run() == plain


def test_disable_amid_a_step(lms):
    lms.enable(limit="1GiB", min_size=SMALL)
    given = torch.randn(64 * 1024, requires_grad=True)
    loss = (given * 1.0).exp().sum()
    assert evict_all() > 0
    lms.disable()
    assert not lms.enabled
    loss.backward()
    assert _core.find((given.detach() * 2).data_ptr()) is None, "new tensors are ordinary memory"
    torch.testing.assert_close(given.grad, given.detach().exp())


def test_it_can_be_switched_inside_hooks_of_others(lms):
    """Theirs decide inside them, and leave every tensor alone here."""

    def loss_of():
        return (given * 1.0).exp().sum()

    given = torch.randn(64 * 1024, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        lms.enable(limit="1GiB", min_size=SMALL)
        loss = loss_of()
        assert evict_all() == 0
        loss.backward()
    loss = loss_of()
    assert evict_all() > 0
    loss.backward()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        lms.disable()
    loss = loss_of()
    assert evict_all() == 0
    loss.backward()


def test_one_op_that_needs_more_than_the_limit(lms):
    lms.enable(limit="24MiB", min_size=SMALL, overflow=False)
    with pytest.raises(
        torch.OutOfMemoryError, match=r"asked for 64\.00 MiB.*24 MiB left of the limit of large model support"
    ):
        torch.ones(16 * MIB)
    with pytest.raises(torch.OutOfMemoryError, match="asked for"):
        train(1, width=512, batch=16384)
    gc.collect()
    assert train(1, depth=2, batch=64)
    assert lms.stats()["peak_device_bytes"] <= 24 * MIB


def test_a_host_budget_that_is_gone(lms):
    plain = train()
    with lms.enable(limit="1GiB", min_size=SMALL):
        train()
        needed = lms.stats()["peak_device_bytes"]
    held = _core.stats()["host_held_bytes"]
    with lms.enable(limit=needed // 2, min_size=SMALL, host_limit=held + 2 * MIB):
        with pytest.raises(torch.OutOfMemoryError, match=r"saved tensors could not leave it: .*host_limit"):
            train()
        gc.collect()
        assert train(2, depth=1, batch=256)
    with lms.enable(limit=needed // 2, min_size=SMALL):
        assert train() == plain


@pytest.mark.timeout(200)
def test_a_program_that_enables_in_threads_ends_well(run_python):
    program = (
        "import torch\nimport threading\nfrom ebbtide import lms\n"
        "threads = [threading.Thread(target=lambda: lms.enable(limit='1GiB')) for _ in range(40)]\n"
        "[thread.start() for thread in threads]\n"
        "[thread.join() for thread in threads]\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    for _ in range(2):  # which begin faster
        done = run_python(program)
        assert done.returncode == 0, done.stderr
