// Modules and their functions. A module is the list of the kernels in its image.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <map>
#include <set>
#include <string>

namespace ebbtide::sim {

struct Module {
  uint64_t context;
  // The entries of the image, whether or not the simulator knows them.
  std::set<std::string> entries;
};

struct Function {
  uint64_t module;
  uint64_t context;
  std::string entry;
};

// cuModuleLoadData by HIP's name: of an offload bundle, and not of PTX.
CUresult load_code_objects(CUmodule* module, const void* image);

class Modules {
 public:
  // Reads the entries of a PTX text. Returns an error if a driver of this version would refuse the text.
  static CUresult read_ptx(const char* image, int driver_version, std::set<std::string>& entries);

  uint64_t add(Module module);
  CUresult find_function(uint64_t module, const char* name, uint64_t& function);
  const Function* find(uint64_t function) const;
  CUresult remove(uint64_t module);
  void drop_context(uint64_t context);
  uint64_t count() const { return modules_.size(); }
  void reset();

 private:
  std::map<uint64_t, Module> modules_;
  std::map<uint64_t, Function> functions_;
};

}  // namespace ebbtide::sim
