"""`ebbtide.lms`: its settings while it runs, its limits beside the user's, its report, and IBM's names."""

import asyncio
import inspect
import logging
import sys
import threading
import warnings

import pytest

torch = pytest.importorskip("torch")

from ebbtide import _core  # noqa: E402
from ebbtide.errors import OutOfMemoryError, StateError  # noqa: E402
from ebbtide.lms import control, devices  # noqa: E402
from lms_model import MIB, SMALL, evict_all, train  # noqa: E402

pytestmark = pytest.mark.sim_only  # tests/gpu/test_gpu_lms.py is for GPUs


def test_settings_while_it_runs(lms, saver):
    assert lms.min_size == MIB
    lms.enable("64MiB", "2MiB")
    assert (lms.enabled, lms.limit, lms.min_size) == (True, 64 * MIB, 2 * MIB)
    lms.limit, lms.min_size = "32MiB", 4096
    assert (lms.limit, lms.min_size, _core.query_device(0).limit_bytes) == (32 * MIB, 4096, 32 * MIB)
    lms.limit = "auto"
    assert lms.limit == "auto"
    lms.enabled = False
    assert not lms.enabled
    lms.enabled = True
    assert (lms.enabled, lms.min_size) == (True, 4096)
    saver.configure(device_limit="48MiB")  # the user's word is the last
    lms.disable()
    assert _core.query_device(0).limit_bytes == 48 * MIB
    saver.configure(device_limit=None)
    for wrong in ("lots", -1, True, 1.5, b"1"):
        with pytest.raises((TypeError, ValueError)):
            lms.enable(limit=wrong)
        with pytest.raises((TypeError, ValueError)):
            lms.enable(min_size=wrong)
        assert not lms.enabled
    with pytest.raises(TypeError, match="True or False"):
        lms.enabled = 1


