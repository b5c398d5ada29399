// Fault injection: driver calls of every operation fail (sweep.h). After each failure invariants 1 to 3 hold, nothing
// leaks, and the operation succeeds when it is repeated.
#include <algorithm>
#include <sstream>

#include "driver/context.h"
#include "driver/device_kernels.h"
#include "fault_world.h"
#include "sweep.h"
#include "vmm/deferred_undos.h"

namespace ebbtide::testing {
namespace {

struct Case {
  const char* name;
  std::vector<BlockSpec> blocks;
  std::vector<std::string> tags;
  std::optional<BackupKind> backup;
  bool has_come_back = false;  // makes neighbours share a handle
  std::map<std::string, BackupKind, std::less<>> backup_by_tag = {};
  friend void PrintTo(const Case& shown, std::ostream* out) { *out << shown.name; }
};

const std::vector<uint64_t> kOne = {kChunk};
const std::vector<uint64_t> kTwo = {kChunk, kChunk};
const std::vector<uint64_t> kMany = {kChunk, 3 * kChunk, kChunk};  // the second is several pieces

std::vector<Case> cases() {
  constexpr BackupKind kRam = BackupKind::kRam;
  constexpr BackupKind kNone = BackupKind::kNone;
  return {
      {"one_chunk", {{"w", kRam, 0, kOne}}, {}, {}},
      {"many_chunks", {{"w", kRam, 0, kMany}, {"w", kRam, 0, kOne}}, {}, {}},
      {"no_backup", {{"kv", kNone, 0, kTwo}, {"kv", kNone, 0, kOne}}, {}, {}},
      {"two_devices", {{"w", kRam, 0, kTwo}, {"w", kRam, 1, kTwo}}, {}, {}},
      {"mixed_tags",
       {{"w", kRam, 0, kTwo}, {"kv", kNone, 1, kTwo}, {"w", kNone, 0, kOne}, {"other", kRam, 1, kOne}},
       {"w", "kv"},
       {}},
      {"many_chunks_that_share", {{"w", kRam, 0, kMany}, {"w", kRam, 0, kOne}}, {}, {}, true},
      {"mixed_tags_that_share",
       {{"w", kRam, 0, kTwo}, {"kv", kRam, 1, kTwo}, {"w", kRam, 0, kOne}, {"other", kRam, 1, kOne}},
       {"w", "kv"},
       {},
       true},
      {"backup_refused_this_once", {{"w", kRam, 0, kTwo}}, {}, kNone},
      {"backup_wanted_this_once", {{"kv", kNone, 1, kTwo}, {"w", kRam, 0, kOne}}, {}, kRam},
      {"a_backup_for_each_tag",
       {{"w", kNone, 0, kTwo}, {"kv", kRam, 0, kTwo}, {"other", kRam, 1, kOne}},
       {"w", "kv", "other"},
       {},
       false,
       {{"w", kRam}, {"kv", kNone}}},
  };
}

class OperationFaults : public FaultTest, public ::testing::WithParamInterface<Case> {
 protected:
  void pause_it() {
    OperationRequest request;
    request.tags.names = GetParam().tags;
    request.backup = GetParam().backup;
    request.backup_by_tag = GetParam().backup_by_tag;
    Operation::claim(core(), OperationKind::kPause, std::move(request))->commit();
  }
  void resume_it() { resume(GetParam().tags); }

  bool has_stale_memory() {
    return std::any_of(blocks_.begin(), blocks_.end(),
                       [&](const Block& block) { return core().registry.find(block.address)->has_stale_memory(); });
  }

  void expect_untouched_or_partial(const std::vector<Place>& before, const Live& live_before) {
    const std::vector<Place> now = places();
    if (now == before) {
      // Nothing was given up, so everything is as before, except for the ring, which is kept, and for memory that a
      // copy may still write to.
      if (!has_stale_memory()) {
        EXPECT_EQ(without_lost(Live::now()), without_lost(live_before));
      }
      for (const Block& block : blocks_) EXPECT_FALSE(is_partial(block.spec.tag)) << block.spec.tag;
      return;
    }
    struct Moved {
      bool is_any_away = false, is_any_here = false;
    };
    std::map<std::string, Moved> tags;
    size_t index = 0;
    for (const Block& block : blocks_) {
      for (const Chunk& chunk : core().registry.find(block.address)->chunks) {
        Moved& moved = tags[block.spec.tag];
        moved.is_any_away |= !chunk.is_resident();
        // A pause that could not release the memory of what left has work to do; memory that a resume could not use
        // does not count.
        moved.is_any_here |= chunk.is_resident() || (chunk.has_stale_memory() && now[index] != before[index]);
        ++index;
      }
    }
    for (const auto& [tag, moved] : tags) EXPECT_EQ(is_partial(tag), moved.is_any_away && moved.is_any_here) << tag;
  }

