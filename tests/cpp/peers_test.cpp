// Peers: a device that is alive and can access the memory may use all of it, at whatever time it came alive and
// wherever the memory has been meanwhile.
#include <atomic>
#include <thread>

#include "base/error.h"
#include "core/allocate/allocator.h"
#include "core/operation/pending.h"
#include "driver/context.h"
#include "driver/peers.h"
#include "driver/stream.h"
#include "peers_world.h"
#include "sweep.h"
#include "threads_fixture.h"

namespace ebbtide::testing {
namespace {

using Act = std::function<void()>;

class PeersTest : public PeersWorld {};

TEST_F(PeersTest, ACopyFromAPeerWritesAndReads) {
  const CUdeviceptr here = alloc("a", 2 * kChunk, BackupKind::kRam, 0);
  const CUdeviceptr there = alloc("b", 2 * kChunk, BackupKind::kRam, 1);
  fill(there, 2 * kChunk, 5);
  copy_to(here, there, 2 * kChunk, 1);
  EXPECT_TRUE(holds(here, 2 * kChunk, 5));
  pause();
  resume();
  fill(here, 2 * kChunk, 6);
  copy_to(there, here, 2 * kChunk, 1);
  EXPECT_TRUE(holds(there, 2 * kChunk, 6));
}

TEST_F(PeersTest, ADeviceThatSleepsOrDoesNotReachTheMemoryIsLeftOut) {
  start_with_one();
  const CUdeviceptr asleep = alloc("a", kChunk);
  EXPECT_TRUE(is_usable_by(0, asleep));
  EXPECT_FALSE(is_usable_by(1, asleep));
  start();
  sim().set_peers(1, 0, 0);
  forget_peers();
  const CUdeviceptr unreached = alloc("a", kChunk);
  const CUdeviceptr reached = alloc("a", kChunk, BackupKind::kRam, 1);
  EXPECT_FALSE(is_usable_by(1, unreached));
  EXPECT_TRUE(is_usable_by_all(reached)) << "device 0 reaches device 1";
}

TEST_F(PeersTest, WithoutTheDriversCallsADeviceIsAlone) {
  sim().fail("cuDevicePrimaryCtxGetState", 1, kOther, 0);
  EXPECT_TRUE(live_devices().none());
  const CUdeviceptr address = alloc("a", kChunk);
  EXPECT_TRUE(is_usable_by(0, address));
  EXPECT_FALSE(is_usable_by(1, address));
  sim().clear_failures();
  EXPECT_EQ(live_devices().count(), 2u);
  forget_peers();
  sim().fail("cuDeviceCanAccessPeer", 1, kOther, 1);
  sim().set_peers(1, 0, 0);
  EXPECT_EQ(peers_of(0, live_devices()), only(1)) << "the access that is set will show it";
  EXPECT_TRUE(peers_of(0, live_devices()).none()) << "a refused question is asked again";
  sim().set_peers(1, 0, 1);
  EXPECT_TRUE(peers_of(0, live_devices()).none()) << "and an answer is kept";
}

TEST_F(PeersTest, AccessIsKeptWhereverTheMemoryWas) {
  const size_t spilled = spill("w", kSplitRam, 2 * kChunk, 3 * kChunk);
  const size_t dropped = spill("kv", kSplitNone, kChunk, 2 * kChunk);
  const auto expect_usable = [&](const char* when) {
    for (const Item& item : items_) {
      EXPECT_EQ(core().registry.find(item.address)->resident_bytes(), item.size_bytes) << when;
      EXPECT_TRUE(is_usable_by_all(item.address)) << when;
    }
    expect_sound(when);
  };
  expect_usable("new");
  const auto pause_some = [&](const std::vector<std::string>& tags) {
    pause(tags);
    note_dropped();
  };
  pause_some({});
  resume();
  expect_usable("resumed");
  pause_some({});
  PendingResume::start(claim(OperationKind::kResume))->wait();
  expect_usable("resumed in the background");
  pause_some({"w"});
  OperationRequest request;
  request.tags.names = {"kv"};
  request.resume_tags.names = {"w"};
  Operation::claim(core(), OperationKind::kSwap, std::move(request))->commit();
  note_dropped();
  resume({"kv"});
  expect_usable("swapped");
  trim({"kv"}, {items_[dropped].address});
  note_dropped();
  resume_at({"kv"}, {items_[dropped].address});
  expect_usable("trimmed and put back");
  promote();
  EXPECT_EQ(host_bytes(spilled), 0u);
  expect_usable("promoted");
  demote();
  EXPECT_EQ(device_bytes(spilled), 0u);
  expect_usable("demoted");
}

TEST_F(PeersTest, MemoryMappedBeforeADeviceCameAliveIsCaughtUpWith) {
  const std::vector<std::pair<const char*, Act>> occasions = {
      {"an allocation", [&] { alloc("new", kChunk); }},
      {"an allocation on the other device", [&] { alloc("new", kChunk, BackupKind::kRam, 1); }},
      {"a resume", [&] { resume({"away"}); }},
      {"a resume in the background", [&] { PendingResume::start(claim(OperationKind::kResume, {"away"}))->wait(); }},
      {"the entry of a region", [&] { core().registry.leases.close(open_lease(core(), "elsewhere", "somebody").id); }},
      {"the program's wish", [&] { core().peers.enable(1); }},
  };
  for (const auto& [name, act] : occasions) {
    SCOPED_TRACE(name);
    start_with_one();
    spill("w", kSplitRam, 2 * kChunk, 3 * kChunk);
    spill("away", kSplitRam, kChunk, kChunk);
    pause({"away"});
    set_alive(1, true);
    EXPECT_FALSE(is_usable_by(1, items_[0].address));
    act();
    for (const Item& item : items_) EXPECT_TRUE(is_usable_by_all(item.address));
    const size_t calls = sim().calls("cuMemSetAccess");
    core().peers.refresh(true);
    EXPECT_EQ(sim().calls("cuMemSetAccess"), calls) << "once";
  }
}

TEST_F(PeersTest, WhatAnOperationHoldsIsCaughtUpWithWhenItEnds) {
  for (const bool is_committed : {false, true}) {
    start_with_one();
    spill("w", kSplitRam, 2 * kChunk, kChunk);
    pause({"w"});
    auto operation = claim(OperationKind::kResume, {"w"});  // the claim has decided which devices get access
    set_alive(1, true);
    const CUdeviceptr other = alloc("other", kChunk);
    EXPECT_TRUE(is_usable_by_all(other));
    deallocate(core(), other);
    if (is_committed) operation->commit();
    operation.reset();
    EXPECT_TRUE(is_usable_by_all(items_[0].address));
    if (!is_committed) resume({"w"});
    EXPECT_TRUE(is_usable_by_all(items_[0].address));
    expect_resident("ended");
  }
}

// Two operations in sequence: the second begins between the end of the first and the first one's catching up.
TEST_F(PeersTest, WhatPassesFromHandToHandIsCaughtUpWithByTheLast) {
  start_with_one();
  spill("w", kSplitRam, 2 * kChunk, kChunk);
  TagClaim of_first{.tags = {.names = {"w"}, .addresses = {}, .only = nullptr},
                    .concerns = [](const Allocation& each) { return each.device_bytes() > 0; }};
  const uint64_t seen = core().peers.generation();
  Selection selection = core().registry.claim({std::move(of_first)});
  set_alive(1, true);
  core().peers.refresh(true);
  core().deferred_frees.destroy_all(core().registry.release(selection, Outcome::kUntouched));
  auto operation = claim(OperationKind::kPrepare, {"w"});
  core().peers.catch_up_after_hold(seen);
  EXPECT_FALSE(is_usable_by(1, items_[0].address)) << "it is held";
  operation.reset();
  EXPECT_TRUE(is_usable_by_all(items_[0].address));
}

TEST_F(PeersTest, AFreeMeanwhileIsFinishedByTheCatchingUp) {
  start_with_one();
  spill("w", kSplitRam, kChunk, kChunk);
  Selection selection = core().registry.claim_idle([](const Allocation&) { return true; });
  EXPECT_TRUE(deallocate_if_ours(core(), items_[0].address));
  EXPECT_EQ(core().registry.find(items_[0].address), nullptr);
  EXPECT_EQ(core().registry.claim_idle([](const Allocation&) { return true; }).tags.size(), 0u) << "its tag is held";
  core().deferred_frees.destroy_all(core().registry.release(selection, Outcome::kUntouched));
  items_.clear();
  expect_nothing_left();
}

TEST_F(PeersTest, ADeviceThatEnabledAccessCountsInWhateverContextItDidSo) {
  start_with_one();
  core().peers.enable(1);
  EXPECT_TRUE(is_usable_by_all(alloc("a", kChunk)));
}

// Driver calls of every occasion fail (sweep.h). Bytes, owners and budgets stay right,
// the device keeps its access, and the next occasion grants the missing access.
TEST_F(PeersTest, Invariant3_CatchingUpWithEveryCallFailing) {
  const std::vector<Act> occasions = {
      [&] { deallocate(core(), alloc("new", kChunk)); },
      [&] { core().registry.leases.close(open_lease(core(), "elsewhere", "somebody").id); },
      [&] { core().peers.enable(1); },
  };
  const auto prepare = [&] {
    start_with_one();
    forget_peers();
    spill("w", kSplitRam, kChunk, kChunk);
    spill("kv", kSplitNone, kChunk, 0);
    set_alive(1, true);
  };
  for (size_t which = 0; which < occasions.size(); ++which) {
    const Act& act = occasions[which];
    prepare();
    sim().clear_log();
    act();
    for (const CallFailure& failure : failures_of(logged_calls())) {
      if (HasFailure()) return;
      SCOPED_TRACE("occasion " + std::to_string(which) + ", " + failure.text());
      prepare();
      failure.inject();
      fails(act);
      sim().clear_failures();
      give_back_caches(core());
      expect_sound("after the failure");
      for (const Item& item : items_) EXPECT_TRUE(is_usable_by(0, item.address));
      core().registry.leases.close(open_lease(core(), "elsewhere", "somebody").id);
      expect_resident("back");
      for (const Item& item : items_) EXPECT_TRUE(is_usable_by_all(item.address));
      free_all();
      expect_nothing_left();
    }
  }
}

TEST_F(PeersTest, Invariant9_CatchingUpBreaksNoCapture) {
  start_with_one();
  const CUdeviceptr before = alloc("a", kChunk);
  const Stream stream = Stream::create();
  core().capture_gate.begin_capture();
  ASSERT_EQ(driver().cuStreamBeginCapture(stream.get(), CU_STREAM_CAPTURE_MODE_GLOBAL), CUDA_SUCCESS);
  set_alive(1, true);
  const CUdeviceptr during = alloc("a", kChunk);
  EXPECT_TRUE(is_usable_by_all(before));
  EXPECT_TRUE(is_usable_by_all(during));
  CUgraph graph = nullptr;
  EXPECT_EQ(driver().cuStreamEndCapture(stream.get(), &graph), CUDA_SUCCESS);
  EXPECT_EQ(driver().cuGraphDestroy(graph), CUDA_SUCCESS);
  core().capture_gate.end_capture();
}

// A device comes and goes while other threads allocate, free, pause and resume. At the end both devices can use
// everything, and nothing is left.
TEST_F(PeersTest, ThreadsMayDoAllOfItAtOnce) {
  start_with_one();
  for (int index = 0; index < 4; ++index) spill("w", kSplitRam, kChunk, kChunk);
  constexpr int kRounds = 20;
  {
    std::vector<std::jthread> threads;
    threads.emplace_back([&] {
      for (int round = 0; round < kRounds; ++round) {
        pause({"w"});
        resume({"w"});
      }
    });
    for (const char* tag : {"x", "y"}) {
      threads.emplace_back([this, tag] {
        for (int round = 0; round < kRounds; ++round) {
          const CUdeviceptr address = alloc(tag, kChunk);
          const LeaseInfo lease = open_lease(core(), tag, "a thread");
          deallocate(core(), address);
          core().registry.leases.close(lease.id);
        }
      });
    }
    threads.emplace_back([&] {
      for (int round = 0; round < kRounds; ++round) {
        set_alive(1, true);
        core().peers.refresh(true);
        set_alive(1, false);
        core().peers.refresh(true);
      }
    });
  }
  set_alive(1, true);
  core().peers.refresh(true);
  for (const Item& item : items_) EXPECT_TRUE(is_usable_by_all(item.address));
  expect_resident("at the end");
  free_all();
  expect_nothing_left();
}

}  // namespace
}  // namespace ebbtide::testing
