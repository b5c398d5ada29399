"""Random programs on `ebbtide._core` against a plain model, on the simulator, with driver calls that fail.

EBBTIDE_WALK is the number of programs (`make walk`); by default they are the same few in each run.
"""

import itertools
import os

import pytest
from core_sim import CHUNK, MIB, OUT_OF_MEMORY, UNKNOWN, Block, Sim, content, fill, is_filled, set_limit
from ebbtide import _core
from ebbtide.errors import DriverError, OutOfMemoryError, StateError, StoreError
from ebbtide.saver.values.arguments import AS_ALLOCATED_CODE, NO_BACKUP_CODE, backup_code
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

pytestmark = pytest.mark.sim_only

_runs = itertools.count(1)
RING_BYTES = 16 * MIB  # at most: the ring of a copy of these sizes, and a ring that is about to be freed
LEAST_RING_BYTES, TABLE_BYTES = 4 * MIB, 64 << 10
TAGS = ("a", "b", "c")
SOME_TAGS = st.lists(st.sampled_from(TAGS), min_size=1, max_size=4)
ONE_TAG = st.sampled_from(TAGS)
RAM = backup_code("ram")
KINDS = st.sampled_from(["pause", "resume"])
VALUES = st.integers(min_value=1, max_value=255)
PICKS = st.integers(min_value=0, max_value=10**6)


