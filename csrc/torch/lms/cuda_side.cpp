#include "torch/lms/cuda_side.h"

#include <c10/core/AllocatorConfig.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <exception>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>

#include "api/ebbtide.h"
#include "torch/lms/ledger.h"
#include "torch/lms/virtual_entry.h"

namespace ebbtide::lms {
namespace {

constexpr auto kCuda = c10::DeviceType::CUDA;
constexpr size_t kAll = 0;  // in torch's statistics: small and large blocks together
constexpr size_t kMostDevices = 64;
constexpr uint64_t kPageBytes = uint64_t{20} << 20;  // by which torch may exceed a limit: it maps so much at once
constexpr uint64_t kSmallLimitPart = 16;             // of a small limit, a part in so many
constexpr size_t kWatchedBytes = size_t{1} << 20;
constexpr uint64_t kUnwatchedBytes = uint64_t{16} << 20;
constexpr uint64_t kToleratedPart = 64;  // of a limit, a part in so many may be exceeded for a moment

// While one lives, LMS allocates for itself in this thread.
struct OwnAllocation {
  OwnAllocation() { is_open = true; }
  OwnAllocation(const OwnAllocation&) = delete;
  OwnAllocation& operator=(const OwnAllocation&) = delete;
  ~OwnAllocation() { is_open = false; }
  static thread_local bool is_open;
};
thread_local bool OwnAllocation::is_open = false;

std::array<std::atomic<uint64_t>, kMostDevices> limits{}, away{}, elsewhere{};
std::array<std::atomic<uint64_t>, kMostDevices> given_back{};  // how often torch's cache was, in an allocation
std::array<std::atomic<Watch>, kMostDevices> watches{};
std::atomic<decltype(CudaHooks::reclaim)> reclaim_hook{nullptr};
std::atomic<decltype(CudaHooks::overflow)> overflow_hook{nullptr};
std::atomic<decltype(CudaHooks::balance)> balance_hook{nullptr};
std::atomic<decltype(CudaHooks::give_back)> give_back_hook{nullptr};
std::atomic<decltype(CudaHooks::explain)> explain_hook{nullptr};

const c10::impl::DeviceGuardImplInterface& guard_impl() { return *c10::impl::getDeviceGuardImpl(kCuda); }

class CudaSide final : public DeviceSide {
 public:
  c10::Device current_device() const override { return guard_impl().getDevice(); }
  int number_of(c10::Device device) const override { return device.index(); }
  c10::Stream current_stream(c10::Device device) const override { return guard_impl().getStream(device); }
  void* handle_of(c10::Stream stream) const override { return guard_impl().getStreamNativeHandle(stream); }

  c10::Stream copying_stream(c10::Device device) const override {
    static std::mutex mutex;
    static auto& streams = *new std::map<c10::DeviceIndex, c10::Stream>();
    const std::lock_guard lock(mutex);
    const auto found = streams.find(device.index());
    if (found != streams.end()) return found->second;
    return streams.emplace(device.index(), guard_impl().getStreamFromGlobalPool(device)).first->second;
  }

  double come_after(OwnedCopy& copy, c10::Stream stream) const override {
    copy.come_before(handle_of(stream));
    return 0;
  }

  TimeMark mark(c10::Device device, double /*host_seconds*/) const override { return TimeMark(current_stream(device)); }

  c10::DataPtr allocate(c10::Device device, size_t size_bytes) const override {
    const c10::DeviceGuard guard(device);
    const OwnAllocation own;
    c10::DataPtr data = c10::GetAllocator(kCuda)->allocate(size_bytes);
    bool is_found = false;
    ebbtide_allocation_info info{};
    if (ebbtide_find(data.get(), &is_found, &info, nullptr) == EBBTIDE_OK && is_found && !overflow_memory.has(info.tag))
      throw std::runtime_error(
          "a saved tensor that has left the device is wanted inside a saver.region, whose tag would take it away with "
          "its own memory: run backward outside of the region, or inside saver.disabled()");
    return data;
  }

  bool is_on_device(const void* /*address*/) const override { return true; }

  // torch hands the memory out again in the order of the stream that it was allocated in. If that is another one, torch
  // waits for this one first.
  void let_go(c10::Storage storage, c10::Stream stream) const noexcept override {
    try {
      guard_impl().recordDataPtrOnStream(storage.data_ptr(), stream);
    } catch (const std::exception&) {
      static_cast<void>(new c10::Storage(std::move(storage)));  // rather lost than used too early
    }
  }

  Usage usage(c10::Device device) const override {
    const auto found = stats(device);
    return {counted(found.allocated_bytes[kAll].current),
            counted(found.num_alloc_retries) + given_back.at(device.index()).load()};
  }
  uint64_t elsewhere_bytes(c10::Device device) const override { return elsewhere.at(device.index()).load(); }
  uint64_t held_bytes(c10::Device device) const override {
    const uint64_t reserved_bytes = counted(stats(device).reserved_bytes[kAll].current);
    return reserved_bytes - std::min(reserved_bytes, away.at(device.index()).load());
  }