  // Starts from the state right after the world was built. None of ebbtide's own caches are kept, so that every run of
  // the operation makes the same calls.
  void start_over(bool has_context) {
    core().rules.shared_handle_bytes = GetParam().has_come_back ? policy::kSharedHandleBytes : 0;
    resume();
    core().rules.shared_handle_bytes = policy::kSharedHandleBytes;
    core().engines.trim();
    refill_blank();
    if (without_handles(Live::now()) != built_) rebuild();
    // The caller's current context must not matter: that of a device, or none.
    check(driver().cuCtxSetCurrent(has_context ? primary_context(0) : nullptr), "cuCtxSetCurrent");
  }
  void rebuild() {
    build(GetParam().blocks);
    // Loaded once for the process, so not part of an operation.
    for (int device = 0; device < kDevices; ++device) ASSERT_NE(DeviceKernels::of(device), nullptr);
    if (GetParam().has_come_back) {
      pause();
      resume();
      core().engines.trim();
    }
    built_ = without_handles(Live::now());
  }
  // A resume after a failed one may have put more behind a handle than the resume before.
  static Live without_handles(Live live) {
    live.handles = live.mappings = 0;
    return live;
  }

  void sweep(const Act& prepare, const Act& act) {
    for (const bool has_context : {true, false}) sweep_in(has_context, prepare, act);
  }

  // Every other failure, because the current context changes what is called.
  void sweep_in(bool has_context, const Act& prepare, const Act& act) {
    rebuild();
    start_over(has_context);
    prepare();
    core().engines.trim();
    expect_sound("prepared");
    const std::vector<std::string> names = calls_of(act);
    ASSERT_GT(names.size(), 5u);
    expect_sound("whole");
    const Live whole = Live::now();
    const uint64_t host_bytes = core().budgets.host.held_bytes();
    const std::vector<Place> wanted = places();
    size_t failures = 0;
    std::vector<CallFailure> all = failures_of(names);
    std::erase_if(all, [&, index = 0](const CallFailure&) mutable { return index++ % 2 == (has_context ? 1 : 0); });
    for (const CallFailure& failure : all) {
      SCOPED_TRACE(failure.text());
      start_over(has_context);
      prepare();
      core().engines.trim();
      note_dropped();
      const std::vector<Place> before = places();
      const Live live_before = Live::now();
      failure.inject();
      const bool has_failed = fails(act);
      sim().clear_failures();
      failures += has_failed ? 1 : 0;
      give_back_caches(core());
      expect_sound("after the failure");
      if (has_failed) {
        expect_untouched_or_partial(before, live_before);
        ASSERT_FALSE(fails(act)) << "tried again";
        expect_sound("after the second try");
      }
      EXPECT_EQ(places(), wanted);
      // Streams and events hold no memory, and are lost if they cannot be destroyed. If the system refuses to pin a
      // ring, a smaller one is tried. Without tables, everything is copied.
      const std::string& name = failure.name;
      const bool is_exact =
          failure.times != 0 && name != "cuStreamDestroy" && name != "cuEventDestroy" &&
          !(failure.code == kOutOfMemory && (name == "cuMemHostRegister" || name == "cuMemHostAlloc"));
      EXPECT_EQ(is_exact ? Live::now() : without_lost(Live::now()), is_exact ? whole : without_lost(whole));
      if (is_exact) {
        EXPECT_EQ(core().budgets.host.held_bytes(), host_bytes);
      }
      if (HasFailure()) return;
    }
    EXPECT_GE(failures, all.size() / 3);
  }

 private:
  Live built_;
};

std::string name_of(const ::testing::TestParamInfo<Case>& info) { return info.param.name; }

TEST_P(OperationFaults, Invariant3_Pause) {
  sweep([] {}, [&] { pause_it(); });
}
TEST_P(OperationFaults, Invariant3_Resume) {
  sweep([&] { pause_it(); }, [&] { resume_it(); });
}

INSTANTIATE_TEST_SUITE_P(Cases, OperationFaults, ::testing::ValuesIn(cases()), name_of);

}  // namespace
}  // namespace ebbtide::testing
