"""Large model support: the extension tells which operators have written weights."""

import threading

import pytest

torch = pytest.importorskip("torch")

from lms_model import SMALL, make_model  # noqa: E402
from lms_states import extension  # noqa: E402
from torch import library  # noqa: E402

pytestmark = [pytest.mark.sim_only, pytest.mark.usefixtures("no_weights_left")]


@pytest.fixture
def weight(lms):
    """A weight that may move, watched."""
    lms.enable(limit="1GiB", min_size=SMALL)
    model = make_model(2, 512)
    model(torch.ones(1, 512))
    extension().begin_write_watch()
    yield model[0].weight
    extension().end_write_watch()


WRITES = {
    "in place": lambda weight: weight.mul_(1),
    "data": lambda weight: weight.data.mul_(1),
    "data, a part": lambda weight: weight.data[3].zero_(),
    "item": lambda weight: weight.__setitem__((0, slice(3)), 1.0),
    "out": lambda weight: torch.mul(torch.ones_like(weight), 2, out=weight.data),
    "foreach": lambda weight: torch._foreach_mul_([torch.ones(2), weight.data], 2),
    "alias": lambda weight: weight.detach().view(-1)[7:9].copy_(torch.ones(2)),
    "optimizer": lambda weight: step(weight),
    "operator of the program": lambda weight: torch.ops.ebbtide_test.fill(weight.data),
}
READS = {
    "product": lambda weight: torch.ones(1, 512) @ weight,
    "copy": lambda weight: weight.clone(),
    "into another": lambda weight: torch.empty_like(weight).copy_(weight),
    "view": lambda weight: weight.view(-1).detach(),
    "others": lambda weight: torch.ones(4).add_(1),
}


def step(weight):
    weight.grad = torch.ones_like(weight)
    torch.optim.SGD([weight], 0.1).step()


@library.custom_op("ebbtide_test::fill", mutates_args=("given",))
def fill(given: torch.Tensor) -> None:
    given.numpy().fill(1)


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_writes(weight, write):
    with torch.no_grad():
        write(weight)
    assert extension().take_written_weights()
    assert not extension().take_written_weights()


def test_collectives_write(weight, one_rank):
    with torch.no_grad():
        for collective in (torch.distributed.all_reduce, lambda each: torch.distributed.broadcast(each, 0)):
            collective(weight.data)
            assert extension().take_written_weights()


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_reads_and_other_tensors(weight, read):
    with torch.no_grad():
        read(weight)
    assert not extension().take_written_weights()


def test_each_thread_is_watched_by_itself(weight):
    with torch.no_grad():
        thread = threading.Thread(target=lambda: weight.data.mul_(1))
        thread.start()
        thread.join()
        assert not extension().take_written_weights()
        weight.mul_(1)
        extension().begin_write_watch()  # anew
        assert not extension().take_written_weights()
        weight.mul_(1)
        extension().end_write_watch()
        extension().end_write_watch()
        assert extension().take_written_weights()
        weight.mul_(1)
        assert not extension().take_written_weights()
