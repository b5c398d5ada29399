#include "core/host_reader.h"

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

void add_levels(const std::string& mount, std::string path, const CgroupFiles& files,
                std::vector<policy::CgroupLevel>& levels) {
  while (true) {
    const std::string folder = mount + path;
    const auto limit = read_number(folder + "/" + files.limit);
    const auto used = read_number(folder + "/" + files.used);
    if (limit && *limit < kV1NoLimit && used) {
      const auto statistics = read_table(folder + "/memory.stat", 1);
      levels.push_back(
          {*limit, *used, value_of(statistics, files.active_file, 0) + value_of(statistics, files.inactive_file, 0)});
    }
    const size_t slash = path.rfind('/');
    if (slash == std::string::npos || path.empty()) return;
    path.resize(slash);
  }
}

void add_cgroups(const std::string& root, std::vector<policy::CgroupLevel>& levels) {
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
      add_levels(root + "/sys/fs/cgroup", path, kV2, levels);
      add_levels(root + "/sys/fs/cgroup/unified", path, kV2, levels);
    } else if (controllers.find(",memory,") != std::string::npos) {
      add_levels(root + "/sys/fs/cgroup/memory", path, kV1, levels);
    }
  }
}

}  // namespace

policy::HostMemory read_host_memory(const std::string& root) {
  policy::HostMemory memory;
  const auto table = read_table(root + "/proc/meminfo", 1024);
  memory.total_bytes = value_of(table, "MemTotal", kUnlimited);
  memory.available_bytes = value_of(table, "MemAvailable", kUnlimited);
  add_cgroups(root, memory.cgroups);
  return memory;
}

}  // namespace ebbtide
