#include "sim/modules.h"

#include <regex>

#include "sim/code_objects.h"
#include "sim/entry.h"
#include "sim/simulator.h"

namespace ebbtide::sim {
namespace {

std::string without_comments(const std::string& text) {
  static const auto* const comment = new std::regex(R"(//[^\n]*|/\*[^*]*\*+([^/*][^*]*\*+)*/)");
  return std::regex_replace(text, *comment, " ");
}

}  // namespace

CUresult Modules::read_ptx(const char* image, int driver_version, std::set<std::string>& entries) {
  const std::string text = without_comments(image);
  std::smatch found;
  static const auto* const version = new std::regex(R"(^\s*\.version\s+(\d{1,4})\.(\d{1,4})\s)");
  if (!std::regex_search(text, found, *version)) return CUDA_ERROR_INVALID_IMAGE;
  // CUDA 12.0 came with PTX 8.0, and 13.0 with 9.0. In between, the real minor version may lag behind; that is not
  // modelled.
  const int asked_for = 10 * std::stoi(found[1]) + std::stoi(found[2]);
  if (asked_for > driver_version / 100 - 40 + driver_version % 100 / 10) return CUDA_ERROR_UNSUPPORTED_PTX_VERSION;
  static const auto* const target = new std::regex(R"(^\s*\.version\s+\S+\s+\.target\s+sm_\d+)");
  if (!std::regex_search(text, *target)) return CUDA_ERROR_INVALID_PTX;
  static const auto* const entry = new std::regex(R"(\.entry\s+([A-Za-z_$][\w$]*)\s*\()");
  for (auto each = std::sregex_iterator(text.begin(), text.end(), *entry); each != std::sregex_iterator(); ++each) {
    entries.insert((*each)[1]);
  }
  return CUDA_SUCCESS;
}

uint64_t Modules::add(Module module) {
  const uint64_t id = simulator().next_id();
  modules_[id] = std::move(module);
  return id;
}

CUresult Modules::find_function(uint64_t module, const char* name, uint64_t& function) {
  const auto found = modules_.find(module);
  if (found == modules_.end()) return CUDA_ERROR_INVALID_HANDLE;
  if (!found->second.entries.contains(name)) return CUDA_ERROR_NOT_FOUND;
  for (const auto& [id, known] : functions_) {
    if (known.module == module && known.entry == name) {
      function = id;
      return CUDA_SUCCESS;
    }
  }
  function = simulator().next_id();
  functions_[function] = {module, found->second.context, name};
  return CUDA_SUCCESS;
}

const Function* Modules::find(uint64_t function) const {
  const auto found = functions_.find(function);
  return found == functions_.end() ? nullptr : &found->second;
}

CUresult Modules::remove(uint64_t module) {
  if (modules_.erase(module) == 0) return CUDA_ERROR_INVALID_HANDLE;
  std::erase_if(functions_, [&](const auto& entry) { return entry.second.module == module; });
  return CUDA_SUCCESS;
}

void Modules::drop_context(uint64_t context) {
  std::erase_if(modules_, [&](const auto& entry) { return entry.second.context == context; });
  std::erase_if(functions_, [&](const auto& entry) { return entry.second.context == context; });
}

void Modules::reset() {
  modules_.clear();
  functions_.clear();
}

namespace {

template <typename Reader>
CUresult load_by(const Reader& read, CUmodule* module, const void* image) {
  if (module == nullptr || image == nullptr) return CUDA_ERROR_INVALID_VALUE;
  Lock lock(simulator().mutex);
  Module made{current_context(lock), {}};
  const CUresult wrong = read(static_cast<const char*>(image), made.entries);
  if (wrong != CUDA_SUCCESS) return wrong;
  *module = handle_of<CUmodule>(simulator().modules.add(std::move(made)));
  return CUDA_SUCCESS;
}

CUresult load(CUmodule* module, const void* image) {
  const auto read = [](const char* text, std::set<std::string>& entries) {
    return Modules::read_ptx(text, simulator().driver_version, entries);
  };
  return load_by(read, module, image);
}

CUresult load_bundle(CUmodule* module, const void* image) { return load_by(read_code_objects, module, image); }

CUresult load_with_options(CUmodule* module, const void* image, unsigned int numOptions, CUjit_option* options,
                           void** optionValues) {
  if (numOptions > 0 && (options == nullptr || optionValues == nullptr)) return CUDA_ERROR_INVALID_VALUE;
  return load(module, image);  // nothing is compiled
}

CUresult get_function(CUfunction* hfunc, CUmodule hmod, const char* name) {
  if (hfunc == nullptr || name == nullptr) return CUDA_ERROR_INVALID_VALUE;
  Lock lock(simulator().mutex);
  uint64_t function = 0;
  const CUresult result = simulator().modules.find_function(id_of(hmod), name, function);
  if (result == CUDA_SUCCESS) *hfunc = handle_of<CUfunction>(function);
  return result;
}

CUresult unload(CUmodule hmod) {
  Lock lock(simulator().mutex);
  return simulator().modules.remove(id_of(hmod));
}

}  // namespace

CUresult load_code_objects(CUmodule* module, const void* image) {
  EBBTIDE_SIM_FORWARD(cuModuleLoadData, kContext | kNoCapture, load_bundle, module, image);
}

}  // namespace ebbtide::sim

using namespace ebbtide::sim;

EBBTIDE_SIM_EXPORT CUresult cuModuleLoadData(CUmodule* module, const void* image) {
  EBBTIDE_SIM_FORWARD(cuModuleLoadData, kContext | kNoCapture, load, module, image);
}

// For programs (program_functions.def).
EBBTIDE_SIM_EXPORT CUresult cuModuleLoadDataEx(CUmodule* module, const void* image, unsigned int numOptions,
                                               CUjit_option* options, void** optionValues) {
  EBBTIDE_SIM_FORWARD(cuModuleLoadDataEx, kContext | kNoCapture, load_with_options, module, image, numOptions, options,
                      optionValues);
}

EBBTIDE_SIM_EXPORT CUresult cuModuleGetFunction(CUfunction* hfunc, CUmodule hmod, const char* name) {
  EBBTIDE_SIM_FORWARD(cuModuleGetFunction, kContext, get_function, hfunc, hmod, name);
}

EBBTIDE_SIM_EXPORT CUresult cuModuleUnload(CUmodule hmod) {
  EBBTIDE_SIM_FORWARD(cuModuleUnload, kContext | kNoCapture, unload, hmod);
}
