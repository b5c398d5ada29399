#pragma once

#include "kernels/block_types.h"

// What the GPU computes about blocks and writes into them: blocks.cu as embedded PTX and AMD code objects, and the same
// on the CPU, bit for bit. digest_steps.h has the algorithm.
//
// The entries of both and their parameters. These are launched with a CTA of kThreads for each block:
//   ebbtide_digest_blocks(const uint64_t* addresses, BlockReport* reports,
//                         uint64_t seed_low, uint64_t seed_high, uint32_t count)
//   ebbtide_fill_blocks(const BlockFill* fills, uint32_t count)
// the first also with a grid of (blocks, kSections), which reports each section; and this one with kLanes CTAs:
//   ebbtide_deliver(const Piece* pieces, const std::byte* slots, uint32_t* board,
//                   uint64_t slot_bytes, uint32_t lane_slots, uint32_t count)
// Their arguments point to memory that the GPU can access, such as pinned host memory. Blocks are kBlockBytes long and
// 16-byte aligned.
//
// A delivery runs while threads fill its slots, lane_slots for each lane in turn. It makes no driver calls, so it
// continues while other calls wait for the device inside the driver.
namespace ebbtide::kernels {

inline constexpr char kDigestEntry[] = "ebbtide_digest_blocks";
inline constexpr char kFillEntry[] = "ebbtide_fill_blocks";
inline constexpr char kDeliverEntry[] = "ebbtide_deliver";

// block: kBlockBytes, aligned or not.
BlockReport digest_block(const std::byte* block, Digest seed);
BlockReport digest_section(const std::byte* block, uint32_t section, Digest seed);
// The block's report, from those of its kSections sections.
BlockReport join_sections(const BlockReport* sections, Digest seed);
void fill_block(std::byte* block, Value value);

// PTX that every driver from CUDA 12.0 on compiles, as a C string.
const char* ptx();
// Clang's offload bundle of code objects for AMD's gfx90a, gfx942, gfx950 and gfx1100, which hipModuleLoadData takes.
const void* code_objects();

}  // namespace ebbtide::kernels
