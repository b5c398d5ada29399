#include <pybind11/pybind11.h>

#include <cstring>
#include <string>

#include "bindings/call.h"
#include "bindings/frames.h"
#include "bindings/records.h"
#include "bindings/segments.h"

namespace py = pybind11;
using namespace ebbtide::bindings;

namespace {

// A preloaded library serves this module, too, and neither knows the other's structs where their headers differ.
void refuse_another_build() {
  if (std::strcmp(ebbtide_build(), EBBTIDE_BUILD) == 0) return;
  throw py::import_error(std::string("ebbtide's library in this process, ") + ebbtide_library_path() + ", is build " +
                         ebbtide_build() + ", and this package is build " + EBBTIDE_BUILD +
                         ": they must be of one installation. Start the program by its own `ebbtide run`, or take the "
                         "library out of LD_PRELOAD and LD_LIBRARY_PATH");
}

}  // namespace

PYBIND11_MODULE(_core, module) {
  ebbtide::bindings::prepare_unwinder();
  refuse_another_build();
  module.doc() = "The pybind11 face of ebbtide.h, and the `with` blocks of the saver.";
  module.attr("__version__") = ebbtide_version();
  module.attr("TAGGING_UNSET") = static_cast<int>(EBBTIDE_TAGGING_UNSET);
  module.attr("TAGGING_OFF") = static_cast<int>(EBBTIDE_TAGGING_OFF);
  module.attr("TAGGING_ON") = static_cast<int>(EBBTIDE_TAGGING_ON);
  module.attr("UNLIMITED") = EBBTIDE_UNLIMITED;
  register_records(module);
  register_memory(module);
  register_operations(module);
  register_queries(module);
  register_living(module);
  register_settings(module);
  register_sharing(module);
  register_frames(module);
  register_segments(module);
}