def test_an_older_torch_is_refused(lms, monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.10.0+cu128")
    with pytest.raises(StateError, match=r"torch 2\.11 or newer, and this is 2\.10: upgrade torch"):
        lms.enable("64MiB")
    assert not lms.enabled


def test_an_eviction_before_the_first_enable_builds_nothing(run_python):
    result = run_python(
        """
        from ebbtide import torch_extension
        from ebbtide.lms import control
        assert control.evict(1) == 0 and not torch_extension.is_loaded("_lms")
        """,
        EBBTIDE_DRIVER="sim",
    )
    assert result.returncode == 0, result.stderr


def test_the_end_of_a_with_puts_back_what_was_before(lms):
    def has_host_limit():
        return _core.stats()["host_available_bytes"] <= 512 * MIB

    with lms.enable("64MiB", "2MiB", "512MiB"):
        with lms.enable("32MiB", SMALL):
            assert (lms.limit, lms.min_size, has_host_limit()) == (32 * MIB, 16 << 10, False)
        assert (lms.limit, lms.min_size, has_host_limit()) == (64 * MIB, 2 * MIB, True)
        with pytest.raises(ValueError), lms.enable("16MiB"):
            raise ValueError
        assert (lms.enabled, lms.limit) == (True, 64 * MIB)
        with lms.enable("16MiB"):
            lms.disable()
        assert not lms.enabled
    assert not lms.enabled
    later = lms.enable("48MiB")
    lms.disable()
    with later:
        assert (lms.enabled, lms.limit) == (True, 48 * MIB)
    assert not lms.enabled


def test_a_pause_of_every_tag_names_its_obstacle(lms, saver):
    with lms.enable():
        with pytest.raises(
            StateError, match=r"large model support \(name the tags.*ebbtide.lms.disable\(\)\) is inside"
        ):
            saver.pause()


def test_a_misspelt_setting_is_refused(lms):
    with pytest.raises(AttributeError, match="no setting 'limt': enabled, limit and min_size can be set"):
        lms.limt = "1GiB"
    assert not hasattr(lms, "limt")


def test_a_limit_of_the_user_stays(lms, saver):
    saver.configure(device_limit="32MiB")
    with lms.enable(limit="64MiB"):
        assert _core.query_device(0).limit_bytes == 32 * MIB
    assert _core.query_device(0).limit_bytes == 32 * MIB
    saver.configure(device_limit=None)


def test_the_lower_one_of_both_limits_holds_and_is_named(lms, saver):
    lms.enable(limit="24MiB", overflow=False)
    saver.configure(device_limit="512MiB")  # does not lift the other one
    assert saver.settings()["device_limit"] == 512 * MIB
    assert (lms.limit, _core.query_device(0).limit_bytes) == (24 * MIB, 24 * MIB)
    with pytest.raises(torch.OutOfMemoryError) as refused:
        torch.empty(16 * MIB)
    assert "left of the limit of large model support, 24 MiB" in str(refused.value)
    assert "In Python: ebbtide.lms.limit = ..." in str(refused.value)
    assert "device_limit" not in str(refused.value) and "overflow" not in str(refused.value)
    saver.configure(device_limit="16MiB")
    with pytest.raises(torch.OutOfMemoryError, match=r"left of device_limit 16 MiB .*In Python: saver\.configure"):
        torch.empty(16 * MIB)
    lms.limit = "1GiB"
    assert _core.query_device(0).limit_bytes == 16 * MIB
    saver.configure(device_limit=None)
    assert torch.empty(16 * MIB).numel() == 16 * MIB
    lms.disable()
    assert _core.query_device(0).limit_bytes == _core.UNLIMITED
    assert saver.settings()["device_limit"] is None


def test_the_host_limit_is_no_setting_of_the_users(lms, saver):
    saver.configure(host_limit=None)
    with lms.enable(limit="1GiB", host_limit="500MiB"):
        before = saver.settings()
        assert before["host_limit"] is None
        assert _core.stats()["host_available_bytes"] <= 500 * MIB
        saver.configure(**before)
        assert _core.stats()["host_available_bytes"] <= 500 * MIB
        saver.configure(host_limit="400MiB")
        assert _core.stats()["host_available_bytes"] <= 400 * MIB
    assert saver.settings()["host_limit"] == 400 * MIB
    saver.configure(host_limit=None)
    assert _core.stats()["host_available_bytes"] > 500 * MIB


def test_an_open_region_keeps_its_tensors(lms, saver):
    def tags():
        """Of what this thread makes, and another one."""
        found = [_core.find(torch.empty(MIB).data_ptr()).tag]
        thread = threading.Thread(target=lambda: found.append(_core.find(torch.empty(MIB).data_ptr()).tag))
        thread.start()
        thread.join()
        return found

    with saver.region("weights"):
        lms.enable(limit="1GiB")
        assert tags() == ["weights", "lms"]
        with saver.region("other"):
            assert tags() == ["other", "lms"]
        assert tags() == ["weights", "lms"]
    assert tags() == ["lms", "lms"]
    lms.disable()
    with saver.region("weights"):
        lms.enable(limit="1GiB")
        lms.disable()
        assert _core.find(torch.empty(MIB).data_ptr()).tag == "weights"
    assert _core.find(torch.empty(MIB).data_ptr()) is None


def test_it_can_be_enabled_by_a_task_that_is_inside_a_region(lms, saver):
    async def enable_inside():
        with saver.region("weights"):
            lms.enable(limit="1GiB")
            return _core.find(torch.empty(MIB).data_ptr()).tag

    assert asyncio.run(enable_inside()) == "weights"
    assert _core.find(torch.empty(MIB).data_ptr()).tag == "lms"


def test_what_a_thread_takes_itself_is_not_changed(lms, saver):
    """In a preloaded program: see test_saver_thread_policy.py."""
    outside = _core.thread_policy()[:2]
    with saver.region("weights"):
        inside = _core.thread_policy()[:2]
        lms.enable(limit="1GiB")
        assert inside == _core.thread_policy()[:2] == (_core.TAGGING_ON, "weights")
    assert _core.thread_policy()[:2] == outside
    lms.disable()
    assert _core.thread_policy()[:2] == outside


@pytest.mark.parametrize("size", [1, 16, 1 << 20])
def test_a_number_that_can_only_be_meant_in_another_unit_is_refused(lms, size):
    for use in (lms.enable, lambda limit: setattr(lms, "limit", limit)):
        with pytest.raises(ValueError, match=f"limit={size} is {size} bytes: give a unit, such as limit='1"):
            use(limit=size)
    with pytest.raises(ValueError, match="give a unit"):
        lms.enable(limit=str(size))
    assert not lms.enabled and lms.limit == "auto"


def test_small_limits_with_a_unit_and_0_are_kept_and_put_back(lms, monkeypatch):
    monkeypatch.setattr(devices.SimulatedDevice, "held_bytes", lambda _: 0)  # other tests may hold more
    for limit, size in (("512KiB", 512 << 10), ("1MiB", 1 << 20), (0, 0)):
        lms.limit = limit
        lms.enabled = True
        with lms.enable(limit="1GiB"):
            assert lms.limit == 1 << 30
        assert lms.enabled and lms.limit == size
        lms.disable()


def test_a_handler_that_fails_does_not_leave_it_on_unseen(lms, capsys):
    class Failing(logging.Handler):
        def emit(self, record):
            raise ZeroDivisionError

    logger, handler = logging.getLogger("ebbtide"), Failing()
    before = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with lms.enable(limit="1GiB"):
                assert lms.enabled
            assert not lms.enabled
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
    assert capsys.readouterr().err.count("\nZeroDivisionError") == 2


def test_a_limit_below_the_held_memory_evicts_or_refuses(lms):
    lms.enable(limit="1GiB", min_size=SMALL)
    given = torch.randn(4 * MIB, requires_grad=True)  # 16 MiB
    loss = (given * 1.0).exp().sum()  # 16 MiB more
    before = lms.stats()["device_bytes"]
    lms.limit = before - 16 * MIB
    assert lms.stats()["device_bytes"] <= before - 16 * MIB
    with pytest.raises(OutOfMemoryError, match="can't leave"):
        lms.limit = "8MiB"
    assert lms.limit == before - 16 * MIB
    lms.limit = "1GiB"
    loss.backward()
    assert torch.equal(given.grad, given.detach().exp())


def test_what_an_earlier_lms_left_makes_room_for_a_new_limit(lms):
    lms.enable(limit="1GiB", min_size=SMALL)
    given = torch.randn(4 * MIB, requires_grad=True)  # 16 MiB
    loss = (given * 1.0).exp().sum()  # 16 MiB more
    lms.disable()
    held = lms.stats()["device_bytes"]
    lms.enable(limit=held - 16 * MIB, min_size=SMALL)
    assert lms.stats()["host_bytes"] == 16 * MIB
    lms.limit = "1GiB"
    loss.backward()
    assert torch.equal(given.grad, given.detach().exp())


def test_beside_regions_and_pauses(lms, saver, tag):
    lms.enable(limit="1GiB", min_size=SMALL)
    with saver.region(tag):
        inside = torch.full((64 * 1024,), 3.0, requires_grad=True)
    assert _core.find(inside.data_ptr()).tag == tag
    assert _core.find(torch.ones(1000).data_ptr()).tag == "lms"
    loss = (inside * 1.0).exp().sum()
    evict_all()
    saver.pause(tag)
    saver.resume(tag)
    loss.backward()
    torch.testing.assert_close(inside.grad, inside.detach().exp())
    with pytest.raises(StateError, match="lms"):
        saver.pause()
    lms.disable()
    saver.pause()
    saver.resume()
    assert float(inside.detach().sum()) == 3 * 64 * 1024


def test_the_report_says_what_left(lms):
    assert "is off" in lms.report() or "never wanted" in lms.report() or "came back" in lms.report()
    lms.enable(limit="1GiB", min_size=SMALL)
    assert "Nothing had to leave" in lms.report()
    given = torch.randn(256 * 1024, requires_grad=True)
    loss = (given * 1.0).exp().sum()
    evict_all()
    loss.backward()
    text = lms.report()
    assert "What left came back" in text and "1.0 MiB, 1.0 MiB" in text and "limit" in text
    assert all(len(line) <= 120 for line in text.splitlines())


@pytest.mark.parametrize("name", ["state_host_bytes", "weight_host_bytes", "state_evicted_bytes"])
def test_the_report_knows_of_what_lives_long(lms, monkeypatch, name):
    numbers = {**lms.stats(), name: MIB}
    monkeypatch.setattr(control, "is_enabled", lambda: True)
    monkeypatch.setattr(sys.modules["ebbtide.lms.report"], "stats", lambda: numbers)
    assert "Nothing had to leave" not in lms.report()
    numbers["slow_reads"] = 3
    assert ("used on the host" in lms.report()) == (name != "state_evicted_bytes")


def test_everything_is_a_no_op_where_ebbtide_is_off(run_python):
    result = run_python(
        """
        import ebbtide, torch
        with ebbtide.lms.enable(limit="1MiB", plan="no folder/plan.json"):
            x = torch.nn.Parameter(torch.randn(2**20))
            optimizer = torch.optim.SGD([x], 0.1)
            ebbtide.lms.step_in_backward(optimizer)
            (x * 1.0).exp().sum().backward()
            assert ebbtide.lms.stats()["evictions"] == 0 and not ebbtide.lms.enabled
        print(ebbtide.lms.report())
        ebbtide.lms.plot("no folder/step.png")
        ebbtide.lms.save_plan("no folder/plan.json")
        """,
        EBBTIDE_DRIVER="off",
    )
    assert result.returncode == 0, result.stderr


def test_ibm_names(lms, monkeypatch):
    from ebbtide.compat import ibm_lms

    had_stats = torch.cuda.memory_stats
    ibm_lms.install()
    ibm_lms.install()
    try:
        plain = train()
        torch.cuda.set_limit_lms(0)
        torch.cuda.set_size_lms(4096)
        torch.cuda.set_enabled_lms(True)
        assert torch.cuda.get_enabled_lms() and torch.cuda.get_limit_lms() == 0 and torch.cuda.get_size_lms() == 4096
        assert train() == plain
        counters = torch.cuda.memory_stats()
        assert counters["reclaimed"] > 0
        sources = ("freelist", "cudamalloc", "reclaim_one", "reclaim_fragments", "reclaim_all", "cudamalloc_retry")
        assert all(counters[f"alloc_distribution.{source}"] >= 0 for source in sources)
        torch.cuda.set_limit_lms(512 * MIB)
        given = torch.randn(256 * 1024, requires_grad=True)
        loss = (given * 1.0).exp().sum()
        before = torch.cuda.memory_stats()["reclaimed_bytes"]
        torch.cuda.reclaim_inactive()
        assert torch.cuda.memory_stats()["reclaimed_bytes"] == before + MIB
        loss.backward()
        torch.cuda.set_enabled_lms(False)
        assert not torch.cuda.get_enabled_lms()
    finally:
        ibm_lms.uninstall()
    assert torch.cuda.memory_stats is had_stats and not hasattr(torch.cuda, "set_limit_lms")


@pytest.mark.parametrize(
    ("option", "wrong"), [("recompute", 1.5), ("recompute", "yes"), ("evict", "auto"), ("evict", 1)]
)
def test_another_word_for_a_rule_is_refused(lms, option, wrong):
    words = {"recompute": "'auto', False,", "evict": "True, False,"}
    for given in (wrong, None):
        with pytest.raises(TypeError, match=f"{option} must be {words[option]} or a function"):
            lms.enable(limit="1GiB", **{option: given})
        assert not lms.enabled


def test_recomputing_is_the_default():
    """The fixture of these tests leaves it out."""
    assert inspect.signature(control.enable).parameters["recompute"].default == "auto"
