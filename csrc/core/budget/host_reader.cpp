#include "core/budget/host_reader.h"

#include <charconv>
#include <cstdint>
#include <fstream>
#include <map>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

namespace ebbtide {
namespace {

std::optional<uint64_t> parse_number(const std::string& text) {
  uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end == text.data()) return std::nullopt;
  return value;
}

std::optional<uint64_t> read_number(const std::string& file) {
  std::ifstream stream(file);
  std::string word;
  if (!(stream >> word)) return std::nullopt;
  return parse_number(word);  // "max" is no number: no limit
}

// Lines "key value" or "key: value kB".
std::map<std::string, uint64_t> read_table(const std::string& file, uint64_t unit) {
  std::map<std::string, uint64_t> table;
  std::ifstream stream(file);
  std::string line;
  while (std::getline(stream, line)) {
    std::istringstream words(line);
    std::string key;
    std::string value;
    if (!(words >> key >> value)) continue;
    if (key.back() == ':') key.pop_back();
    if (const auto number = parse_number(value)) table[key] = *number * unit;
  }
  return table;
}

uint64_t value_of(const std::map<std::string, uint64_t>& table, const std::string& key, uint64_t otherwise) {
  const auto found = table.find(key);
  return found == table.end() ? otherwise : found->second;
}

struct CgroupFiles {
  const char* limit;
  const char* used;
  const char* active_file;
  const char* inactive_file;
};
constexpr CgroupFiles kV2 = {"memory.max", "memory.current", "active_file", "inactive_file"};
constexpr CgroupFiles kV1 = {"memory.limit_in_bytes", "memory.usage_in_bytes", "total_active_file",
                             "total_inactive_file"};

// v1 says "no limit" as the largest multiple of a page below 2^63.
constexpr uint64_t kV1NoLimit = 0x7000000000000000;

// Calls visit with each folder from this one up to the mount, the process's own first.
template <typename Visit>
void visit_upwards(const std::string& mount, std::string path, const Visit& visit) {
  while (true) {
    visit(mount + path);
    const size_t slash = path.rfind('/');
    if (slash == std::string::npos || path.empty()) return;
    path.resize(slash);
  }
}

// Calls v2 or v1 with each folder of a cgroup above this process that can say something of the controller.
template <typename VisitV2, typename VisitV1>
void visit_cgroups(const std::string& root, const std::string& controller, const VisitV2& v2, const VisitV1& v1) {
  std::ifstream stream(root + "/proc/self/cgroup");
  std::string line;
  while (std::getline(stream, line)) {
    const size_t first = line.find(':');
    const size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    std::string path = line.substr(second + 1);
    if (path == "/") path.clear();
    if (controllers == ",,") {
      visit_upwards(root + "/sys/fs/cgroup", path, v2);
      visit_upwards(root + "/sys/fs/cgroup/unified", path, v2);
    } else if (controllers.find("," + controller + ",") != std::string::npos) {
      visit_upwards(root + "/sys/fs/cgroup/" + controller, path, v1);
    }
  }
}

void add_level(const std::string& folder, const CgroupFiles& files, std::vector<policy::CgroupLevel>& levels) {
  const auto limit = read_number(folder + "/" + files.limit);
  const auto used = read_number(folder + "/" + files.used);
  if (!limit || *limit >= kV1NoLimit || !used) return;
  const auto statistics = read_table(folder + "/memory.stat", 1);
  levels.push_back(
      {*limit, *used, value_of(statistics, files.active_file, 0) + value_of(statistics, files.inactive_file, 0)});
}

}  // namespace

policy::HostMemory read_host_memory(const std::string& root) {
  policy::HostMemory memory;
  const auto table = read_table(root + "/proc/meminfo", 1024);
  memory.total_bytes = value_of(table, "MemTotal", kUnlimited);
  memory.available_bytes = value_of(table, "MemAvailable", kUnlimited);
  visit_cgroups(
      root, "memory", [&](const std::string& folder) { add_level(folder, kV2, memory.cgroups); },
      [&](const std::string& folder) { add_level(folder, kV1, memory.cgroups); });
  return memory;
}

std::optional<double> read_cpu_quota(const std::string& root) {
  std::optional<double> least;
  const auto bind = [&](std::optional<uint64_t> quota, std::optional<uint64_t> period) {
    if (!quota || !period || *quota == 0 || *period == 0) return;
    const double cores = static_cast<double>(*quota) / static_cast<double>(*period);
    if (!least || cores < *least) least = cores;
  };
  visit_cgroups(
      root, "cpu",
      [&](const std::string& folder) {
        std::ifstream stream(folder + "/cpu.max");  // "200000 100000", or "max 100000"
        std::string quota;
        std::string period;
        if (stream >> quota >> period) bind(parse_number(quota), parse_number(period));
      },
      [&](const std::string& folder) {
        bind(read_number(folder + "/cpu.cfs_quota_us"), read_number(folder + "/cpu.cfs_period_us"));  // -1: none
      });
  return least;
}

}  // namespace ebbtide
