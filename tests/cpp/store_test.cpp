// The ram store and the copier: bit-exact with one thread and with several, and honest about what did not get through.
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <mutex>
#include <random>
#include <set>
#include <thread>

#include "base/error.h"
#include "core_fixture.h"
#include "driver/context.h"
#include "store/copier.h"
#include "store/nontemporal_copy.h"
#include "store/ram_store.h"

namespace ebbtide::testing {
namespace {

TEST(NontemporalCopy, AnyAlignmentAndSizeIsExactAndTouchesNothingElse) {
  std::mt19937_64 random(3);
  std::vector<std::byte> from(5000);
  for (std::byte& byte : from) byte = static_cast<std::byte>(random());
  std::vector<size_t> sizes = {0, 1, 15, 16, 63, 64, 65, 127, 128, 129, 191, 192, 4096};
  for (int i = 0; i < 40; ++i) sizes.push_back(random() % 4500);
  for (const size_t size : sizes) {
    for (const size_t to_shift : {0, 1, 7, 16, 63}) {
      for (const size_t from_shift : {0, 3, 64}) {
        std::vector<std::byte> to(5200, std::byte{0xAB});
        copy_nontemporal(to.data() + to_shift, from.data() + from_shift, size);
        ASSERT_EQ(std::memcmp(to.data() + to_shift, from.data() + from_shift, size), 0)
            << size << " " << to_shift << " " << from_shift;
        for (size_t before = 0; before < to_shift; ++before) ASSERT_EQ(to[before], std::byte{0xAB});
        for (size_t after = to_shift + size; after < to.size(); ++after) ASSERT_EQ(to[after], std::byte{0xAB});
      }
    }
  }
}

TEST(RamStoreTest, BackupsKeepBytesAndAreWritableFromSeveralThreads) {
  const auto backup = store_of(BackupKind::kRam).open(8 * kMiB);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(backup->view()) % (2 * kMiB), 0u);
  std::vector<std::thread> threads;
  for (int part = 0; part < 4; ++part) {
    threads.emplace_back([&, part] {
      const std::vector<std::byte> bytes(2 * kMiB, static_cast<std::byte>(part + 1));
      backup->write(static_cast<size_t>(part) * bytes.size(), bytes.data(), bytes.size());
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::vector<std::byte> read(8 * kMiB);
  backup->read(0, read.data(), read.size());
  EXPECT_EQ(std::memcmp(read.data(), backup->view(), read.size()), 0);
  for (size_t part = 0; part < 4; ++part) EXPECT_EQ(read[part * 2 * kMiB + 12345], static_cast<std::byte>(part + 1));
}

TEST(RamStoreTest, OnlyWhatIsBuiltHasAStore) {
  EXPECT_NO_THROW(store_of(BackupKind::kRam));
  for (const BackupKind kind :
       {BackupKind::kNone, BackupKind::kPinned, BackupKind::kDisk, static_cast<BackupKind>(77)}) {
    EXPECT_THROW(store_of(kind), InvalidArgument);
  }
  EXPECT_THROW(store_of(BackupKind::kRam).open(1ULL << 60), StoreError);
}

// Fails when asked to.
class TestBackup final : public Backup {
 public:
  explicit TestBackup(size_t size_bytes) : inner_(store_of(BackupKind::kRam).open(size_bytes)) {}
  void write(size_t offset, const std::byte* bytes, size_t size_bytes) override {
    if (--calls_left == 0) throw StoreError("the disk is full", {});
    inner_->write(offset, bytes, size_bytes);
  }
  void read(size_t offset, std::byte* bytes, size_t size_bytes) const override {
    if (--calls_left == 0) throw StoreError("the disk can't be read", {});
    inner_->read(offset, bytes, size_bytes);
  }
  void discard(size_t offset, size_t size_bytes) noexcept override { inner_->discard(offset, size_bytes); }
  const std::byte* view() const override { return inner_->view(); }
  mutable std::atomic<int> calls_left{0};

 private:
  std::unique_ptr<Backup> inner_;
};

constexpr size_t kSlot = 64 * kKiB;

struct CopyParameters {
  int threads;
  int slots;
};

class CopierTest : public CoreTest, public ::testing::WithParamInterface<CopyParameters> {
 protected:
  CopierTest() : scope_(0), staging_(Staging::allocate(kSlot, GetParam().slots)), backup_(kBytes) {
    range_ = Reservation::reserve(kBytes);
    memory_ = PhysicalMemory::create_on_device(kBytes, 0);
    mapping_ = Mapping::map(range_.address(), memory_);
    copier_ = std::make_unique<Copier>(0, *staging_, GetParam().threads);
    // Jobs of odd sizes: less than a slot, a slot exactly, many slots and a rest.
    size_t offset = 0;
    for (const size_t size : {size_t{8}, kSlot, 5 * kSlot + 24, kSlot - 8, 2 * kSlot, size_t{4096}, 11 * kSlot + 8}) {
      jobs_.push_back({range_.address() + offset, &backup_, offset, size});
      offset += size;
    }
    used_bytes_ = offset;
  }
  ~CopierTest() override {
    copier_.reset();
    staging_.reset();
  }
  CUdeviceptr address() const { return range_.address(); }
  CUdeviceptr view() const { return reinterpret_cast<CUdeviceptr>(backup_.view()); }
  bool is_same(const CopyJob& job) const {
    return std::memcmp(reinterpret_cast<const void*>(job.device_address), backup_.view() + job.offset,
                       job.size_bytes) == 0;
  }
  void expect_idle() { EXPECT_EQ(Live::now().queued_items, 0u); }

  static constexpr size_t kBytes = 2 * kChunk;
  const ContextScope scope_;
  std::unique_ptr<Staging> staging_;
  TestBackup backup_;
  Reservation range_;
  PhysicalMemory memory_;
  Mapping mapping_;
  std::unique_ptr<Copier> copier_;
  std::vector<CopyJob> jobs_;
  size_t used_bytes_ = 0;
};

TEST_P(CopierTest, BothWaysBitForBitEachJobAnnouncedOnceInTheCallingThread) {
  for (const int mode : {EBBTIDE_SIM_LATE, EBBTIDE_SIM_EAGER, EBBTIDE_SIM_RANDOM}) {
    sim().set_async(mode, 5);
    const uint64_t seed = static_cast<uint64_t>(mode) + 1;
    fill(address(), kBytes, seed);
    std::multiset<size_t> landed;
    const auto caller = std::this_thread::get_id();
    copier_->run(CopyDirection::kToStore, jobs_, [&](size_t job) {
      EXPECT_EQ(std::this_thread::get_id(), caller);
      EXPECT_TRUE(is_same(jobs_[job])) << "announced before all of it was there";
      landed.insert(job);
    });
    EXPECT_EQ(landed, (std::multiset<size_t>{0, 1, 2, 3, 4, 5, 6}));
    EXPECT_TRUE(holds(view(), used_bytes_ / 8 * 8, seed));
    fill(address(), kBytes, 99);
    landed.clear();
    copier_->run(CopyDirection::kToDevice, jobs_, [&](size_t job) {
      EXPECT_TRUE(is_same(jobs_[job]));
      landed.insert(job);
    });
    EXPECT_EQ(landed.size(), jobs_.size());
    EXPECT_TRUE(holds(address(), used_bytes_ / 8 * 8, seed));
    expect_idle();
  }
}

TEST_P(CopierTest, NoJobsAreDoneAtOnce) {
  copier_->run(CopyDirection::kToStore, {}, [](size_t) { FAIL(); });
  expect_idle();
}

TEST_P(CopierTest, AFailingStoreEndsTheCopyWithItsErrorAndNothingQueued) {
  fill(address(), kBytes, 1);
  for (int piece = 1; piece <= 20; piece += 3) {
    for (const CopyDirection direction : {CopyDirection::kToStore, CopyDirection::kToDevice}) {
      backup_.calls_left = piece;
      std::set<size_t> landed;
      EXPECT_THROW(copier_->run(direction, jobs_, [&](size_t job) { landed.insert(job); }), StoreError);
      EXPECT_LT(landed.size(), jobs_.size());
      backup_.calls_left = 0;
      for (const size_t job : landed) EXPECT_TRUE(is_same(jobs_[job]));
      expect_idle();
      // Used again after a failure, it copies all.
      copier_->run(CopyDirection::kToStore, jobs_, [](size_t) {});
      EXPECT_TRUE(holds(view(), used_bytes_ / 8 * 8, 1));
    }
  }
}

TEST_P(CopierTest, AnErrorOfLandedIsPassedOnAndStopsTheCopy) {
  fill(address(), kBytes, 1);
  int calls = 0;
  EXPECT_THROW(copier_->run(CopyDirection::kToStore, jobs_,
                            [&](size_t) {
                              if (++calls == 3) throw DriverError("stop", "cuMemUnmap", 999, "");
                            }),
               DriverError);
  EXPECT_EQ(calls, 3) << "no job is announced after that";
  expect_idle();
  copier_->run(CopyDirection::kToStore, jobs_, [](size_t) {});
  EXPECT_TRUE(holds(view(), used_bytes_ / 8 * 8, 1));
}

TEST_P(CopierTest, EveryDriverCallThatFailsIsReportedAndDrained) {
  fill(address(), kBytes, 1);
  sim().clear_log();
  copier_->run(CopyDirection::kToStore, jobs_, [](size_t) {});
  const uint64_t calls = sim().calls(nullptr);
  const uint64_t streams = Live::now().streams;
  for (const CopyDirection direction : {CopyDirection::kToStore, CopyDirection::kToDevice}) {
    for (uint64_t k = 1; k <= calls; ++k) {
      sim().fail(nullptr, k, 999, 1);
      try {
        copier_->run(direction, jobs_, [&](size_t job) { EXPECT_TRUE(is_same(jobs_[job])); });
      } catch (const DriverError& error) {
        EXPECT_EQ(error.code, 999);
      }
      sim().clear_failures();
      check(driver().cuCtxSetCurrent(primary_context(0)), "cuCtxSetCurrent");
      expect_idle();
      EXPECT_FALSE(staging_->is_poisoned()) << "one failed synchronisation is made up for by the next";
      ASSERT_EQ(Live::now().streams, streams);
    }
  }
}

TEST_P(CopierTest, AStreamThatCantBeWaitedForPoisonsTheRing) {
  sim().fail("cuEventSynchronize", 1, 999, 0);
  sim().fail("cuStreamSynchronize", 1, 999, 0);
  EXPECT_THROW(copier_->run(CopyDirection::kToStore, jobs_, [](size_t) {}), DriverError);
  sim().clear_failures();
  EXPECT_TRUE(staging_->is_poisoned());
}

INSTANTIATE_TEST_SUITE_P(Threads, CopierTest,
                         ::testing::Values(CopyParameters{1, 1}, CopyParameters{1, 2}, CopyParameters{3, 6},
                                           CopyParameters{4, 9}),
                         [](const auto& info) {
                           return std::to_string(info.param.threads) + "_threads_" + std::to_string(info.param.slots) +
                                  "_slots";
                         });

}  // namespace
}  // namespace ebbtide::testing
