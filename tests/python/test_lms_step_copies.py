"""The order of copies and kernels in a step that runs in pieces, on a model of CUDA's streams.

The model runs what is queued in any order that streams and events allow. So a wait that is missing shows as a result
that is wrong for some order, without a GPU.
"""

import contextlib
import random
from typing import ClassVar

import pytest

torch = pytest.importorskip("torch")

from ebbtide.lms.streaming import host_ranges, optimizer_step, step_copies  # noqa: E402


class Event:
    def __init__(self):
        self.recorded = self.reached = 0

    def record(self, stream):
        self.recorded += 1
        stream.queue.append(lambda turn=self.recorded: self.reach(turn))

    def reach(self, turn):
        self.reached = turn
        return True


class Stream:
    every: ClassVar[list] = []

    def __init__(self, device=None):
        self.queue = []
        Stream.every.append(self)

    def wait_event(self, event):
        self.queue.append(lambda turn=event.recorded: event.reached >= turn)

    def wait_stream(self, other):
        event = Event()
        event.record(other)
        self.wait_event(event)

    def run(self, function, *arguments):
        self.queue.append(lambda: function(*arguments) or True)


class Cuda:
    """What a step uses of torch.cuda, and which stream is current."""

    def __init__(self, monkeypatch):
        Stream.every = []
        self.main = self.current = Stream()
        for name, value in {
            "Stream": Stream,
            "Event": Event,
            "stream": self.enter,
            "current_stream": lambda device=None: self.current,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
        monkeypatch.setattr(step_copies, "_streams", {})
        copy = step_copies.copy
        monkeypatch.setattr(step_copies, "copy", lambda *tensors: self.current.run(copy, *tensors))
        monkeypatch.setattr(optimizer_step, "make_lanes", step_copies._CudaLanes)

    @contextlib.contextmanager
    def enter(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before

    def drain(self, chooser):
        while waiting := [stream for stream in Stream.every if stream.queue]:
            chooser.shuffle(waiting)
            for stream in waiting:
                if stream.queue[0]():
                    stream.queue.pop(0)
                    break
            else:
                raise AssertionError("every stream waits")


class Device:
    @staticmethod
    def ordinary():
        return contextlib.nullcontext()

    @staticmethod
    def allowed_bytes():
        return 0  # the smallest slots


def train(make_step):
    """Three steps of SGD over several chunks of 1 MiB, which has no counters."""
    torch.manual_seed(5)
    parameters = [torch.nn.Parameter(torch.randn(size)) for size in (100_000, 700_000, 300, 260_000)]
    optimizer = torch.optim.SGD(parameters, 0.1, momentum=0.9)
    for _ in range(3):
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        make_step(optimizer)
    return parameters, [state["momentum_buffer"] for state in optimizer.state.values()]


def step_on(cuda, chooser, monkeypatch):
    plain = torch.optim.SGD.step

    def step(optimizer):
        if not optimizer.state:
            plain(optimizer)
            return
        tensors = [state["momentum_buffer"] for state in optimizer.state.values()]
        tensors += [each for parameter in optimizer.param_groups[0]["params"] for each in (parameter, parameter.grad)]
        hosted = sorted((each.data_ptr(), each.data_ptr() + each.nbytes) for each in tensors[:-2])
        monkeypatch.setattr(host_ranges.HostRanges, "now", classmethod(lambda kind: kind(hosted)))
        assert optimizer_step.run(lambda view: cuda.main.run(plain, view), optimizer, Device())
        cuda.drain(chooser)

    return step


def is_right(seed, monkeypatch):
    chooser = random.Random(seed)
    plain = train(lambda optimizer: optimizer.step())
    cuda = Cuda(monkeypatch)
    found = train(step_on(cuda, chooser, monkeypatch))
    (*_, states), (*_, of_pieces) = plain, found
    return all(map(torch.equal, plain[0], found[0])) and all(map(torch.equal, states, of_pieces))


@pytest.mark.parametrize("seed", range(15))
def test_any_order_that_the_streams_allow_is_right(seed, monkeypatch):
    assert is_right(seed, monkeypatch)


@pytest.mark.parametrize("forgotten", ["arrival", "departure", "slot"])
def test_a_wait_that_is_missing_shows(forgotten, monkeypatch):
    lanes = step_copies._CudaLanes
    if forgotten == "arrival":
        monkeypatch.setattr(lanes, "await_copy_in", lambda *_: None)
    number = {"arrival": None, "slot": 1, "departure": 2}[forgotten]  # the streams for copies in, and out
    wait_event = Stream.wait_event

    def forget(stream, event):
        if number is None or stream is not Stream.every[number]:
            wait_event(stream, event)

    monkeypatch.setattr(Stream, "wait_event", forget)
    assert not all(is_right(seed, monkeypatch) for seed in range(10))
