"""The last resort of `ebbtide.lms.enable`: where nothing can leave any more, new memory lies on the host."""

import contextlib
import gc
from concurrent.futures import ThreadPoolExecutor

import pytest

torch = pytest.importorskip("torch")

from ebbtide import _core, torch_extension  # noqa: E402
from ebbtide.lms import control  # noqa: E402
from lms_model import MIB, SMALL, peak_of_training, train, train_plainly  # noqa: E402

pytestmark = pytest.mark.sim_only

TAG = "lms.overflow"


@pytest.fixture(autouse=True)
def nothing_left(lms, saver):
    yield
    lms.disable()
    gc.collect()
    if _core.query_tag(TAG) is not None:
        saver.trim(TAG)
        assert _core.query_tag(TAG).resident_bytes == 0


def overflowed(tensor):
    found = _core.find(tensor.untyped_storage().data_ptr())
    return found is not None and found.tag == TAG


def test_what_the_program_holds_may_exceed_the_limit(lms):
    with lms.enable(limit="40MiB"):
        held = [torch.full((1024, 1024), float(number)) for number in range(30)]
        assert [each.sum().item() for each in held] == [number * MIB for number in range(30)]
        assert [each for each in held if overflowed(each)] == held[-sum(map(overflowed, held)) :], "the last ones"
        assert 20 <= sum(map(overflowed, held)) <= 21
        numbers = lms.stats()
        assert 80 * MIB <= numbers["overflow_bytes"] <= 120 * MIB
        assert numbers["peak_device_bytes"] <= 40 * MIB
        assert "new tensors lie on the host" in lms.report()
        del held
        gc.collect()
        assert not overflowed(torch.empty(1024, 1024))


def test_it_is_an_error_without(lms):
    with lms.enable(limit="40MiB", overflow=False), pytest.raises(torch.OutOfMemoryError):
        [torch.empty(1024, 1024) for _ in range(30)]


def test_what_can_leave_leaves_before(lms):
    plain, needed = train_plainly(steps=4), peak_of_training()
    with lms.enable(limit=int(0.6 * needed), min_size=SMALL):
        assert train(steps=4) == plain
        assert lms.stats()["evictions"] > 0 and lms.stats()["peak_overflow_bytes"] == 0


@pytest.mark.parametrize("mebibytes", [2, 6])
def test_losses_are_equal_in_less_than_one_operation_needs(lms, mebibytes):
    shape = {"steps": 4, "depth": 4, "width": 128, "batch": 4096}
    plain = train_plainly(**shape)
    with lms.enable(limit=f"{mebibytes}MiB", min_size=SMALL):
        assert train(**shape) == plain
        assert lms.stats()["peak_overflow_bytes"] > 0
        assert lms.stats()["peak_device_bytes"] <= mebibytes * MIB


def test_tensors_live_on_after_it_is_off(lms):
    with lms.enable(limit="8MiB"):
        held = torch.arange(4 * MIB)
        assert overflowed(held)
    assert torch.equal(held, torch.arange(4 * MIB))
    grown = torch.cat([held, held])
    assert not overflowed(grown) and grown.nbytes == 2 * held.nbytes


def test_a_saved_tensor_there_stays_there(lms):
    with lms.enable(limit="8MiB", min_size=SMALL):
        given = torch.full((2 * MIB,), 2.0, requires_grad=True)
        result = given.exp()
        assert overflowed(result) and lms.stats()["evictions"] == 0
        result.sum().backward()
        torch.testing.assert_close(given.grad, given.detach().exp())


def test_inside_a_region_memory_gets_its_tag_or_an_error(lms, saver, tag):
    with lms.enable(limit="8MiB"), saver.region(tag), pytest.raises(torch.OutOfMemoryError):
        torch.empty(16 * MIB)


def test_no_room_on_the_host_either(lms):
    with lms.enable(limit="8MiB", host_limit="128MiB"):  # the ring for copies may have 64 MiB of it
        for _ in range(2):
            with pytest.raises(torch.OutOfMemoryError, match="host_limit") as failed:
                torch.empty(64 * MIB)
            assert str(failed.value).count("the host has no room") == 1
        assert overflowed(torch.empty(3 * MIB))


