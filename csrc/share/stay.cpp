#include "share/stay.h"

#include "base/error.h"

namespace ebbtide {
namespace {

TagClaim claim_of(Core& core, CUdeviceptr address, bool may_wait) {
  const auto found = core.registry.find(address);
  if (found == nullptr) throw InvalidArgument("this address is in no allocation of ebbtide");
  return {.tags = {.names = {found->tag->name}, .addresses = {found->address()}, .only = nullptr},
          .concerns = [sequence = found->sequence](const Allocation& each) { return each.sequence == sequence; },
          .may_wait = may_wait,
          .moves_memory = false};
}

}  // namespace

Stay::Stay(Core& core, CUdeviceptr address, bool may_wait)
    : core_(core),
      peer_generation_(core.peers.generation()),
      selection_(core.registry.claim({claim_of(core, address, may_wait)})) {
  const auto& found = selection_.groups.front().allocations;
  if (!found.empty()) allocation_ = found.front();
  if (allocation_ != nullptr && allocation_->device_bytes() == allocation_->size_bytes() && !allocation_->is_away())
    return;
  const std::string tag = selection_.tags.front()->name;
  let_go();
  throw StateError("this memory of tag '" + tag + "' is not on the device: resume or promote the tag first");
}

Stay::~Stay() { let_go(); }

void Stay::let_go() noexcept {
  allocation_.reset();
  core_.deferred_frees.destroy_all(core_.registry.release(selection_, Outcome::kUntouched));
  core_.peers.catch_up_after_hold(peer_generation_);
}

}  // namespace ebbtide
