// Deliveries: bit-exact with few slots and many threads, and correct in their reports after a failure. Streams can
// wait for them.
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <thread>

#include "base/error.h"
#include "core_fixture.h"
#include "driver/context.h"
#include "hooked_backup.h"
#include "store/delivery.h"

namespace ebbtide::testing {
namespace {

constexpr size_t kUnit = kernels::kPieceUnit;
constexpr size_t kUnits = 100;
constexpr size_t kBytes = kUnits * kUnit;

class DeliveryTest : public CoreTest {
 protected:
  DeliveryTest() : scope_(0) {
    range_ = Reservation::reserve(round_up(kBytes, granularity(0)));
    memory_ = PhysicalMemory::create_on_device(range_.size_bytes(), 0);
    mapping_ = Mapping::map(range_.address(), memory_);
    // Two slots of one unit for each lane.
    engine_ = std::make_unique<CopyEngine>(0, HostMemory::allocate(kUnit * 2 * kernels::kLanes));
    table_ = HostMemory::allocate(1 << 20);
    content_.resize(kBytes);
    for (size_t index = 0; index < kBytes / sizeof(uint64_t); ++index) {
      const uint64_t word = index * 0x9e3779b97f4a7c15ULL;
      std::memcpy(content_.data() + index * sizeof word, &word, sizeof word);
    }
  }
  ~DeliveryTest() override {
    engine_.reset();
    table_.reset();
  }
  std::unique_ptr<HookedBackup> make_backup(HookedBackup::Hook before_read = nullptr) {
    auto backup = std::make_unique<HookedBackup>(kBytes, nullptr, std::move(before_read));
    backup->write(0, content_.data(), kBytes);
    return backup;
  }
  void start(Delivery& delivery, int threads) {
    delivery.prepare(table_->bytes(), threads);
    delivery.launch(*DeviceKernels::of(0));
  }
  bool is_there(size_t offset, size_t size_bytes) const {
    return std::memcmp(reinterpret_cast<const void*>(address() + offset), content_.data() + offset, size_bytes) == 0;
  }
  // The next work of the stream runs as soon as it may. Without the wait it would run before the kernel.
  bool reads_what_must_come(const Stream& stream, size_t unit) {
    std::vector<std::byte> seen(kUnit);
    check(driver().cuMemcpyDtoHAsync(seen.data(), address() + unit * kUnit, kUnit, stream.get()), "cuMemcpyDtoHAsync");
    stream.synchronize();
    return std::memcmp(seen.data(), content_.data() + unit * kUnit, kUnit) == 0;
  }
  CUdeviceptr address() const { return range_.address(); }

