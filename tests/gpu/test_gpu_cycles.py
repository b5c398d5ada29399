"""Fifty random cycles over all stores, with realistic sizes: the bytes are right, and no resource grows."""

from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.device_memory

TESTS = Path(__file__).resolve().parent.parent


def test_invariant_2_fifty_random_cycles_over_all_stores(program: Callable[..., str]) -> None:
    program(
        f"""
sys.path.insert(0, {str(TESTS)!r})
from checks.cycles import Cycles
torch.zeros(1, device="cuda")
cycles = Cycles(seed=4, tensor_count=20, least_kib=1024, most_kib=40 * 1024)
cycles.run(5)  # rings, tables and torch's cache have their size now
torch.cuda.empty_cache()
before = free()
cycles.run(50)
torch.cuda.empty_cache()
assert before - free() < 64 * MIB, (before, free())
assert all(cycles.done.values()), cycles.done
"""
    )
