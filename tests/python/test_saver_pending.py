"""saver.resume(wait=False) and its Pending, on the simulated device and against a model of the core's Pending."""

import gc
import pickle
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from ebbtide import _core  # noqa: E402
from ebbtide.errors import DriverError, OutOfMemoryError, StateError  # noqa: E402
from ebbtide.saver.operations import hooked_operation, pending  # noqa: E402
from ebbtide.saver.operations.pending import Pending  # noqa: E402
from ebbtide.saver.tensors.ranges import range_of, ranges_of  # noqa: E402
from random_memory import random_bytes  # noqa: E402

MIB = 1 << 20


def noise(saver, tag, mib, **options):
    with saver.region(tag, **options):
        return random_bytes(mib * MIB, saver.device)


def test_the_same_bytes_and_the_report_each_time(saver, tag):
    data = noise(saver, tag, 16)
    want = data.cpu().clone()
    saver.pause(tag)
    with saver.resume(tag, wait=False, order=[data]) as going:
        assert isinstance(going, saver.Pending)
    assert going.done
    assert going.ready(data) and going.ready(torch.ones(3))
    report = going.wait()
    assert (report.kind, report.bytes, report.by_tag) == ("resume", 16 * MIB, {tag: 16 * MIB})
    assert going.wait() == report
    going.stream_wait()
    going.stream_wait(tensors=data)
    assert torch.equal(data.cpu(), want)
    assert "over" in repr(going)


@pytest.mark.sim_only
def test_on_the_simulated_device_it_is_over_at_once(saver, tag):
    data = noise(saver, tag, 16)
    want = data.clone()
    saver.pause(tag)
    saver.resume(tag, wait=False, hold_stream=False)
    assert torch.equal(data, want)
    assert not saver.is_paused(tag)


def test_nothing_to_do(saver, tag):
    with saver.region(tag):
        pass
    going = saver.resume(tag, wait=False)
    assert going.wait().bytes == 0
    assert saver.resume(f"{tag}-unknown", wait=False, missing_ok=True).wait().bytes == 0


def test_one_that_is_dropped_goes_on(saver, tag):
    data = noise(saver, tag, 16)
    want = data.cpu().clone()
    for _ in range(3):
        saver.pause(tag)
        saver.resume(tag, wait=False)
        gc.collect()
    saver.pause(tag)
    saver.resume(tag)
    assert torch.equal(data.cpu(), want)


def test_what_is_refused_is_refused_at_once(saver, tag):
    data = noise(saver, tag, 16)
    saver.pause(tag)
    with pytest.raises(StateError, match="no region"):
        saver.resume(f"{tag}-unknown", wait=False)
    for order in (1, "weights", [data, None]):
        with pytest.raises(TypeError, match=r"resume\(order=\)"):
            saver.resume(tag, wait=False, order=order)
    with pytest.raises(ValueError, match="timeout"):
        saver.resume(tag, wait=False, timeout=-1)
    saver.configure(device_limit=1)
    with pytest.raises(OutOfMemoryError):
        saver.resume(tag, wait=False, timeout=0.05)
    saver.configure(device_limit=None)
    assert saver.is_paused(tag)
    assert saver.resume(tag, wait=False).wait().bytes == 16 * MIB


@pytest.mark.sim_only
def test_a_failure_on_the_way_is_raised_by_every_wait(run_python, root):
    result = run_python(
        f"""
        import sys; sys.path.insert(0, {str(root / "tests/python")!r})
        import torch
        from core_sim import UNKNOWN, Sim
        from ebbtide import saver
        from ebbtide.errors import DriverError
        with saver.region("w"):
            data = torch.randn(4 << 20, device=saver.device)
        want = data.clone()
        saver.pause("w")
        ran = []
        saver.on("after_resume", "w", ran.append)
        sim = Sim()
        sim.fail("cuStreamQuery", 1, UNKNOWN, 1000)
        going = saver.resume("w", wait=False)
        assert going.done
        for _ in range(2):
            try:
                going.wait()
            except DriverError as error:
                assert error.code == UNKNOWN
            else:
                raise AssertionError("no error")
        assert going.ready(data)
        try:
            with going:
                raise KeyError("mine")
        except KeyError:
            pass
        assert ran == []
        sim.clear_failures()
        with saver.resume("w", wait=False):
            pass
        assert torch.equal(data, want)
        assert ran == ["w"]
        """
    )
    said = "StreamQuery() failed"
    assert (result.returncode, result.stderr.count(said), result.stderr.count("\n")) == (0, 1, 1), result.stderr


