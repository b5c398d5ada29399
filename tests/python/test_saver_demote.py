"""`saver.demote`: living memory moves to the host at the same addresses, and `promote` brings it back."""

import threading

import pytest

torch = pytest.importorskip("torch")

import caches  # noqa: E402
from ebbtide import _core  # noqa: E402
from ebbtide.errors import OutOfMemoryError, StateError, StoreError  # noqa: E402
from random_memory import random_bytes  # noqa: E402

MIB = 1 << 20


def noise(saver, tag, mib, **options):
    with saver.region(tag, **options):
        return random_bytes(mib * MIB, saver.device)


def on_host(saver, tag):
    return saver.tags()[tag].host_bytes


def test_invariant_1_and_2_demoted_memory_keeps_address_and_bytes(saver, tag):
    tensor = noise(saver, tag, 40)
    want, address = tensor.cpu().clone(), tensor.data_ptr()
    before = saver.stats()
    report = saver.demote(tag)
    assert (report.kind, report.bytes, report.copied) == ("demote", 40 * MIB, 40 * MIB)
    assert "demote: freed 40.0 MiB" in str(report)
    status = saver.tags()[tag]
    assert (status.host_bytes, status.resident_bytes, status.state) == (40 * MIB, 40 * MIB, "resident")
    after = saver.stats()
    assert before["device_bytes"] - after["device_bytes"] == 40 * MIB
    assert after["host_bytes"] - before["host_bytes"] == after["bytes_demoted"] - before["bytes_demoted"] == 40 * MIB
    assert tensor.data_ptr() == address and torch.equal(tensor.cpu(), want)
    tensor += 1
    assert saver.demote(tag).bytes == 0, "it is there already"
    assert saver.promote(tag).bytes == 40 * MIB
    assert on_host(saver, tag) == 0
    assert tensor.data_ptr() == address and torch.equal(tensor.cpu(), want + 1)
    assert [event.kind for event in saver.timeline if event.tags == tag] == ["demote", "demote", "promote"]


def test_max_bytes_bounds_what_leaves(saver, tag):
    tensors = [noise(saver, tag, mib) for mib in (24, 32, 26)]
    want = [tensor.cpu().clone() for tensor in tensors]
    assert saver.demote(tag, max_bytes=0).bytes == 0
    assert saver.demote(tag, max_bytes="23MiB").bytes == 0, "no handle is as small"
    freed = saver.demote(tag, max_bytes="58 MiB").bytes
    assert freed == on_host(saver, tag) and freed in (50 * MIB, 56 * MIB, 58 * MIB)
    assert saver.demote(tag).bytes == 82 * MIB - freed
    assert all(torch.equal(tensor.cpu(), each) for tensor, each in zip(tensors, want, strict=True))
    for bad in (-1, "much"):
        with pytest.raises(ValueError, match="max_bytes"):
            saver.demote(tag, max_bytes=bad)
    with pytest.raises(TypeError, match="max_bytes"):
        saver.demote(tag, max_bytes=1.5)


def test_open_regions_and_unknown_tags_are_refused(saver, tag):
    with saver.region(tag), pytest.raises(StateError, match="inside its region"):
        saver.demote(tag)
    with pytest.raises(StateError, match="no region was ever named"):
        saver.demote("nobody")
    assert saver.demote("nobody", missing_ok=True).bytes == 0


def test_without_host_room_nothing_moves(saver, tag):
    tensor = noise(saver, tag, 40)
    want = tensor.cpu().clone()
    saver.configure(host_limit=saver.stats()["host_held_bytes"] + 30 * MIB)
    with pytest.raises(StoreError, match="demotion"):
        saver.demote(tag)
    saver.configure(host_limit=None)
    assert on_host(saver, tag) == 0 and torch.equal(tensor.cpu(), want)
    assert [event.kind for event in saver.timeline if event.tags == tag] == ["demote_failed"]


