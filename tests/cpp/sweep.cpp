#include "sweep.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <sstream>
#include <utility>

#include "base/error.h"
#include "new_hook.h"
#include "sim_control.h"

namespace ebbtide::testing {
namespace {

bool changes_memory(const std::string& name) {
  return name == "cuMemUnmap" || name == "cuMemMap" || name.starts_with("cuMemcpy") || name.starts_with("cuMemset");
}

bool takes_memory(const std::string& name) {
  const auto contains = [&](const char* word) { return name.find(word) != std::string::npos; };
  return contains("Create") || contains("Alloc") || contains("Reserve") || contains("Register");
}

}  // namespace

std::vector<std::string> logged_calls() {
  std::string text(sim().log(nullptr, 0) + 1, '\0');
  sim().log(text.data(), text.size());
  std::vector<std::string> names;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (const size_t end = line.find('('); end != std::string::npos) names.push_back(line.substr(0, end));
  }
  return names;
}

bool sweeps_all() {
  const char* const wanted = std::getenv("EBBTIDE_SWEEP");
  return wanted != nullptr && std::string(wanted) == "all";
}

void CallFailure::inject() const { sim().fail(nullptr, k, code, times); }

std::string CallFailure::text() const {
  return "call " + std::to_string(k) + " (" + name + ") gives " + std::to_string(code) +
         (times == 0 ? ", and all after it" : "");
}

std::vector<CallFailure> failures_of(const std::vector<std::string>& names) {
  std::vector<CallFailure> failures;
  const auto add = [&](size_t k, int code, uint64_t times) { failures.push_back({k, names[k - 1], code, times}); };
  std::map<std::pair<std::string, bool>, std::vector<size_t>> groups;
  bool has_changed = false;
  for (size_t k = 1; k <= names.size(); ++k) {
    has_changed |= changes_memory(names[k - 1]);
    groups[{names[k - 1], has_changed}].push_back(k);
    if (!sweeps_all()) continue;
    for (const int code : {kOutOfMemory, kOther}) {
      for (const uint64_t times : {1, 0}) add(k, code, times);
    }
  }
  if (sweeps_all()) return failures;
  bool is_for_good = false;
  for (const auto& [group, calls] : groups) {
    add(calls.front(), takes_memory(group.first) ? kOutOfMemory : kOther, 1);
    if (calls.size() > 1) add(calls.back(), kOther, 1);
    is_for_good = !is_for_good;
    if (is_for_good || takes_memory(group.first))
      add(calls[calls.size() / 2], calls.front() % 2 == 0 ? kOutOfMemory : kOther, 0);
  }
  // What fails for good may leave objects that later runs need not make: such runs come last.
  std::sort(failures.begin(), failures.end(), [](const CallFailure& one, const CallFailure& other) {
    return std::pair(one.times == 0, one.k) < std::pair(other.times == 0, other.k);
  });
  return failures;
}

bool fails(const Act& act) {
  try {
    act();
    return false;
  } catch (const Error& error) {
    EXPECT_STRNE(error.what(), "");
    return true;
  }
}

#if EBBTIDE_HAS_NEW_HOOK

void sweep_new(const Act& begin, const Act& act, const Act& check, const Act& end) {
  begin();
  const size_t count = count_new(act);
  check();
  end();
  const size_t stride = sweeps_all() ? 1 : std::max<size_t>(1, count / 20);
  size_t failures = 0;
  for (size_t k = 1; k <= count && !::testing::Test::HasFailure(); k += stride) {
    SCOPED_TRACE("new " + std::to_string(k) + " of " + std::to_string(count));
    begin();
    fail_new(k);
    try {
      act();
    } catch (const std::exception&) {
      ++failures;
    }
    fail_new(0);
    check();
    ASSERT_NO_THROW(act());
    end();
  }
  EXPECT_GT(failures, count / stride / 4);
}

#endif

}  // namespace ebbtide::testing
