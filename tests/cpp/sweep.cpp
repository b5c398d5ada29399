#include "sweep.h"

#include <algorithm>
#include <cstdlib>
#include <map>
#include <numeric>
#include <set>
#include <sstream>
#include <utility>

#include "sim_control.h"

namespace ebbtide::testing {

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

std::vector<size_t> calls_to_fail(const std::vector<std::string>& names) {
  std::vector<size_t> all(names.size());
  std::iota(all.begin(), all.end(), 1);
  if (sweeps_all()) return all;
  const auto changes_memory = [](const std::string& name) {
    return name == "cuMemUnmap" || name == "cuMemMap" || name.starts_with("cuMemcpy") || name.starts_with("cuMemset");
  };
  const size_t first_change =
      static_cast<size_t>(std::find_if(names.begin(), names.end(), changes_memory) - names.begin()) + 1;
  std::map<std::pair<std::string, bool>, std::vector<size_t>> alike;
  for (const size_t k : all) alike[{names[k - 1], k >= first_change}].push_back(k);
  std::set<size_t> chosen;
  for (const auto& [which, calls] : alike) chosen.insert({calls.front(), calls[calls.size() / 2], calls.back()});
  return {chosen.begin(), chosen.end()};
}

}  // namespace ebbtide::testing