def test_it_makes_room_for_others(saver, tag, tag2):
    tensor = noise(saver, tag, 40)
    want = tensor.cpu().clone()
    caches.release(saver)  # torch would otherwise release what earlier tests left
    saver.configure(device_limit=_core.query_device(0).held_bytes + 8 * MIB)
    with pytest.raises((OutOfMemoryError, torch.OutOfMemoryError, RuntimeError), match="out of memory"):
        noise(saver, tag2, 44)
    saver.demote(tag)
    other = noise(saver, tag2, 44)
    assert saver.promote(tag).bytes == 0, "no room"
    del other
    assert torch.equal(tensor.cpu(), want)


@pytest.mark.parametrize("backup", ["ram", "pinned", "disk"])
def test_invariant_2_a_pause_leaves_it_on_the_host(saver, tag, backup):
    tensors = [noise(saver, tag, 24, backup=backup), noise(saver, tag, 32, backup=backup)]
    want = [tensor.cpu().clone() for tensor in tensors]
    saver.demote(tag, max_bytes="40MiB")
    kept = on_host(saver, tag)
    assert kept in (24 * MIB, 32 * MIB)
    assert saver.pause(tag).bytes == 56 * MIB - kept
    assert saver.is_paused(tag) and saver.tags()[tag].paused_host_bytes == kept
    assert saver.demote(tag).bytes == saver.promote(tag).bytes == 0, "paused memory is skipped"
    assert saver.resume(tag).bytes == 56 * MIB - kept
    assert on_host(saver, tag) == kept
    saver.promote(tag)
    assert all(torch.equal(tensor.cpu(), each) for tensor, each in zip(tensors, want, strict=True))


def test_what_a_pause_drops_needs_no_policy_to_come_back(saver, tag):
    tensor = noise(saver, tag, 40, backup=None)
    saver.demote(tag)
    saver.pause(tag)
    assert on_host(saver, tag) == 0
    saver.configure(device_limit=_core.query_device(0).held_bytes)
    saver.resume(tag)
    assert on_host(saver, tag) == 40 * MIB
    assert not tensor.cpu().any()


def test_a_swap_takes_it_and_brings_it_back(saver, tag, tag2):
    one, other = noise(saver, tag, 40), noise(saver, tag2, 40)
    want = one.cpu().clone(), other.cpu().clone()
    saver.pause(tag2)
    saver.demote(tag)
    swapped = saver.swap(pause=tag, resume=tag2)
    assert (swapped.paused.bytes, swapped.resumed.bytes) == (0, 40 * MIB)
    saver.swap(pause=tag2, resume=tag)
    saver.resume(tag2)
    assert torch.equal(one.cpu(), want[0]) and torch.equal(other.cpu(), want[1])


def test_what_an_earlier_resume_put_behind_one_handle(saver, tag):
    tensors = [noise(saver, tag, 22) for _ in range(3)]
    want = [tensor.cpu().clone() for tensor in tensors]
    saver.pause(tag)
    saver.resume(tag)
    assert saver.demote(tag).bytes == 66 * MIB
    saver.promote(tag)
    assert all(torch.equal(tensor.cpu(), each) for tensor, each in zip(tensors, want, strict=True))


@pytest.mark.usefixtures("quick_scans")
def test_adopted_tensors_and_their_dlpack_partners(saver, tag):
    model = torch.nn.Linear(2048, 2048, device=saver.device)
    want = model.weight.detach().cpu().clone()
    saver.adopt(model, tag=tag)
    partner = torch.from_dlpack(model.weight.detach())
    assert saver.demote(tag).bytes >= 16 * MIB
    assert partner.data_ptr() == model.weight.data_ptr()
    partner.add_(1)
    assert torch.equal(model.weight.detach().cpu(), want + 1)
    saver.promote(tag)
    assert torch.equal(partner.cpu(), want + 1)


