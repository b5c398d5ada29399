// Copies between a device and a store: bit-exact with one thread and with several, and correct in their reports
// after a failure.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <deque>
#include <functional>
#include <set>
#include <thread>

#include "base/error.h"
#include "core_fixture.h"
#include "driver/context.h"
#include "store/ring_copy.h"

namespace ebbtide::testing {
namespace {

// Fails on demand.
class TestBackup final : public Backup {
 public:
  explicit TestBackup(size_t size_bytes) : inner_(open_backup(BackupKind::kRam, size_bytes)) {}
  void write(size_t offset, const std::byte* bytes, size_t size_bytes) override {
    if (--calls_left == 0) throw StoreError("the disk is full", {});
    if (before_write) before_write();
    ++writes;
    inner_->write(offset, bytes, size_bytes);
  }
  void read(size_t offset, std::byte* bytes, size_t size_bytes) const override {
    if (--calls_left == 0) throw StoreError("the disk can't be read", {});
    ++reads;
    inner_->read(offset, bytes, size_bytes);
  }
  void discard(size_t offset, size_t size_bytes) noexcept override { inner_->discard(offset, size_bytes); }
  std::byte* view() override { return inner_->view(); }
  const std::byte* memory() const noexcept override { return is_shown ? inner_->memory() : nullptr; }
  std::byte* direct() noexcept override { return direct_bytes; }
  mutable std::atomic<int> calls_left{0};
  mutable std::atomic<int> reads{0};
  std::atomic<int> writes{0};
  std::function<void()> before_write;
  std::byte* direct_bytes = nullptr;
  bool is_shown = false;

 private:
  std::unique_ptr<Backup> inner_;
};

constexpr size_t kUnit = 64 * kKiB;

// Sizes are in units. A file's requests are of two units.
constexpr RingCut cut(int threads, size_t piece, size_t part) {
  return {threads, 16 * kUnit, piece * kUnit, part * kUnit, 2 * kUnit};
}

class CopyTest : public CoreTest, public ::testing::WithParamInterface<RingCut> {
 protected:
  CopyTest() : scope_(0), backup_(kBytes) {
    range_ = Reservation::reserve(kBytes);
    memory_ = PhysicalMemory::create_on_device(kBytes, 0);
    mapping_ = Mapping::map(range_.address(), memory_);
    engine_ = std::make_unique<CopyEngine>(0, HostMemory::allocate(16 * kUnit));
    // Jobs of odd sizes: less than a unit, exactly one unit, many units and a rest.
    size_t offset = 0;
    for (const size_t size : {size_t{8}, kUnit, 5 * kUnit + 24, kUnit - 8, 2 * kUnit, size_t{4096}, 11 * kUnit + 8}) {
      ranges_.push_back({0, size});
      jobs_.push_back({range_.address() + offset, &backup_, offset, std::span(&ranges_.back(), 1)});
      offset += size;
    }
    used_bytes_ = offset;
  }
  ~CopyTest() override { engine_.reset(); }
  // Uses the class once in the intended way: submits everything, and takes the landed pieces.
  void run(CopyDirection direction, std::span<const CopyJob> jobs, const std::function<void(size_t)>& landed) {
    RingCopy copy(*engine_, direction, GetParam());
    for (const CopyJob& job : jobs) {
      copy.submit(job);
      if (const auto done = copy.poll_landed()) landed(*done);
    }
    while (const auto done = copy.finish_next()) landed(*done);
  }
  CUdeviceptr address() const { return range_.address(); }
  CUdeviceptr view() { return reinterpret_cast<CUdeviceptr>(backup_.view()); }
  bool is_same(const CopyJob& job) {
    return std::memcmp(reinterpret_cast<const void*>(job.device_address), backup_.view() + job.offset,
                       job.ranges.front().size_bytes) == 0;
  }
  void expect_idle() { EXPECT_EQ(Live::now().queued_items, 0u); }

