// The cost of a query does not grow with unrelated tags and allocations. The tests count those that the registry
// examines.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "base/error.h"
#include "core/operation/backup_view.h"
#include "core_fixture.h"

namespace ebbtide::testing {
namespace {

class ManyTags : public CoreTest {
 protected:
  // A core with these tags, "t0", "t1", ..., and an allocation in each.
  std::vector<CUdeviceptr> make(size_t count) {
    restart();
    std::vector<CUdeviceptr> addresses;
    for (size_t number = 0; number < count; ++number)
      addresses.push_back(alloc("t" + std::to_string(number), kChunk, BackupKind::kRam));
    return addresses;
  }
  uint64_t looks_of(const std::function<void()>& act) {
    const uint64_t before = core().registry.look_count();
    act();
    return core().registry.look_count() - before;
  }
};

TEST_F(ManyTags, AQuestionAboutOneCostsTheSameWithAnyNumberOfOthers) {
  std::map<size_t, std::vector<uint64_t>> looks;
  for (const size_t count : {3, 300}) {
    const CUdeviceptr address = make(count)[1];
    const auto ask = [&](const std::function<void()>& act) { looks[count].push_back(looks_of(act)); };
    ask([&] { core().registry.visit_tag("t1", [](const Tag&) {}); });
    ask([&] { core().registry.leases.close(open_lease(core(), "t1", "a test").id); });
    ask([&] { core().registry.find(address); });
    ask([&] { core().registry.is_away(address, 1); });
    ask([&] { preview(OperationKind::kPause, {"t1"}); });
    ask([&] { pause({"t1"}); });
    ask([&] { EXPECT_TRUE(view_backup(core(), {address, kChunk})); });
    ask([&] { resume({"t1"}); });
    ask([&] { claim(OperationKind::kPrepare, {"t1"})->commit(); });
    ask([&] {
      OperationRequest request;
      request.tags = {{"t1"}, {address}, false};
      Operation::claim(core(), OperationKind::kTrim, std::move(request))->commit();
    });
    ask([&] { deallocate(core(), address); });
  }
  EXPECT_EQ(looks[3], looks[300]);
}

TEST_F(ManyTags, AnUnknownOneIsToldWhichThereAre) {
  const auto told = [&] {
    try {
      preview(OperationKind::kPause, {"other"});
    } catch (const StateError& error) {
      return std::string(error.what());
    }
    return std::string("nothing was thrown");
  };
  const std::string begin = "no region was ever named 'other'; known tags: ";
  const std::string end = ". Operations skip unknown ones with missing_ok";
  make(0);
  EXPECT_EQ(told(), begin + "none" + end);
  make(3);
  EXPECT_EQ(told(), begin + "'t0', 't1', 't2'" + end);
}

TEST_F(ManyTags, AQuestionAboutOneAllocationCostsTheSameWithAnyNumberInItsTag) {
  std::map<size_t, std::vector<uint64_t>> looks;
  for (const size_t count : {3, 300}) {
    restart();
    std::vector<CUdeviceptr> addresses;
    for (size_t number = 0; number < count; ++number) addresses.push_back(alloc("w", kChunk));
    const auto ask = [&](const std::function<void()>& act) { looks[count].push_back(looks_of(act)); };
    const auto move = [&](OperationKind kind) {
      OperationRequest request;
      request.tags = {{"w"}, {addresses[2], addresses[0], addresses[2]}, false};
      Operation::claim(core(), kind, std::move(request))->commit();
    };
    ask([&] { move(OperationKind::kPause); });
    ask([&] { EXPECT_TRUE(view_backup(core(), {addresses[2], 8})); });
    ask([&] { move(OperationKind::kResume); });
    ask([&] { move(OperationKind::kTrim); });
    ask([&] { move(OperationKind::kResume); });
    ask([&] { core().registry.visit_tag("w", [](const Tag& tag) { tag.total_now(); }); });
  }
  EXPECT_EQ(looks[3], looks[300]);
}

TEST_F(ManyTags, TheCostOfAllGrowsAsTheirNumberDoes) {
  std::map<size_t, std::vector<uint64_t>> looks;
  for (const size_t count : {20, 200}) {
    const std::vector<CUdeviceptr> addresses = make(count);
    std::vector<std::string> names;
    for (size_t number = 0; number < count; ++number) names.push_back("t" + std::to_string(number));
    const auto ask = [&](const std::function<void()>& act) { looks[count].push_back(looks_of(act)); };
    ask([&] { pause(); });
    ask([&] { resume(names); });
    ask([&] {
      sim().fail("cuMemUnmap", static_cast<int>(count / 2), 999, 1);
      EXPECT_THROW(pause(names), DriverError);
      sim().clear_failures();
    });
    ask([&] { resume(); });
    ask([&] {
      OperationRequest request;
      request.tags = {names, addresses, false};
      Operation::claim(core(), OperationKind::kTrim, std::move(request))->commit();
    });
  }
  for (size_t index = 0; index < looks[20].size(); ++index) {
    EXPECT_GT(looks[20][index], 0u);
    EXPECT_LE(looks[200][index], 11 * looks[20][index]) << "question " << index;
  }
}

TEST_F(ManyTags, AnEventNamesTheFirstOfThem) {
  make(300);
  pause({"t0"});
  EXPECT_EQ(core().events.after(0).back().tags, "t0");
  pause();
  const std::string tags = core().events.after(0).back().tags;
  EXPECT_LT(tags.size(), 2048u);
  EXPECT_EQ(tags.substr(0, 12), "t0, t1, t10,");
  const size_t named = static_cast<size_t>(std::count(tags.begin(), tags.end(), ','));
  EXPECT_NE(tags.find(", and " + std::to_string(300 - named) + " more"), std::string::npos) << tags;
}

TEST_F(ManyTags, TheHeldMemoryNamesEveryTagAndDevice) {
  alloc("a", kChunk, BackupKind::kRam, 0);
  alloc("a", 2 * kChunk, BackupKind::kRam, 1);
  alloc("b", kChunk, BackupKind::kRam, 1);
  alloc("c", kChunk);
  const ReportRows left = pause({"c"}).remaining();
  EXPECT_EQ(left.size(), 3u);
  EXPECT_EQ(left.at({"a", 0}).bytes, kChunk);
  EXPECT_EQ(left.at({"a", 1}).bytes, 2 * kChunk);
  EXPECT_EQ(left.at({"b", 1}).bytes, kChunk);
  const auto held = claim(OperationKind::kPause, {"b"});
  EXPECT_EQ(pause({"a"}).remaining().at({"b", 1}).bytes, kChunk) << "also while an operation holds it";
}

TEST_F(ManyTags, SlotsAreFoundByTagPolicyAndDevice) {
  SlotTable& slots = core().slots;
  const int first = slots.bind("a", Policy{BackupKind::kRam}, 0);
  EXPECT_EQ(slots.bind("a", Policy{BackupKind::kRam}, 0), first);
  EXPECT_NE(slots.bind("a", Policy{BackupKind::kRam, true}, 0), first);
  EXPECT_NE(slots.bind("a", Policy{BackupKind::kRam}, 1), first);
  EXPECT_NE(slots.bind("b", Policy{BackupKind::kRam}, 0), first);
  EXPECT_EQ(slots.bind("a", Policy{BackupKind::kRam}, 0), first);
}

// csrc/core/operation/backup_view.cpp: in this build, an index past the end of a container ends the process.
using ChecksDeathTest = ManyTags;
TEST_F(ChecksDeathTest, AnIndexPastTheEndOfAContainerIsFound) {
  const std::vector<int> blocks(3);
  volatile size_t index = 3;
  EXPECT_DEATH(static_cast<void>(blocks[index] == 0), "ssertion|overflow");
}

}  // namespace
}  // namespace ebbtide::testing
