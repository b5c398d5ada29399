#include "core/allocate/thread_policy.h"

#include <string_view>

#include "core/state/core.h"

namespace ebbtide {
namespace {

thread_local constinit ThreadPolicy own_policy;

bool is_over(const ThreadPolicy& policy) {
  if (policy.lease == 0 || is_forked_child()) return false;
  const Core* const core = Core::instance_if_made();
  return core == nullptr || !core->registry.leases.is_open(policy.lease);
}

}  // namespace

ThreadPolicy thread_policy() { return is_over(own_policy) ? ThreadPolicy{} : own_policy; }

void set_thread_policy(const ThreadPolicy& policy) {
  const std::string_view tag = policy.tag.data();
  if (policy.tagging == Tagging::kOn || !tag.empty()) check_tag_name(tag);
  own_policy = policy;
}

__attribute__((weak)) ThreadPolicy program_policy() { return {}; }

}  // namespace ebbtide
