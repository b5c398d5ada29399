"""torch's expandable segments, which LMS switches on where they can be had, beside what they exclude before torch 2.13:
regions and captures."""

import pytest

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.device_memory

SEGMENTS = """
    def kind_of(tensor):
        address = tensor.data_ptr()
        for segment in torch.cuda.memory_snapshot():
            if segment["address"] <= address < segment["address"] + segment["total_size"]:
                return "expandable" if segment["is_expandable"] else "ordinary"

    def make():
        return torch.empty(32 * MIB, dtype=torch.uint8, device="cuda")
"""


def test_they_are_on_while_lms_is_and_off_in_regions_and_captures(trial):
    trial(
        SEGMENTS
        + """
    before = make()
    assert kind_of(before) == "ordinary"
    with lms.enable(limit="4GiB"):
        inside = make()
        assert kind_of(inside) == "expandable"
        with saver.region("weights"):
            kept = make().fill_(7)
            with saver.region("others"):
                other = make().fill_(8)
            later = make().fill_(9)
        after = make()
        assert kind_of(after) == "expandable"
        assert saver.tags()["weights"].size_bytes >= 64 * MIB
        saver.pause("weights", "others")
        saver.resume("weights", "others")
        assert [tensor[-1].item() for tensor in (kept, other, later)] == [7, 8, 9]
        graph = torch.cuda.CUDAGraph()
        static = torch.ones(1024, device="cuda")
        with torch.cuda.graph(graph):
            doubled = static * 2
        graph.replay()
        assert doubled.sum().item() == 2048
        with saver.cuda_graph(torch.cuda.CUDAGraph(), tag="graphs"):
            static * 3
        assert kind_of(make()) == "expandable"
    assert kind_of(make()) == "ordinary"
    """
    )


def test_a_program_that_says_no_gets_none(trial):
    trial(
        SEGMENTS.replace("    def kind_of", "    import os\n    def kind_of", 1)
        + """
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:False"
    with lms.enable(limit="4GiB"):
        assert kind_of(make()) == "ordinary"
    """
    )


def test_blocks_of_many_sizes_hold_the_limit(trial):
    """Free memory that lies in pieces goes back in pages: what is short leaves, and no more."""
    trial("""
    torch.manual_seed(0)

    def block(width):
        return torch.nn.Sequential(torch.nn.Linear(1024, width), torch.nn.GELU(), torch.nn.Linear(width, 1024))

    model = torch.nn.Sequential(*(block(3000 + 16 * number) for number in range(12))).cuda()

    def train(steps):
        losses = []
        for step in range(steps):
            torch.manual_seed(step)
            loss = model(torch.randn(16384, 1024, device="cuda")).pow(2).mean()
            loss.backward()
            model.zero_grad()
            losses.append(loss.item())
        return losses

    plain = train(6)
    needed = torch.cuda.max_memory_allocated()
    torch.cuda.empty_cache()
    limit = int(0.7 * needed)
    with lms.enable(limit=limit, min_size=SMALL), HeldByDriver() as held:
        assert train(6) == plain
        numbers = lms.stats()
        before = lms.stats()
        assert train(1) == plain[:1]
        moved = lms.stats()["evicted_bytes"] - before["evicted_bytes"]
    assert held.most_bytes <= 1.02 * limit, (held.most_bytes, limit)
    assert numbers["margin_bytes"] <= 0.1 * limit, numbers
    assert 0 < moved <= 1.35 * (needed - limit), (moved, needed - limit)
    """)


def test_steps_that_evict_nothing_flush_no_more_once_they_are_known(trial):
    """A step that evicts on demand leaves what is in use in islands: others flush until all is given back once."""
    trial("""
    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.body = torch.nn.Sequential(torch.nn.Linear(1024, 4096), torch.nn.GELU(), torch.nn.Linear(4096, 1024))

        def forward(self, given):
            return given + self.body(given)

    def train(steps):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(Block() for _ in range(12))).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
        losses, flushes = [], []
        for _ in range(steps):
            before = torch.cuda.memory_stats()["num_alloc_retries"]
            optimizer.zero_grad()
            loss = model(torch.randn(16384, 1024, device="cuda")).pow(2).mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            flushes.append(torch.cuda.memory_stats()["num_alloc_retries"] - before)
        return losses, flushes

    torch.cuda.reset_peak_memory_stats()
    plain, _ = train(4)
    needed = torch.cuda.max_memory_reserved()
    torch.cuda.empty_cache()
    with lms.enable(limit=int(0.7 * needed), min_size=SMALL):
        losses, flushes = train(32)
        report = lms.report()
    assert losses[:4] == plain, (losses, plain)
    assert sum(flushes[:4]) > 0, flushes
    assert flushes[-8:] == [0] * 8, (flushes, report)
    """)
