#include "core/arrivals.h"

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "driver/context.h"

namespace ebbtide {
namespace {

std::atomic<uint32_t> newest_number{0};

constexpr size_t kLeastCapacity = 1024;

}  // namespace

// Leaked on purpose: streams may wait on the words when the process ends.
std::vector<Arrivals::Board>& Arrivals::idle_boards() {
  static auto* const boards = new std::vector<Board>;
  return *boards;
}

std::mutex& Arrivals::boards_mutex() {
  static auto* const mutex = new std::mutex;
  return *mutex;
}

Arrivals::Arrivals(int device, size_t capacity) : number_(++newest_number), board_{nullptr, 0} {
  expected_.reserve(capacity);
  {
    const std::lock_guard lock(boards_mutex());
    auto& boards = idle_boards();
    boards.reserve(boards.size() + 1);  // for the way back
    const auto found =
        std::find_if(boards.begin(), boards.end(), [&](const Board& board) { return board.capacity > capacity; });
    if (found != boards.end()) {
      board_ = *found;
      boards.erase(found);
      return;
    }
  }
  const ContextScope scope(device);
  const size_t words = std::max(kLeastCapacity, capacity + 1);
  void* bytes = nullptr;
  check(driver().cuMemHostAlloc(&bytes, words * sizeof(uint32_t), CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP),
        "cuMemHostAlloc", "size=" + std::to_string(words * sizeof(uint32_t)));
  std::memset(bytes, 0, words * sizeof(uint32_t));
  board_ = {static_cast<uint32_t*>(bytes), words};
}

Arrivals::~Arrivals() {
  end();
  const std::lock_guard lock(boards_mutex());
  try {
    idle_boards().push_back(board_);
  } catch (...) {
    // Lost: 4 bytes a chunk.
  }
}

size_t Arrivals::expect(CUdeviceptr address, size_t size_bytes) {
  expected_.push_back({address, size_bytes});
  return expected_.size() - 1;
}

void Arrivals::set(size_t index) noexcept {
  std::atomic_ref<uint32_t>(board_.words[index]).store(number_, std::memory_order_release);
}

void Arrivals::arrive(size_t number) noexcept { set(number + 1); }

void Arrivals::end() noexcept {
  for (size_t number = 0; number < expected_.size(); ++number) arrive(number);
  set(0);
}

bool Arrivals::has_arrived(const AddressRange& range) const {
  for (size_t number = 0; number < expected_.size(); ++number) {
    const Expected& chunk = expected_[number];
    const bool is_inside = chunk.address < range.end() && range.address < chunk.address + chunk.size_bytes;
    if (is_inside && std::atomic_ref<uint32_t>(board_.words[number + 1]).load(std::memory_order_acquire) != number_)
      return false;
  }
  return true;
}

void Arrivals::forget_all() noexcept {
  const std::lock_guard lock(boards_mutex());
  idle_boards().clear();
}

bool Arrivals::can_stream_wait() { return driver().cuStreamWaitValue32 != nullptr; }

void Arrivals::wait_for_word(CUstream stream, size_t index) const {
  check(driver().cuStreamWaitValue32(stream, reinterpret_cast<CUdeviceptr>(board_.words + index), number_,
                                     CU_STREAM_WAIT_VALUE_GEQ),
        "cuStreamWaitValue32");
}

void Arrivals::stream_wait(CUstream stream, const AddressRange& range) const {
  for (size_t number = 0; number < expected_.size(); ++number) {
    const Expected& chunk = expected_[number];
    const bool is_inside = chunk.address < range.end() && range.address < chunk.address + chunk.size_bytes;
    const bool is_there =
        std::atomic_ref<uint32_t>(board_.words[number + 1]).load(std::memory_order_acquire) == number_;
    if (is_inside && !is_there) wait_for_word(stream, number + 1);
  }
}

void Arrivals::stream_wait_for_end(CUstream stream) const { wait_for_word(stream, 0); }

}  // namespace ebbtide