  static constexpr size_t kBytes = 2 * kChunk;
  const ContextScope scope_;
  TestBackup backup_;
  Reservation range_;
  PhysicalMemory memory_;
  Mapping mapping_;
  std::unique_ptr<CopyEngine> engine_;
  std::deque<CopyRange> ranges_;
  std::vector<CopyJob> jobs_;
  size_t used_bytes_ = 0;
};

TEST_P(CopyTest, BothWaysBitForBitEachJobAnnouncedOnceInTheCallingThread) {
  for (const int mode : {EBBTIDE_SIM_LATE, EBBTIDE_SIM_EAGER, EBBTIDE_SIM_RANDOM}) {
    sim().set_async(mode, 5);
    const uint64_t seed = static_cast<uint64_t>(mode) + 1;
    fill(address(), kBytes, seed);
    std::multiset<size_t> landed;
    const auto caller = std::this_thread::get_id();
    run(CopyDirection::kToStore, jobs_, [&](size_t job) {
      EXPECT_EQ(std::this_thread::get_id(), caller);
      EXPECT_TRUE(is_same(jobs_[job])) << "announced before all of it was there";
      landed.insert(job);
    });
    EXPECT_EQ(landed, (std::multiset<size_t>{0, 1, 2, 3, 4, 5, 6}));
    EXPECT_TRUE(holds(view(), used_bytes_ / 8 * 8, seed));
    fill(address(), kBytes, 99);
    landed.clear();
    run(CopyDirection::kToDevice, jobs_, [&](size_t job) {
      EXPECT_TRUE(is_same(jobs_[job]));
      landed.insert(job);
    });
    EXPECT_EQ(landed.size(), jobs_.size());
    EXPECT_TRUE(holds(address(), used_bytes_ / 8 * 8, seed));
    expect_idle();
  }
}

// Two ranges of each job: the bytes between them keep their content on both sides.
TEST_P(CopyTest, OnlyTheRangesOfAJobMove) {
  fill(address(), kBytes, 1);
  const std::vector<CopyRange> ranges = {{kUnit, 2 * kUnit + 8}, {5 * kUnit, kUnit}};
  const std::vector<CopyJob> jobs = {{address(), &backup_, 0, ranges}, {address() + kChunk, &backup_, kChunk, {}}};
  std::memset(const_cast<std::byte*>(backup_.view()), 0, kBytes);
  std::set<size_t> landed;
  run(CopyDirection::kToStore, jobs, [&](size_t job) { landed.insert(job); });
  EXPECT_EQ(landed, (std::set<size_t>{0, 1})) << "a job without ranges lands as well";
  const auto* device = reinterpret_cast<const std::byte*>(address());
  const std::vector<std::byte> zeros(kUnit);
  EXPECT_EQ(std::memcmp(backup_.view(), zeros.data(), kUnit), 0);
  for (const CopyRange& range : ranges)
    EXPECT_EQ(std::memcmp(backup_.view() + range.offset, device + range.offset, range.size_bytes), 0);
  EXPECT_EQ(std::memcmp(backup_.view() + 4 * kUnit, zeros.data(), kUnit), 0);
  EXPECT_EQ(std::memcmp(backup_.view() + 6 * kUnit, zeros.data(), kUnit), 0);
  EXPECT_EQ(std::memcmp(backup_.view() + kChunk, zeros.data(), kUnit), 0);
}

// Backups in memory are cut into parts between the threads. A file gets requests of its own size.
TEST_P(CopyTest, PartsAreAsLargeAsTheStoreWants) {
  fill(address(), kBytes, 1);
  const auto count = [&](size_t most) {
    int parts = 0;
    for (const CopyJob& job : jobs_) {
      for (size_t left = job.ranges.front().size_bytes; left > 0;) {
        const size_t piece = std::min(left, GetParam().piece_bytes);
        parts += static_cast<int>((piece + most - 1) / most);
        left -= piece;
      }
    }
    return parts;
  };
  for (const bool is_shown : {true, false}) {
    backup_.is_shown = is_shown;
    backup_.writes = 0;
    backup_.reads = 0;
    run(CopyDirection::kToStore, jobs_, [](size_t) {});
    run(CopyDirection::kToDevice, jobs_, [](size_t) {});
    const int parts = count(is_shown ? GetParam().part_bytes : GetParam().request_bytes);
    EXPECT_EQ(backup_.writes, parts);
    EXPECT_EQ(backup_.reads, parts);
  }
}

// While one thread is busy with its part of a piece, the others do all the work that the ring has room for. Only pieces
// behind it in the ring have to wait.
TEST_P(CopyTest, APartThatTakesLongHoldsUpNothingButItsRoom) {
  fill(address(), kBytes, 1);
  backup_.is_shown = true;
  const bool has_others = GetParam().threads > 1;  // a single thread waits for no other
  // One job is twice as large as the ring. All parts of its first half but one can be written.
  const CopyRange range = {0, 2 * GetParam().ring_bytes};
  size_t awaited = 0;
  for (size_t piece = 0; piece + GetParam().piece_bytes <= GetParam().ring_bytes; piece += GetParam().piece_bytes)
    awaited += (GetParam().piece_bytes + GetParam().part_bytes - 1) / GetParam().part_bytes;
  std::atomic<bool> is_held{false};
  std::atomic<size_t> others{0};
  std::atomic<size_t> others_meanwhile{0};
  backup_.before_write = [&] {
    if (is_held.exchange(true)) {
      ++others;
      return;
    }
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (has_others && others < awaited - 1 && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
    others_meanwhile = others.load();
  };
  const CopyJob job = {address(), &backup_, 0, std::span(&range, 1)};
  run(CopyDirection::kToStore, std::span(&job, 1), [](size_t) {});
  EXPECT_GE(others_meanwhile, has_others ? awaited - 1 : 0);
  EXPECT_TRUE(is_same(job));
}

// A backup that the copy engine can access directly needs no ring.
TEST_P(CopyTest, DirectBackupsMoveWithoutTheRing) {
  fill(address(), kBytes, 1);
  void* pinned = nullptr;
  check(driver().cuMemHostAlloc(&pinned, kBytes, 0), "cuMemHostAlloc");
  backup_.direct_bytes = static_cast<std::byte*>(pinned);
  backup_.calls_left = 1;  // the first read() or write() would fail
  run(CopyDirection::kToStore, jobs_, [](size_t) {});
  EXPECT_TRUE(holds(reinterpret_cast<CUdeviceptr>(pinned), used_bytes_ / 8 * 8, 1));
  fill(address(), kBytes, 2);
  run(CopyDirection::kToDevice, jobs_, [](size_t) {});
  EXPECT_TRUE(holds(address(), used_bytes_ / 8 * 8, 1));
  expect_idle();
  backup_.direct_bytes = nullptr;
  check(driver().cuMemFreeHost(pinned), "cuMemFreeHost");
}

TEST_P(CopyTest, WhatFollowsAJobIsQueuedOnceBehindItsLastByte) {
  fill(address(), kBytes, 1);
  std::atomic<int> followed = 0;
  std::vector<CopyJob> jobs = jobs_;
  for (CopyJob& job : jobs) {
    job.then = [&followed, &job, this] {
      ++followed;
      check(driver().cuMemsetD8Async(job.device_address, 0xCD, job.ranges.front().size_bytes, engine_->stream().get()),
            "cuMemsetD8Async");
    };
  }
  run(CopyDirection::kToStore, jobs, [&](size_t job) {
    const auto* const bytes = reinterpret_cast<const unsigned char*>(jobs[job].device_address);
    const size_t size_bytes = jobs[job].ranges.front().size_bytes;
    EXPECT_TRUE(std::all_of(bytes, bytes + size_bytes, [](unsigned char byte) { return byte == 0xCD; })) << job;
  });
  EXPECT_EQ(followed, static_cast<int>(jobs.size()));
  EXPECT_TRUE(holds(view(), used_bytes_ / 8 * 8, 1));
  expect_idle();
}

TEST_P(CopyTest, AFailureOfWhatFollowsAJobEndsTheCopy) {
  fill(address(), kBytes, 1);
  std::vector<CopyJob> jobs = jobs_;
  jobs[2].then = [] { throw DriverError("stop", "cuLaunchKernel", 999, ""); };
  EXPECT_THROW(run(CopyDirection::kToStore, jobs, [](size_t job) { EXPECT_NE(job, 2u); }), DriverError);
  expect_idle();
  run(CopyDirection::kToStore, jobs_, [](size_t) {});
  EXPECT_TRUE(holds(view(), used_bytes_ / 8 * 8, 1));
}

TEST_P(CopyTest, ACopyThatIsGivenUpLeavesNothingQueued) {
  fill(address(), kBytes, 1);
  {
    RingCopy copy(*engine_, CopyDirection::kToStore, GetParam());
    for (const CopyJob& job : jobs_) copy.submit(job);
    copy.poll_landed();
  }
  expect_idle();
  run(CopyDirection::kToStore, jobs_, [](size_t) {});
  EXPECT_TRUE(holds(view(), used_bytes_ / 8 * 8, 1));
}

TEST_P(CopyTest, NoJobsAreDoneAtOnce) {
  run(CopyDirection::kToStore, {}, [](size_t) { FAIL(); });
  expect_idle();
}

TEST_P(CopyTest, AFailingStoreEndsTheCopyWithItsErrorAndNothingQueued) {
  fill(address(), kBytes, 1);
  backup_.is_shown = true;
  run(CopyDirection::kToStore, jobs_, [](size_t) {});
  const int parts = backup_.writes;
  ASSERT_GE(parts, 10);
  for (int part = 1; part <= parts; part += 2) {
    for (const CopyDirection direction : {CopyDirection::kToStore, CopyDirection::kToDevice}) {
      backup_.calls_left = part;
      std::set<size_t> landed;
      EXPECT_THROW(run(direction, jobs_, [&](size_t job) { landed.insert(job); }), StoreError);
      EXPECT_LT(landed.size(), jobs_.size());
      backup_.calls_left = 0;
      for (const size_t job : landed) EXPECT_TRUE(is_same(jobs_[job]));
      expect_idle();
      // After a failure the engine copies everything.
      run(CopyDirection::kToStore, jobs_, [](size_t) {});
      EXPECT_TRUE(holds(view(), used_bytes_ / 8 * 8, 1));
    }
  }
}

TEST_P(CopyTest, AnErrorOfLandedIsPassedOnAndStopsTheCopy) {
  fill(address(), kBytes, 1);
  int calls = 0;
  EXPECT_THROW(run(CopyDirection::kToStore, jobs_,
                   [&](size_t) {
                     if (++calls == 3) throw DriverError("stop", "cuMemUnmap", 999, "");
                   }),
               DriverError);
  EXPECT_EQ(calls, 3) << "no job is announced after that";
  expect_idle();
  run(CopyDirection::kToStore, jobs_, [](size_t) {});
  EXPECT_TRUE(holds(view(), used_bytes_ / 8 * 8, 1));
}

TEST_P(CopyTest, EveryDriverCallThatFailsIsReportedAndDrained) {
  fill(address(), kBytes, 1);
  sim().clear_log();
  run(CopyDirection::kToStore, jobs_, [](size_t) {});
  const uint64_t calls = sim().calls(nullptr);
  const uint64_t streams = Live::now().streams;
  for (const CopyDirection direction : {CopyDirection::kToStore, CopyDirection::kToDevice}) {
    for (uint64_t k = 1; k <= calls; ++k) {
      sim().fail(nullptr, k, 999, 1);
      try {
        run(direction, jobs_, [&](size_t job) { EXPECT_TRUE(is_same(jobs_[job])); });
      } catch (const DriverError& error) {
        EXPECT_EQ(error.code, 999);
      }
      sim().clear_failures();
      check(driver().cuCtxSetCurrent(primary_context(0)), "cuCtxSetCurrent");
      expect_idle();
      EXPECT_FALSE(engine_->is_poisoned()) << "one failed synchronisation is made up for by the next";
      ASSERT_EQ(Live::now().streams, streams);
    }
  }
}

TEST_P(CopyTest, AStreamThatCantBeWaitedForPoisonsTheRing) {
  sim().fail("cuEventSynchronize", 1, 999, 0);
  sim().fail("cuStreamSynchronize", 1, 999, 0);
  EXPECT_THROW(run(CopyDirection::kToStore, jobs_, [](size_t) {}), DriverError);
  sim().clear_failures();
  EXPECT_TRUE(engine_->is_poisoned());
}

INSTANTIATE_TEST_SUITE_P(Threads, CopyTest,
                         ::testing::Values(cut(1, 1, 1), cut(1, 16, 1), cut(3, 1, 1), cut(2, 4, 1), cut(4, 8, 3)),
                         [](const auto& info) {
                           return std::to_string(info.param.threads) + "_threads_pieces_of_" +
                                  std::to_string(info.param.piece_bytes / kUnit) + "_parts_of_" +
                                  std::to_string(info.param.part_bytes / kUnit);
                         });

}  // namespace
}  // namespace ebbtide::testing