class Core(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        _core.use_driver("sim")
        self.sim = Sim()
        self.prefix = f"core-property-{next(_runs)}-"
        self.blocks: list[Block] = []
        self.leases: dict[int, str] = {}
        self.frames: dict[int, _core.Frame] = {}
        self.epochs = dict.fromkeys(TAGS, 0)
        self.known: set[str] = set()
        self.device_limit = _core.UNLIMITED
        self.base_bytes = _core.query_device(0).held_bytes
        set_limit("host_margin", 0)

    def names(self, tags: list[str]) -> list[str]:
        return [self.prefix + tag for tag in tags]

    def of(self, tags: list[str]) -> list[Block]:
        return [block for block in self.blocks if block.tag in tags]

    def held(self) -> int:
        return self.base_bytes + sum(block.size for block in self.blocks if block.place == "device")

    def away(self, tags: list[str]) -> list[Block]:
        """What a resume brings back."""
        return [block for block in self.of(tags) if block.place != "device" and not block.is_trimmed]

    def release(self, block: Block) -> None:
        _core.free(block.address)
        self.blocks.remove(block)

    def pick(self, number: int, place: str | None = None) -> Block | None:
        found = [block for block in self.blocks if place is None or block.place == place]
        return found[number % len(found)] if found else None

    @rule(tag=ONE_TAG, size=st.sampled_from([1, CHUNK, 2 * CHUNK + 1]), backup=st.sampled_from([RAM, NO_BACKUP_CODE]))
    def allocate(self, tag: str, size: int, backup: int) -> None:
        rounded = (size + CHUNK - 1) // CHUNK * CHUNK
        self.known.add(tag)
        if self.held() + rounded > self.device_limit:
            with pytest.raises(OutOfMemoryError) as caught:
                _core.alloc(self.prefix + tag, size, backup=backup)
            assert (caught.value.requested_bytes, caught.value.limit_bytes) == (rounded, self.device_limit)
            return
        address = _core.alloc(self.prefix + tag, size, backup=backup)
        assert all(address + rounded <= b.address or b.address + b.size <= address for b in self.blocks)
        self.blocks.append(Block(address, tag, rounded, backup))

    @rule(number=PICKS, value=VALUES)
    def write(self, number: int, value: int) -> None:
        if block := self.pick(number, "device"):
            fill(block.address, block.size, value)
            block.value = value

    @rule(number=PICKS, value=st.none() | VALUES, writable=st.booleans())
    def look_at_a_backup(self, number: int, value: int | None, writable: bool) -> None:
        if block := self.pick(number, "stored"):
            backup = _core.backup_of(block.address, block.size, writable)
            assert bytes(memoryview(backup)) == content(block.size, block.value)
            block.was_seen = True
            if value is not None:
                fill(backup.address, block.size, value)
                block.value = value

    @rule(number=PICKS)
    def free(self, number: int) -> None:
        if block := self.pick(number):
            self.release(block)
            with pytest.raises(ValueError, match="freed before"):
                _core.free(block.address)

    @rule(tags=SOME_TAGS, override=st.sampled_from([AS_ALLOCATED_CODE, RAM, NO_BACKUP_CODE]))
    def pause(self, tags: list[str], override: int) -> None:
        if self.refuses_unknown("pause", tags) or self.refuses_leased(tags):
            return
        report = _core.pause(self.names(tags), backup=override)
        self.expect_report(report, self.leave(tags, override))

    @rule(tags=SOME_TAGS, waits=st.booleans(), freed=st.none() | PICKS)
    def resume(self, tags: list[str], waits: bool, freed: int | None) -> None:
        """In the background, every other block begins first, and one may be freed meanwhile."""
        if self.refuses_unknown("resume", tags):
            return
        names, blocks = self.names(tags), self.of(tags)
        order = [(block.address, CHUNK) for block in blocks[::2]]
        resume = (lambda: _core.resume(names)) if waits else (lambda: _core.resume_async(names, order=order))
        away = self.away(tags)
        if self.held() + sum(block.size for block in away) > self.device_limit and away:
            with pytest.raises(OutOfMemoryError):
                resume()
            return
        done = resume()
        if not waits and freed is not None and blocks:
            self.release(blocks[freed % len(blocks)])
        report, moved_and_copied = done if waits else done.wait(), self.come_back(tags)
        if waits or freed is None:
            self.expect_report(report, moved_and_copied)

    @rule(tags=SOME_TAGS, room=st.sampled_from([0, CHUNK, 3 * CHUNK]))
    def pause_with_little_host_memory(self, tags: list[str], room: int) -> None:
        if self.refuses_unknown("pause", tags) or self.refuses_leased(tags):
            return
        needed = sum(b.size for b in self.of(tags) if b.place == "device" and b.backup == RAM)
        set_limit("host_limit", _core.stats()["host_held_bytes"] + room)
        try:
            report = _core.pause(self.names(tags))
        except StoreError as error:
            assert needed + RING_BYTES > room
            if needed > room:
                assert (error.requested_bytes, error.free_bytes) == (needed, room)
            for tag in set(tags):
                self.epochs[tag] += 1  # the tag was claimed and released
        else:
            assert needed <= room
            moved, copied = self.leave(tags, AS_ALLOCATED_CODE)
            if "everything was copied" in report.note:
                assert room - needed < LEAST_RING_BYTES + TABLE_BYTES, "there was room for the tables of digests"
                copied = needed
            self.expect_report(report, (moved, copied))
        finally:
            set_limit("host_limit", _core.UNLIMITED)

    @rule(kind=KINDS, tags=SOME_TAGS, number=PICKS, abandons=st.booleans(), frees=st.booleans())
    def in_two_phases(self, kind: str, tags: list[str], number: int, abandons: bool, frees: bool) -> None:
        if self.refuses_unknown(kind, tags) or (kind == "pause" and self.refuses_leased(tags)):
            return
        try:
            operation = _core.claim(kind, self.names(tags))
        except OutOfMemoryError:
            assert kind == "resume"
            assert self.device_limit != _core.UNLIMITED
            return
        if kind == "pause":
            for tag in set(tags):
                self.epochs[tag] += 1
        held = self.of(tags)
        if frees and held:
            block = held[number % len(held)]  # the operation dooms a block that it holds; another is freed at once
            self.release(block)
            assert _core.find(block.address) is None
        if abandons:
            operation.abandon()
        else:
            operation.commit()
            if kind == "pause":
                for tag in set(tags):
                    self.epochs[tag] -= 1  # `leave` counts it
                self.leave(tags, AS_ALLOCATED_CODE)
            else:
                self.come_back(tags)
        with pytest.raises(ValueError, match="over"):
            operation.commit()

    @rule(leaving=ONE_TAG, returning=ONE_TAG)
    def swap(self, leaving: str, returning: str) -> None:
        if leaving == returning or self.refuses_unknown("resume", [leaving, returning]):
            return
        names = self.names([leaving]), self.names([returning])
        if leaving in self.leases.values():
            with pytest.raises(StateError, match="a test of"):
                _core.swap(*names)
            return
        try:
            reports = _core.swap(*names)
        except OutOfMemoryError:
            assert self.device_limit != _core.UNLIMITED
            self.epochs[leaving] = self.epoch_of(leaving)
            return
        moved_and_copied = self.leave([leaving], AS_ALLOCATED_CODE), self.come_back([returning])
        assert tuple((report.bytes, report.copied) for report in reports) == moved_and_copied

    @rule(tag=ONE_TAG, pattern=st.integers(1, 7))
    def trim(self, tag: str, pattern: int) -> None:
        """What shares a handle with others is separated first, for which there must be room."""
        chosen = [block for index, block in enumerate(self.of([tag])) if pattern >> index % 3 & 1]
        if not chosen:
            return
        _core.trim(self.names([tag]), addresses=[block.address for block in chosen])
        for block in chosen:
            info = _core.find(block.address)
            assert info.is_trimmed or (self.device_limit != _core.UNLIMITED and info.place == block.place)
            if info.is_trimmed:
                block.is_trimmed, block.place, block.value, block.was_seen = True, "dropped", 0, False

    @rule(tag=ONE_TAG)
    def resume_by_address(self, tag: str) -> None:
        """Half of the blocks come back, trimmed ones too."""
        chosen = self.of([tag])[::2]
        if not chosen:
            return
        addresses = [block.address for block in chosen]
        try:
            _core.resume(self.names([tag]), addresses=addresses)
        except OutOfMemoryError:
            assert self.device_limit != _core.UNLIMITED
            return
        for block in chosen:
            block.is_trimmed = False
        self.come_back([tag], chosen)

    @rule(kind=KINDS, tags=SOME_TAGS, k=st.integers(1, 90), code=st.sampled_from([OUT_OF_MEMORY, UNKNOWN]))
    def with_a_failing_call(self, kind: str, tags: list[str], k: int, code: int) -> None:
        if self.refuses_unknown(kind, tags) or (kind == "pause" and self.refuses_leased(tags)):
            return
        act = _core.pause if kind == "pause" else _core.resume
        selected = self.of(tags)
        self.sim.fail(None, k, code)
        try:
            act(self.names(tags))
        except (DriverError, OutOfMemoryError, StoreError):
            self.sim.clear_failures()
            self.take_over_places(kind, selected)
            infos = {info.tag: info.state for info in _core.tags()}
            for tag in set(tags):
                places = {block.place == "device" for block in self.of([tag])}
                assert len(places) == 2 or infos[self.prefix + tag] != "partial" or kind == "pause"
        else:
            self.sim.clear_failures()
            self.leave(tags, AS_ALLOCATED_CODE) if kind == "pause" else self.come_back(tags)
        if kind == "pause":
            self.epochs = {tag: max(self.epochs[tag], self.epoch_of(tag)) for tag in TAGS}

    @rule(tag=ONE_TAG)
    def open_lease(self, tag: str) -> None:
        frame = _core.Frame()
        lease = frame.open_lease(self.prefix + tag, f"a test of {tag}")
        self.known.add(tag)
        assert lease.epoch == self.epochs[tag]
        assert lease.is_away == bool(self.away([tag]))
        self.frames[lease.id] = frame
        self.leases[lease.id] = tag

    @precondition(lambda self: self.leases)
    @rule(number=PICKS)
    def close_lease(self, number: int) -> None:
        lease = sorted(self.leases)[number % len(self.leases)]
        self.frames.pop(lease).close()
        del self.leases[lease]

    @rule(chunks=st.sampled_from([None, 1, 4, 12]))
    def limit_the_device(self, chunks: int | None) -> None:
        self.device_limit = _core.UNLIMITED if chunks is None else self.base_bytes + chunks * CHUNK
        set_limit("device_limit", self.device_limit)

    @rule(mode=st.integers(0, 2), seed=st.integers(0, 99))
    def run_asynchronous_work_otherwise(self, mode: int, seed: int) -> None:
        self.sim.set_async(mode, seed)

    def epoch_of(self, tag: str) -> int:
        if tag not in self.known:
            return 0
        with _core.Frame() as frame:
            return frame.open_lease(self.prefix + tag, "a look").epoch

    def refuses_unknown(self, kind: str, tags: list[str]) -> bool:
        unknown = [tag for tag in tags if tag not in self.known]
        if unknown:
            with pytest.raises(StateError, match=unknown[0]):
                (_core.pause if kind == "pause" else _core.resume)(self.names(tags))
            with pytest.raises(StateError, match=unknown[0]):
                _core.claim(kind, self.names(tags))
        return bool(unknown)

    def refuses_leased(self, tags: list[str]) -> bool:
        is_leased = any(tag in self.leases.values() for tag in tags)
        if is_leased:
            with pytest.raises(StateError, match="a test of"):
                _core.pause(self.names(tags))
        return is_leased

    def leave(self, tags: list[str], override: int) -> tuple[int, int]:
        moved = copied = 0
        for block in self.of(tags):
            if block.place == "device":
                backup = block.backup if override == AS_ALLOCATED_CODE else override
                block.place = "stored" if backup == RAM else "dropped"
                block.was_seen = False
                moved += block.size
                copied += block.copied_bytes if backup == RAM else 0
        for tag in set(tags):
            self.epochs[tag] += 1
        return moved, copied

    def come_back(self, tags: list[str], chosen: list[Block] | None = None) -> tuple[int, int]:
        moved = copied = 0
        for block in self.away(tags):
            if chosen is not None and block not in chosen:
                continue
            moved += block.size
            copied += block.copied_bytes if block.place == "stored" else 0
            block.value = block.value if block.place == "stored" else 0
            block.place = "device"
            block.was_seen = False
        return moved, copied

    def take_over_places(self, kind: str, selected: list[Block]) -> None:
        """Updates the model from the core after a failure: no other moves than the operation's may have happened."""
        for block in selected:
            place = _core.find(block.address).place
            if place == block.place:
                continue
            if kind == "pause":
                assert (block.place, place) == ("device", "stored" if block.backup == RAM else "dropped")
            else:
                assert place == "device"
                block.value = block.value if block.place == "stored" else 0
            block.place = place
            block.was_seen = False

    def expect_report(self, report: _core.Report, moved_and_copied: tuple[int, int]) -> None:
        assert (report.bytes, report.copied) == moved_and_copied
        assert sum(row[2] for row in report.rows) == report.bytes
        mine = sum(size for tag, _, size in report.remaining if tag.startswith(self.prefix))
        assert mine == self.held() - self.base_bytes

    @invariant()
    def everything_is_as_the_model_says(self) -> None:
        if not hasattr(self, "blocks"):
            return
        for block in self.blocks:
            info = _core.find(block.address + block.size - 1)
            assert (info.address, info.size_bytes, info.tag) == (block.address, block.size, self.prefix + block.tag)
            assert (info.place, info.backup, info.device) == (block.place, block.backup, 0)
            assert _core.is_away(block.address, 1) == (block.place != "device")
            if block.place == "device":
                assert is_filled(block.address, block.size, block.value)
            if block.place != "stored":
                assert _core.backup_of(block.address, block.size) is None
        for info in _core.tags():
            if not info.tag.startswith(self.prefix):
                continue
            mine = self.of([info.tag.removeprefix(self.prefix)])
            assert info.allocation_count == len(mine)
            assert info.resident_bytes == sum(b.size for b in mine if b.place == "device")
            assert info.stored_bytes == sum(b.size for b in mine if b.place == "stored")
            assert info.dropped_bytes == sum(b.size for b in mine if b.place == "dropped" and not b.is_trimmed)
            assert info.trimmed_bytes == sum(b.size for b in mine if b.is_trimmed)
            if info.resident_bytes + info.trimmed_bytes == info.size_bytes:
                assert info.state == ("resident" if mine else "empty")
            else:
                assert info.state in ("paused", "partial")

    def teardown(self) -> None:
        if not hasattr(self, "blocks"):
            return
        self.sim.clear_failures()
        self.sim.set_async(0)
        set_limit("device_limit", _core.UNLIMITED)
        for frame in self.frames.values():
            frame.close()
        for block in self.blocks:
            _core.free(block.address)
        _core.free(_core.alloc(self.prefix + "last", 1))  # releases what a failing call has left behind
        assert _core.query_device(0).held_bytes == self.base_bytes
        stats = _core.stats()
        assert (stats["deferred_frees"], stats["deferred_undos"]) == (0, 0)


TestCore = Core.TestCase
TestCore.settings = settings(
    max_examples=int(os.environ.get("EBBTIDE_WALK", "60")),
    stateful_step_count=30,
    derandomize="EBBTIDE_WALK" not in os.environ,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
