#include "torch/lms/weights.h"

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <iterator>
#include <memory>
#include <new>
#include <utility>

#include "api/ebbtide.h"
#include "policy/lms/eviction.h"
#include "torch/lms/device_side.h"
#include "torch/lms/gil.h"
#include "torch/lms/ledger.h"
#include "torch/lms/packed.h"

namespace ebbtide::lms {
namespace {

constexpr const char* kWeightTags[] = {"lms.weights", "lms.gradients"};  // python/ebbtide/lms/weights.py
constexpr TagMemory weight_memory(kWeightTags);
constexpr const char* kOfWeights[] = {kWeightTags[0]};
constexpr TagMemory without_gradients(kOfWeights);

bool find(const void* address, ebbtide_allocation_info* info) {
  bool is_found = false;
  return ebbtide_find(address, &is_found, info, nullptr) == EBBTIDE_OK && is_found && weight_memory.has(info->tag);
}

bool contains(const std::vector<ebbtide_allocation_info>& units, uint64_t sequence) {
  return std::any_of(units.begin(), units.end(), [&](const auto& unit) { return unit.sequence == sequence; });
}

// The units that lie behind these addresses, each once.
std::vector<ebbtide_allocation_info> units_of(const std::vector<const void*>& addresses) {
  std::vector<ebbtide_allocation_info> units;
  for (const void* const address : addresses) {
    ebbtide_allocation_info info{};
    if (find(address, &info) && !contains(units, info.sequence)) units.push_back(info);
  }
  return units;
}

uint64_t on_device_bytes(const ebbtide_allocation_info& unit) { return unit.resident_bytes - unit.host_bytes; }

const void* address_of(const ebbtide_allocation_info& unit) {
  return reinterpret_cast<const void*>(static_cast<uintptr_t>(unit.address));
}

c10::Device device_of(int number) {
  const c10::DeviceType type = rules().device_type.load();
  return type == c10::DeviceType::CPU ? c10::Device(type) : c10::Device(type, static_cast<c10::DeviceIndex>(number));
}

uint64_t room_bytes(int device) {
  ebbtide_device_info info{};
  return ebbtide_query_device(device, &info, nullptr) == EBBTIDE_OK ? info.room_bytes : 0;
}

}  // namespace

Weights& Weights::instance() {
  static Weights& weights = *new Weights();
  return weights;
}

Weights::Weights() : gate_(weight_memory, "weights") {}

MoveGate::Turn Weights::take_turn() {
  return {gate_, [this] { return !has_other_users() && !at::in_parallel_region(); }};
}

void Weights::allow_moves(bool are_allowed) {
  {
    Lock lock = gate_.lock();
    if (are_allowed) {  // uses that nobody told of their end: an interrupt ended them
      uses_.clear();
      in_backward_.clear();
    }
    gate_.allow(lock, are_allowed);
  }
  if (!are_allowed) ebbtide_trim_host_memory(nullptr);  // what was kept for weights that have not changed
}

// A thread may end inside a call that an interrupt ended.
struct Weights::ThreadEnd {
  ~ThreadEnd() {
    Weights& weights = instance();
    const Lock lock = weights.gate_.lock();
    weights.uses_.erase(std::this_thread::get_id());
  }
};

// A thread's part in a backward. torch's graph task owns it, so it also ends where the backward fails.
class Weights::Backward {
 public:
  explicit Backward(std::pair<std::thread::id, int> part) : part_(part) {}
  Backward(const Backward&) = delete;
  Backward& operator=(const Backward&) = delete;
  ~Backward() { end(); }
  void end() noexcept {
    Weights& weights = instance();
    const Lock lock = weights.gate_.lock();
    weights.in_backward_.erase(part_);
  }

