// Steps of models that are made of blocks, with calls of modules: for tests of recomputation and of choices.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "policy/lms/step_record.h"

namespace ebbtide::policy {

// One block: an input that it saves, and parts that it makes.
struct BlockShape {
  uint64_t input_bytes = 0;
  std::vector<uint64_t> parts_bytes;
  double forward_seconds = 0;
};

inline constexpr uint64_t kRootModule = 1;

// A step of a model (call 0) of blocks (modules 2, 3, ...; calls 1, 2, ...), each of which saves its argument and its
// parts. Backward takes twice as long as forward. temporary_bytes: in backward, beside what is saved.
inline StepRecord block_step(const std::vector<BlockShape>& blocks, uint64_t base_bytes, uint64_t temporary_bytes) {
  StepRecord record;
  uint64_t held_bytes = base_bytes;
  double now = 0;
  const auto add = [&](StepEventKind kind, uint32_t index, uint64_t more_bytes = 0) {
    record.events.push_back({kind, index, held_bytes + more_bytes, now});
  };
  const auto save = [&](uint64_t size_bytes, uint32_t call, uint32_t input_of) {
    const auto storage = static_cast<uint32_t>(record.storages.size());
    record.storages.push_back({size_bytes, storage + uint64_t{1000}, call, input_of});
    record.saves.push_back({storage, call});
    held_bytes += size_bytes;
    add(StepEventKind::kSaved, storage);
    return storage;
  };
  record.calls.push_back({.key = 1, .module = kRootModule});
  add(StepEventKind::kEntered, 0);
  uint32_t last = kNone;
  const auto set_last_free = [&](uint32_t next) {
    if (last != kNone) add(StepEventKind::kFree, last);
    last = next;
  };
  std::vector<std::vector<uint32_t>> saved(blocks.size());
  for (const BlockShape& block : blocks) {
    const auto call = static_cast<uint32_t>(record.calls.size());
    const auto entered_at = static_cast<uint32_t>(record.events.size());
    record.calls.push_back({.key = call + uint64_t{1},
                            .name = call + uint64_t{500},
                            .module = call + uint64_t{1},
                            .parent = 0,
                            .entered_at = entered_at,
                            .input_bytes = block.input_bytes,
                            .saved_input_bytes = block.input_bytes});
    add(StepEventKind::kEntered, call);
    std::vector<uint32_t>& mine = saved[call - 1];
    mine.push_back(save(block.input_bytes, call, call));
    set_last_free(mine.back());
    for (const uint64_t part_bytes : block.parts_bytes) {
      now += block.forward_seconds / static_cast<double>(block.parts_bytes.size());
      mine.push_back(save(part_bytes, call, kNone));
      set_last_free(mine.back());
    }
    record.calls[call].returned_at = static_cast<uint32_t>(record.events.size());
    add(StepEventKind::kReturned, call);
  }
  set_last_free(kNone);
  record.calls[0].returned_at = static_cast<uint32_t>(record.events.size());
  add(StepEventKind::kReturned, 0);
  for (size_t block = blocks.size(); block-- > 0;) {
    for (size_t part = saved[block].size(); part-- > 0;) {
      const uint32_t storage = saved[block][part];
      add(StepEventKind::kWanted, storage, temporary_bytes);
      if (part > 0) now += 2 * blocks[block].forward_seconds / static_cast<double>(blocks[block].parts_bytes.size());
      held_bytes -= record.storages[storage].size_bytes;
      add(StepEventKind::kDropped, storage);
    }
  }
  return record;
}

inline constexpr double kBlockRate = 400e12;  // floating-point operations a second

// A Transformer: blocks of width h give 34 h bytes a token (2 h of them their input) and take 24 h^2 operations.
inline StepRecord transformer_step(uint64_t width, uint64_t tokens, size_t block_count = 24) {
  const uint64_t unit = width * tokens;
  const double seconds =
      24.0 * static_cast<double>(width) * static_cast<double>(width) * static_cast<double>(tokens) / kBlockRate;
  const BlockShape block{2 * unit, {2 * unit, 6 * unit, 2 * unit, 2 * unit, 8 * unit, 8 * unit, 4 * unit}, seconds};
  return block_step(std::vector<BlockShape>(block_count, block), 6 * unit, 6 * unit);
}

// A convolutional network: early blocks are large and fast, late ones small and slow.
inline StepRecord convolutional_step() {
  std::vector<BlockShape> blocks;
  for (uint64_t stage = 0; stage < 4; ++stage) {
    for (int block = 0; block < 6; ++block) {
      const uint64_t unit = uint64_t{256'000'000} >> stage;
      blocks.push_back({unit, {unit, unit, unit, unit / 2}, 1e-3 * static_cast<double>(1 + stage)});
    }
  }
  return block_step(blocks, 500'000'000, 300'000'000);
}

}  // namespace ebbtide::policy
