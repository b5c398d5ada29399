#include "api/ebbtide.h"
#include "api/guard.h"
#include "lms/copies.h"
#include "lms/evicted_memory.h"

// Large model support: the torch extension's host memory, its copies, and peaks.
using namespace ebbtide;
using api::guarded;
using api::handles;
using api::require;

struct ebbtide_copy {
  static constexpr const char* kName = "copy";
  std::unique_ptr<lms::Copy> copy;
};

extern "C" {

ebbtide_status ebbtide_take_host_memory(int32_t device, uint64_t size_bytes, void** address, ebbtide_error* error) {
  return guarded(error, [&] {
    require(address != nullptr, "address is null");
    *address = nullptr;
    require_not_forked();
    *address = lms::evicted_memory().take(device, size_bytes);
  });
}

ebbtide_status ebbtide_give_host_memory(void* address, ebbtide_error* error) {
  return guarded(error, [&] {
    require_not_forked();
    lms::evicted_memory().give_back(address);
  });
}

ebbtide_status ebbtide_trim_host_memory(ebbtide_error* error) {
  return guarded(error, [&] {
    require_not_forked();
    lms::evicted_memory().trim();
    Core::instance().host_pool.twins().give_way(kUnlimited);
  });
}

ebbtide_status ebbtide_query_host_memory(ebbtide_host_memory_info* info, ebbtide_error* error) {
  return guarded(error, [&] {
    require(info != nullptr, "info is null");
    require_not_forked();
    const auto usage = lms::evicted_memory().usage();
    *info = {usage.held_bytes, usage.used_bytes, usage.pinned_bytes};
  });
}

ebbtide_status ebbtide_begin_copy(int32_t device, void* destination, const void* source, uint64_t size_bytes,
                                  int32_t direction, void* after_stream, ebbtide_copy** copy, ebbtide_error* error) {
  return guarded(error, [&] {
    require(copy != nullptr, "copy is null");
    *copy = nullptr;
    require(destination != nullptr && source != nullptr, "destination or source is null");
    require(size_bytes > 0, "size_bytes is 0");
    require(direction == EBBTIDE_TO_HOST || direction == EBBTIDE_TO_DEVICE, "direction is no ebbtide_copy_direction");
    require_not_forked();
    const auto way = direction == EBBTIDE_TO_HOST ? lms::CopyDirection::kToHost : lms::CopyDirection::kToDevice;
    // Known before it begins: a copy that is under way must not be forgotten for lack of memory.
    ebbtide_copy* const handle = handles<ebbtide_copy>().add(std::make_unique<ebbtide_copy>());
    try {
      handle->copy =
          lms::copies().begin(device, destination, source, size_bytes, way, static_cast<CUstream>(after_stream));
    } catch (...) {
      handles<ebbtide_copy>().drop(handle);
      throw;
    }
    *copy = handle;
  });
}

int ebbtide_is_copy_done(const ebbtide_copy* copy) {
  bool is_done = false;
  guarded(nullptr, [&] { is_done = handles<ebbtide_copy>().at(copy).copy->is_done(); });
  return is_done ? 1 : 0;
}

ebbtide_status ebbtide_wait_for_copy(ebbtide_copy* copy, ebbtide_error* error) {
  return guarded(error, [&] { handles<ebbtide_copy>().at(copy).copy->wait(); });
}

ebbtide_status ebbtide_order_after_copy(ebbtide_copy* copy, void* stream, ebbtide_error* error) {
  return guarded(error, [&] { handles<ebbtide_copy>().at(copy).copy->order_before(static_cast<CUstream>(stream)); });
}

ebbtide_status ebbtide_end_copy(ebbtide_copy* copy, double* seconds, double* waited_seconds, ebbtide_error* error) {
  return guarded(error, [&] {
    const lms::CopySeconds found = handles<ebbtide_copy>().take(copy)->copy->end();
    if (seconds != nullptr) *seconds = found.copying;
    if (waited_seconds != nullptr) *waited_seconds = found.waited;
  });
}

ebbtide_status ebbtide_set_lms_limit(uint64_t bytes, ebbtide_error* error) {
  return guarded(error, [&] {
    require_not_forked();
    Core::instance().budgets.device.set_lms_limit(bytes);
  });
}

ebbtide_status ebbtide_set_lms_host_limit(uint64_t bytes, ebbtide_error* error) {
  return guarded(error, [&] {
    require_not_forked();
    Core::instance().budgets.host.set_lms_limit(bytes);
  });
}

ebbtide_status ebbtide_leave_torch_to_lms(int32_t is_left, ebbtide_error* error) {
  return guarded(error, [&] {
    require_not_forked();
    Core::instance().rules.leaves_torch_to_lms.store(is_left != 0);
  });
}

ebbtide_status ebbtide_reset_peaks(ebbtide_error* error) {
  return guarded(error, [&] {
    require_not_forked();
    Core::instance().budgets.device.reset_peaks();
  });
}

}  // extern "C"
