"""The order of copies and kernels of a step in pieces, on a model of CUDA's streams."""

import random

import pytest

torch = pytest.importorskip("torch")

from cuda_streams import Cuda, Stream  # noqa: E402
from ebbtide.lms.streaming import host_ranges, optimizer_step, step_copies  # noqa: E402


class Device:
    @staticmethod
    def optional(make):
        return make()

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


def step_on(cuda, monkeypatch):
    plain = torch.optim.SGD.step

    def step(optimizer):
        if not optimizer.state:
            plain(optimizer)
            return
        tensors = [state["momentum_buffer"] for state in optimizer.state.values()]
        tensors += [each for parameter in optimizer.param_groups[0]["params"] for each in (parameter, parameter.grad)]
        hosted = sorted((each.data_ptr(), each.data_ptr() + each.nbytes) for each in tensors[:-2])
        ranges = host_ranges.HostRanges(hosted)
        assert optimizer_step.run(lambda view: cuda.main.run(plain, view), optimizer, Device(), ranges)
        Stream.drain()

    return step


def is_right(seed, monkeypatch):
    chooser = random.Random(seed)
    monkeypatch.setattr(optimizer_step, "make_lanes", step_copies._CudaLanes)
    plain = train(lambda optimizer: optimizer.step())
    cuda = Cuda(monkeypatch, chooser)
    found = train(step_on(cuda, monkeypatch))
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
