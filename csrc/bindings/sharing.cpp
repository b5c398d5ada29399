#include <pybind11/stl.h>

#include <optional>

#include <tuple>
#include <utility>
#include <vector>

#include "bindings/records.h"
#include "bindings/request.h"

// Memory of several processes.

namespace ebbtide::bindings {
namespace {

using Pieces = std::vector<std::pair<uint64_t, int>>;  // size and descriptor

std::vector<ebbtide_piece> copy(const Pieces& pieces) {
  std::vector<ebbtide_piece> copied;
  for (const auto& [size_bytes, file] : pieces) copied.push_back({size_bytes, file});
  return copied;
}

// None: an operation holds the tag.
std::optional<Pieces> export_memory(uint64_t address) {
  Pieces pieces;
  pieces.reserve(256);  // so that no descriptor is lost for want of memory
  const auto visit = [](void* user, const ebbtide_piece* piece) {
    static_cast<Pieces*>(user)->emplace_back(piece->size_bytes, piece->file);
  };
  const bool is_busy = get<bool>(ebbtide_export, as_pointer(address), +visit, static_cast<void*>(&pieces));
  if (is_busy) return std::nullopt;
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

// Calls a Python function from any thread. What it raises counts as the answer `otherwise`.
template <typename Answer, typename... Arguments>
Answer call_back(const py::function& function, Answer otherwise, Arguments... arguments) noexcept {
  const py::gil_scoped_acquire gil;
  try {
    const py::object answer = function(arguments...);
    return answer.is_none() ? otherwise : answer.cast<Answer>();
  } catch (py::error_already_set& error) {
    if (error.matches(PyExc_KeyboardInterrupt))
      PyErr_SetInterrupt();  // it comes again once the call is over
    else
      error.discard_as_unraisable("a hand-over between processes");
  } catch (const py::cast_error&) {
  }
  return otherwise;
}

struct ReceiverFunctions {
  py::function wants, give, released;
};

ReportRecord hand_over(const std::vector<std::string>& tags, bool is_missing_ok, const py::function& wants,
                       const py::function& give, const py::function& released, const py::kwargs& options) {
  const Request request(tags, is_missing_ok, options);
  ReceiverFunctions functions{wants, give, released};
  const ebbtide_receiver receiver = {
      &functions,
      [](void* user, int32_t device, uint64_t size_bytes) {
        return call_back(static_cast<ReceiverFunctions*>(user)->wants, false, device, size_bytes);
      },
      [](void* user, int32_t device, uint64_t size_bytes, int32_t file) {
        return call_back(static_cast<ReceiverFunctions*>(user)->give, false, device, size_bytes, file);
      },
      [](void* user, int32_t device, uint64_t size_bytes) {
        call_back(static_cast<ReceiverFunctions*>(user)->released, false, device, size_bytes);
      }};
  return request.run([&] { return ReportRecord(get<ebbtide_report*>(ebbtide_hand_over, request.get(), &receiver)); });
}

using LeavingHandle = std::tuple<int, uint64_t, bool>;  // device, size, whether it can be given

std::vector<LeavingHandle> find_leaving(const std::vector<std::string>& tags) {
  const Request request(tags, true);
  std::vector<LeavingHandle> found;
  const auto visit = [](void* user, const ebbtide_leaving* leaving) {
    static_cast<std::vector<LeavingHandle>*>(user)->emplace_back(leaving->device, leaving->size_bytes,
                                                                 leaving->exportable);
  };
  call(ebbtide_find_leaving, request.get(), +visit, static_cast<void*>(&found));
  return found;
}

class Reception {
 public:
  Reception(const std::vector<LeavingHandle>& leaving, bool must_clear) {
    std::vector<ebbtide_leaving> copied;
    for (const auto& [device, size_bytes, is_exportable] : leaving)
      copied.push_back({size_bytes, device, is_exportable});
    reception_.reset(get<ebbtide_reception*>(ebbtide_make_reception, copied.data(), copied.size(), must_clear));
  }
  ReportRecord resume(const std::vector<std::string>& tags, bool is_missing_ok, const py::function& want,
                      const py::kwargs& options) {
    const Request request(tags, is_missing_ok, options);
    const auto visit = [](void* user, int32_t device, uint64_t size_bytes) {
      return call_back(*static_cast<const py::function*>(user), false, device, size_bytes);
    };
    void* const user = const_cast<py::function*>(&want);
    return ReportRecord(get<ebbtide_report*>(ebbtide_resume_from, request.get(), reception_.get(), +visit, user));
  }
  void receive(int device, uint64_t size_bytes, int file) {
    call(ebbtide_receive, reception_.get(), device, size_bytes, file);
  }
  void note_released(int device, uint64_t size_bytes) {
    call(ebbtide_note_released, reception_.get(), device, size_bytes);
  }
  void end() { call(ebbtide_end_reception, reception_.get()); }

 private:
  Owned<ebbtide_reception, ebbtide_free_reception> reception_;
};

}  // namespace

void register_sharing(py::module_& module) {
  const auto address = py::arg("address");
  module.def("export", &export_memory, address);
  module.def("end_export", [](uint64_t at) { call(ebbtide_end_export, as_pointer(at)); }, address);
  module.def("keep", [](uint64_t at) { call(ebbtide_keep, as_pointer(at)); }, address);
  module.def("end_keep", [](uint64_t at) { call(ebbtide_end_keep, as_pointer(at)); }, address);
  module.def(
      "refuse_moves", [](uint64_t at, bool refuses) { call(ebbtide_refuse_moves, as_pointer(at), refuses); }, address,
      py::arg("refuses"));
  py::class_<Import>(module, "Import")
      .def(py::init<int, const Pieces&>(), py::arg("device"), py::arg("pieces"))
      .def_property_readonly("address", &Import::address)
      .def("wait", &Import::wait)
      .def("unmap", &Import::unmap)
      .def("map", &Import::map, py::arg("pieces"))
      .def("free", &Import::free);
  const py::arg_v missing_ok = py::arg("missing_ok") = false;
  module.def("hand_over", &hand_over, py::arg("tags"), missing_ok, py::arg("wants"), py::arg("give"),
             py::arg("released"));
  module.def("find_leaving", &find_leaving, py::arg("tags"));
  py::class_<Reception>(module, "Reception")
      .def(py::init<const std::vector<LeavingHandle>&, bool>(), py::arg("leaving"), py::arg("must_clear"))
      .def("resume", &Reception::resume, py::arg("tags"), missing_ok, py::arg("want"))
      .def("receive", &Reception::receive, py::arg("device"), py::arg("size_bytes"), py::arg("file"))
      .def("note_released", &Reception::note_released, py::arg("device"), py::arg("size_bytes"))
      .def("end", &Reception::end);
}

}  // namespace ebbtide::bindings
