"""Random pauses, resumes, swaps, preparations and trims over all stores, against a digest of each tensor.

On the simulated device with small tensors, on a GPU with large ones: `Cycles(...).run(count)`.
"""

import gc
import random

import torch
from ebbtide import _core, saver

KIB = 1 << 10
SECOND_EVERY = 4  # a tag's second policy is for few of its tensors, because disks are slow
TABLE_BYTES = 1 << 20  # lists for the kernels grow with the largest pause so far, and stay with their ring

# The policy of each tag's tensors: (backup, retain).
POLICIES = (
    (("ram", False), ("disk", False)),
    (("ram", True), ("disk", True)),
    (("pinned", False), (None, False)),
    (("pinned", True), ("ram", False)),
)


class Held:
    """A tensor and the digest of its content; `backup` is that of its region."""

    def __init__(self, tensor, backup):
        self.tensor = tensor
        self.backup = backup
        self.address = tensor.data_ptr()
        self.digest = 0


class Cycles:
    """Four tags with tensors of least to most KiB. Raises AssertionError where a byte has changed."""

    def __init__(self, seed, tensor_count, least_kib, most_kib, prefix="cycles"):
        self.random = random.Random(seed)
        self.device = saver.device
        self.torch_random = torch.Generator(device=self.device).manual_seed(seed)
        # Odd: then each bit of a tensor changes its digest, and so does each change of places.
        weights = torch.randint(-(2**62), 2**62, (most_kib * KIB // 8,), generator=torch.Generator().manual_seed(seed))
        self.weights = (weights * 2 + 1).to(self.device)
        self.tags = {f"{prefix}-{number}": [] for number in range(len(POLICIES))}
        self.policies = dict(zip(self.tags, POLICIES, strict=True))
        self.scratch_bytes = most_kib * KIB
        self.pending = []
        self.preparations = []
        self.done = dict.fromkeys(("pause", "resume", "resume_async", "swap", "prepare", "trim"), 0)
        for tag, held in self.tags.items():
            for number in range(tensor_count):
                backup, retain = self.policies[tag][number % SECOND_EVERY == 0]
                largest_kib = self.random.choice((most_kib, most_kib // 4))
                size = self.random.randrange(least_kib * KIB, largest_kib * KIB, 8)
                with saver.region(tag, backup=backup, retain=retain):
                    tensor = torch.empty(size, dtype=torch.uint8, device=self.device)
                held.append(Held(tensor, backup))
                self.refill(held[-1])

    # --- content ---

    def noise(self, tensor):
        tensor.random_(0, 256, generator=self.torch_random)

    def nans(self, tensor):
        self.noise(tensor)
        tensor[: tensor.numel() // 4 * 4].view(torch.int32).bitwise_or_(0x7FC00000)

    def all_but_the_last_byte(self, tensor):
        tensor.fill_(self.random.randrange(256))
        tensor[-1:] ^= 1

    def refill(self, held):
        """New content for all of it."""
        fill = self.random.choice([self.noise, self.noise, self.nans, self.all_but_the_last_byte, torch.Tensor.zero_])
        fill(held.tensor)
        held.digest = self.digest(held.tensor)

    def change(self, held):
        """New content for some of it: one bit, a part, or all."""
        tensor, size = held.tensor, held.tensor.numel()
        kind = self.random.randrange(4)
        if kind == 0:
            self.refill(held)
            return
        position = self.random.choice([0, size - 1, self.random.randrange(size), min(size, 2 << 20) - 1])
        if kind == 1:
            tensor[position : position + 1] ^= 1 << self.random.randrange(8)
        elif kind == 2:
            self.noise(tensor[position : position + self.random.randrange(1, size + 1)])
        else:
            tensor[position:].fill_(self.random.randrange(256))
        held.digest = self.digest(tensor)

    def digest(self, tensor):
        words = tensor.view(torch.int64)
        return int((words * self.weights[: words.numel()]).sum())

    def check(self, tags):
        for tag in tags:
            for held in self.tags[tag]:
                assert held.tensor.data_ptr() == held.address
                assert self.digest(held.tensor) == held.digest, (tag, held.backup, held.tensor.numel(), self.done)

    # --- operations ---

    def some(self, tags):
        """At least one of the tags."""
        return self.random.sample(tags, self.random.randrange(1, len(tags) + 1))

    def resident(self):
        return [tag for tag in self.tags if not saver.is_paused(tag)]

    def away(self):
        return [tag for tag in self.tags if saver.is_paused(tag)]

    def drop(self, tags, once):
        """The model of a pause: memory without a backup is zeros."""
        for tag in tags:
            for held in self.tags[tag]:
                kind = once["backup"] if once else held.backup
                held.digest = 0 if kind is None else held.digest

    def once(self):
        kind = self.random.choice(["", "", "", "ram", "pinned", "disk", None])
        return {} if kind == "" else {"backup": kind}

    def pause(self, tags):
        once = self.once()
        report = saver.pause(*tags, **once)
        assert report.skipped == report.clean + report.unused + report.constant
        self.drop(tags, once)
        self.done["pause"] += 1

    def swap(self, leaving, returning):
        once = self.once()
        saver.swap(pause=leaving, resume=returning, retain=self.random.choice([None, True, False]), **once)
        self.drop(leaving, once)
        self.done["swap"] += 1
        self.check(returning)

    def resume(self, tags):
        order = None
        if self.random.random() < 0.5:
            order = [self.random.choice(self.tags[tag]).tensor for tag in self.some(tags)]
        retain = self.random.choice([None, True, False])
        if self.random.random() < 0.5:
            saver.resume(*tags, order=order, retain=retain)
            self.done["resume"] += 1
        else:
            hold_stream = self.random.random() < 0.5
            going = saver.resume(*tags, wait=False, order=order, retain=retain, hold_stream=hold_stream)
            if not hold_stream:
                going.stream_wait()
            self.pending.append(going)
            self.done["resume_async"] += 1
        self.check(tags)

    def settle(self):
        """Waits for running operations."""
        for one in (*self.pending, *self.preparations):
            one.wait()
        self.pending.clear()
        self.preparations.clear()

    def scratch(self, tag):
        """Memory that torch keeps as free blocks: a pause calls it unused, and trim gives it back."""
        backup, retain = self.policies[tag][0]
        with saver.region(tag, backup=backup, retain=retain):
            tensor = torch.empty(self.scratch_bytes, dtype=torch.uint8, device=self.device)
            tensor.fill_(1)
        if self.device == "cuda":
            torch.cuda.synchronize()

    def step(self):
        resident = self.resident()
        for tag in resident:
            for held in self.random.sample(self.tags[tag], self.random.randrange(len(self.tags[tag]))):
                self.change(held)
        if self.random.random() < 0.5:
            self.settle()
            for tag in self.some(resident) if resident else ():
                self.scratch(tag)
        if self.random.random() < 0.4:
            saver.trim(*self.some(list(self.tags)))
            self.done["trim"] += 1
        if self.random.random() < 0.3:
            wait = self.random.random() < 0.5
            prepared = saver.prepare(*self.some(list(self.tags)), wait=wait)
            self.preparations += [] if wait else [prepared]
            self.done["prepare"] += 1
        resident, away = self.resident(), self.away()
        if resident and away and self.random.random() < 0.5:
            self.swap(self.some(resident), self.some(away))
        elif resident:
            self.pause(self.some(resident))
        away = self.away()
        if away and self.random.random() < 0.7:
            self.resume(self.some(away))
        self.check(self.resident())

    def rest(self):
        """All resident, nothing retained, every trimmed segment back: the held memory does not depend on the past."""
        self.settle()
        saver.resume(*self.tags)
        self.check(self.tags)
        before = saver.tags()
        saver.pause(*self.tags)
        self.drop(self.tags, {})
        saver.resume(*self.tags, retain=False)
        for tag in self.tags:
            assert saver.tags()[tag].size_bytes == before[tag].size_bytes
            self.scratch(tag)
        self.check(self.tags)
        gc.collect()

    def held(self):
        """Bytes that are held at rest, but for the pinned rings, of which as many are kept as were needed at once."""
        stats = saver.stats()
        names = ("device_bytes", "stored_bytes", "allocation_count", "pools_made", "deferred_undos")
        kept = {name: stats[name] for name in names}
        kept["retained_bytes"] = sum(status.retained_bytes for status in saver.tags().values())
        kept["device_held_bytes"] = _core.query_device(0).held_bytes
        kept["host_bytes"] = stats["host_held_bytes"] - stats["staging_bytes"]
        kept["pinned_bytes"] = stats["pinned_bytes"] - stats["staging_bytes"]
        return kept

    def run(self, count):
        self.rest()
        before = self.held()
        for _ in range(count):
            self.step()
        self.rest()
        after = self.held()
        for name, size in before.items():
            tolerated = TABLE_BYTES if name in ("host_bytes", "pinned_bytes") else 0
            assert abs(after[name] - size) <= tolerated, (name, before, after)
