#include "api/view.h"

#include <map>
#include <string>
#include <string_view>

#include "api/guard.h"

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
  require(!policy->exportable || policy->overflow == EBBTIDE_OVERFLOW_NONE,
          "memory that other processes may have does not overflow to the host");
  const Overflow overflow = read_overflow(policy->overflow);
  if (overflow != Overflow::kNone) require_overflow();
  return Policy{.backup = read_backup(policy->backup),
                .retain = policy->retain,
                .overflow = overflow,
                .flushes_first = policy->flushes_first,
                .is_exportable = policy->exportable};
}

AddressRange read_range(const ebbtide_range& range) {
  require(range.size_bytes <= UINT64_MAX - range.address, "a range reaches beyond the address space");
  return {static_cast<CUdeviceptr>(range.address), range.size_bytes};
}

std::vector<AddressRange> read_ranges(const ebbtide_range* ranges, size_t count, const char* name) {
  if (count > 0) require_given(ranges, name);
  std::vector<AddressRange> read;
  for (size_t index = 0; index < count; ++index) read.push_back(read_range(ranges[index]));
  return read;
}

namespace {

// By tag, its backup; no entry for AS_ALLOCATED.
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
  if (request->tag_count > 0) require_given(request->tags, "tags");
  if (request->address_count > 0) require_given(request->addresses, "addresses");
  for (size_t index = 0; index < request->tag_count; ++index) {
    require_given(request->tags[index], "a tag");
    read.tags.names.emplace_back(request->tags[index]);
  }
  for (size_t index = 0; index < request->address_count; ++index) {
    read.tags.addresses.push_back(reinterpret_cast<CUdeviceptr>(request->addresses[index]));
  }
  read.tags.is_missing_ok = request->missing_ok;
  if (request->backup != EBBTIDE_BACKUP_AS_ALLOCATED) read.backup = read_backup(request->backup);
  read.backup_by_tag = read_backups(*request);
  require(request->retain >= -1 && request->retain <= 1, "retain is 0, 1, or -1 for the policies' choice");
  if (request->retain != -1) read.retain = request->retain == 1;
  read.unused = AddressRanges(read_ranges(request->unused, request->unused_count, "unused"));
  read.unused_as_of = request->unused_as_of;
  read.order = read_ranges(request->order, request->order_count, "order");
  read.max_bytes = request->max_bytes;
  read.keeps_host = request->keeps_host;
  if (request->before_moving != nullptr)
    read.before_moving = [before = request->before_moving, user = request->before_moving_user] { return before(user); };
  if (request->paused_set != nullptr) read.tags.only = read.paused_set = find_paused_set(request->paused_set);
  return read;
}

void hand_out_report(Report report, ebbtide_report** out) {
  if (out != nullptr) *out = handles<ebbtide_report>().add(std::make_unique<ebbtide_report>(std::move(report)));
}

ebbtide_allocation_info describe(const Allocation& allocation) {
  ebbtide_allocation_info filled{};
  filled.address = allocation.address();
  filled.size_bytes = allocation.size_bytes();
  filled.resident_bytes = allocation.resident_bytes();
  filled.host_bytes = allocation.host_bytes();
  filled.stored_bytes = allocation.bytes_in(Place::kStored);
  filled.device = allocation.device;
  filled.place = place_of(allocation);
  filled.backup = static_cast<int32_t>(allocation.policy.backup);
  filled.is_trimmed = allocation.is_trimmed;
  filled.is_exportable = allocation.policy.is_exportable;
  filled.is_kept = allocation.is_kept();
  filled.is_lent = allocation.lent_count > 0;
  filled.is_paused = allocation.is_paused.load();
  filled.chunk_count = static_cast<int32_t>(allocation.chunks.size());
  filled.sequence = allocation.sequence;
  copy_text(filled.tag, sizeof filled.tag, allocation.tag->name.c_str());
  return filled;
}

}  // namespace ebbtide::api