def test_a_training_loop_whose_optimizer_states_come_and_go(saver, tag):
    """The same weights as without demotions."""

    def train(moves):
        torch.manual_seed(0)
        with saver.region(tag if moves else f"{tag}-plain"):
            model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 256))
            model.to(saver.device)
            optimizer = torch.optim.Adam(model.parameters())
        for _ in range(4):
            model(torch.ones(8, 256, device=saver.device)).square().mean().backward()
            if moves:
                assert saver.promote(tag).bytes >= 0
            optimizer.step()
            optimizer.zero_grad()
            if moves:
                saver.demote(tag)
                assert on_host(saver, tag) > 0
        return [parameter.detach().cpu().clone() for parameter in model.parameters()]

    assert all(torch.equal(one, other) for one, other in zip(train(False), train(True), strict=True))


def test_the_host_pool_serves_the_round_trip(saver, tag):
    """It is full of a piece of 64 MiB for spills, which gives way."""
    tensor = noise(saver, tag, 40)
    want = tensor.cpu().clone()
    saver.configure(host_pool="64MiB")
    try:
        saver.demote(tag)
        saver.promote(tag)
        assert saver.stats()["host_pool_bytes"] == 40 * MIB
        saver.demote(tag)
        assert saver.stats()["host_pool_bytes"] == 0
        assert torch.equal(tensor.cpu(), want)
    finally:
        saver.configure(host_pool=0)


def test_invariant_12_threads_allocate_and_free_meanwhile(saver, tag, tag2):
    tensor = noise(saver, tag, 24)
    want = tensor.cpu().clone()
    is_over = threading.Event()
    errors = []

    def churn():
        try:
            while not is_over.is_set():
                one = noise(saver, tag2, 3)
                assert torch.equal(one, one.clone())
                del one
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=churn) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(10):
        saver.demote(tag)
        assert torch.equal(tensor.cpu(), want)
        saver.promote(tag)
    is_over.set()
    for thread in threads:
        thread.join()
    assert not errors
    assert torch.equal(tensor.cpu(), want)


def test_off_demotes_nothing(run_python):
    result = run_python(
        """
        from ebbtide import saver
        with saver.region("w"):
            pass
        print(saver.demote("w", max_bytes="1GiB"))
        """,
        EBBTIDE_DRIVER="off",
    )
    assert result.stdout.startswith("demote: freed 0"), result.stderr


@pytest.mark.parametrize("options", [{"backup": "pinned"}, {"backup": "ram", "retain": True}], ids=["pinned", "ram"])
def test_the_backup_that_demoted_memory_keeps_is_in_the_table(saver, tag, options):
    tensor = noise(saver, tag, 24, **options)
    want = tensor.cpu().clone()
    saver.pause(tag)
    saver.resume(tag)
    kept = saver.tags()[tag].retained_bytes
    assert kept == 24 * MIB
    saver.demote(tag)
    status = saver.tags()[tag]
    assert (status.host_bytes, status.retained_bytes, status.ahead_bytes) == (24 * MIB, kept, 0)
    saver.promote(tag)
    assert saver.tags()[tag].retained_bytes == kept
    assert saver.pause(tag).clean == 24 * MIB
    saver.resume(tag)
    assert torch.equal(tensor.cpu(), want)


def test_what_spilled_has_no_backup_beside_it(saver, tag):
    """A pause leaves it where it is, so that its tag's kept backup is that of the rest."""
    caches.release(saver)
    saver.configure(device_limit=_core.query_device(0).held_bytes + 32 * MIB, reserve=0)
    with saver.region(tag, overflow="split", retain=True):
        tensor = torch.arange(6 * MIB, device=saver.device)
    assert saver.tags()[tag].host_bytes > 0
    saver.pause(tag)
    saver.resume(tag)
    status = saver.tags()[tag]
    assert status.retained_bytes == status.resident_bytes - status.host_bytes > 0
    saver.configure(device_limit=None, reserve=None)
    assert torch.equal(tensor.cpu(), torch.arange(6 * MIB))
