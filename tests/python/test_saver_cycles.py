"""Random cycles over all stores with small tensors. tests/gpu runs the same with large ones."""

import pytest

pytest.importorskip("torch")


@pytest.mark.parametrize("seed", [1, 2])
def test_invariant_2_random_cycles_over_all_stores(saver, tag, seed):
    from checks.cycles import Cycles

    cycles = Cycles(seed, tensor_count=6, least_kib=64, most_kib=3 << 10, prefix=tag)
    cycles.run(12)
    assert cycles.done["pause"] + cycles.done["swap"] >= 8
    assert cycles.done["resume"] + cycles.done["resume_async"] >= 3
