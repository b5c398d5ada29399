// Pure decisions, swept: chunking, the copy plan, host room.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>

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
}

TEST(Chunking, EverySizeIsCoveredInOrderByFewEnoughChunks) {
  std::mt19937_64 random(7);
  std::vector<uint64_t> granules = {1, 2, 63, 64, 65, 511, 512, 513, 64 * 256, 64 * 256 + 1, 1ull << 20, 1ull << 24};
  for (int i = 0; i < 300; ++i) granules.push_back(1 + (random() >> (40 + random() % 24)));
  for (const uint64_t granularity : {2 * kMiB, 64 * kKiB, 512 * kMiB}) {
    for (const uint64_t count : granules) {
      for (const bool has_backup : {false, true}) {
        const uint64_t size = count * granularity;
        const std::vector<uint64_t> chunks = cut_into_chunks(size, granularity, has_backup);
        ASSERT_FALSE(chunks.empty());
        EXPECT_EQ(std::accumulate(chunks.begin(), chunks.end(), uint64_t{0}), size);
        EXPECT_LE(chunks.size(), kMaxChunks);
        for (const uint64_t chunk : chunks) {
          EXPECT_GT(chunk, 0u);
          EXPECT_EQ(chunk % granularity, 0u);
        }
        // All alike but the last, which is no larger.
        EXPECT_TRUE(std::all_of(chunks.begin(), std::prev(chunks.end()),
                                [&](uint64_t chunk) { return chunk == chunks.front(); }));
        EXPECT_LE(chunks.back(), chunks.front());
      }
    }
  }
}

TEST(Chunking, WhatIsCopiedHasSmallerChunksThanWhatIsDropped) {
  EXPECT_EQ(cut_into_chunks(2 * kMiB, 2 * kMiB, true).size(), 1u);
  EXPECT_EQ(cut_into_chunks(kGiB, 2 * kMiB, true).size(), 8u);
  EXPECT_EQ(cut_into_chunks(kGiB, 2 * kMiB, false).size(), 1u);
  EXPECT_EQ(cut_into_chunks(kGiB + 2 * kMiB, 2 * kMiB, false).back(), 2 * kMiB);
  EXPECT_LE(cut_into_chunks(140 * kGiB, 2 * kMiB, true).size(), kMaxChunks);
}

TEST(CopyPlan, ThreadsFollowBytesCoresAndTheWish) {
  for (const uint64_t bytes : {uint64_t{0}, uint64_t{1}, kSlotBytes, 100 * kMiB, 100 * kGiB, UINT64_MAX}) {
    for (const int cores : {-1, 0, 1, 2, 4, 5, 16, 256}) {
      for (const int wanted : {-3, 0, 1, 2, 1000}) {
        const int threads = copy_threads(bytes, cores, wanted);
        EXPECT_GE(threads, 1);
        EXPECT_LE(threads, kMaxCopyThreads);
        if (wanted > 0) {
          EXPECT_LE(threads, wanted);
        }
        EXPECT_LE(static_cast<uint64_t>(threads), bytes / (kSlotBytes * kSlotsPerThread) + 1);
        if (bytes < UINT64_MAX) {
          EXPECT_LE(threads, copy_threads(bytes + kGiB, cores, wanted));
        }
      }
    }
  }
  EXPECT_EQ(copy_threads(10 * kGiB, 16, 0), 14);
  EXPECT_EQ(copy_threads(10 * kGiB, 2, 0), 2);
  EXPECT_EQ(copy_threads(10 * kGiB, 2, 8), 8);
  EXPECT_EQ(copy_threads(kMiB, 16, 8), 1);
}

HostMemory machine(uint64_t total, uint64_t available) { return {total, available, {}}; }

TEST(HostRoom, EachBoundBinds) {
  HostMemory memory = machine(64 * kGiB, 32 * kGiB);
  EXPECT_EQ(host_room(memory, {}, {}), 32 * kGiB);
  EXPECT_EQ(host_room(memory, {}, {kUnlimited, kGiB}), 31 * kGiB);
  EXPECT_EQ(host_room(memory, {}, {4 * kGiB, 0}), 4 * kGiB);
  // Promised pages are unknown to the kernel, touched ones are known.
  EXPECT_EQ(host_room(memory, {.promised_bytes = 2 * kGiB, .touched_bytes = 3 * kGiB, .uncharged_bytes = 0}, {}),
            30 * kGiB);
  EXPECT_EQ(host_room(memory, {.promised_bytes = 2 * kGiB, .touched_bytes = 3 * kGiB, .uncharged_bytes = kGiB},
                      {10 * kGiB, 0}),
            4 * kGiB);
  // A cgroup does not know of what the driver pins; page cache that it would give up is no use.
  memory.cgroups = {{8 * kGiB, 5 * kGiB, kGiB}, {kUnlimited, 60 * kGiB, 0}};
  EXPECT_EQ(host_room(memory, {}, {}), 4 * kGiB);
  EXPECT_EQ(
      host_room(memory, {.promised_bytes = kGiB, .touched_bytes = 0, .uncharged_bytes = kGiB}, {kUnlimited, kGiB}),
      kGiB);
  // Already beyond: nothing, and no wrap.
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
