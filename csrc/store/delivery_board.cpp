#include "store/delivery_board.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <string>
#include <vector>

#include "driver/context.h"

namespace ebbtide {
namespace {

constexpr size_t kBoardBytes = kernels::kBoardWords * sizeof(uint32_t);

// Leaked on purpose: streams may wait on the words when the process ends.
struct Idle {
  std::mutex mutex;
  std::vector<uint32_t*> boards;
};

Idle& idle() {
  static auto* const boards = new Idle;
  return *boards;
}

uint32_t* take_idle() {
  const std::lock_guard lock(idle().mutex);
  auto& boards = idle().boards;
  boards.reserve(boards.size() + 1);  // for the way back
  if (boards.empty()) return nullptr;
  uint32_t* const words = boards.back();
  boards.pop_back();
  return words;
}

uint32_t* make(int device) {
  const ContextScope scope(device);
  void* bytes = nullptr;
  check(driver().cuMemHostAlloc(&bytes, kBoardBytes, CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP),
        "cuMemHostAlloc", "size=" + std::to_string(kBoardBytes));
  std::memset(bytes, 0, kBoardBytes);
  return static_cast<uint32_t*>(bytes);
}

}  // namespace

DeliveryBoard::DeliveryBoard(int device) : words_(take_idle()) {
  if (words_ == nullptr) words_ = make(device);
  words_[0] = 0;
  for (uint32_t lane = 0; lane < kernels::kLanes; ++lane) {
    uint32_t* const words = words_ + at(lane, 0);
    words[kernels::kBase] = words[kernels::kGate];
    words[kernels::kDone] = 0;
    std::fill_n(words + kernels::kFirstFilled, kernels::kMaxLaneSlots, 0U);
  }
}

DeliveryBoard::~DeliveryBoard() {
  if (is_abandoned_.load()) return;
  const std::lock_guard lock(idle().mutex);
  try {
    idle().boards.push_back(words_);
  } catch (...) {
    // Lost: a kilobyte.
  }
}

void DeliveryBoard::forget_all() noexcept {
  const std::lock_guard lock(idle().mutex);
  idle().boards.clear();
}

}  // namespace ebbtide