  bool has_pages() const override {
    return c10::CachingAllocator::AcceleratorAllocatorConfig::use_expandable_segments();
  }

  void release_cached(c10::Device /*device*/) const noexcept override {
    try {
      c10::getDeviceAllocator(kCuda)->emptyCache();
    } catch (const std::exception&) {
      // What is cached stays.
    }
    balance();
  }

  uint64_t limit_bytes(c10::Device device) const override {
    const uint64_t bytes = limits.at(device.index()).load();
    return bytes == 0 ? UINT64_MAX : bytes;  // of a device that was not in use when limits were set
  }

  void balance() const noexcept override {
    if (const auto hook = balance_hook.load(); hook != nullptr) hook();
  }

 private:
  static uint64_t counted(int64_t number) { return static_cast<uint64_t>(std::max<int64_t>(number, 0)); }
  static c10::CachingDeviceAllocator::DeviceStats stats(c10::Device device) {
    return c10::getDeviceAllocator(kCuda)->getDeviceStats(device.index());
  }
};

// --- torch's allocator ---

// torch asks nobody who knows the size of an allocation that does not fit: its free-memory callbacks are not told, and
// the allocator behind a pool is asked for segments, once, and not again when blocks became free. So `allocate` of the
// caching allocator is replaced in its table of virtual functions. Every tensor is allocated through that.
using AllocateEntry = VirtualEntry<c10::Allocator, c10::DataPtr, size_t>;

std::atomic<AllocateEntry::Function> former_allocate{nullptr};

bool has_found_room(size_t size_bytes, bool is_first) {
  const auto balance = balance_hook.load();
  if (is_first && balance != nullptr && balance()) return true;  // a tag has left the device since
  const auto reclaim = reclaim_hook.load();
  return reclaim != nullptr && reclaim(guard_impl().getDevice(), size_bytes, is_first) > 0;
}

struct NoRoomAheadOfNeed final : std::exception {
  const char* what() const noexcept override { return "memory that is wanted later has no room yet"; }
};

// torch counts what tags have on the host, and takes no limit above the size of the device. And memory of tags on the
// host, for which its limit was raised, may go in a flush inside of an allocation. There torch's limit does not hold,
// and ours is kept here (`Watch`).
struct Holdings {
  explicit Holdings(c10::Device device) : held_bytes(cuda_side().held_bytes(device)), usage(cuda_side().usage(device)) {
    const uint64_t here_bytes = usage.bytes - std::min(usage.bytes, cuda_side().elsewhere_bytes(device));
    cached_bytes = held_bytes - std::min(held_bytes, here_bytes);
  }
  uint64_t held_bytes, cached_bytes = 0;
  DeviceSide::Usage usage;
};

uint64_t most_bytes(c10::Device device) {
  const uint64_t limit_bytes = cuda_side().limit_bytes(device);
  const uint64_t page_bytes = cuda_side().has_pages() ? std::min(kPageBytes, limit_bytes / kSmallLimitPart) : 0;
  return limit_bytes + std::min(page_bytes, UINT64_MAX - limit_bytes);
}

// What torch takes from its cache can't be told before. Where that would be much too much, it has no cache then.
bool would_exceed(c10::Device device, size_t size_bytes, const Holdings& now) {
  const uint64_t limit_bytes = most_bytes(device);
  return now.held_bytes + size_bytes > limit_bytes &&
         (now.cached_bytes < size_bytes || size_bytes > limit_bytes / kToleratedPart);
}

bool exceeds(c10::Device device, const Holdings& before) {
  const Holdings now(device);
  const bool has_flushed = now.usage.flushes != before.usage.flushes;
  if (!has_flushed && (now.held_bytes <= before.held_bytes || now.held_bytes <= most_bytes(device))) return false;
  cuda_side().balance();
  return cuda_side().held_bytes(device) > most_bytes(device);
}

// Whether the thread's memory is that of a tag, which goes to the host where the device has no room.
bool is_in_region() {
  ebbtide_thread_policy policy = EBBTIDE_THREAD_POLICY_INIT;
  return ebbtide_get_thread_policy(&policy, nullptr) == EBBTIDE_OK && policy.tagging == EBBTIDE_TAGGING_ON;
}

[[noreturn]] void refuse(size_t size_bytes) {
  if (Ledger::is_prefetching()) throw NoRoomAheadOfNeed();
  throw c10::OutOfMemoryError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)},
                              "CUDA out of memory. Tried to allocate " + std::to_string(size_bytes >> 20) +
                                  " MiB within the limit of ebbtide.lms. ");
}

// Small allocations share segments: one in so many bytes is looked at.
bool is_looked_at(size_t size_bytes) {
  if (size_bytes >= kWatchedBytes) return true;
  static std::atomic<uint64_t> unseen_bytes{0};
  if (unseen_bytes.fetch_add(size_bytes) + size_bytes < kUnwatchedBytes) return false;
  unseen_bytes.store(0);
  return true;
}