def test_order_takes_tensors_and_modules_and_is_right(saver, tag):
    with saver.region(tag):
        model = torch.nn.Sequential(torch.nn.Linear(1100, 1100), torch.nn.BatchNorm1d(1100)).to(saver.device)
        extra = torch.randn(MIB, device=saver.device)
    want = {name: tensor.cpu().clone() for name, tensor in model.state_dict().items()}
    want_extra = extra.cpu().clone()
    taken = [model, extra, [extra, model], (model[1], model[0].weight), [], [torch.ones(4)], [torch.empty(0)]]
    for order in (*taken, saver.order([extra, model]), saver.order([])):
        for wait in (True, False):
            saver.pause(tag)
            saver.resume(tag, order=order, wait=wait)
            assert all(torch.equal(tensor.cpu(), want[name]) for name, tensor in model.state_dict().items())
            assert torch.equal(extra.cpu(), want_extra)


def test_ranges_are_in_the_order_of_the_forward_and_each_once():
    tied = torch.nn.Linear(4, 4, bias=False)
    model = torch.nn.Sequential(tied, torch.nn.BatchNorm1d(4), tied)
    model[0].weight.grad = torch.ones(4, 4)
    names = ["0.weight", "1.weight", "1.bias", "1.running_mean", "1.running_var", "1.num_batches_tracked"]
    state = model.state_dict(keep_vars=True)
    expected = [(0, (state[name].data_ptr(), state[name].nbytes)) for name in names]
    assert ranges_of(model, "test") == expected
    assert ranges_of([tied, model], "test") == expected
    base = torch.zeros(10, 10)
    assert range_of(base[2:4, 1:3]) == (base.data_ptr() + 4 * 21, 4 * 12)
    assert range_of(torch.ones(3, device="meta")) is None


def test_an_order_stands_for_its_tensors_and_is_made_once(saver, tag):
    data = noise(saver, tag, 4)
    model = torch.nn.Linear(4, 4)
    order = saver.order([model, data])
    assert ranges_of(order, "test") == tuple(ranges_of([model, data], "test"))
    assert repr(order) == "<saver.Order of 3 ranges>"
    assert ranges_of([data, order], "test") == ranges_of([data, model], "test")
    assert saver.order([order, order]).ranges == order.ranges
    with pytest.raises(TypeError, match="addresses of this process"):
        pickle.dumps(order)
    saver.adopt(data, tag=f"{tag}-other")  # it notes addresses: what moves needs a new one
    assert ranges_of(order, "test") != tuple(ranges_of([model, data], "test"))
    saver.pause(f"{tag}-other")
    saver.resume(f"{tag}-other", wait=False, order=order).wait()
    core = ModelCore()
    Pending(core).stream_wait(ModelStream(0, 7), saver.order(model))
    assert core.waits == [(0, 7, [one for _, one in ranges_of(model, "test")])]
    for wrong in (1, "weights", [order, 1], [model, None], None):
        with pytest.raises(TypeError, match="order takes tensors"):
            saver.order(wrong)


class ModelCore:
    """Acts as `_core.Pending`, under the control of the test."""

    def __init__(self, error=None):
        self.is_finished, self.error, self.waits, self.there = False, error, [], set()

    def is_over(self):
        return self.is_finished

    def is_ready(self, address, size_bytes):
        return self.is_finished or (address, size_bytes) in self.there

    def stream_wait(self, device, stream, ranges=()):
        self.waits.append((device, stream, list(ranges)))

    def wait(self):
        self.is_finished = True
        if self.error is not None:
            raise self.error
        return _core.resume(["model-of-pending"], True)


class ModelStream:
    def __init__(self, index, number):
        self.device = torch.device("cuda", index)
        self.cuda_stream = number


@pytest.fixture
def streams(saver, monkeypatch):
    assert saver.device
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: ModelStream(device, 100 + device))


def test_streams_wait_for_all_or_for_some(streams, monkeypatch):
    on_both = [SimpleNamespace(device=device) for device in (0, 1)]
    monkeypatch.setattr(pending, "allocations_of", lambda names: on_both)
    core, tensor = ModelCore(), torch.ones(8)
    reached = range_of(tensor)
    going = Pending(core)
    going.stream_wait()
    assert core.waits == [(0, 100, []), (1, 101, [])]
    core.waits.clear()
    going.stream_wait(ModelStream(1, 7))
    going.stream_wait(ModelStream(1, 7), [tensor, tensor])
    going.stream_wait(tensors=tensor)
    assert core.waits == [(1, 7, []), (1, 7, [reached]), (0, 100, [reached])]
    core.waits.clear()
    going.stream_wait(ModelStream(1, 7), [])  # an empty list means nothing, not everything
    going.stream_wait(ModelStream(1, 7), torch.empty(0))
    going.stream_wait(tensors=[])
    assert core.waits == []
    for bad in (1, [None], "w"):
        with pytest.raises(TypeError, match="stream_wait takes"):
            going.stream_wait(tensors=bad)
    core.is_finished = True
    going.stream_wait()
    assert core.waits == []


def test_ready_asks_for_the_tensors_bytes():
    core, tensor = ModelCore(), torch.ones(8)
    going = Pending(core)
    assert not going.ready(tensor) and not going.done
    assert "under way" in repr(going)
    core.there.add(range_of(tensor))
    assert going.ready(tensor) and not going.ready(tensor[1:])
    assert going.ready(torch.empty(0))
    with pytest.raises(TypeError, match="ready takes"):
        going.ready(3)


