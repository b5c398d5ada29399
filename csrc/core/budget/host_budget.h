#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "core/budget/charge.h"
#include "core/budget/ledger.h"
#include "policy/host_room.h"

// How much host memory ebbtide may hold, and how much it holds. It is charged before a page is touched (invariants 4
// and 7), since the kernel answers overuse with SIGKILL.
namespace ebbtide {

// Host memory that serves nothing yet, or that others need more, and can be given back at once.
class IdleMemory {
 public:
  virtual ~IdleMemory() = default;
  // Gives back this much, or all there is. False if there was none. No charge is made meanwhile.
  virtual bool give_way(uint64_t bytes) noexcept = 0;
};

// A purpose of held memory, and its bytes: for the text of a refusal. Made by HostBudget::holder().
struct HostHolder {
  std::atomic<uint64_t> bytes{0};
};

struct HostPart {
  policy::HostHoldings amounts;
  HostHolder* holder = nullptr;
  uint64_t size_bytes() const { return policy::total(amounts); }
  void add(HostPart other) noexcept;  // counts with this holder, if there is one
  void hold_for(HostHolder& new_holder) noexcept;
};

// A charge is promised until its pages are touched; from then on the kernel counts them too.
class HostCharge : public Charge<class HostBudget, HostPart> {
 public:
  using Charge::Charge;
  void touch(uint64_t bytes) noexcept;              // promised pages that are touched now; capped at the promised bytes
  HostCharge split_promised(uint64_t bytes);        // capped at the promised bytes
  void give_back_touched(uint64_t bytes) noexcept;  // pages that went back to the system; capped at the touched bytes
  // Of the same budget. From now on it counts there, and so do charges that are merged into it or split from it.
  void hold_for(HostHolder& holder) noexcept {
    if (budget_ != nullptr) part_.hold_for(holder);
  }

 private:
  HostCharge split(uint64_t policy::HostHoldings::* kind, uint64_t bytes);
};

class HostBudget : public Limits {
 public:
  // root: where /proc and /sys are looked for; "" is the real system.
  explicit HostBudget(std::string root = "") : root_(std::move(root)) {}

  // For anonymous memory. Throws StoreError naming need, free, limit and the largest holders. purpose, for that text:
  // "the backup of 'weights'". The charge counts with holder; null: with the one that is called as the purpose is.
  HostCharge charge(uint64_t bytes, const std::string& purpose, HostHolder* holder = nullptr);
  // The same for memory that gives way itself (set_spare), or that the caller does without as well. Refused, too, while
  // another charge waits for memory.
  HostCharge charge_spare(uint64_t bytes, const std::string& purpose, HostHolder* holder = nullptr);
  // For memory that the driver pins. No cgroup counts it, so only this budget bounds it.
  HostCharge charge_outside_cgroups(uint64_t bytes, const std::string& purpose);
  // The same for memory that will itself be idle. Other idle memory is not released for it.
  HostCharge charge_idle(uint64_t bytes, const std::string& purpose);
  // Throws as a charge would, and takes nothing. Idle memory is released for it, too.
  void require_room(uint64_t bytes, const std::string& purpose);
  // Idle memory that is released before a charge is refused; null: none. It outlives the use of the budget.
  void set_idle(IdleMemory* idle) { idle_.store(idle); }
  // The same for memory that is of some use where it is: it is released where releasing the idle memory is not enough.
  void set_spare(IdleMemory* spare) { spare_.store(spare); }
  // The holder of this name: "backups of 'weights'". The same one each time; it lives as long as the budget.
  HostHolder& holder(std::string_view name);

  uint64_t held_bytes() const;
  uint64_t available_bytes() const;
  uint64_t margin_bytes() const;
  uint64_t ram_bytes() const;
  void set_margin(uint64_t bytes) { margin_bytes_.store(bytes); }  // kUnlimited: the default
  // Counts the host memory of the other processes of the run, too, and shows them that of this one. Before the first
  // charge.
  void join(std::unique_ptr<Ledger> ledger) { ledger_ = std::move(ledger); }

 private:
  friend Charge<HostBudget, HostPart>;
  friend class HostCharge;
  void give_back(const HostPart& part) noexcept;
  void lose(const HostPart& /*part*/) noexcept {}
  policy::HostRules rules(const policy::HostMemory& memory) const;
  policy::HostHoldings holdings() const;
  policy::HostHoldings others() const { return ledger_ == nullptr ? policy::HostHoldings{} : ledger_->others(); }
  // The ledger knows processes: its turn is one thread's after the other.
  struct Turn {
    std::unique_lock<std::mutex> in_process;
    std::optional<Ledger::Turn> in_ledger;
  };
  Turn take_turn() const;
  void publish() noexcept;
  void check_room(uint64_t bytes, const std::string& purpose) const;
  std::string describe_holders() const;
  HostCharge charge_once(uint64_t policy::HostHoldings::* kind, uint64_t bytes, const std::string& purpose,
                         HostHolder* holder = nullptr);
  template <typename Charge>
  auto try_charge(uint64_t bytes, const Charge& charge);

  const std::string root_;
  std::atomic<IdleMemory*> idle_{nullptr};
  std::atomic<IdleMemory*> spare_{nullptr};
  std::atomic<int> short_count_{0};  // callers for whom spare memory is being released
  mutable std::mutex turn_mutex_;
  mutable std::mutex mutex_;
  policy::HostHoldings holdings_;
  std::map<std::string, HostHolder, std::less<>> holders_;
  std::unique_ptr<Ledger> ledger_;  // null: this process counts itself only
  std::atomic<uint64_t> margin_bytes_{kUnlimited};
};

}  // namespace ebbtide
