"""autograd's hooks of large model support: C++, in every thread, beside those that a program has in Python."""

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from lms_model import SMALL  # noqa: E402
from lms_states import extension  # noqa: E402

pytestmark = pytest.mark.sim_only  # tests/gpu/test_gpu_lms.py is for GPUs


def loss_of(x, weight):
    return (x @ weight).sin().pow(2).sum()


@pytest.fixture
def leaves():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(64, 64, generator=generator, requires_grad=True) for _ in range(2)]


def test_python_is_not_called_for_each_saved_tensor(lms, leaves, monkeypatch):
    called = []

    def profile(_frame, event, argument):
        if event == "c_call" and getattr(argument, "__name__", "") == "unpack":
            called.append(argument)

    with lms.enable(limit="1GiB", min_size=SMALL):
        assert extension().follow_saved_tensors() is True  # again
        # torch would take them with it into each node of a backward.
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        saved = loss_of(*leaves).grad_fn.next_functions[0][0]._raw_saved_self  # as Python sees it
        sys.setprofile(profile)
        try:
            loss_of(*leaves).backward()
        finally:
            sys.setprofile(None)
    assert called == [] and saved is not None
    assert leaves[0].grad is not None


def test_python_reads_a_saved_tensor_and_a_limit_of_0_evicts_it_first(lms, leaves):
    plain = loss_of(*leaves).grad_fn.next_functions[0][0]._saved_self.clone()
    with lms.enable(limit=0, min_size="1KiB"):
        loss = loss_of(*leaves)
        evicted = lms.stats()["evictions"]
        assert evicted > 0 and torch.equal(loss.grad_fn.next_functions[0][0]._saved_self, plain)


def test_hooks_of_the_program_lie_above_and_get_their_own_tensors(lms, leaves):
    seen = []
    with lms.enable(limit="1GiB", min_size=SMALL):
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: seen.append(1) or tensor, lambda tensor: tensor):
            loss_of(*leaves).backward()
        count = len(seen)
        loss_of(*leaves).backward()
    assert count > 0 and len(seen) == count


def test_compiled_autograd_gets_the_pair_in_python(run_python):
    """In a process of its own: torch keeps the tensors that it compiled with, and so their room of every limit."""
    folder = str(Path(__file__).parent)
    done = run_python(
        f"""
        import sys
        import torch
        sys.path.insert(0, {folder!r})
        from ebbtide import lms
        from lms_functions import Cube
        from torch._dynamo import compiled_autograd

        def loss_of(x, weight):
            return Cube.apply((x @ weight).sin()).pow(2).sum()

        leaves = [torch.randn(64, 64, requires_grad=True) for _ in range(2)]
        loss_of(*leaves).backward()
        expected = [each.grad.clone() for each in leaves]
        with lms.enable(limit="1GiB", min_size="1KiB"):
            for kept in (False, True):
                for each in leaves:
                    each.grad = None
                loss = loss_of(*leaves)
                if kept:
                    loss.backward(retain_graph=True)
                    for each in leaves:
                        each.grad = None
                with compiled_autograd._enable(torch.compile(backend="eager")):
                    loss.backward()
                assert all(torch.equal(each.grad, wanted) for each, wanted in zip(leaves, expected, strict=True))
    """,
        trains=True,
    )
    assert done.returncode == 0, done.stderr


def test_what_make_fx_traces_has_no_constants_of_ours(lms):
    from torch.fx.experimental.proxy_tensor import make_fx

    def gradient(given):
        return torch.autograd.grad((given * 1.0).exp().sin().sum(), given)[0]

    first, second = (torch.randn(64, 64, requires_grad=True) for _ in range(2))
    with lms.enable(limit="1GiB", min_size="1KiB"):
        graph = make_fx(gradient)(first)
    assert torch.equal(graph(second), gradient(second))
