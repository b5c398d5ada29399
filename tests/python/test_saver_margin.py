"""saver.configure(device_margin=): free device memory that allocations leave to others."""

import pytest

torch = pytest.importorskip("torch")

MIB = 1 << 20


def block(saver, tag, mib, value=1.0, **options):
    with saver.region(tag, **options):
        return torch.full((mib * MIB // 4,), value, device=saver.device)


def test_a_margin_refuses_allocations_and_no_resume(saver, tag):
    keep = block(saver, tag, 16)
    saver.pause(tag)
    saver.configure(device_margin="1TiB")
    try:
        with saver.region(f"{tag}-other"), pytest.raises(torch.OutOfMemoryError):
            torch.empty(12 * MIB, dtype=torch.uint8, device=saver.device)
        events = [event for event in saver.timeline if event.kind == "out_of_memory" and event.tags == f"{tag}-other"]
        assert "of which device_margin keeps 1 TiB (configured)" in events[-1].detail
        assert "(overflow: split)" in events[-1].detail
        with saver.region(f"{tag}-spills", overflow="split"):
            spilled = torch.ones(32 * MIB, dtype=torch.uint8, device=saver.device)
        assert saver.tags()[f"{tag}-spills"].host_bytes == 32 * MIB
        saver.resume(tag)
    finally:
        saver.configure(device_margin=0)
    with saver.region(f"{tag}-other"):
        fits = torch.empty(12 * MIB, dtype=torch.uint8, device=saver.device)
    assert float(keep.sum()) == 4 * MIB and int(spilled.sum()) == 32 * MIB and fits.numel()
    with pytest.raises(TypeError, match="None"):
        saver.configure(device_margin=None)
