"""`ebbtide.lms.enable(overflow=True)`: where nothing can leave any more, new memory lies on the host."""

import gc

import pytest

torch = pytest.importorskip("torch")

from ebbtide import _core  # noqa: E402
from lms_model import MIB, SMALL, train  # noqa: E402

pytestmark = pytest.mark.sim_only

TAG = "lms.overflow"


@pytest.fixture(autouse=True)
def nothing_left(lms):
    yield
    lms.disable()
    gc.collect()
    found = _core.query_tag(TAG)
    assert found is None or found.size_bytes == 0


def overflowed(tensor):
    found = _core.find(tensor.untyped_storage().data_ptr())
    return found is not None and found.tag == TAG


def test_what_the_program_holds_may_exceed_the_limit(lms):
    with lms.enable(limit="40MiB", overflow=True):
        held = [torch.full((1024, 1024), float(number)) for number in range(30)]
        assert [each.sum().item() for each in held] == [number * MIB for number in range(30)]
        assert [each for each in held if overflowed(each)] == held[-sum(map(overflowed, held)) :], "the last ones"
        assert 20 <= sum(map(overflowed, held)) <= 21
        numbers = lms.stats()
        assert numbers["overflow_bytes"] >= 80 * MIB
        assert numbers["peak_device_bytes"] <= 40 * MIB
        assert "new tensors lie on the host" in lms.report()
        del held
        gc.collect()
        assert not overflowed(torch.empty(1024, 1024))


def test_it_is_an_error_without(lms):
    with lms.enable(limit="40MiB"), pytest.raises(torch.OutOfMemoryError):
        [torch.empty(1024, 1024) for _ in range(30)]


def test_what_can_leave_leaves_before(lms):
    plain = train(steps=4, depth=8, width=128, batch=2048)
    with lms.enable(limit="4GiB", min_size=SMALL):
        train(steps=4, depth=8, width=128, batch=2048)
        needed = lms.stats()["peak_device_bytes"]
    with lms.enable(limit=int(0.6 * needed), min_size=SMALL, overflow=True):
        assert train(steps=4, depth=8, width=128, batch=2048) == plain
        assert lms.stats()["evictions"] > 0 and lms.stats()["overflow_bytes"] == 0


@pytest.mark.parametrize("mebibytes", [2, 6])
def test_losses_are_equal_in_less_than_one_operation_needs(lms, mebibytes):
    plain = train(steps=4, depth=4, width=256, batch=2048)
    with lms.enable(limit=f"{mebibytes}MiB", min_size=SMALL, overflow=True):
        assert train(steps=4, depth=4, width=256, batch=2048) == plain
        assert lms.stats()["overflow_bytes"] > 0
        assert lms.stats()["peak_device_bytes"] <= mebibytes * MIB


def test_tensors_live_on_after_it_is_off(lms):
    with lms.enable(limit="8MiB", overflow=True):
        held = torch.arange(4 * MIB)
        assert overflowed(held)
    assert torch.equal(held, torch.arange(4 * MIB))
    grown = torch.cat([held, held])
    assert not overflowed(grown) and grown.nbytes == 2 * held.nbytes


def test_a_saved_tensor_there_stays_there(lms):
    with lms.enable(limit="8MiB", min_size=SMALL, overflow=True):
        given = torch.full((2 * MIB,), 2.0, requires_grad=True)
        result = given.exp()
        assert overflowed(result) and lms.stats()["evictions"] == 0
        result.sum().backward()
        torch.testing.assert_close(given.grad, given.detach().exp())


def test_inside_a_region_memory_gets_its_tag_or_an_error(lms, saver, tag):
    with lms.enable(limit="8MiB", overflow=True), saver.region(tag), pytest.raises(torch.OutOfMemoryError):
        torch.empty(16 * MIB)


def test_no_room_on_the_host_either(lms):
    with lms.enable(limit="8MiB", host_limit="16MiB", overflow=True):
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(64 * MIB)
        assert overflowed(torch.empty(3 * MIB))


def test_what_else_it_may_be(lms):
    with pytest.raises(TypeError, match="overflow must be True or False"):
        lms.enable(limit="1GiB", overflow="split")
    with lms.enable(limit="40MiB", overflow=True):
        with lms.enable(limit="40MiB"), pytest.raises(torch.OutOfMemoryError):
            torch.empty(64 * MIB)
        assert overflowed(torch.empty(64 * MIB)), "as before the inner `with`"
