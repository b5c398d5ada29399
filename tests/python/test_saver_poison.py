"""saver.configure(poison=True): memory whose content was dropped comes back as a pattern."""

import pytest

torch = pytest.importorskip("torch")

MIB = 1 << 20
BYTE = 0xEB
TWO_CYCLES = """
import torch
from ebbtide import saver
with saver.region("kv", backup=None):
    cache = torch.ones(1 << 20, dtype=torch.uint8, device=saver.device)
for poison in (None, False):
    if poison is not None:
        saver.configure(poison=poison)
    saver.pause("kv")
    saver.resume("kv")
    print(int(cache[0]), int(cache[-1]))
"""


@pytest.fixture
def poison(saver):
    saver.configure(poison=True)
    yield saver
    saver.configure(poison=False)


def full(saver, tag, mib, value, **options):
    with saver.region(tag, **options):
        return torch.full((mib * MIB,), value, dtype=torch.uint8, device=saver.device)


def is_all(tensor, value):
    return bool((tensor == value).all())


def test_dropped_memory_comes_back_as_a_pattern(poison, tag, tag2):
    cache, weights = full(poison, tag, 4, 1, backup=None), full(poison, tag2, 4, 2)
    poison.pause(tag, tag2)
    poison.resume(tag, tag2)
    assert is_all(cache, BYTE) and is_all(weights, 2)
    poison.pause({tag: "ram", tag2: None})
    poison.resume(tag, tag2)
    assert is_all(cache, BYTE) and is_all(weights, BYTE)
    floats = weights.view(torch.float32)
    assert float(floats[0]) < -1e26  # far from anything that a program computes with


@pytest.mark.parametrize("way", ["wait", "swap", "paused"])
def test_whichever_way_it_comes_back(poison, tag, tag2, way):
    cache, other = full(poison, tag, 4, 1, backup=None), full(poison, tag2, 4, 2)
    if way == "paused":
        with poison.paused(tag):
            pass
    else:
        poison.pause(tag)
        if way == "wait":
            poison.resume(tag, wait=False).wait()
        else:
            poison.swap(pause=tag2, resume=tag)
            poison.resume(tag2)
    assert is_all(cache, BYTE) and is_all(other, 2)


def test_free_blocks_that_a_pause_skips(poison, tag):
    keep, gone = full(poison, tag, 12, 1), full(poison, tag, 32, 2)
    address = gone.data_ptr()
    del gone
    assert poison.pause(tag).unused == 32 * MIB
    poison.resume(tag)
    with poison.region(tag):
        again = torch.empty(32 * MIB, dtype=torch.uint8, device=poison.device)
    assert again.data_ptr() == address
    assert is_all(again, BYTE) and is_all(keep, 1)


def test_from_the_environment_and_off_again(run_python):
    assert run_python(TWO_CYCLES, EBBTIDE_POISON="1").stdout == "235 235\n0 0\n"
