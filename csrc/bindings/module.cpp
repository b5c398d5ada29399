#include <pybind11/pybind11.h>

#include "bindings/call.h"
#include "bindings/frames.h"
#include "bindings/records.h"

namespace py = pybind11;
using namespace ebbtide::bindings;

PYBIND11_MODULE(_core, module) {
  ebbtide::bindings::prepare_unwinder();
  module.doc() = "The pybind11 face of ebbtide.h, and the `with` blocks of the saver.";
  module.attr("__version__") = ebbtide_version();
  module.attr("BACKUP_AS_ALLOCATED") = static_cast<int>(EBBTIDE_BACKUP_AS_ALLOCATED);
  module.attr("BACKUP_NONE") = static_cast<int>(EBBTIDE_BACKUP_NONE);
  module.attr("BACKUP_RAM") = static_cast<int>(EBBTIDE_BACKUP_RAM);
  module.attr("BACKUP_PINNED") = static_cast<int>(EBBTIDE_BACKUP_PINNED);
  module.attr("BACKUP_DISK") = static_cast<int>(EBBTIDE_BACKUP_DISK);
  module.attr("TAGGING_UNSET") = static_cast<int>(EBBTIDE_TAGGING_UNSET);
  module.attr("TAGGING_OFF") = static_cast<int>(EBBTIDE_TAGGING_OFF);
  module.attr("TAGGING_ON") = static_cast<int>(EBBTIDE_TAGGING_ON);
  module.attr("OVERFLOW_NONE") = static_cast<int>(EBBTIDE_OVERFLOW_NONE);
  module.attr("OVERFLOW_SPLIT") = static_cast<int>(EBBTIDE_OVERFLOW_SPLIT);
  module.attr("OVERFLOW_WHOLE") = static_cast<int>(EBBTIDE_OVERFLOW_WHOLE);
  module.attr("UNLIMITED") = EBBTIDE_UNLIMITED;
  module.attr("SLOT_COUNT") = EBBTIDE_SLOT_COUNT;
  module.attr("API_VERSION") = EBBTIDE_API_VERSION;
  register_records(module);
  register_memory(module);
  register_operations(module);
  register_queries(module);
  register_living(module);
  register_settings(module);
  register_frames(module);
}
