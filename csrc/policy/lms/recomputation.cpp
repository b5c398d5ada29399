#include "policy/lms/recomputation.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace ebbtide::policy {
namespace {

constexpr uint64_t kLargestRecomputedPart = 8;  // of all that a step saves, one in so many

// Events of a storage, or kNone.
struct Life {
  uint32_t free_at = kNone;    // for the first time, before it is wanted
  uint32_t wanted_at = kNone;  // for the first time
  uint32_t gone_at = kNone;
  // What the program holds until backward needs its memory whether it is saved or not.
  bool is_let_go() const { return free_at != kNone; }
};

std::vector<Life> lives_of(const StepRecord& record) {
  std::vector<Life> lives(record.storages.size());
  for (uint32_t event = 0; event < record.events.size(); ++event) {
    const auto& [kind, index, demand, seconds] = record.events[event];
    if (is_of_call(kind) || index >= lives.size()) continue;
    Life& life = lives[index];
    if (kind == StepEventKind::kFree && life.wanted_at == kNone) life.free_at = std::min(life.free_at, event);
    if (kind == StepEventKind::kWanted) life.wanted_at = std::min(life.wanted_at, event);
    if (kind == StepEventKind::kDropped) life.gone_at = std::min(life.gone_at, event);
  }
  return lives;
}

// Calls with the storages that recomputing each of them would drop. Calls of other threads may lie between those inside
// a call, so only parents tell what is inside.
class CallTree {
 public:
  explicit CallTree(const StepRecord& record) : record_(record), lives_(lives_of(record)) {
    dropped_bytes_.assign(record.calls.size(), 0);
    inside_bytes_.assign(record.calls.size(), 0);
    wanted_at_.assign(record.calls.size(), kNone);
    for (uint32_t index = 0; index < record.storages.size(); ++index) add_storage(index);
    for (uint32_t call = 0; call < record.calls.size(); ++call)
      if (parent_of(call) != kNone) inside_bytes_[parent_of(call)] += dropped_bytes_[call];
  }

  uint32_t parent_of(uint32_t call) const {
    const uint32_t parent = record_.calls[call].parent;
    return parent < call ? parent : kNone;
  }
  bool is_inside(uint32_t inner, uint32_t outer) const {
    while (inner < record_.calls.size() && inner > outer) inner = parent_of(inner);
    return inner == outer;
  }
  // A storage that the call itself got as an argument stays. One that only a call inside got was made in this one.
  bool is_dropped(const RecordedStorage& storage, uint32_t call) const {
    return storage.call < record_.calls.size() && is_inside(storage.call, call) &&
           (storage.input_of == kNone || (storage.input_of != call && is_inside(storage.input_of, call)));
  }
  const std::vector<Life>& lives() const { return lives_; }

  // Whether both of its ends are known, and backward comes after them.
  bool is_whole(uint32_t call) const {
    const ModuleCall& made = record_.calls[call];
    return made.returned_at < record_.events.size() && made.entered_at < made.returned_at &&
           wanted_at_[call] != kNone && wanted_at_[call] > made.returned_at;
  }
  // Whether the calls inside it are no better blocks.
  bool is_small(uint32_t call) const {
    return dropped_bytes_[call] <= all_bytes_ / kLargestRecomputedPart ||
           inside_bytes_[call] < dropped_bytes_[call] / 2;
  }
  Block block_of(uint32_t call) const {
    const ModuleCall& made = record_.calls[call];
    Block block{.call = call, .dropped_bytes = dropped_bytes_[call], .backward_at = wanted_at_[call]};
    block.added_bytes = made.input_bytes - std::min(made.input_bytes, made.saved_input_bytes);
    const double seconds = record_.events[made.returned_at].seconds - record_.events[made.entered_at].seconds;
    block.forward_seconds = std::isfinite(seconds) ? std::max(0.0, seconds) : 0;
    return block;
  }

 private:
  void add_storage(uint32_t index) {
    const RecordedStorage& storage = record_.storages[index];
    const uint64_t freed_bytes = lives_[index].is_let_go() ? storage.size_bytes : 0;
    all_bytes_ += freed_bytes;
    if (storage.call >= record_.calls.size()) return;
    for (uint32_t call = storage.call; call != kNone; call = parent_of(call)) {
      if (!is_dropped(storage, call)) continue;
      dropped_bytes_[call] += freed_bytes;
      wanted_at_[call] = std::min(wanted_at_[call], lives_[index].wanted_at);
    }
  }

  const StepRecord& record_;
  const std::vector<Life> lives_;
  std::vector<uint64_t> dropped_bytes_;
  std::vector<uint64_t> inside_bytes_;  // that calls directly inside this one would drop
  std::vector<uint32_t> wanted_at_;
  uint64_t all_bytes_ = 0;
};

// A record that is changed for blocks.
class Rewriter {
 public:
  Rewriter(const StepRecord& record, const std::vector<Block>& blocks)
      : record_(record), blocks_(blocks), tree_(record), inputs_(blocks.size()), has_run_(blocks.size()) {
    find_storages();
    find_inputs();
  }

