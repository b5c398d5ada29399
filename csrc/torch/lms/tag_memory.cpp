#include "torch/lms/tag_memory.h"

#include <algorithm>
#include <cstring>
#include <new>

#include "torch/lms/device_side.h"
#include "torch/lms/packed.h"

namespace ebbtide::lms {

bool TagMemory::has(const char* tag) const noexcept {
  return std::any_of(tags_, tags_ + tag_count_, [&](const char* own) { return std::strcmp(own, tag) == 0; });
}

TagMemory::Amounts TagMemory::query() const noexcept {
  Amounts amounts;
  for (size_t index = 0; index < tag_count_; ++index) {
    ebbtide_tag_info info{};
    bool is_found = false;
    ebbtide_query_tag(tags_[index], &is_found, &info, nullptr);
    amounts.resident_bytes += info.resident_bytes;
    amounts.host_bytes += info.host_bytes;
    amounts.detached_bytes += info.detached_bytes;
    amounts.allocation_count += info.allocation_count;
  }
  return amounts;
}

std::vector<ebbtide_allocation_info> TagMemory::allocations() const {
  std::vector<ebbtide_allocation_info> found;
  found.reserve(query().allocation_count);
  const auto visit = [](void* user, const ebbtide_allocation_info* info) {
    auto& all = *static_cast<std::vector<ebbtide_allocation_info>*>(user);
    if (all.size() < all.capacity()) all.push_back(*info);  // one that was made since is left out: no throw in here
  };
  for (size_t index = 0; index < tag_count_; ++index) ebbtide_visit_allocations(tags_[index], visit, &found, nullptr);
  return found;
}

bool TagMemory::mend() const noexcept {
  const ebbtide_request all = request();
  return query().detached_bytes == 0 || ebbtide_resume(&all, nullptr, nullptr) == EBBTIDE_OK;
}

Moved TagMemory::move(Operation operation, const std::vector<const void*>& addresses, uint64_t most_bytes,
                      bool keeps_host) const noexcept {
  ebbtide_request wanted = request();
  wanted.addresses = addresses.data();
  wanted.address_count = addresses.size();
  wanted.max_bytes = most_bytes;
  wanted.keeps_host = keeps_host ? 1 : 0;
  ebbtide_report* report = nullptr;
  ebbtide_error error = EBBTIDE_ERROR_INIT;
  const ebbtide_status status = operation(&wanted, &report, &error);
  side_of(c10::Device(rules().device_type.load(), 0)).balance();
  Moved moved;
  if (status != EBBTIDE_OK) {
    moved.has_failed = true;
    moved.is_broken = !mend();  // a driver call that failed may have left memory whole, but not mapped
    try {
      if (status != EBBTIDE_STATE_ERROR) moved.problem = error.message;
    } catch (const std::bad_alloc&) {
      // Then nobody tells why.
    }
    return moved;
  }
  ebbtide_report_totals totals{};
  ebbtide_read_report(report, &totals, nullptr);
  ebbtide_free_report(report);
  moved.bytes = totals.sum.bytes;
  return moved;
}

ebbtide_request TagMemory::request() const noexcept {
  ebbtide_request request = EBBTIDE_REQUEST_INIT;
  request.tags = tags_;
  request.tag_count = tag_count_;
  request.missing_ok = 1;
  return request;
}

}  // namespace ebbtide::lms