  ContextScope scope_;
  Reservation range_;
  PhysicalMemory memory_;
  Mapping mapping_;
  std::unique_ptr<CopyEngine> engine_;
  std::unique_ptr<HostMemory> table_;
  std::vector<std::byte> content_;
};

TEST_F(DeliveryTest, FilesAreReadInLargerPieces) {
  CopyEngine engine(0, HostMemory::allocate(64 * kMiB));
  HookedBackup backup(8 * kMiB, nullptr, nullptr);
  for (const bool has_files : {false, true}) {
    Delivery delivery(engine, has_files);
    delivery.reserve(8 * kMiB);
    delivery.add_copy(address(), backup, 0, 8 * kMiB);
    EXPECT_EQ(delivery.piece_count(), has_files ? 2u : 4u);
  }
}

TEST_F(DeliveryTest, BitForBitThroughFewSlotsByAnyNumberOfThreads) {
  for (const int threads : {1, 2, 5}) {
    const auto backup = make_backup();
    check(driver().cuMemsetD8Async(address(), 0, kBytes, engine_->side_stream().get()), "cuMemsetD8Async");
    Delivery delivery(*engine_);
    // In another order than that of memory, and in ranges of several sizes.
    delivery.add_copy(address() + 40 * kUnit, *backup, 40 * kUnit, 60 * kUnit);
    delivery.add_copy(address(), *backup, 0, kUnit);
    delivery.add_copy(address() + kUnit, *backup, kUnit, 39 * kUnit);
    EXPECT_EQ(delivery.piece_count(), kUnits);
    EXPECT_EQ(delivery.staged_bytes(), kBytes);
    start(delivery, threads);
    EXPECT_LE(delivery.arrived(), kUnits);
    delivery.finish();
    EXPECT_EQ(delivery.arrived(), kUnits);
    EXPECT_TRUE(is_there(0, kBytes));
  }
}

TEST_F(DeliveryTest, ValuesAndMemoryThatTheDeviceReachesNeedNoSlots) {
  const auto pinned = open_backup(BackupKind::kPinned, 2 << 20);
  pinned->populate(0, 2 << 20);
  pinned->seal();
  ASSERT_NE(pinned->direct(), nullptr);
  std::memcpy(pinned->direct(), content_.data(), 2 << 20);
  Delivery delivery(*engine_);
  delivery.add_copy(address(), *pinned, 0, 2 << 20);
  delivery.add_value(address() + (2 << 20), {3, 4}, 3 * kUnit);
  EXPECT_EQ(delivery.staged_bytes(), 0u);
  start(delivery, 4);
  delivery.finish();
  EXPECT_TRUE(is_there(0, 2 << 20));
  const auto* const words = reinterpret_cast<const uint64_t*>(address() + (2 << 20));
  for (size_t index = 0; index < 3 * kUnit / sizeof(uint64_t); index += 2) {
    ASSERT_EQ(words[index], 3u);
    ASSERT_EQ(words[index + 1], 4u);
  }
}

TEST_F(DeliveryTest, StreamsWaitForWhatTheyNeed) {
  const auto backup = make_backup();
  Delivery delivery(*engine_);
  delivery.add_copy(address(), *backup, 0, kBytes);
  start(delivery, 2);
  const Stream stream = Stream::create();
  delivery.stream_wait(stream.get(), 20);
  EXPECT_TRUE(reads_what_must_come(stream, 19));
  EXPECT_GE(delivery.arrived(), 20u);
  EXPECT_TRUE(is_there(0, 20 * kUnit));
  delivery.wait_for(50);
  EXPECT_TRUE(is_there(0, 50 * kUnit));
  delivery.finish();
  delivery.stream_wait(stream.get(), kUnits);
  stream.synchronize();
}

// The board is in use again by a delivery whose gates never reach the number that the stream waits for.
TEST_F(DeliveryTest, AStreamThatIsLateFindsItsWaitOver) {
  const auto backup = make_backup();
  const auto deliver = [&](size_t units, const Stream* waiting) {
    Delivery delivery(*engine_);
    delivery.add_copy(address(), *backup, 0, units * kUnit);
    start(delivery, 2);
    if (waiting != nullptr) delivery.stream_wait(waiting->get(), units);
    delivery.finish();
  };
  const Stream late = Stream::create();
  deliver(kUnits, &late);
  deliver(1, nullptr);
  EXPECT_EQ(driver().cuStreamQuery(late.get()), CUDA_ERROR_NOT_READY) << "a poll runs one item";
  for (uint32_t polls = 0; polls <= kernels::kLanes; ++polls) driver().cuStreamQuery(late.get());
  EXPECT_EQ(driver().cuStreamQuery(late.get()), CUDA_SUCCESS);
}

TEST_F(DeliveryTest, GatesRunOnBeyondTheEndOfTheNumbers) {
  const auto backup = make_backup();
  {
    const DeliveryBoard board(0);
    for (uint32_t lane = 0; lane < kernels::kLanes; ++lane) const_cast<uint32_t*>(board.gate(lane))[0] = 0xfffffffe;
  }
  Delivery delivery(*engine_);
  delivery.add_copy(address(), *backup, 0, kBytes);
  const Stream stream = Stream::create();
  start(delivery, 2);
  delivery.stream_wait(stream.get(), 40);
  EXPECT_TRUE(reads_what_must_come(stream, 39));
  delivery.finish();
}

TEST_F(DeliveryTest, ThreadsEndWhereNothingIsLaunched) {
  const auto backup = make_backup();
  Delivery delivery(*engine_);
  delivery.add_copy(address(), *backup, 0, kBytes);
  delivery.prepare(table_->bytes(), 3);
}

TEST_F(DeliveryTest, AStoreThatFailsEndsItAndLetsStreamsGo) {
  for (const int failing_read : {1, 2, 50, 100}) {
    std::atomic<int> reads = 0;
    const auto backup = make_backup([&] {
      if (++reads == failing_read) throw StoreError("the disk can't be read", {});
    });
    Delivery delivery(*engine_);
    delivery.add_copy(address(), *backup, 0, kBytes);
    start(delivery, 3);
    const Stream stream = Stream::create();
    delivery.stream_wait(stream.get(), kUnits);
    delivery.wait_for(kUnits);
    EXPECT_THROW(delivery.finish(), StoreError);
    EXPECT_LT(delivery.arrived(), kUnits);
    EXPECT_TRUE(is_there(0, delivery.arrived() * kUnit));
    stream.synchronize();
    EXPECT_FALSE(engine_->is_poisoned());
  }
}

TEST_F(DeliveryTest, AnAbandonedDeliveryEndsAndSaysSo) {
  const auto backup = make_backup();
  Delivery delivery(*engine_);
  delivery.add_copy(address(), *backup, 0, kBytes);
  start(delivery, 2);
  delivery.cancel();
  const Stream stream = Stream::create();
  delivery.stream_wait(stream.get(), kUnits);
  EXPECT_THROW(delivery.finish(), StateError);
  stream.synchronize();
}

TEST_F(DeliveryTest, ALaunchThatFailsLeavesNothingQueued) {
  const auto backup = make_backup();
  Delivery delivery(*engine_);
  delivery.add_copy(address(), *backup, 0, kBytes);
  ASSERT_NE(DeviceKernels::of(0), nullptr);
  sim().fail("cuLaunchKernel", 1, CUDA_ERROR_LAUNCH_FAILED, 1);
  EXPECT_THROW(start(delivery, 2), DriverError);
  engine_->side_stream().synchronize();
  EXPECT_EQ(delivery.arrived(), 0u);
}

TEST_F(DeliveryTest, ADeviceThatDiesPoisonsTheRing) {
  const auto backup = make_backup();
  Delivery delivery(*engine_);
  delivery.add_copy(address(), *backup, 0, kBytes);
  sim().fail("ebbtide_deliver", 30, CUDA_ERROR_ILLEGAL_ADDRESS, 1);
  start(delivery, 2);
  EXPECT_THROW(delivery.finish(), DriverError);
  EXPECT_EQ(delivery.arrived(), 29u);
  EXPECT_TRUE(engine_->is_poisoned());
}

TEST_F(DeliveryTest, ADriverWithoutSuchWaitsIsAStateError) {
  const auto backup = make_backup();
  Delivery delivery(*engine_);
  delivery.add_copy(address(), *backup, 0, kBytes);
  start(delivery, 2);
  const Stream stream = Stream::create();
  sim().fail("cuStreamWaitValue32", 1, CUDA_ERROR_NOT_SUPPORTED, 1);
  EXPECT_THROW(delivery.stream_wait(stream.get(), 1), DriverError);
  delivery.finish();
}

TEST_F(DeliveryTest, EveryDriverCallThatFailsIsReported) {
  for (uint64_t k = 1;; ++k) {
    const auto backup = make_backup();
    Delivery delivery(*engine_);
    delivery.add_copy(address(), *backup, 0, kBytes);
    ASSERT_NE(DeviceKernels::of(0), nullptr);
    const uint64_t before = sim().calls(nullptr);
    sim().fail(nullptr, k, 999, 1);
    bool has_failed = false;
    try {
      start(delivery, 2);
      delivery.finish();
    } catch (const DriverError&) {
      has_failed = true;
    }
    const uint64_t calls = sim().calls(nullptr) - before;
    sim().clear_failures();
    if (!has_failed) EXPECT_TRUE(is_there(0, kBytes));
    if (calls < k) break;
    engine_->side_stream().synchronize();
  }
}

}  // namespace
}  // namespace ebbtide::testing