  StepRecord rewrite() {
    find_changes();
    StepRecord changed = record_;
    int64_t change = 0;
    double delay = 0;
    for (uint32_t event = 0; event < changed.events.size(); ++event) {
      StepEvent& here = changed.events[event];
      change += demand_changes_[event];
      const auto bytes = static_cast<int64_t>(here.demand_bytes) + change;
      here.demand_bytes = static_cast<uint64_t>(std::max<int64_t>(bytes, 0));
      here.seconds += delay;  // that of its own block comes after what the block reads is back
      const uint32_t block = block_of(here);
      if (block == kNone) continue;
      here.index = kNone;
      if (here.kind != StepEventKind::kWanted || event < blocks_[block].backward_at || has_run_[block]) continue;
      here.index = take_input(block);
      if (!inputs_[block].empty()) continue;
      delay += blocks_[block].forward_seconds;
      has_run_[block] = true;
    }
    return changed;
  }

 private:
  void find_storages() {
    block_of_call_.assign(record_.calls.size(), kNone);
    for (uint32_t block = 0; block < blocks_.size(); ++block) block_of_call_[blocks_[block].call] = block;
    for (uint32_t call = 0; call < block_of_call_.size(); ++call)
      if (block_of_call_[call] == kNone && tree_.parent_of(call) != kNone)
        block_of_call_[call] = block_of_call_[tree_.parent_of(call)];
    block_of_storage_.assign(record_.storages.size(), kNone);
    for (uint32_t index = 0; index < record_.storages.size(); ++index) {
      const RecordedStorage& storage = record_.storages[index];
      const uint32_t block = storage.call < block_of_call_.size() ? block_of_call_[storage.call] : kNone;
      if (block != kNone && tree_.is_dropped(storage, blocks_[block].call)) block_of_storage_[index] = block;
    }
  }

  // What is saved in a block and stays is read when the block runs again.
  void find_inputs() {
    for (const auto& [storage, call] : record_.saves) {
      if (storage >= block_of_storage_.size() || call >= block_of_call_.size()) continue;
      const uint32_t block = block_of_call_[call];
      if (block == kNone || block_of_storage_[storage] != kNone || !tree_.lives()[storage].is_let_go()) continue;
      std::vector<uint32_t>& inputs = inputs_[block];
      if (std::find(inputs.begin(), inputs.end(), storage) == inputs.end()) inputs.push_back(storage);
    }
    // No more than there are events to take.
    std::vector<size_t> wants(blocks_.size(), 0);
    for (uint32_t event = 0; event < record_.events.size(); ++event) {
      const uint32_t block = block_of(record_.events[event]);
      const bool is_wanted = record_.events[event].kind == StepEventKind::kWanted;
      if (block != kNone && is_wanted && event >= blocks_[block].backward_at) ++wants[block];
    }
    for (size_t block = 0; block < wants.size(); ++block)
      if (inputs_[block].size() > wants[block]) inputs_[block].resize(wants[block]);
  }

  void find_changes() {
    demand_changes_.assign(record_.events.size() + 1, 0);
    const auto add = [&](uint32_t begin, uint32_t end, int64_t bytes) {
      if (begin >= end) return;
      demand_changes_[begin] += bytes;
      demand_changes_[end] -= bytes;
    };
    for (const Block& block : blocks_)
      add(record_.calls[block.call].returned_at, block.backward_at, static_cast<int64_t>(block.added_bytes));
    for (uint32_t index = 0; index < block_of_storage_.size(); ++index) {
      const Life& life = tree_.lives()[index];
      if (block_of_storage_[index] == kNone || !life.is_let_go()) continue;
      const Block& block = blocks_[block_of_storage_[index]];
      const uint32_t returned_at = record_.calls[block.call].returned_at;
      add(std::max(returned_at, life.free_at), std::min(block.backward_at, life.gone_at),
          -static_cast<int64_t>(record_.storages[index].size_bytes));
    }
  }

  // That drops the event's storage.
  uint32_t block_of(const StepEvent& event) const {
    return is_of_call(event.kind) || event.index >= block_of_storage_.size() ? kNone : block_of_storage_[event.index];
  }

  // In place of the first ones that are wanted no more, the block's inputs are.
  uint32_t take_input(uint32_t block) {
    if (inputs_[block].empty()) return kNone;
    const uint32_t input = inputs_[block].back();
    inputs_[block].pop_back();
    return input;
  }

  const StepRecord& record_;
  const std::vector<Block>& blocks_;
  const CallTree tree_;
  std::vector<uint32_t> block_of_call_;     // around it
  std::vector<uint32_t> block_of_storage_;  // that drops it
  std::vector<std::vector<uint32_t>> inputs_;
  std::vector<bool> has_run_;  // again
  std::vector<int64_t> demand_changes_;
};

}  // namespace

std::vector<Block> find_blocks(const StepRecord& record, const std::unordered_set<uint64_t>& forbidden) {
  std::vector<Block> blocks;
  const CallTree tree(record);
  std::vector<bool> is_taken(record.calls.size(), false);  // with a call around it, or itself
  for (uint32_t call = 0; call < record.calls.size(); ++call) {
    const uint32_t parent = tree.parent_of(call);
    is_taken[call] = parent != kNone && is_taken[parent];
    if (is_taken[call] || forbidden.contains(record.calls[call].module) || !tree.is_whole(call)) continue;
    const Block block = tree.block_of(call);
    is_taken[call] = tree.is_small(call) && block.dropped_bytes > block.added_bytes;
    if (is_taken[call]) blocks.push_back(block);
  }
  return blocks;
}

StepRecord with_recomputation(const StepRecord& record, const std::vector<Block>& blocks) {
  return Rewriter(record, blocks).rewrite();
}

}  // namespace ebbtide::policy
