// The text of a refusal: the holders, the limit that refused, advice, and nothing of Python.
#include <gtest/gtest.h>

#include <functional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "overflow_world.h"
#include "policy/placement.h"

namespace ebbtide::testing {
namespace {

const Policy kRam{};
const Policy kRetained = {BackupKind::kRam, true, Overflow::kNone, false};

template <typename Refusal>
Refusal refusal(const std::function<void()>& act) {
  try {
    act();
  } catch (const Refusal& error) {
    return error;
  }
  throw std::logic_error("nothing was refused");
}

::testing::AssertionResult says(const Error& error, const std::string& text) {
  if (std::string(error.what()).find(text) != std::string::npos) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << "'" << text << "' is not in: " << error.what();
}

// Of the text in an ebbtide_error.
constexpr size_t kMostBytes = 1023;

class RefusalTest : public OverflowWorld {
 protected:
  StoreError refused_pause(const std::string& tag) {
    return refusal<StoreError>([&] { pause({tag}); });
  }
  HostBudget& host() { return core().budgets.host; }
};

TEST_F(RefusalTest, TheHostsHoldersAreNamedByTagAndLargestFirst) {
  make("kept", kRetained, {1, 2});
  make("small", kRam, {1});
  make("wanted", kRam, {2});
  spill("mixed", kSplitRam, kChunk, 2 * kChunk);
  pause({"kept"});
  pause({"small"});
  resume({"kept"});
  host().set_limit(host().held_bytes() + kChunk);
  const StoreError error = refused_pause("wanted");
  EXPECT_EQ(error.cause, Cause::kHostMemory);
  EXPECT_TRUE(says(error, "the backup of 'wanted' needs 4 MiB of host memory; 2 MiB are free for it"));
  EXPECT_TRUE(says(error, "ebbtide holds " + format_bytes(host().held_bytes()) + ": "));
  EXPECT_TRUE(says(error, "backups of 'kept' 6 MiB"));
  EXPECT_TRUE(says(error, "backups of 'small' 2 MiB"));
  EXPECT_TRUE(says(error, "spilled memory 4 MiB"));
  EXPECT_TRUE(says(error, "the pinned ring between device and host "));
  for (const char* advice : {"Pause less", "backups on disk", "trim", "EBBTIDE_HOST_LIMIT", "EBBTIDE_HOST_MARGIN"})
    EXPECT_TRUE(says(error, advice));
  host().set_limit(kUnlimited);
  resume({"small"});  // its backup goes
  host().set_limit(host().held_bytes());
  EXPECT_FALSE(says(refused_pause("wanted"), "'small'"));
  host().set_limit(kUnlimited);
}

TEST_F(RefusalTest, HoldersAddUpToTheHeldBytesAndEachByteHasOne) {
  HostBudget budget;
  budget.set_margin(0);
  HostHolder& tag = budget.holder("backups of 'a'");
  HostCharge whole = budget.charge(8 * kMiB, "the backup of 'a', 'b'", &budget.holder("backups"));
  HostCharge part = whole.split_promised(3 * kMiB);
  part.hold_for(tag);
  part.touch(2 * kMiB);
  EXPECT_EQ(tag.bytes.load(), 3 * kMiB);
  EXPECT_EQ(budget.holder("backups").bytes.load(), 5 * kMiB);
  HostCharge record;  // takes the holder of the first that is merged into it
  record.merge(part.split_promised(kMiB));
  record.merge(whole.split_promised(kMiB));
  EXPECT_EQ(tag.bytes.load(), 4 * kMiB) << "a merged charge counts with the one that takes it";
  part.give_back_touched(kMiB);
  whole.split_promised(kUnlimited);
  EXPECT_EQ(tag.bytes.load(), 3 * kMiB);
  EXPECT_EQ(budget.holder("backups").bytes.load(), 0u);
  EXPECT_EQ(budget.held_bytes(), 3 * kMiB);
  HostCharge moved = std::move(part);
  moved = HostCharge{};
  EXPECT_EQ(tag.bytes.load(), 2 * kMiB);
  record.keep_for_good();
  record.reset();
  EXPECT_EQ(tag.bytes.load(), 2 * kMiB) << "it stays, and is named for ever";
  EXPECT_EQ(budget.charge_outside_cgroups(kMiB, "the ring").size_bytes(), kMiB);
  EXPECT_EQ(budget.holder("the ring").bytes.load(), 0u);
}

TEST_F(RefusalTest, AnyNamesLeaveRoomForTheAdvice) {
  HostBudget budget;
  budget.set_margin(0);
  std::vector<HostCharge> charges;
  for (int index = 0; index < 20; ++index) {
    const std::string name = std::string(255, static_cast<char>('a' + index));
    charges.push_back(budget.charge((index + 1ULL) * kMiB, "x", &budget.holder("backups of '" + name + "'")));
  }
  budget.set_limit(budget.held_bytes());
  const StoreError error = refusal<StoreError>([&] { budget.charge(1, std::string(4000, 'p')); });
  EXPECT_LE(std::string(error.what()).size(), kMostBytes);
  EXPECT_TRUE(says(error, "ebbtide holds 210 MiB: backups of 'ttt"));
  EXPECT_TRUE(says(error, ", and 16 more 136 MiB."));
  EXPECT_TRUE(says(error, "EBBTIDE_HOST_MARGIN"));
}

TEST_F(RefusalTest, WhereNothingIsHeldNoHolderIsNamed) {
  HostBudget budget;
  budget.set_limit(kMiB);
  const StoreError error = refusal<StoreError>([&] { budget.require_room(kGiB, "x"); });
  EXPECT_FALSE(says(error, "ebbtide holds"));
}

TEST_F(RefusalTest, TheHostPoolAndTwinsAreHoldersOfTheirOwn) {
  HostPool& pool = core().host_pool;
  pool.set_capacity(2 * policy::kHostChunkBytes);
  pool.fill(0);
  EXPECT_EQ(host().holder("host pool").bytes.load(), pool.kept_bytes());
  EXPECT_EQ(pool.kept_bytes(), 2 * policy::kHostChunkBytes);
  auto handles = pool.take(0, {policy::kHostChunkBytes, kChunk}, "tag 'w'");  // one is kept, one is made
  EXPECT_EQ(host().holder("spilled memory").bytes.load(), policy::kHostChunkBytes + kChunk);
  EXPECT_EQ(host().holder("host pool").bytes.load(), pool.kept_bytes());
  pool.put_back(0, std::move(handles));
  EXPECT_EQ(host().holder("spilled memory").bytes.load(), 0u);
  HostTwin twin{host().charge_outside_cgroups(kChunk, "x"), {}, {}};
  const auto place = pool.twins().keep(std::move(twin));
  EXPECT_EQ(host().holder("host copies of promoted memory").bytes.load(), kChunk);
  const HostTwin taken = pool.twins().take(place);
  EXPECT_EQ(host().holder("host copies of promoted memory").bytes.load(), 0u);
  EXPECT_EQ(host().holder("spilled memory").bytes.load(), kChunk);
}

TEST_F(RefusalTest, OutOfMemoryNamesTheLimitThatRefusedAndOffersOverflow) {
  const auto refused = [&](const Policy& policy, uint64_t size_bytes) {
    return refusal<OutOfMemory>([&] { alloc_with("w", policy, size_bytes); });
  };
  // Nothing overflows there.
  const std::string offer = is_hip() ? "" : ", or let what does not fit lie on the host (overflow: split)";
  core().budgets.device.set_limit(kChunk);
  const OutOfMemory by_limit = refused(kRam, 2 * kChunk);
  EXPECT_EQ(by_limit.cause, Cause::kDeviceLimit);
  EXPECT_TRUE(says(by_limit, "left of device_limit 2 MiB (default). Pause a tag, or raise device_limit"));
  EXPECT_TRUE(says(by_limit, offer));
  core().budgets.device.set_limit(kUnlimited);
  core().budgets.device_margin.set_bytes(1024 * kGiB);
  const OutOfMemory by_margin = refused(kRam, kChunk);
  EXPECT_EQ(by_margin.cause, Cause::kDeviceMargin);
  EXPECT_TRUE(says(by_margin, "device_margin keeps"));
  EXPECT_FALSE(says(by_margin, "device_limit"));
  EXPECT_TRUE(says(by_margin, offer));
  core().budgets.device_margin.set_bytes(0);
  const OutOfMemory by_card = refused(kRam, 1ULL << 45);
  EXPECT_EQ(by_card.cause, Cause::kDevice);
  EXPECT_TRUE(says(by_card, "free on the device itself (device_limit: no limit)"));
  EXPECT_TRUE(says(by_card, offer));
  host().set_limit(0);
  const OutOfMemory by_host = refused(kSplitRam, 1ULL << 40);
  EXPECT_EQ(by_host.cause, Cause::kHostMemory);
  EXPECT_FALSE(says(by_host, "(overflow: split)")) << "it is on";
  host().set_limit(kUnlimited);
  // What comes back may not overflow, so it is not offered.
  alloc_with("away", kRam, 2 * kChunk);
  pause({"away"});
  core().budgets.device.set_limit(kChunk);
  const OutOfMemory of_resume = refusal<OutOfMemory>([&] { resume({"away"}); });
  EXPECT_EQ(of_resume.cause, Cause::kDeviceLimit);
  EXPECT_FALSE(says(of_resume, "overflow"));
  core().budgets.device.set_limit(kUnlimited);
}

}  // namespace
}  // namespace ebbtide::testing
