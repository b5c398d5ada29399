"""A model of CUDA's streams, for tests of the order of copies and kernels.

It runs queued work in any order that streams and events allow. So a wait that is missing shows as a result that is
wrong for some order, without a GPU.
"""

import contextlib
from typing import ClassVar

import torch
from ebbtide.lms.streaming import step_copies


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
    chooser = None

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
        self.queue.append(lambda: (function(*arguments), True)[1])

    @classmethod
    def drain(cls):
        while waiting := [stream for stream in cls.every if stream.queue]:
            cls.chooser.shuffle(waiting)
            for stream in waiting:
                if stream.queue[0]():
                    stream.queue.pop(0)
                    break
            else:
                raise AssertionError("every stream waits")


class Cuda:
    """The part of torch.cuda that a step uses, and the current stream."""

    def __init__(self, monkeypatch, chooser):
        Stream.every, Stream.chooser = [], chooser
        self.main = self.current = Stream()
        for name, value in {
            "Stream": Stream,
            "Event": Event,
            "stream": self.enter,
            "current_stream": lambda device=None: self.current,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(step_copies, "_streams", {})
        monkeypatch.setattr(step_copies, "copy", self.copy)

    @contextlib.contextmanager
    def enter(self, stream):
        before, self.current = self.current, stream or self.current
        yield
        self.current = before

    def copy(self, to, source):
        self.current.run(to.copy_, source)
