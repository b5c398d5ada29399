#include <pybind11/stl.h>

#include <utility>
#include <vector>

#include "bindings/call.h"

// Memory of several processes.
namespace py = pybind11;

namespace ebbtide::bindings {
namespace {

using Pieces = std::vector<std::pair<uint64_t, int>>;  // size and descriptor

std::vector<ebbtide_piece> copy(const Pieces& pieces) {
  std::vector<ebbtide_piece> copied;
  for (const auto& [size_bytes, file] : pieces) copied.push_back({size_bytes, file});
  return copied;
}

Pieces export_memory(uint64_t address) {
  Pieces pieces;
  pieces.reserve(256);  // so that no descriptor is lost for want of memory
  const auto visit = [](void* user, const ebbtide_piece* piece) {
    static_cast<Pieces*>(user)->emplace_back(piece->size_bytes, piece->file);
  };
  call(ebbtide_export, as_pointer(address), +visit, static_cast<void*>(&pieces));
  return pieces;
}

// Freed by free(), which may fail and be tried again. It does not free itself: kernels may use the memory.
class Import {
 public:
  Import(int device, const Pieces& pieces) {
    const std::vector<ebbtide_piece> copied = copy(pieces);
    void* address = nullptr;
    call(ebbtide_import_memory, device, copied.data(), copied.size(), &import_, &address);
    address_ = reinterpret_cast<uint64_t>(address);
  }
  uint64_t address() const { return address_; }
  void wait() { call(ebbtide_wait_import, import_); }
  void unmap() { call(ebbtide_unmap_import, import_); }
  void map(const Pieces& pieces) {
    const std::vector<ebbtide_piece> copied = copy(pieces);
    call(ebbtide_map_import, import_, copied.data(), copied.size());
  }
  void free() { call(ebbtide_free_import, import_); }

 private:
  ebbtide_import* import_ = nullptr;
  uint64_t address_ = 0;
};

}  // namespace

void register_sharing(py::module_& module) {
  const auto address = py::arg("address");
  module.def("export", &export_memory, address);
  module.def("end_export", [](uint64_t at) { call(ebbtide_end_export, as_pointer(at)); }, address);
  module.def("keep", [](uint64_t at) { call(ebbtide_keep, as_pointer(at)); }, address);
  module.def("end_keep", [](uint64_t at) { call(ebbtide_end_keep, as_pointer(at)); }, address);
  py::class_<Import>(module, "Import")
      .def(py::init<int, const Pieces&>(), py::arg("device"), py::arg("pieces"))
      .def_property_readonly("address", &Import::address)
      .def("wait", &Import::wait)
      .def("unmap", &Import::unmap)
      .def("map", &Import::map, py::arg("pieces"))
      .def("free", &Import::free);
}

}  // namespace ebbtide::bindings
