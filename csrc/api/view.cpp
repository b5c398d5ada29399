#include "api/view.h"

#include <algorithm>
#include <map>
#include <string>
#include <string_view>

#include "api/guard.h"
#include "base/error.h"

namespace ebbtide::api {
namespace {

Overflow read_overflow(int32_t value) {
  if (value < EBBTIDE_OVERFLOW_NONE || value > EBBTIDE_OVERFLOW_WHOLE) {
    throw InvalidArgument("unknown overflow policy " + std::to_string(value) +
                          ": it is 0 (none), 1 (split) or 2 (whole)");
  }
  return static_cast<Overflow>(value);
}

ebbtide_place place_of(const Allocation& allocation) {
  const Place first = allocation.chunks.front().place.load();
  for (const Chunk& chunk : allocation.chunks) {
    if (chunk.place.load() != first) return EBBTIDE_PLACE_MIXED;
  }
  return static_cast<ebbtide_place>(first);
}

}  // namespace

BackupKind read_backup(int32_t value) {
  if (value < EBBTIDE_BACKUP_NONE || value > EBBTIDE_BACKUP_DISK) {
    throw InvalidArgument("unknown backup kind " + std::to_string(value) +
                          ": it is 0 (none), 1 (ram), 2 (pinned) or 3 (disk)");
  }
  return static_cast<BackupKind>(value);
}

Policy read_policy(const ebbtide_policy* policy) {
  if (policy == nullptr) return Policy{};
  const ebbtide_policy read = read_struct(policy, ebbtide_policy EBBTIDE_POLICY_INIT, kLeastPolicy, "ebbtide_policy");
  require(read.retain == 0 || read.retain == 1, "retain is 0 or 1");
  require(read.flushes_first == 0 || read.flushes_first == 1, "flushes_first is 0 or 1");
  return Policy{.backup = read_backup(read.backup),
                .retain = read.retain == 1,
                .overflow = read_overflow(read.overflow),
                .flushes_first = read.flushes_first == 1};
}

AddressRange read_range(const ebbtide_range& range) {
  require(range.size_bytes <= UINT64_MAX - range.address, "a range reaches beyond the address space");
  return {static_cast<CUdeviceptr>(range.address), range.size_bytes};
}

ebbtide_report_row show_row(const std::string& tag, int device, const ReportRow& row) {
  return {sizeof(ebbtide_report_row),
          tag.c_str(),
          device,
          row.bytes,
          row.copied,
          row.skipped(),
          row.clean,
          row.unused,
          row.constant};
}

namespace {

// By tag, what is said for it; nothing for AS_ALLOCATED.
std::map<std::string, BackupKind, std::less<>> read_backups(const ebbtide_request& given) {
  std::map<std::string, BackupKind, std::less<>> backups;
  if (given.backups == nullptr) return backups;
  std::map<std::string_view, int32_t> said;
  for (size_t index = 0; index < given.tag_count; ++index) {
    const int32_t value = given.backups[index];
    const auto [found, is_new] = said.emplace(given.tags[index], value);
    require(is_new || found->second == value, "a tag is listed with two kinds of backup");
    if (value != EBBTIDE_BACKUP_AS_ALLOCATED) backups[given.tags[index]] = read_backup(value);
  }
  return backups;
}

}  // namespace

OperationRequest read_request(const ebbtide_request* request) {
  OperationRequest read;
  if (request == nullptr) return read;
  const ebbtide_request given =
      read_struct(request, ebbtide_request EBBTIDE_REQUEST_INIT, kLeastRequest, "ebbtide_request");
  require(given.tag_count == 0 || given.tags != nullptr, "tags is null");
  require(given.address_count == 0 || given.addresses != nullptr, "addresses is null");
  for (size_t index = 0; index < given.tag_count; ++index) {
    require(given.tags[index] != nullptr, "a tag is null");
    read.tags.names.emplace_back(given.tags[index]);
  }
  for (size_t index = 0; index < given.address_count; ++index) {
    read.tags.addresses.push_back(reinterpret_cast<CUdeviceptr>(given.addresses[index]));
  }
  read.tags.is_missing_ok = given.missing_ok != 0;
  if (given.backup != EBBTIDE_BACKUP_AS_ALLOCATED) read.backup = read_backup(given.backup);
  read.backup_by_tag = read_backups(given);
  require(given.retain >= -1 && given.retain <= 1, "retain is 0, 1, or -1 for what the policies say");
  if (given.retain != -1) read.retain = given.retain == 1;
  require(given.unused_count == 0 || given.unused != nullptr, "unused is null");
  require(given.order_count == 0 || given.order != nullptr, "order is null");
  std::vector<AddressRange> unused;
  for (size_t index = 0; index < given.unused_count; ++index) unused.push_back(read_range(given.unused[index]));
  read.unused = AddressRanges(std::move(unused));
  read.unused_as_of = given.unused_as_of;
  for (size_t index = 0; index < given.order_count; ++index) read.order.push_back(read_range(given.order[index]));
  read.max_bytes = given.max_bytes;
  read.keeps_host = given.keeps_host != 0;
  if (given.moved != nullptr) {
    read.moved = find_moved(given.moved);
    read.tags.only = read.moved;
  }
  return read;
}

void add_unused(OperationRequest& request, const OperationRequest& other) {
  if (other.unused.empty()) return;
  request.unused_as_of =
      request.unused.empty() ? other.unused_as_of : std::min(request.unused_as_of, other.unused_as_of);
  request.unused = AddressRanges(request.unused, other.unused);
}

ebbtide_allocation_info describe(const Allocation& allocation) {
  ebbtide_allocation_info filled = EBBTIDE_ALLOCATION_INFO_INIT;
  filled.address = allocation.address();
  filled.size_bytes = allocation.size_bytes();
  filled.resident_bytes = allocation.resident_bytes();
  filled.host_bytes = allocation.host_bytes();
  for (const Chunk& chunk : allocation.chunks)
    filled.stored_bytes += chunk.place.load() == Place::kStored ? chunk.size_bytes : 0;
  filled.device = allocation.device;
  filled.place = place_of(allocation);
  filled.backup = static_cast<int32_t>(allocation.policy.backup);
  filled.is_trimmed = allocation.is_trimmed ? 1 : 0;
  filled.is_paused = allocation.is_paused.load() ? 1 : 0;
  filled.chunk_count = static_cast<int32_t>(allocation.chunks.size());
  filled.sequence = allocation.sequence;
  copy_text(filled.tag, sizeof filled.tag, allocation.tag->name.c_str());
  return filled;
}

}  // namespace ebbtide::api
