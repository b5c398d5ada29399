// `_torch`: regions for CPU tensors, for ebbtide.saver only. This file only converts arguments. Every function is
// called with the GIL held.
#include <c10/core/StorageImpl.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <cstring>
#include <string>

#include "api/ebbtide.h"
#include "torch/cpu/allocator.h"
#include "torch/cpu/fault_handler.h"
#include "torch/cpu/reclaim.h"
#include "torch/cpu/region_memory.h"

namespace py = pybind11;

namespace ebbtide::cpu {

namespace {

[[noreturn]] void raise_state_error(const std::string& message) {
  const py::object type = py::module_::import("ebbtide.errors").attr("StateError");
  PyErr_SetString(type.ptr(), message.c_str());
  throw py::error_already_set();
}

void refuse_in_child(const char* what) {
  if (is_forked_child())
    raise_state_error(std::string(what) +
                      " in a forked child: it shares its parent's pages. Use the 'spawn' or 'forkserver' start method "
                      "for processes that need regions.");
}

Pool& pool_of(int64_t id) {
  Pool* pool = region_memory().arena.find_pool(id);
  if (pool == nullptr) throw py::value_error("there is no pool " + std::to_string(id));
  return *pool;
}

// Also allowed in a forked child: it leaves the regions that were open at the fork one by one, and what it allocates is
// ordinary memory anyway.
Pool& open_pool(int64_t id) {
  Pool& pool = pool_of(id);
  if (!region_memory().arena.open(pool))
    raise_state_error("pool " + std::to_string(id) + " of " + describe(pool) +
                      " is open already: each use of a tag needs a pool of its own");
  return pool;
}

void install() {
  refuse_in_child("ebbtide was set up");
  const std::string driver = ebbtide_driver_name();
  if ((driver == "cuda" || driver == "hip") && !ebbtide_is_simulated())
    raise_state_error("CPU tensors can live in regions on the simulated device only, and this process uses the " +
                      driver + " driver");
  if (!install_allocator())
    raise_state_error(
        "another library has replaced torch's CPU allocator with a higher priority: regions can't take CPU tensors "
        "beside it");
  if (!install_fault_handler()) raise_state_error("the system refused a handler for SIGSEGV and SIGBUS");
}

int64_t pool_create(int32_t slot, const std::string& tag) {
  refuse_in_child("a pool was made");
  if (slot < 0 || slot >= EBBTIDE_SLOT_COUNT)
    throw py::value_error("slot " + std::to_string(slot) + " is not one of 0 to " +
                          std::to_string(EBBTIDE_SLOT_COUNT - 1));
  return region_memory().arena.make_pool(slot, tag).id;
}

void pool_enter(int64_t id, bool is_for_all) { region_memory().routing.enter(&open_pool(id), is_for_all); }

void pool_leave(int64_t id, bool is_for_all) {
  Pool& pool = pool_of(id);
  if (!region_memory().routing.leave(&pool, is_for_all))
    raise_state_error("pool " + std::to_string(id) + " of " + describe(pool) + " was not entered" +
                      (is_for_all ? " for all threads" : "") + ", or it was left already");
  region_memory().arena.close(pool);
}

uint64_t pool_suspend() { return region_memory().routing.enter(nullptr); }

void pool_restore(uint64_t token) {
  if (!region_memory().routing.restore(token))
    raise_state_error("there is no suspension " + std::to_string(token) + " to end");
}

py::list pool_snapshot(int64_t id) {
  py::list segments;
  for (const SegmentView& segment : region_memory().arena.snapshot(pool_of(id))) {
    py::list blocks;
    for (const BlockView& block : segment.blocks)
      blocks.append(py::make_tuple(block.offset_bytes, block.size_bytes, block.is_allocated));
    segments.append(py::make_tuple(reinterpret_cast<uintptr_t>(segment.address), segment.size_bytes, blocks));
  }
  return segments;
}

size_t pool_trim(int64_t id) {
  refuse_in_child("memory was given back");
  Pool& pool = pool_of(id);
  py::gil_scoped_release without_gil;  // releasing a segment waits for the device
  return region_memory().arena.trim(&pool);
}

// The storage of a tensor or an UntypedStorage. Python's storage object has the address of its StorageImpl, so this
// file needs no header above c10.
c10::StorageImpl& storage_of(const py::object& owner) {
  const py::object storage = py::hasattr(owner, "untyped_storage") ? owner.attr("untyped_storage")() : owner;
  if (!py::isinstance(storage, py::module_::import("torch").attr("UntypedStorage")))
    throw py::type_error("exchange takes tensors or untyped storages");
  return *reinterpret_cast<c10::StorageImpl*>(storage.attr("_cdata").cast<uintptr_t>());
}

void exchange(const py::object& left, const py::object& right) {
  c10::StorageImpl& first = storage_of(left);
  c10::StorageImpl& second = storage_of(right);
  if (first.nbytes() != second.nbytes()) {
    throw py::value_error("storages of " + std::to_string(first.nbytes()) + " and " + std::to_string(second.nbytes()) +
                          " bytes can't change places");
  }
  if (first.device() != second.device())
    throw py::value_error("storages on " + first.device().str() + " and " + second.device().str() +
                          " can't change places");
  if (&first == &second) return;
  // A copy-on-write context belongs to its storage, so each storage gets a copy of its own first.
  first.mutable_data_ptr();
  second.mutable_data_ptr();
  first.set_data_ptr(second.set_data_ptr(first.set_data_ptr(c10::DataPtr())));
}

}  // namespace

}  // namespace ebbtide::cpu

