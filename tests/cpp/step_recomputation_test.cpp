// Which calls can be recomputed, and what that does to a step: in random trees of calls, beside the generator's own
// knowledge of who made and who got each storage.
#include "policy/lms/recomputation.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "model_steps.h"
#include "policy/lms/step_plan.h"
#include "step_replay.h"

namespace ebbtide::policy {
namespace {

// A random model: modules in modules, which save what they make, their arguments, and what others have made.
struct Model {
  explicit Model(uint64_t seed) : random(seed) {
    call(kNone, kNone, 0);
    backward();
  }

  StepRecord record;
  std::vector<std::set<uint32_t>> arguments, savers;  // by call: storages; by storage: calls
  std::vector<bool> is_held;                          // by the program, until backward

 private:
  void add(StepEventKind kind, uint32_t index) {
    now += 1e-3 * static_cast<double>(random() % 10);
    record.events.push_back({kind, index, held_bytes + random() % 50, now});
  }

  void save(uint32_t storage, uint32_t call) {
    RecordedStorage& saved = record.storages[storage];
    savers[storage].insert(call);
    record.saves.push_back({storage, call});
    const bool is_new = savers[storage].size() == 1 && saved.call == kNone;
    if (!is_new) {
      while (!is_around(saved.call, call)) saved.call = record.calls[saved.call].parent;
      return;
    }
    saved.call = call;
    for (uint32_t around = call; around != kNone; around = record.calls[around].parent)
      if (arguments[around].contains(storage)) saved.input_of = around;
    held_bytes += saved.size_bytes;
    add(StepEventKind::kSaved, storage);
    order.push_back(storage);
  }

  uint32_t make() {
    record.storages.push_back({.size_bytes = 1 + random() % 100, .key = record.storages.size() + 1});
    savers.emplace_back();
    is_held.push_back(random() % 8 == 0);
    return static_cast<uint32_t>(record.storages.size() - 1);
  }

  // Returns what the call makes in the end.
  uint32_t call(uint32_t parent, uint32_t argument, int depth) {
    const auto index = static_cast<uint32_t>(record.calls.size());
    record.calls.push_back({.key = index + uint64_t{1}, .module = 1 + random() % 40, .parent = parent});
    arguments.emplace_back();
    if (argument != kNone) arguments[index].insert(argument);
    if (argument != kNone) record.calls[index].input_bytes = record.storages[argument].size_bytes;
    record.calls[index].entered_at = static_cast<uint32_t>(record.events.size());
    add(StepEventKind::kEntered, index);
    uint32_t last = argument;
    for (size_t count = 1 + random() % (depth == 0 ? 12 : 4); count-- > 0;) {
      if (depth < 4 && random() % 3 != 0) {
        last = call(index, last, depth + 1);
      } else {
        if (last != kNone && random() % 2 == 0) save(last, index);
        last = make();
        if (random() % 2 == 0) save(last, index);
        if (random() % 6 == 0) save(static_cast<uint32_t>(random() % (last + 1)), index);
      }
      for (uint32_t storage = 0; storage < last; ++storage)
        if (!is_held[storage] && !savers[storage].empty() && random() % 2 == 0) let_go(storage);
    }
    if (argument != kNone && savers[argument].contains(index))
      record.calls[index].saved_input_bytes = record.storages[argument].size_bytes;
    record.calls[index].returned_at = static_cast<uint32_t>(record.events.size());
    add(StepEventKind::kReturned, index);
    return last;
  }

  void let_go(uint32_t storage) {
    if (!was_let_go.insert(storage).second) return;
    add(StepEventKind::kFree, storage);
  }

  void backward() {
    for (uint32_t storage = 0; storage < is_held.size(); ++storage)
      if (!is_held[storage] && !savers[storage].empty()) let_go(storage);
    while (!order.empty()) {
      add(StepEventKind::kWanted, order.back());
      held_bytes -= record.storages[order.back()].size_bytes;
      add(StepEventKind::kDropped, order.back());
      order.pop_back();
    }
  }

  bool is_around(uint32_t outer, uint32_t inner) const {
    while (inner != kNone && inner != outer) inner = record.calls[inner].parent;
    return inner == outer;
  }