def test_many_small_tensors_share_memory(lms):
    with lms.enable(limit="4MiB", host_limit="128MiB"):
        held = [torch.full((1024, 1024), 1.0)]
        held += [torch.full((4,), float(number)) for number in range(500)]
        assert overflowed(held[-1]) and [each[0].item() for each in held[1:]] == list(range(500))
        assert lms.stats()["overflow_bytes"] <= 8 * MIB


def test_threads_that_find_no_room_at_once(lms):
    def work(number):
        return [torch.full((1024, 256), float(number + turn)).sum().item() / MIB * 4 for turn in range(20)]

    with lms.enable(limit="3MiB"), ThreadPoolExecutor(4) as pool:
        held = torch.empty(1024, 768)
        found = list(pool.map(work, range(4)))
        assert found == [[number + turn for turn in range(20)] for number in range(4)] and held.numel()


def test_weights_and_states_made_there_come_back_under_a_higher_limit(lms):
    def run(change=lambda: None):
        torch.manual_seed(3)
        model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(4)])
        optimizer = torch.optim.Adam(model.parameters())
        losses = []
        for number in range(6):
            if number == 3:
                change()
            loss = model(torch.randn(64, 512)).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, model, optimizer

    plain, *_ = run()
    with lms.enable(limit="3MiB", min_size=SMALL):
        losses, model, optimizer = run(lambda: setattr(lms, "limit", "1GiB"))
        assert losses == plain
        tensors = [*model.parameters(), *(each for state in optimizer.state.values() for each in state.values())]
        assert not any(overflowed(each) for each in tensors if each.nbytes >= MIB)


def test_an_interrupt_in_it_is_not_lost(lms):
    def interrupted(_):
        raise KeyboardInterrupt

    extension = torch_extension.load("_lms")
    with lms.enable(limit="8MiB"):
        extension.set_overflow(interrupted)
        came = False
        try:
            with contextlib.suppress(torch.OutOfMemoryError):
                torch.empty(16 * MIB)
            for _ in range(1000):
                pass
        except KeyboardInterrupt:
            came = True
        assert came


def test_a_forked_child_drops_them(run_python):
    result = run_python(
        """
        import gc, os
        import torch
        import ebbtide
        ebbtide.lms.enable(limit="8MiB")
        held = [torch.ones(1024, 1024) for _ in range(4)]
        if (pid := os.fork()) == 0:
            del held
            gc.collect()
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        assert all(each.sum() == 2**20 for each in held)
        """
    )
    assert result.returncode == 0, result.stderr


def test_what_else_it_may_be(lms):
    with pytest.raises(TypeError, match="overflow must be True or False"):
        lms.enable(limit="1GiB", overflow="split")
    with lms.enable(limit="40MiB"):
        with lms.enable(limit="40MiB", overflow=False), pytest.raises(torch.OutOfMemoryError):
            torch.empty(64 * MIB)
        assert overflowed(torch.empty(64 * MIB)), "as before the inner `with`"


def test_what_makes_lms_faster_is_not_worth_memory_on_the_host(lms):
    with lms.enable(limit="40MiB"):
        held = [torch.empty(1024, 1024) for _ in range(9)]
        with pytest.raises(torch.OutOfMemoryError):
            control._now.device.optional(lambda: torch.empty(4 * MIB))
        assert overflowed(torch.empty(4 * MIB))
        del held


def test_the_memory_of_dead_tensors_goes_with_the_next_step_of_an_optimizer(lms):
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], 0.1)
    with lms.enable(limit="40MiB"):
        spike = torch.empty(32 * MIB)
        assert overflowed(spike) and lms.stats()["overflow_bytes"] > 0
        del spike
        gc.collect()
        weight.grad = torch.ones(4)
        optimizer.step()
        assert _core.query_tag(TAG).resident_bytes == 0