PYBIND11_MODULE(_torch, module) {
  using namespace ebbtide::cpu;
  module.doc() = "Regions for CPU tensors on the simulated device. For ebbtide.saver only.";
  module.def("install", &install, "Puts the allocator and the fault handler in place. Idempotent.");
  module.def("say_ops_are_checked", &say_ops_are_checked, py::arg("are_checked"),
             "Whether EBBTIDE_CHECK's checks are on: the line of a crash says what can be done.");
  module.def("pool_create", &pool_create, py::arg("slot"), py::arg("tag") = "",
             "A new pool over a slot of ebbtide's; it lives as long as the process. tag: for messages.");
  module.def(
      "pool_enter", &pool_enter, py::arg("id"), py::arg("for_all") = false,
      "This thread's CPU tensors come from the pool from now on; the innermost pool wins. for_all: those of every "
      "thread that has no pool of its own. A pool is open in one place at a time.");
  module.def("pool_leave", &pool_leave, py::arg("id"), py::arg("for_all") = false);
  module.def(
      "set_pool_apart", [](int64_t id) { set_pool_apart(id == 0 ? nullptr : &pool_of(id)); }, py::arg("pool"),
      "The pool of memory that comes back, wherever its thread is; 0: none.");
  module.def(
      "lms_functions",
      [] {
        return py::make_tuple(reinterpret_cast<uintptr_t>(&allocate_apart), reinterpret_cast<uintptr_t>(&used_bytes),
                              reinterpret_cast<uintptr_t>(&release_apart));
      },
      "For `_lms.set_hooks`.");
  module.def(
      "set_reclaimer",
      [](uintptr_t evict, uintptr_t explain, uintptr_t overflow, uintptr_t took) {
        set_reclaimer(
            {reinterpret_cast<uint64_t (*)(uint64_t)>(evict), reinterpret_cast<void (*)(char*, size_t)>(explain),
             reinterpret_cast<bool (*)(size_t, c10::DataPtr*)>(overflow), reinterpret_cast<void (*)(size_t)>(took)});
      },
      py::arg("evict"), py::arg("explain"), py::arg("overflow"), py::arg("took"),
      "Addresses of C functions (torch/cpu/reclaim.h); 0: none.");
  module.def("pool_suspend", &pool_suspend,
             "Ordinary memory for this thread until pool_restore(token), or until a pool is entered inside.");
  module.def("pool_restore", &pool_restore, py::arg("token"));
  module.def("pool_snapshot", &pool_snapshot, py::arg("id"),
             "[(address, size, [(offset, size, is_allocated)])], in bytes, by address.");
  module.def("pool_trim", &pool_trim, py::arg("id"),
             "Gives the pool's wholly free segments back; returns their bytes.");
  module.def("exchange", &exchange, py::arg("left"), py::arg("right"),
             "Lets two storages (or those of two tensors) of equal bytes and device change their memory; views and "
             "aliases follow.");
}