  std::mt19937_64 random;
  std::vector<uint32_t> order;
  std::set<uint32_t> was_let_go;
  uint64_t held_bytes = 0;
  double now = 0;
};

bool is_inside(const StepRecord& record, uint32_t inner, uint32_t outer) {
  while (inner != kNone && inner != outer) inner = record.calls[inner].parent;
  return inner == outer;
}

// By what the generator knows: only the call saves it, and neither it nor a call around it got it.
bool is_made_and_saved_in(const Model& model, uint32_t storage, uint32_t call) {
  const std::set<uint32_t>& savers = model.savers[storage];
  const auto is_in_call = [&](uint32_t saver) { return is_inside(model.record, saver, call); };
  if (savers.empty() || !std::all_of(savers.begin(), savers.end(), is_in_call)) return false;
  while (call != kNone && !model.arguments[call].contains(storage)) call = model.record.calls[call].parent;
  return call == kNone;
}

bool is_free_before(const StepRecord& record, uint32_t storage, uint32_t event) {
  return std::any_of(record.events.begin(), record.events.begin() + event,
                     [&](const StepEvent& each) { return each.kind == StepEventKind::kFree && each.index == storage; });
}

TEST(StepRecomputation, BlocksAreWholeCallsOutsideOneAnother) {
  size_t found = 0, inner = 0;
  for (uint64_t seed = 0; seed < 200; ++seed) {
    const Model model(seed);
    const StepRecord& record = model.record;
    const std::unordered_set<uint64_t> forbidden = {1, 2, 3, 4, 5};
    const std::vector<Block> blocks = find_blocks(record, forbidden);
    for (size_t index = 0; index < blocks.size(); ++index) {
      const Block& block = blocks[index];
      const ModuleCall& call = record.calls[block.call];
      EXPECT_FALSE(forbidden.contains(call.module));
      EXPECT_TRUE(index == 0 || blocks[index - 1].call < block.call);
      for (const Block& other : blocks)
        EXPECT_TRUE(&other == &block || !is_inside(record, other.call, block.call)) << "one in another";
      EXPECT_LT(call.returned_at, block.backward_at);
      EXPECT_GT(block.dropped_bytes, block.added_bytes);
      EXPECT_NEAR(block.forward_seconds,
                  record.events[call.returned_at].seconds - record.events[call.entered_at].seconds, 1e-9);
      uint64_t dropped_bytes = 0;
      uint32_t backward_at = kNone;
      for (uint32_t storage = 0; storage < record.storages.size(); ++storage) {
        if (!is_made_and_saved_in(model, storage, block.call)) continue;
        if (!model.is_held[storage]) dropped_bytes += record.storages[storage].size_bytes;
        for (uint32_t event = 0; event < record.events.size(); ++event)
          if (record.events[event].kind == StepEventKind::kWanted && record.events[event].index == storage)
            backward_at = std::min(backward_at, event);
      }
      EXPECT_EQ(block.dropped_bytes, dropped_bytes);
      EXPECT_EQ(block.backward_at, backward_at);
      inner += call.parent != kNone && call.parent != 0 ? 1 : 0;
    }
    found += blocks.size();
    if (HasFailure()) return;
  }
  EXPECT_GT(found, 200u);
  EXPECT_GT(inner, 50u);
}

TEST(StepRecomputation, OnlyWhatIsDroppedChanges) {
  std::mt19937_64 random(41);
  for (uint64_t seed = 0; seed < 200; ++seed) {
    const Model model(seed);
    const StepRecord& record = model.record;
    std::vector<Block> blocks = find_blocks(record, {});
    std::erase_if(blocks, [&](const Block&) { return random() % 3 == 0; });
    std::shuffle(blocks.begin(), blocks.end(), random);
    const StepRecord changed = with_recomputation(record, blocks);
    ASSERT_EQ(changed.events.size(), record.events.size());
    std::vector<uint32_t> wants(blocks.size(), 0);
    for (uint32_t event = 0; event < record.events.size(); ++event) {
      const StepEvent &before = record.events[event], &after = changed.events[event];
      int64_t away_bytes = 0;
      double delay = 0;
      bool is_of_dropped = false;
      for (const Block& block : blocks) {
        const uint32_t returned_at = record.calls[block.call].returned_at;
        if (event > block.backward_at) delay += block.forward_seconds;
        if (event >= returned_at && event < block.backward_at) away_bytes -= static_cast<int64_t>(block.added_bytes);
        for (uint32_t storage = 0; storage < record.storages.size(); ++storage) {
          if (!is_made_and_saved_in(model, storage, block.call)) continue;
          is_of_dropped |= !is_of_call(before.kind) && before.index == storage;
          if (event >= returned_at && event < block.backward_at && is_free_before(record, storage, event + 1))
            away_bytes += static_cast<int64_t>(record.storages[storage].size_bytes);
        }
      }
      EXPECT_EQ(static_cast<int64_t>(before.demand_bytes) - static_cast<int64_t>(after.demand_bytes), away_bytes);
      EXPECT_EQ(before.kind, after.kind);
      EXPECT_TRUE(is_of_dropped || before.index == after.index);
      EXPECT_TRUE(!is_of_dropped || before.kind == StepEventKind::kWanted || after.index == kNone);
      // Blocks with several inputs run once all of these are back.
      const bool is_last = event + 1 == record.events.size();
      EXPECT_LE(after.seconds - before.seconds, delay + 1e-9);
      EXPECT_TRUE(!is_last || after.seconds - before.seconds > delay - 1e-9);
    }
    if (HasFailure()) return;
  }
}

TEST(StepRecomputation, InputsAreWantedWhenBackwardBegins) {
  size_t inputs = 0, late = 0;
  for (uint64_t seed = 0; seed < 200; ++seed) {
    const Model model(seed);
    const StepRecord& record = model.record;
    const std::vector<Block> blocks = find_blocks(record, {});
    const StepRecord changed = with_recomputation(record, blocks);
    for (const Block& block : blocks) {
      std::set<uint32_t> wanted;  // before the block runs again
      for (uint32_t event = block.backward_at; event < changed.events.size(); ++event) {
        const StepEvent& here = changed.events[event];
        if (here.kind == StepEventKind::kWanted && here.index != kNone) wanted.insert(here.index);
        if (event + 1 == changed.events.size() ||
            (changed.events[event + 1].seconds - record.events[event + 1].seconds) >
                here.seconds - record.events[event].seconds + 1e-12)
          break;
      }
      for (uint32_t storage = 0; storage < record.storages.size(); ++storage) {
        const bool is_saved_inside = std::any_of(model.savers[storage].begin(), model.savers[storage].end(),
                                                 [&](uint32_t call) { return is_inside(record, call, block.call); });
        if (!is_saved_inside || model.is_held[storage] || is_made_and_saved_in(model, storage, block.call)) continue;
        ++inputs;
        late += wanted.contains(storage) || block.forward_seconds == 0 ? 0 : 1;
      }
    }
  }
  EXPECT_GT(inputs, 200u);
  EXPECT_LE(late, inputs / 5) << "blocks with more inputs than what they drop";
}

TEST(StepRecomputation, BlocksOfATransformerAreFound) {
  const StepRecord record = transformer_step(1280, 1024);
  std::vector<Block> blocks = find_blocks(record, {});
  ASSERT_EQ(blocks.size(), 24u);
  for (const Block& block : blocks) {
    EXPECT_EQ(block.dropped_bytes, 32 * uint64_t{1280 * 1024});
    EXPECT_EQ(block.added_bytes, 0u);
  }
  EXPECT_EQ(find_blocks(record, {kRootModule}).size(), 24u);
  EXPECT_EQ(find_blocks(record, {2, 3}).size(), 22u);
  // A block that keeps what nothing else saves is worth less, and one that keeps too much is none.
  StepRecord other = record;
  other.calls[1].input_bytes += 1000;
  other.calls[2].input_bytes += 33 * uint64_t{1280 * 1024};
  blocks = find_blocks(other, {});
  ASSERT_EQ(blocks.size(), 23u);
  EXPECT_EQ(blocks[0].added_bytes, 1000u);
}

TEST(StepRecomputation, LargeCallsAreOpened) {
  // Two stages of four blocks each: a stage is half of the step.
  StepRecord record = transformer_step(1280, 1024, 8);
  const std::vector<Block> flat = find_blocks(record, {});
  ASSERT_EQ(flat.size(), 8u);
  StepRecord staged = record;
  staged.calls.insert(staged.calls.begin() + 5, ModuleCall{.key = 100, .module = 100, .parent = 0});
  staged.calls.insert(staged.calls.begin() + 1, ModuleCall{.key = 101, .module = 101, .parent = 0});
  const auto moved = [](uint32_t call) { return call == 0 || call == kNone ? call : call < 5 ? call + 1 : call + 2; };
  for (StepEvent& event : staged.events)
    if (is_of_call(event.kind)) event.index = moved(event.index);
  for (RecordedStorage& storage : staged.storages) {
    storage.call = moved(storage.call);
    storage.input_of = moved(storage.input_of);
  }
  for (SaveInCall& save : staged.saves) save.call = moved(save.call);
  for (uint32_t call = 1; call < staged.calls.size(); ++call) {
    if (staged.calls[call].key >= 100) continue;
    staged.calls[call].parent = call < 6 ? 1 : 6;
  }
  staged.calls[1].entered_at = record.calls[1].entered_at;
  staged.calls[1].returned_at = record.calls[4].returned_at;
  staged.calls[6].entered_at = record.calls[5].entered_at;
  staged.calls[6].returned_at = record.calls[8].returned_at;
  const std::vector<Block> blocks = find_blocks(staged, {});
  ASSERT_EQ(blocks.size(), 8u);
  for (size_t index = 0; index < 8; ++index) EXPECT_EQ(staged.calls[blocks[index].call].key, index + 2);
}

TEST(StepRecomputation, CallsOfAnotherThreadAreNotInside) {
  // Both begin before the first one ends.
  StepRecord record;
  record.calls = {{.key = 1, .module = 1, .entered_at = 0, .returned_at = 6},
                  {.key = 2, .module = 2, .entered_at = 1, .returned_at = 7}};
  for (uint32_t storage = 0; storage < 2; ++storage) {
    record.storages.push_back({.size_bytes = 10, .key = storage + uint64_t{1}, .call = storage});
    record.saves.push_back({storage, storage});
  }
  using enum StepEventKind;
  const std::vector<std::pair<StepEventKind, uint32_t>> events = {
      {kEntered, 0},  {kEntered, 1},  {kSaved, 0},  {kSaved, 1},   {kFree, 0},   {kFree, 1},
      {kReturned, 0}, {kReturned, 1}, {kWanted, 1}, {kDropped, 1}, {kWanted, 0}, {kDropped, 0}};
  for (const auto& [kind, index] : events) record.events.push_back({kind, index, 30, 0});
  const std::vector<Block> blocks = find_blocks(record, {});
  ASSERT_EQ(blocks.size(), 2u);
  const StepRecord changed = with_recomputation(record, {blocks[0]});
  EXPECT_EQ(changed.events[8].index, 1u) << "the other one's storage stays";
  EXPECT_EQ(changed.events[10].index, kNone);
}

TEST(StepRecomputation, ReentrantBackwardAndOpenCallsAreNoBlocks) {
  StepRecord record = transformer_step(1280, 1024, 12);
  EXPECT_EQ(find_blocks(record, {}).size(), 12u);
  record.calls[3].returned_at = kNone;
  std::swap(record.calls[4].returned_at, record.calls[4].entered_at);
  // Its backward runs inside it, or before its return is known.
  record.calls[5].returned_at = static_cast<uint32_t>(record.events.size() - 1);
  const std::vector<Block> blocks = find_blocks(record, {});
  EXPECT_EQ(blocks.size(), 9u);
  for (const Block& block : blocks) EXPECT_FALSE(block.call >= 3 && block.call <= 5);
  EXPECT_TRUE(find_blocks(llama_step(), {}).empty()) << "nothing is called";
}

TEST(StepRecomputation, SenselessRecordsDoNoHarm) {
  std::mt19937_64 random(42);
  const std::vector<double> times = {
      0, 1, 2, -1, 1e300, std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()};
  size_t found = 0;
  for (int round = 0; round < 1000; ++round) {
    Model model(random() % 1000);
    StepRecord& record = model.record;
    const auto index = [&] { return random() % 4 == 0 ? kNone : static_cast<uint32_t>(random() % 40); };
    for (size_t change = random() % 20; change-- > 0;) {
      StepEvent& event = record.events[random() % record.events.size()];
      ModuleCall& call = record.calls[random() % record.calls.size()];
      switch (random() % 8) {
        case 0: event.index = index(); break;
        case 1: event.kind = static_cast<StepEventKind>(random() % 6); break;
        case 2: event.seconds = times[random() % times.size()]; break;
        case 3: call.parent = index(); break;
        case 4: call.returned_at = index(); break;
        case 5: call.entered_at = index(); break;
        case 6: record.saves.push_back({index(), index()}); break;
        default: call.input_bytes = random() % kMostStorageBytes;
      }
    }
    for (RecordedStorage& storage : record.storages) {
      if (random() % 20 == 0) storage.call = index();
      if (random() % 20 == 0) storage.input_of = index();
    }
    const std::vector<Block> blocks = find_blocks(record, {});
    const StepRecord changed = with_recomputation(record, blocks);
    make_plan(changed, {100, 10, 10});
    found += blocks.size();
  }
  EXPECT_GT(found, 200u);
}

}  // namespace
}  // namespace ebbtide::policy
