// Sweeps of pure decisions: chunking, the copy plan, host room.
#include <gtest/gtest.h>

#include <algorithm>
#include <climits>
#include <numeric>
#include <random>
#include <tuple>

#include "base/bytes.h"
#include "policy/chunking.h"
#include "policy/copy_plan.h"
#include "policy/host_room.h"

namespace ebbtide::policy {
namespace {

TEST(Bytes, RoundUpSaturates) {
  EXPECT_EQ(round_up(0, 4), 0u);
  EXPECT_EQ(round_up(1, 4), 4u);
  EXPECT_EQ(round_up(4, 4), 4u);
  EXPECT_EQ(round_up(UINT64_MAX, 2 * kMiB) % (2 * kMiB), 0u);
  EXPECT_EQ(saturating_add(UINT64_MAX, 1), UINT64_MAX);
  EXPECT_EQ(saturating_subtract(1, 2), 0u);
}

TEST(Bytes, FormatIsReadable) {
  EXPECT_EQ(format_bytes(0), "0 bytes");
  EXPECT_EQ(format_bytes(1023), "1023 bytes");
  EXPECT_EQ(format_bytes(kKiB), "1 KiB");
  EXPECT_EQ(format_bytes(3 * kMiB / 2), "1.5 MiB");
  EXPECT_EQ(format_bytes(15 * kGiB), "15 GiB");
  EXPECT_EQ(format_bytes(kUnlimited), "no limit");
  EXPECT_EQ(format_bytes(kUnlimited - 1), "16 EiB");
  EXPECT_EQ(format_amount(kUnlimited), "16 EiB") << "never shown: there is no limit";
  EXPECT_EQ(format_amount(kKiB), "1 KiB");
}

TEST(Chunking, CopiedMemoryHasHandlesThatAreShortToCopy) {
  const auto of_all = [](uint64_t copied, uint64_t limit) { return most_shared_bytes(copied, copied, limit); };
  EXPECT_EQ(of_all(0, kGiB), kGiB) << "nothing is there";
  EXPECT_EQ(of_all(2 * kMiB, kGiB), 128 * kMiB);
  EXPECT_EQ(of_all(kGiB, kGiB), 128 * kMiB);
  EXPECT_EQ(of_all(2 * kGiB, kGiB), 256 * kMiB);
  EXPECT_EQ(of_all(40 * kGiB, kGiB), kGiB);
  EXPECT_EQ(of_all(40 * kGiB, 16 * kGiB), 5 * kGiB) << "a caller may allow more";
  for (const uint64_t limit : {uint64_t{0}, 2 * kMiB, 64 * kMiB})
    EXPECT_EQ(of_all(2 * kGiB, limit), limit) << "and less";
  EXPECT_EQ(most_shared_bytes(0, 40 * kGiB, kGiB), kGiB) << "calls only";
  EXPECT_EQ(most_shared_bytes(2 * kMiB, 40 * kGiB, kGiB), kGiB) << "nearly so";
  EXPECT_EQ(most_shared_bytes(kGiB, 2 * kGiB, kGiB), 128 * kMiB);
}

TEST(Chunking, EverySizeIsCoveredInOrderByFewEnoughChunks) {
  std::mt19937_64 random(7);
  std::vector<uint64_t> granules = {1, 2, 63, 64, 65, 511, 512, 513, 64 * 256, 64 * 256 + 1, 1ull << 20, 1ull << 24};
  for (int i = 0; i < 300; ++i) granules.push_back(1 + (random() >> (40 + random() % 24)));
  for (const uint64_t granularity : {2 * kMiB, 64 * kKiB, 512 * kMiB}) {
    for (const uint64_t count : granules) {
      for (const uint64_t most : {kCopiedChunkBytes, kDroppedChunkBytes, kExportableChunkBytes}) {
        const uint64_t size = count * granularity;
        const std::vector<uint64_t> chunks = cut_into_chunks(size, granularity, most);
        ASSERT_FALSE(chunks.empty());
        EXPECT_EQ(std::accumulate(chunks.begin(), chunks.end(), uint64_t{0}), size);
        EXPECT_LE(chunks.size(), kMaxChunks);
        for (const uint64_t chunk : chunks) {
          EXPECT_GT(chunk, 0u);
          EXPECT_EQ(chunk % granularity, 0u);
        }
        // All alike except the last, which is no larger.
        EXPECT_TRUE(std::all_of(chunks.begin(), std::prev(chunks.end()),
                                [&](uint64_t chunk) { return chunk == chunks.front(); }));
        EXPECT_LE(chunks.back(), chunks.front());
      }
    }
  }
}

TEST(Chunking, CopiedMemoryHasSmallerChunksThanDroppedMemory) {
  EXPECT_EQ(cut_into_chunks(2 * kMiB, 2 * kMiB, kCopiedChunkBytes).size(), 1u);
  EXPECT_EQ(cut_into_chunks(kGiB, 2 * kMiB, kCopiedChunkBytes).size(), 8u);
  EXPECT_EQ(cut_into_chunks(kGiB, 2 * kMiB, kDroppedChunkBytes).size(), 1u);
  EXPECT_EQ(cut_into_chunks(kGiB + 2 * kMiB, 2 * kMiB, kDroppedChunkBytes).back(), 2 * kMiB);
  EXPECT_EQ(cut_into_chunks(15 * kGiB, 2 * kMiB, kExportableChunkBytes).size(), 8u);
  EXPECT_LE(cut_into_chunks(140 * kGiB, 2 * kMiB, kCopiedChunkBytes).size(), kMaxChunks);
}

TEST(CopyPlan, EveryPlanFitsItsRingItsThreadsAndItsBytes) {
  std::mt19937_64 random(5);
  for (int i = 0; i < 20000; ++i) {
    const uint64_t bytes = random() % 8 == 0 ? random() : random() >> (20 + random() % 44);
    const uint64_t fresh_bytes = bytes == 0 ? 0 : random() % bytes;
    const CopyNeed need = {.is_to_device = random() % 2 == 0,
                           .bytes = bytes,
                           .fresh_bytes = fresh_bytes,
                           .has_files = random() % 2 == 0,
                           .cores = static_cast<int>(random() % 40) - 2,
                           .wanted_threads = i % 100 == 0 ? INT_MAX : static_cast<int>(random() % 20) - 2,
                           .devices = static_cast<int>(random() % 8) + 1,
                           .is_swap = random() % 2 == 0};
    const uint64_t ring_bytes = kLeastRingBytes + random() % (256 * kMiB);
    const CopyPlan plan = plan_copy(need, ring_bytes);
    EXPECT_GE(plan.threads, 1);
    EXPECT_LE(plan.threads, std::clamp(need.wanted_threads > 0 ? need.wanted_threads : need.cores, 1, kMaxCopyThreads));
    EXPECT_LE(static_cast<uint64_t>(plan.threads), bytes / (8 * kMiB) + 1);
    EXPECT_LE(plan.ring_bytes, ring_bytes);
    EXPECT_LE(static_cast<uint64_t>(plan.threads), plan.ring_bytes / kPartBytes)
        << "a thread without a part only waits";
    EXPECT_EQ(plan.piece_bytes % kPartBytes, 0u);
    EXPECT_GE(plan.piece_bytes, kPartBytes);
    EXPECT_LE(plan.piece_bytes, kLargestPieceBytes);
    EXPECT_LE(2 * plan.piece_bytes, plan.ring_bytes) << "else bus and threads take turns";
    // A larger ring never makes a copy smaller, and beyond the wanted size it changes nothing.
    EXPECT_LE(plan.piece_bytes, plan_copy(need, ring_bytes + random() % kGiB).piece_bytes);
    EXPECT_LE(plan.threads, plan_copy(need, ring_bytes + random() % kGiB).threads);
    const uint64_t wanted_bytes = wanted_ring_bytes(need);
    EXPECT_GE(wanted_bytes, kLeastRingBytes);
    EXPECT_LE(wanted_bytes, need.has_files ? kMaxCopyThreads * 2 * kRequestBytes : kLargestRingBytes);
    const CopyPlan wanted = plan_copy(need, wanted_bytes);
    const CopyPlan most = plan_copy(need, kUnlimited);
    EXPECT_EQ(std::tie(wanted.threads, wanted.ring_bytes, wanted.piece_bytes),
              std::tie(most.threads, most.ring_bytes, most.piece_bytes));
  }
}

void expect_plan(const CopyPlan& plan, int threads, uint64_t piece_bytes) {
  EXPECT_EQ(plan.threads, threads);
  EXPECT_EQ(plan.piece_bytes, piece_bytes);
}

TEST(CopyPlan, FreshMemoryWantsAllCoresAndTheBusFewer) {
  const CopyNeed fresh = {.bytes = 15 * kGiB, .fresh_bytes = 15 * kGiB, .cores = 24};
  CopyNeed touched = {.bytes = 15 * kGiB, .fresh_bytes = 0, .cores = 24};
  const CopyNeed back = {.is_to_device = true, .bytes = 15 * kGiB, .cores = 24};
  expect_plan(plan_copy(fresh, 64 * kMiB), 16, 16 * kMiB);
  expect_plan(plan_copy(touched, 64 * kMiB), 8, 16 * kMiB);
  expect_plan(plan_copy(back, 64 * kMiB), 10, 16 * kMiB);
  for (const CopyNeed& need : {fresh, touched, back}) EXPECT_EQ(wanted_ring_bytes(need), 64 * kMiB);
  touched.fresh_bytes = touched.bytes / 2;
  EXPECT_EQ(plan_copy(touched, 64 * kMiB).threads, 8);
  touched.fresh_bytes += 1;
  EXPECT_EQ(plan_copy(touched, 64 * kMiB).threads, 16);
  // With fewer cores as well, the resume can use the ring of the first pause.
  for (int cores = 1; cores <= 64; ++cores) {
    const auto ring = [&](bool is_to_device, uint64_t fresh_bytes) {
      return wanted_ring_bytes(
          {.is_to_device = is_to_device, .bytes = kGiB, .fresh_bytes = fresh_bytes, .cores = cores});
    };
    EXPECT_EQ(ring(false, kGiB), ring(false, 0)) << cores;
    EXPECT_EQ(ring(false, kGiB), ring(true, 0)) << cores;
  }
  EXPECT_EQ(wanted_ring_bytes({.bytes = kGiB, .cores = 1}), 16 * kMiB) << "one thread is no faster with more";
}

TEST(CopyPlan, FilesHaveARequestOfEachThreadAndAsMuchAgain) {
  const CopyNeed need = {.bytes = 15 * kGiB, .has_files = true, .cores = 16};
  EXPECT_EQ(wanted_ring_bytes(need), 128 * kMiB);
  expect_plan(plan_copy(need, kUnlimited), 8, kRequestBytes);
  EXPECT_EQ(plan_copy(need, kUnlimited).ring_bytes, 2 * 8 * kRequestBytes);
  EXPECT_EQ(plan_copy({.is_to_device = true, .bytes = kGiB, .has_files = true, .cores = 16}, kUnlimited).threads, 8);
  EXPECT_EQ(wanted_ring_bytes({.bytes = 15 * kGiB, .has_files = true, .cores = 2}), 32 * kMiB);
  EXPECT_EQ(wanted_ring_bytes({.bytes = 15 * kGiB, .has_files = true, .cores = 2, .wanted_threads = 16}), 256 * kMiB);
  EXPECT_EQ(plan_copy({.bytes = 32 * kMiB, .has_files = true, .cores = 16}, kUnlimited).piece_bytes, kRequestBytes);
}

TEST(CopyPlan, BothSidesOfASwapAndAllDevicesShareTheCores) {
  const auto threads = [](bool is_to_device, uint64_t fresh_bytes, int cores, int devices, int wanted) {
    return plan_copy({.is_to_device = is_to_device,
                      .bytes = 15 * kGiB,
                      .fresh_bytes = fresh_bytes,
                      .cores = cores,
                      .wanted_threads = wanted,
                      .devices = devices,
                      .is_swap = true},
                     64 * kMiB)
        .threads;
  };
  EXPECT_EQ(threads(false, 0, 16, 1, 0), 6);
  EXPECT_EQ(threads(true, 0, 16, 1, 0), 10);
  EXPECT_EQ(threads(false, 15 * kGiB, 16, 1, 0), 8) << "which clears memory as well";
  EXPECT_EQ(threads(false, 0, 16, 2, 0), 3);
  EXPECT_EQ(threads(true, 0, 16, 2, 0), 5);
  EXPECT_EQ(threads(false, 0, 1, 8, 0), 1);
  EXPECT_EQ(threads(true, 0, 1, 8, 0), 1);
  EXPECT_EQ(threads(false, 0, 64, 1, 0), 8);
  EXPECT_EQ(threads(true, 0, 64, 1, 0), 10);
  EXPECT_EQ(threads(false, 0, 16, 1, 8), 3) << "of the wish as well";
  EXPECT_EQ(threads(true, 0, 16, 1, 8), 5);
  EXPECT_EQ(threads(true, 0, 16, 1, 1), 1);
  EXPECT_EQ(threads(false, 0, 16, 1, INT_MAX), kMaxCopyThreads);
  for (int cores = 2; cores <= 16; ++cores) {
    EXPECT_LE(threads(false, 0, cores, 1, 0) + threads(true, 0, cores, 1, 0), cores + (cores == 2 ? 1 : 0)) << cores;
  }
}

TEST(CopyPlan, ASmallRingTakesTheSizeOfThePiecesAndThenThreads) {
  const CopyNeed touched = {.bytes = 15 * kGiB, .fresh_bytes = 0, .cores = 16};
  expect_plan(plan_copy(touched, 64 * kMiB - 1), 8, 14 * kMiB);
  expect_plan(plan_copy(touched, 24 * kMiB), 8, 6 * kMiB);
  expect_plan(plan_copy(touched, 16 * kMiB), 8, 4 * kMiB);
  expect_plan(plan_copy(touched, 8 * kMiB), 4, 2 * kMiB);
  expect_plan(plan_copy(touched, 4 * kMiB), 2, 2 * kMiB);
}

TEST(CopyPlan, TheWishGoesBeforeTheCoresAndSmallCopiesHaveFewThreadsAndSmallPieces) {
  CopyNeed need = {.bytes = 10 * kGiB, .fresh_bytes = 0, .cores = 2};
  EXPECT_EQ(plan_copy(need, kUnlimited).threads, 2);
  need.wanted_threads = 14;
  EXPECT_EQ(plan_copy(need, kUnlimited).threads, 14);
  need.wanted_threads = 1000;
  EXPECT_EQ(plan_copy(need, kUnlimited).threads, kMaxCopyThreads);
  need.bytes = 128 * kMiB;
  expect_plan(plan_copy(need, kUnlimited), kMaxCopyThreads, 8 * kMiB);
  need.bytes = kMiB;
  expect_plan(plan_copy(need, kUnlimited), 1, 2 * kMiB);
  EXPECT_EQ(wanted_ring_bytes(need), 4 * kMiB);
}

HostMemory machine(uint64_t total, uint64_t available) { return {total, available, {}}; }

TEST(HostRoom, EachBoundBinds) {
  HostMemory memory = machine(64 * kGiB, 32 * kGiB);
  EXPECT_EQ(host_room(memory, {}, {}), 32 * kGiB);
  EXPECT_EQ(host_room(memory, {}, {kUnlimited, kGiB}), 31 * kGiB);
  EXPECT_EQ(host_room(memory, {}, {4 * kGiB, 0}), 4 * kGiB);
  // The kernel does not know of promised pages, and counts touched ones.
  EXPECT_EQ(host_room(memory, {.promised_bytes = 2 * kGiB, .touched_bytes = 3 * kGiB, .uncharged_bytes = 0}, {}),
            30 * kGiB);
  EXPECT_EQ(host_room(memory, {.promised_bytes = 2 * kGiB, .touched_bytes = 3 * kGiB, .uncharged_bytes = kGiB},
                      {10 * kGiB, 0}),
            4 * kGiB);
  // A cgroup does not count memory that the driver pins. Page cache that the kernel can reclaim does not count as used.
  memory.cgroups = {{8 * kGiB, 5 * kGiB, kGiB}, {kUnlimited, 60 * kGiB, 0}};
  EXPECT_EQ(host_room(memory, {}, {}), 4 * kGiB);
  EXPECT_EQ(
      host_room(memory, {.promised_bytes = kGiB, .touched_bytes = 0, .uncharged_bytes = kGiB}, {kUnlimited, kGiB}),
      kGiB);
  // Already beyond the limit: the room is 0, and does not wrap.
  memory.cgroups = {{kGiB, 5 * kGiB, 0}};
  EXPECT_EQ(host_room(memory, {}, {}), 0u);
  EXPECT_EQ(host_room(machine(0, 0), {}, {}), 0u);
}

TEST(HostRoom, MoreHeldOrStricterNeverGivesMoreRoom) {
  std::mt19937_64 random(11);
  const auto any = [&] { return random() % 3 == 0 ? random() : random() % (64 * kGiB); };
  for (int i = 0; i < 5000; ++i) {
    HostMemory memory = machine(any(), any());
    for (uint64_t level = random() % 4; level > 0; --level) memory.cgroups.push_back({any(), any(), any()});
    const HostHoldings held = {any() / 4, any() / 4, any() / 4};
    const HostRules rules = {random() % 2 == 0 ? kUnlimited : any(), any() / 8};
    const uint64_t room = host_room(memory, held, rules);
    EXPECT_LE(room, memory.available_bytes);
    if (rules.limit_bytes != kUnlimited) {
      EXPECT_LE(room, rules.limit_bytes);
    }
    for (const CgroupLevel& level : memory.cgroups) EXPECT_LE(room, level.limit_bytes);
    const uint64_t more = any();
    EXPECT_LE(
        host_room(memory, {saturating_add(held.promised_bytes, more), held.touched_bytes, held.uncharged_bytes}, rules),
        room);
    EXPECT_LE(
        host_room(memory, {held.promised_bytes, saturating_add(held.touched_bytes, more), held.uncharged_bytes}, rules),
        room);
    EXPECT_LE(
        host_room(memory, {held.promised_bytes, held.touched_bytes, saturating_add(held.uncharged_bytes, more)}, rules),
        room);
    EXPECT_LE(host_room(memory, held, {rules.limit_bytes, saturating_add(rules.margin_bytes, more)}), room);
    memory.cgroups.push_back({any(), any(), 0});
    EXPECT_LE(host_room(memory, held, rules), room);
  }
}

TEST(HostRoom, TheDefaultMarginIsASixteenthAndAtMostAGibibyte) {
  EXPECT_EQ(default_host_margin(machine(64 * kGiB, 0)), kGiB);
  EXPECT_EQ(default_host_margin(machine(8 * kGiB, 0)), 512 * kMiB);
  HostMemory contained = machine(64 * kGiB, 64 * kGiB);
  contained.cgroups = {{2 * kGiB, 0, 0}};
  EXPECT_EQ(default_host_margin(contained), 128 * kMiB);
  EXPECT_EQ(host_limit_in_force(contained, {kGiB, 0}), kGiB);
  EXPECT_EQ(host_limit_in_force(contained, {}), 2 * kGiB);
}

}  // namespace
}  // namespace ebbtide::policy
