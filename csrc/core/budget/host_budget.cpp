#include "core/budget/host_budget.h"

#include <algorithm>
#include <vector>

#include "base/error.h"
#include "base/scope_exit.h"
#include "base/settings.h"
#include "base/text.h"
#include "core/budget/host_reader.h"
#include "vmm/deferred_undos.h"
#include "vmm/physical_memory.h"

namespace ebbtide {
namespace {

// A refusal has 1023 bytes in an ebbtide_error, and its advice comes last.
constexpr size_t kMostHolders = 4;
constexpr size_t kMostNameBytes = 60;
constexpr size_t kMostPurposeBytes = 200;

// The source of a limit, in an error; RAM and the container set a limit as well.
std::string by(bool is_setting, Setting setting) {
  if (!is_setting) return " by RAM or the container";
  return is_configured(setting) ? " as configured" : " by " + source_of(setting);
}

std::string cut(std::string_view text, size_t max_bytes) {
  return std::string(cut_utf8(text, max_bytes)) + (text.size() > max_bytes ? "..." : "");
}

// With both variables or with none: beside a setting without one, a single variable looks like the only way.
std::string how_to_change_both() {
  if (is_configured(Setting::kHostLimit) || is_configured(Setting::kHostMargin)) return "host_limit and host_margin";
  return how_to_change(Setting::kHostLimit) + " and " + how_to_change(Setting::kHostMargin);
}

}  // namespace

void HostPart::hold_for(HostHolder& new_holder) noexcept {
  if (holder == &new_holder) return;
  new_holder.bytes.fetch_add(size_bytes());
  if (holder != nullptr) holder->bytes.fetch_sub(size_bytes());
  holder = &new_holder;
}

void HostPart::add(HostPart other) noexcept {
  if (holder != nullptr) other.hold_for(*holder);
  holder = other.holder;
  amounts = policy::sum(amounts, other.amounts);
}

void HostCharge::touch(uint64_t bytes) noexcept {
  if (budget_ == nullptr) return;
  const std::lock_guard lock(budget_->mutex_);
  const uint64_t moved = std::min(bytes, part_.amounts.promised_bytes);
  for (policy::HostHoldings* amounts : {&part_.amounts, &budget_->holdings_}) {
    amounts->promised_bytes -= moved;
    amounts->touched_bytes += moved;
  }
  budget_->publish();
}

HostCharge HostCharge::split(uint64_t policy::HostHoldings::* kind, uint64_t bytes) {
  HostCharge cut;
  cut.budget_ = budget_;
  cut.part_.holder = part_.holder;
  cut.part_.amounts.*kind = std::min(bytes, part_.amounts.*kind);
  part_.amounts.*kind -= cut.part_.amounts.*kind;
  return cut;
}

HostCharge HostCharge::split_promised(uint64_t bytes) { return split(&policy::HostHoldings::promised_bytes, bytes); }

void HostCharge::give_back_touched(uint64_t bytes) noexcept { split(&policy::HostHoldings::touched_bytes, bytes); }

void HostBudget::give_back(const HostPart& part) noexcept {
  const std::lock_guard lock(mutex_);
  if (part.holder != nullptr) part.holder->bytes.fetch_sub(part.size_bytes());
  holdings_.promised_bytes -= part.amounts.promised_bytes;
  holdings_.touched_bytes -= part.amounts.touched_bytes;
  holdings_.uncharged_bytes -= part.amounts.uncharged_bytes;
  publish();
}

policy::HostRules HostBudget::rules(const policy::HostMemory& memory) const {
  const uint64_t margin = margin_bytes_.load();
  return {limit_bytes(), margin != kUnlimited ? margin : policy::default_host_margin(memory)};
}

// With memory that could not be given back yet.
policy::HostHoldings HostBudget::holdings() const {
  policy::HostHoldings all = holdings_;
  all.uncharged_bytes += deferred_undos::held_bytes(kOnHost);
  return all;
}

// Before a charge is refused, idle memory gives way, and then spare memory: first the missing bytes, then all of it,
// since the budget may be short of more than it says (free memory is never below 0).
template <typename Charge>
auto HostBudget::try_charge(uint64_t bytes, const Charge& charge) {
  bool is_counted = false;
  const ScopeExit end([&]() noexcept { short_count_ -= is_counted ? 1 : 0; });
  for (const auto* source : {&idle_, &spare_}) {
    for (const bool gives_all : {false, true}) {
      uint64_t missing_bytes = kUnlimited;
      try {
        return charge();
      } catch (const StoreError& error) {
        if (bytes == 0) throw;
        if (!gives_all) missing_bytes = saturating_subtract(bytes, error.shortage.free_bytes);
      }
      if (source == &spare_ && !std::exchange(is_counted, true)) ++short_count_;
      IdleMemory* const memory = source->load();
      if (memory == nullptr || !memory->give_way(missing_bytes)) break;
    }
  }
  return charge();
}

void HostBudget::require_room(uint64_t bytes, const std::string& purpose) {
  try_charge(bytes, [&] {
    const std::lock_guard lock(mutex_);
    check_room(bytes, purpose);
  });
}

// Another process may be stopped in its turn. A thread that waits for it does not hold the lock of the budget.
HostBudget::Turn HostBudget::take_turn() const {
  if (ledger_ == nullptr) return {std::unique_lock<std::mutex>(), std::nullopt};
  std::unique_lock in_process(turn_mutex_);
  Ledger::Turn in_ledger = ledger_->take_turn();
  ledger_->mend();
  return {std::move(in_process), std::move(in_ledger)};
}

void HostBudget::publish() noexcept {
  if (ledger_ != nullptr) ledger_->publish(holdings());
}

HostHolder& HostBudget::holder(std::string_view name) {
  const std::lock_guard lock(mutex_);
  const auto found = holders_.find(name);
  return found != holders_.end() ? found->second : holders_[std::string(name)];
}

// " ebbtide holds 36 MiB: backups of 'weights' 16 MiB, staging rings 20 MiB." The largest ones; "" where it holds none.
std::string HostBudget::describe_holders() const {
  std::vector<std::pair<uint64_t, std::string_view>> found;
  for (const auto& [name, holder] : holders_) {
    if (const uint64_t bytes = holder.bytes.load(); bytes > 0) found.emplace_back(bytes, name);
  }
  if (const uint64_t bytes = deferred_undos::held_bytes(kOnHost); bytes > 0)
    found.emplace_back(bytes, "memory that the driver has not given back");
  if (found.empty()) return "";
  std::stable_sort(found.begin(), found.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
  std::string text = " ebbtide holds " + format_bytes(policy::total(holdings())) + ": ";
  uint64_t rest_bytes = 0;
  for (size_t index = 0; index < found.size(); ++index) {
    const auto& [bytes, name] = found[index];
    if (index < kMostHolders) {
      text += (index == 0 ? "" : ", ") + cut(name, kMostNameBytes) + " " + format_bytes(bytes);
    } else {
      rest_bytes += bytes;
    }
  }
  if (rest_bytes == 0) return text + ".";
  return text + ", and " + std::to_string(found.size() - kMostHolders) + " more " + format_bytes(rest_bytes) + ".";
}

void HostBudget::check_room(uint64_t bytes, const std::string& purpose) const {
  const policy::HostHoldings elsewhere = others();  // before the system is asked
  const policy::HostMemory memory = read_host_memory(root_);
  const policy::HostRules now = rules(memory);
  const uint64_t room = policy::host_room(memory, policy::sum(holdings(), elsewhere), now);
  if (bytes <= room) return;
  const uint64_t limit = policy::host_limit_in_force(memory, now);
  const bool is_limit_of_lms = limit == lms_limit_bytes() && limit < own_limit_bytes();
  // RAM may leave less than that limit does.
  const bool is_refused_by_lms =
      is_limit_of_lms && room == saturating_subtract(limit, policy::total(policy::sum(holdings(), elsewhere)));
  const uint64_t held_elsewhere = policy::total(elsewhere);
  throw StoreError(
      cut(purpose, kMostPurposeBytes) + " needs " + format_amount(bytes) + " of host memory; " + format_bytes(room) +
          " are free for it (limit " + format_bytes(limit) +
          (is_limit_of_lms ? " by large model support" : by(limit == own_limit_bytes(), Setting::kHostLimit)) +
          ", margin " + format_bytes(now.margin_bytes) + by(true, Setting::kHostMargin) +
          (held_elsewhere == 0 ? "" : ", other processes of this run hold " + format_bytes(held_elsewhere)) + ")." +
          describe_holders() +
          " Pause less at once, keep backups on disk, or none where the content may go, trim unused memory, or "
          "change " +
          (is_refused_by_lms ? "host_limit of large model support" : how_to_change_both()),
      {bytes, room, limit}, is_refused_by_lms ? Cause::kLmsHostLimit : Cause::kHostMemory);
}

HostCharge HostBudget::charge_once(uint64_t policy::HostHoldings::* kind, uint64_t bytes, const std::string& purpose,
                                   HostHolder* holder) {
  HostHolder& held_for = holder != nullptr ? *holder : this->holder(purpose);
  const auto turn = take_turn();
  HostPart part;
  part.amounts.*kind = bytes;
  const std::lock_guard lock(mutex_);
  publish();  // the ledger may have been mended, and this refused
  check_room(bytes, purpose);
  holdings_.*kind += bytes;
  publish();
  part.hold_for(held_for);
  return {*this, part};
}

HostCharge HostBudget::charge(uint64_t bytes, const std::string& purpose, HostHolder* holder) {
  return try_charge(bytes, [&] { return charge_once(&policy::HostHoldings::promised_bytes, bytes, purpose, holder); });
}

HostCharge HostBudget::charge_spare(uint64_t bytes, const std::string& purpose, HostHolder* holder) {
  if (short_count_.load() == 0) return charge(bytes, purpose, holder);
  throw StoreError(cut(purpose, kMostPurposeBytes) + " needs " + format_amount(bytes) +
                       " of host memory, which others need more at this moment: try again later",
                   {bytes, 0, limit_bytes()}, Cause::kHostMemory);
}

HostCharge HostBudget::charge_outside_cgroups(uint64_t bytes, const std::string& purpose) {
  return try_charge(bytes, [&] { return charge_idle(bytes, purpose); });
}

HostCharge HostBudget::charge_idle(uint64_t bytes, const std::string& purpose) {
  return charge_once(&policy::HostHoldings::uncharged_bytes, bytes, purpose);
}

uint64_t HostBudget::held_bytes() const {
  const std::lock_guard lock(mutex_);
  return policy::total(holdings());
}

uint64_t HostBudget::available_bytes() const {
  const policy::HostHoldings elsewhere = others();
  const policy::HostMemory memory = read_host_memory(root_);
  const std::lock_guard lock(mutex_);
  return policy::host_room(memory, policy::sum(holdings(), elsewhere), rules(memory));
}

uint64_t HostBudget::margin_bytes() const { return rules(read_host_memory(root_)).margin_bytes; }

uint64_t HostBudget::ram_bytes() const { return read_host_memory(root_).total_bytes; }

}  // namespace ebbtide