def test_attach_waits_for_each_layer_before_its_forward(streams):
    core = ModelCore()
    going = Pending(core)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    seen = []
    model[3].register_forward_pre_hook(lambda *_: seen.append(len(core.waits)))
    handle = going.attach(model)
    model(torch.ones(3, 4))
    assert [waited for _, _, waited in core.waits] == [
        [one for _, one in ranges_of(layer, "test")] for layer in (model[0], model[2], model[3])
    ]
    assert seen == [3]  # our hook ran first
    core.is_finished = True
    core.waits.clear()
    model(torch.ones(3, 4))
    assert core.waits == []
    assert all(len(part._forward_pre_hooks) == (part is model[3]) for part in model.modules())
    handle.remove()


def test_attach_can_be_undone_and_is_nothing_where_all_is_over(streams):
    core = ModelCore()
    going = Pending(core)
    layer = torch.nn.Linear(4, 4)
    handle = going.attach(layer)
    handle.remove()
    handle.remove()
    layer(torch.ones(1, 4))
    assert core.waits == []
    core.is_finished = True
    going.attach(layer)
    assert not layer._forward_pre_hooks
    with pytest.raises(TypeError, match="Module"):
        going.attach([layer])


def test_attach_knows_modules_that_read_what_is_inside_them(streams):
    core = ModelCore()
    attention = torch.nn.MultiheadAttention(8, 2)
    Pending(core).attach(torch.nn.Sequential(attention))
    attention(*[torch.ones(2, 1, 8)] * 3)
    waited = {one for _, _, ranges in core.waits for one in ranges}
    assert range_of(attention.out_proj.weight) in waited  # its forward is never called
    encoder = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
    core.waits.clear()
    Pending(core).attach(encoder)
    with torch.inference_mode():
        encoder(torch.ones(1, 2, 8))
    assert {one for _, one in ranges_of(encoder, "test")} <= {one for _, _, ranges in core.waits for one in ranges}


def test_a_forward_after_a_failed_resume_raises_its_error(streams):
    core = ModelCore(DriverError("planted", "cuMemcpyHtoDAsync", 999))
    layer = torch.nn.Linear(4, 4)
    Pending(core).attach(layer)
    core.is_finished = True
    with pytest.raises(DriverError, match="planted"):
        layer(torch.ones(1, 4))
    assert not layer._forward_pre_hooks


def test_hold_stream(streams, saver, tag, monkeypatch):
    data = noise(saver, tag, 4)
    monkeypatch.setattr(pending, "_has_streams", lambda: True)
    core = ModelCore()
    going = Pending()
    going._follow(core, [tag], hooked_operation.HookedOperation({}, False), hold_stream=True)
    assert core.waits == [(0, 100, [])]
    assert not going.done
    core = ModelCore()
    Pending()._follow(core, [tag], hooked_operation.HookedOperation({}, False), hold_stream=False)
    assert core.waits == []
    core = ModelCore(DriverError("planted"))
    monkeypatch.setattr(core, "stream_wait", lambda *_: (_ for _ in ()).throw(DriverError("no wait")))
    going = Pending()
    going._follow(core, [tag], hooked_operation.HookedOperation({}, False), hold_stream=True)
    assert going.done  # the stream cannot wait, so the thread did
    with pytest.raises(DriverError, match="planted"):
        going.wait()
    assert data.numel()


@pytest.mark.parametrize("ending", ["del going", "raise SystemExit(0)"])
def test_the_process_may_end_while_one_is_pending(run_python, ending):
    result = run_python(
        f"""
        import torch
        from ebbtide import saver
        with saver.region("w"):
            data = torch.empty(8 << 20, dtype=torch.int64, device=saver.device).random_()
        saver.pause("w")
        going = saver.resume("w", wait=False, hold_stream=False)
        {ending}
        """,
        whole_exit=True,
    )
    assert (result.returncode, result.stderr) == (0, "")


def test_off(run_python):
    result = run_python(
        """
        import torch
        from ebbtide import saver
        going = saver.resume("w", wait=False)
        assert going.done and going.wait().bytes == 0 and going.ready(torch.ones(1))
        going.stream_wait(); going.attach(torch.nn.Linear(1, 1)).remove()
        assert saver.swap(pause="a", resume="b").paused.bytes == 0
        assert saver.prepare("a").kind == "prepare" and saver.prepare("a", wait=False).wait().bytes == 0
        assert saver.trim().kind == "trim"
        saver.configure(pinned_limit="1GiB", skip_clean=False, disk_directory="/tmp")
        with saver.region("w", backup="disk", retain=True):
            torch.ones(1)
        """,
        EBBTIDE_DRIVER="off",
    )
    assert (result.returncode, result.stderr) == (0, "")
