// The roles that processes of the ledger's tests can have.
#include "core/budget/ledger.h"
#include "ledger_processes.h"

namespace ebbtide::testing {
namespace {

void hold(const std::string& path) {
  const auto ledger = Ledger::open(path);
  ledger->publish({kMiB, kMiB, 3 * kMiB});
  answer('h');
  wait_for_word();
}

void take_turn(const std::string& path) {
  const auto ledger = Ledger::open(path);
  const auto turn = ledger->take_turn();
  answer('t');
  wait_for_word();
}

void hold_deferred_undo(const std::string& path) {
  HostBudget budget;
  budget.set_margin(0);
  budget.join(Ledger::open(path));
  HostCharge released = budget.charge_outside_cgroups(3 * kMiB, "what stays");
  deferred_undos::keep({Undo::Kind::kRelease, 1, 3 * kMiB, kOnHost, 1});
  released.reset();
  const HostCharge held = budget.charge_outside_cgroups(kMiB, "what is held");
  answer('l');
  wait_for_word();
}

void race(const std::string& path) {
  HostBudget budget;
  budget.set_margin(0);
  budget.set_limit(5 * kMiB);
  budget.join(Ledger::open(path));
  answer('r');
  std::vector<HostCharge> claims;
  while (true) {
    wait_for_word();
    try {
      claims.push_back(budget.charge_outside_cgroups(3 * kMiB, "a race"));
      answer('y');
    } catch (const StoreError&) {
      answer('n');
    }
  }
}

std::unique_ptr<Ledger> try_open(const std::string& path) {
  try {
    auto ledger = Ledger::open(path);
    ledger->publish({1, 1, 1});
    answer('y');
    return ledger;
  } catch (const StateError&) {
    answer('e');
    return nullptr;
  }
}

// Mounts a file system of two pages that only this process sees.
bool mount_tiny(const std::string& folder) {
  const std::string user = "0 " + std::to_string(::geteuid()) + " 1";
  const std::string group = "0 " + std::to_string(::getegid()) + " 1";
  if (::unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0) return false;
  std::ofstream("/proc/self/uid_map") << user;
  std::ofstream("/proc/self/setgroups") << "deny";
  std::ofstream("/proc/self/gid_map") << group;
  return ::mount("none", folder.c_str(), "tmpfs", 0, "size=8k") == 0;
}

void fill(const std::string& folder) {
  if (!mount_tiny(folder)) return answer('s');
  const std::string path = folder + "/ledger";
  const std::string page(4096, 'x');
  for (const char* name : {"/0", "/1"}) std::ofstream(folder + name) << page;
  try_open(path);
  std::filesystem::remove(folder + "/0");
  const auto first = try_open(path);
  try_open(path);
}

void limit_files(const std::string& path) {
  struct rlimit all{};
  ::getrlimit(RLIMIT_FSIZE, &all);
  const struct rlimit none = {4096, all.rlim_max};
  ::setrlimit(RLIMIT_FSIZE, &none);
  try_open(path);
  ::setrlimit(RLIMIT_FSIZE, &all);
  const auto held = Ledger::open(path);
  ::setrlimit(RLIMIT_FSIZE, &none);
  held->publish({1, 1, 1});
  answer('y');
  try_open(path);
}

void fork_and_wait(const std::string& path) {
  const auto ledger = Ledger::open(path);
  ledger->publish({5 * kMiB, 0, 0});
  if (::fork() == 0) {
    answer('f');
    wait_for_word();  // until the pipe ends with the test
    ::_exit(0);
  }
  while (true) ::pause();
}

// Runs instead of main if the environment gives this process a role.
[[maybe_unused]] const bool has_no_role = [] {
  const char* role = std::getenv(kRoleVariable);
  if (role == nullptr) return true;
  const std::string name = role;
  const std::string path = std::getenv(kPathVariable);
  if (name == "hold") hold(path);
  if (name == "take_turn") take_turn(path);
  if (name == "deferred_undo") hold_deferred_undo(path);
  if (name == "race") race(path);
  if (name == "fill") fill(path);
  if (name == "limit") limit_files(path);
  if (name == "fork") fork_and_wait(path);
  ::_exit(96);
}();

}  // namespace
}  // namespace ebbtide::testing