// False: during a capture, or where the device is the limit.
bool has_given_back(c10::Device device, decltype(CudaHooks::give_back) give_back) {
  if (!give_back()) return false;
  ++given_back.at(device.index());
  return true;
}

c10::DataPtr allocate_within_limit(c10::Allocator* self, size_t size_bytes) {
  const auto former = former_allocate.load();
  const auto give_back = give_back_hook.load();
  const c10::Device device = guard_impl().getDevice();
  const Watch watch = watches.at(device.index()).load();
  if (give_back == nullptr || watch == Watch::kNone || !is_looked_at(size_bytes) || is_in_region())
    return former(self, size_bytes);
  Holdings before(device);
  if (would_exceed(device, size_bytes, before)) {
    if (Ledger::is_prefetching()) refuse(size_bytes);
    if (!has_given_back(device, give_back)) return former(self, size_bytes);
    before = Holdings(device);
    const bool has_room = before.held_bytes + size_bytes <= most_bytes(device) || before.cached_bytes >= size_bytes;
    if (watch == Watch::kAll && !has_room) refuse(size_bytes);  // otherwise torch's limit, which holds again, decides
  }
  for (const bool is_last : {false, true}) {
    c10::DataPtr data = former(self, size_bytes);
    if (!exceeds(device, before)) return data;
    data.clear();
    if (!has_given_back(device, give_back)) return former(self, size_bytes);
    if (is_last || Ledger::is_prefetching()) break;
    before = Holdings(device);
  }
  refuse(size_bytes);
}

c10::DataPtr allocate_or_reclaim(c10::Allocator* self, size_t size_bytes) {
  // Where it does not fit, torch would wait for the device to give back all that it caches.
  if (Ledger::is_prefetching() && !Ledger::instance().has_room_ahead(guard_impl().getDevice(), size_bytes))
    throw NoRoomAheadOfNeed();
  bool could_reclaim = reclaim_hook.load() != nullptr;
  for (bool is_first = true;; is_first = false) {
    try {
      c10::DataPtr data = allocate_within_limit(self, size_bytes);
      if (could_reclaim && !OwnAllocation::is_open) Ledger::instance().note_taken(guard_impl().getDevice(), size_bytes);
      return data;
    } catch (c10::OutOfMemoryError& error) {
      // What never fits drives nothing out.
      const bool may_fit = size_bytes <= cuda_side().limit_bytes(guard_impl().getDevice());
      c10::DataPtr other;
      const auto overflow = overflow_hook.load();
      if (!may_fit && overflow != nullptr && overflow(size_bytes, &other)) return other;
      if (has_found_room(size_bytes, is_first)) continue;
      if (may_fit && overflow != nullptr && overflow(size_bytes, &other)) return other;
      // LMS was switched off meanwhile, and its limit lifted before.
      if (!could_reclaim || reclaim_hook.load() != nullptr) {
        const auto explain = explain_hook.load();
        if (std::string reason = explain == nullptr ? "" : explain(); !reason.empty())
          error.add_context("ebbtide.lms: " + std::move(reason));
        throw;
      }
      could_reclaim = false;
    }
  }
}

}  // namespace

DeviceSide& cuda_side() {
  static CudaSide& side = *new CudaSide();
  return side;
}

void follow_cuda_allocations(const CudaHooks& hooks) {
  const AllocateEntry entry(c10::getDeviceAllocator(kCuda), &c10::Allocator::allocate);
  if (!entry.is_virtual()) throw std::runtime_error("torch's allocator can't be followed with this compiler");
  reclaim_hook.store(hooks.reclaim);
  overflow_hook.store(hooks.overflow);
  balance_hook.store(hooks.balance);
  give_back_hook.store(hooks.give_back);
  explain_hook.store(hooks.explain);
  if (entry.get() == &allocate_or_reclaim) return;
  former_allocate.store(entry.get());
  if (!entry.set(&allocate_or_reclaim))
    throw std::runtime_error("torch's allocator can't be followed: its table of functions can't be written");
}

// The entry stays: another library may have taken it for its own since.
void leave_cuda_allocations() {
  reclaim_hook.store(nullptr);
  overflow_hook.store(nullptr);
  balance_hook.store(nullptr);
  give_back_hook.store(nullptr);
  explain_hook.store(nullptr);
}

void set_cuda_limit(int device, uint64_t limit_bytes) { limits.at(static_cast<size_t>(device)).store(limit_bytes); }
void set_cuda_away(int device, uint64_t away_bytes, uint64_t unused_bytes, Watch watch) {
  watches.at(static_cast<size_t>(device)).store(watch);
  away.at(static_cast<size_t>(device)).store(away_bytes);
  elsewhere.at(static_cast<size_t>(device)).store(away_bytes - std::min(away_bytes, unused_bytes));
}

}  // namespace ebbtide::lms