 private:
  const std::pair<std::thread::id, int> part_;
};

void Weights::watch_thread() { [[maybe_unused]] static thread_local const ThreadEnd end{}; }

bool Weights::has_other_users() const {
  const std::thread::id own = std::this_thread::get_id();
  return std::any_of(uses_.begin(), uses_.end(), [&](const auto& entry) { return entry.first != own; }) ||
         std::any_of(in_backward_.begin(), in_backward_.end(), [&](const auto& part) { return part.first != own; });
}

// --- uses ---

void Weights::begin_use(const void* user, UseKind kind, const std::vector<const void*>& addresses, bool brings) {
  const std::thread::id thread = std::this_thread::get_id();
  if (kind == UseKind::kModule && !have_left_.load() && module_depth() == 0 && host_bytes() > 0) have_left_.store(true);
  {
    Lock lock = gate_.lock();
    gate_.wait_for_move(lock);
    watch_thread();
    uses_[thread].push_back({user, kind, {}});
  }
  try {
    const Units units = units_of(addresses);
    {
      const Lock lock = gate_.lock();
      if (kind != UseKind::kWrite) expects_backward_ = at::GradMode::is_enabled();
      auto& own = uses_[thread];
      // Another thread has switched moves off and on meanwhile, which ended all uses.
      if (own.empty()) own.push_back({user, kind, {}});
      for (const auto& unit : units) own.back().units.push_back(unit.sequence);
      note_used(units);
    }
    if (brings) bring(units);
    Lock lock = gate_.lock();
    gate_.wait_for_move(lock);  // what could not be mapped is not read now
  } catch (...) {
    end_use(user, thread);
    throw;
  }
}

void Weights::end_use(const void* user, std::thread::id thread) noexcept {
  const Lock lock = gate_.lock();
  const auto found = uses_.find(thread);
  if (found == uses_.end()) return;
  auto& open = found->second;
  const auto is_own = [&](const Use& use) { return use.user == user; };
  const auto own = std::find_if(open.rbegin(), open.rend(), is_own);
  if (own != open.rend()) open.erase(std::prev(own.base()), open.end());
  if (open.empty()) uses_.erase(found);
}

size_t Weights::module_depth() const {
  const Lock lock = gate_.lock();
  const auto found = uses_.find(std::this_thread::get_id());
  if (found == uses_.end()) return 0;
  const auto is_by_module = [](const Use& use) { return use.kind == UseKind::kModule; };
  return static_cast<size_t>(std::count_if(found->second.begin(), found->second.end(), is_by_module));
}

void Weights::use_in_backward(const void* address) {
  const std::pair part(std::this_thread::get_id(), torch::autograd::get_current_graph_task_id());
  const Units units = units_of({address});
  bool is_first = false;
  {
    Lock lock = gate_.lock();
    gate_.wait_for_move(lock);
    watch_thread();
    is_first = part.second != -1 && in_backward_.insert(part).second;
    note_used(units);
  }
  if (is_first) {
    auto backward = std::make_shared<Backward>(part);
    torch::autograd::Engine::get_default_engine().queue_callback([backward] { backward->end(); });
  }
  bring(units);
}

bool Weights::is_on_host(const void* address) {
  ebbtide_allocation_info info{};
  return find(address, &info) && info.host_bytes > 0;
}

bool Weights::is_weight(const c10::Storage& storage) const {
  ebbtide_allocation_info info{};
  return find(storage.data(), &info);
}

void Weights::note_used(const Units& units) {
  for (const auto& unit : units) order_.used(unit.sequence);
}

// --- moves ---

// The units come to the device: into free room, then into that of weights that are used later, then into that of saved
// tensors. What does not come is read on the host.
void Weights::bring(const Units& units) {
  std::map<int, std::vector<const void*>> away;
  std::map<int, uint64_t> wanted_bytes;
  for (const auto& unit : units) {
    if (unit.host_bytes == 0) continue;
    away[unit.device].push_back(address_of(unit));
    wanted_bytes[unit.device] += unit.host_bytes;
  }
  if (away.empty()) return;
  for (const auto& [device, addresses] : away) {
    const uint64_t wanted = wanted_bytes.at(device);
    const auto missing_bytes = [&, device = device] { return wanted - std::min(wanted, room_bytes(device)); };
    const DeviceSide& side = side_of(device_of(device));
    side.balance();
    if (missing_bytes() > 0) side.release_cached(device_of(device));
    if (const MoveGate::Turn turn = take_turn(); turn && missing_bytes() > 0)
      send_away(device, missing_bytes(), &units);
    if (missing_bytes() > 0 && Ledger::instance().evict(missing_bytes(), device_of(device)) > 0)
      side.release_cached(device_of(device));
    if (const MoveGate::Turn turn = take_turn(); turn && missing_bytes() < wanted)
      note(weight_memory.promote(addresses, /*keeps_host=*/true), statistics_.loaded_bytes);
  }
  const auto has_stayed = [](const ebbtide_allocation_info& unit) { return is_on_host(address_of(unit)); };
  const bool is_slow = std::any_of(units.begin(), units.end(), has_stayed);
  const Lock lock = gate_.lock();
  if (is_slow) ++statistics_.slow_reads;
}

// The caller has the turn. spared: units that stay, beside those of open uses; null: the latter may leave, too.
uint64_t Weights::send_away(int device, uint64_t wanted_bytes, const Units* spared) {
  Units candidates = weight_memory.allocations();
  std::vector<policy::Evictable> numbers;
  {
    const Lock lock = gate_.lock();
    std::set<uint64_t> pinned;
    for (const auto& [thread, uses] : uses_)
      for (const Use& use : uses) pinned.insert(use.units.begin(), use.units.end());
    const auto stays = [&](const ebbtide_allocation_info& unit) {
      return unit.device != device || on_device_bytes(unit) == 0 ||
             (spared != nullptr && (pinned.contains(unit.sequence) || contains(*spared, unit.sequence)));
    };
    candidates.erase(std::remove_if(candidates.begin(), candidates.end(), stays), candidates.end());
    for (const auto& unit : candidates)
      numbers.push_back({on_device_bytes(unit), policy::eviction_order(order_, unit.sequence, expects_backward_)});
  }
  std::vector<const void*> leaving;
  for (const size_t index : policy::choose_evictions(numbers, wanted_bytes))
    leaving.push_back(address_of(candidates[index]));
  if (leaving.empty()) return 0;
  const Moved moved = weight_memory.demote(leaving);
  note(moved, statistics_.evicted_bytes);
  return moved.bytes;
}

void Weights::forget_shortage() {
  is_short_.store(false);
  have_left_.store(false);  // as the next outermost use finds it
  limits_.fetch_add(1);
}

uint64_t Weights::make_room(int device, uint64_t wanted_bytes) noexcept {
  const GilReleased released;
  is_short_.store(true);
  have_left_.store(true);
  const MoveGate::Turn turn = take_turn();
  if (!turn) return 0;
  gate_.forget_problem(gate_.lock());
  uint64_t freed_bytes = 0;
  try {
    static const Units none;
    for (const Units* spared : {&none, static_cast<const Units*>(nullptr)}) {
      if (freed_bytes < wanted_bytes) freed_bytes += send_away(device, wanted_bytes - freed_bytes, spared);
    }
  } catch (const std::bad_alloc&) {
    // No memory for the lists: nothing more leaves.
  }
  return freed_bytes;
}

uint64_t Weights::send_gradient_away(const void* address) noexcept {
  const MoveGate::Turn turn = take_turn();
  if (!turn) return 0;
  Moved moved;
  try {
    moved = weight_memory.demote({address});
  } catch (const std::bad_alloc&) {
    return 0;
  }
  note(moved, statistics_.evicted_bytes);
  return moved.bytes;
}

uint64_t Weights::bring_back(uint64_t most_bytes, bool with_gradients) noexcept {
  const MoveGate::Turn turn = take_turn();
  if (!turn) return 0;
  const TagMemory& which = with_gradients ? weight_memory : without_gradients;
  const Moved moved = which.promote(most_bytes, /*keeps_host=*/true);
  note(moved, statistics_.loaded_bytes);
  return moved.bytes;
}

void Weights::note(const Moved& moved, uint64_t& counter) noexcept {
  const Lock lock = gate_.lock();
  gate_.note(lock, moved);
  counter += moved.bytes;
}

uint64_t Weights::host_bytes() { return weight_memory.query().host_bytes; }

uint64_t Weights::weights_host_bytes() { return without_gradients.query().host_bytes; }

WeightStatistics Weights::statistics() {
  const Lock lock = gate_.lock();
  return statistics_;
}

void Weights::reset_statistics() {
  const Lock lock = gate_.lock();
  statistics_ = {};
}

std::string Weights::problem() { return gate_.problem(); }

}  // namespace ebbtide::lms
