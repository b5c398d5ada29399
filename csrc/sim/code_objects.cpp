#include "sim/code_objects.h"

#include <elf.h>

#include <cstdint>
#include <cstring>
#include <optional>
#include <string_view>

namespace ebbtide::sim {
namespace {

constexpr std::string_view kBundleMagic = "__CLANG_OFFLOAD_BUNDLE__";
constexpr std::string_view kTargetPrefix = "hipv4-amdgcn-amd-amdhsa--";
constexpr std::string_view kDescriptor = ".kd";  // of a kernel: its name and this
constexpr uint64_t kMostEntries = 64;
constexpr uint16_t kAmdGpu = 224;  // the machine EM_AMDGPU, which older headers lack

struct BundleEntry {
  uint64_t offset;
  uint64_t size;
  uint64_t name_size;
};

template <typename T>
T read_at(const char* bytes) {
  T value;
  std::memcpy(&value, bytes, sizeof value);
  return value;
}

// The code object for kArchitecture. As in HIP, the bundle itself says how long it is.
std::optional<std::string_view> find_code_object(const char* bundle) {
  const char* next = bundle + kBundleMagic.size();
  const auto count = read_at<uint64_t>(next);
  next += sizeof count;
  for (uint64_t index = 0; index < count && index < kMostEntries; ++index) {
    const auto entry = read_at<BundleEntry>(next);
    const std::string_view name(next + sizeof entry, entry.name_size);
    if (name == std::string(kTargetPrefix) + kArchitecture) return std::string_view(bundle + entry.offset, entry.size);
    next = name.data() + name.size();
  }
  return std::nullopt;
}

// Null where that reaches beyond the file.
template <typename T>
std::optional<T> read_within(std::string_view file, uint64_t offset) {
  if (offset > file.size() || file.size() - offset < sizeof(T)) return std::nullopt;
  return read_at<T>(file.data() + offset);
}

std::string_view part_of(std::string_view file, const Elf64_Shdr& section) {
  return section.sh_offset > file.size() ? std::string_view() : file.substr(section.sh_offset, section.sh_size);
}

void add_kernels(std::string_view symbols, std::string_view names, std::set<std::string>& entries) {
  for (uint64_t offset = 0; const auto symbol = read_within<Elf64_Sym>(symbols, offset); offset += sizeof *symbol) {
    if (symbol->st_name >= names.size()) continue;
    const std::string_view rest = names.substr(symbol->st_name);
    const std::string_view name = rest.substr(0, rest.find('\0'));
    if (name.ends_with(kDescriptor)) entries.emplace(name.substr(0, name.size() - kDescriptor.size()));
  }
}

}  // namespace

CUresult read_code_objects(const char* bundle, std::set<std::string>& entries) {
  if (std::strncmp(bundle, kBundleMagic.data(), kBundleMagic.size()) != 0) return CUDA_ERROR_INVALID_IMAGE;
  const auto file = find_code_object(bundle);
  if (!file) return CUDA_ERROR_NO_BINARY_FOR_GPU;
  const auto header = read_within<Elf64_Ehdr>(*file, 0);
  if (!header || std::memcmp(header->e_ident, ELFMAG, SELFMAG) != 0 || header->e_machine != kAmdGpu) {
    return CUDA_ERROR_INVALID_IMAGE;
  }
  const auto section_at = [&](uint64_t index) {
    return read_within<Elf64_Shdr>(*file, header->e_shoff + index * sizeof(Elf64_Shdr));
  };
  for (uint64_t index = 0; index < header->e_shnum; ++index) {
    const auto section = section_at(index);
    if (!section || section->sh_type != SHT_SYMTAB) continue;
    if (const auto names = section_at(section->sh_link)) {
      add_kernels(part_of(*file, *section), part_of(*file, *names), entries);
    }
  }
  return CUDA_SUCCESS;
}

}  // namespace ebbtide::sim
