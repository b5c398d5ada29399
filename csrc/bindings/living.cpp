#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <exception>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "bindings/call.h"

// Living objects, found in one step. gc.get_objects() also has tuples that another thread is still filling, and CPython
// lets no other code hold a reference to these (the thread that fills one gets a SystemError). So the list of
// all objects lives only within one call: no Python code runs and no other thread gets the GIL before it is released.
namespace py = pybind11;

namespace ebbtide::bindings {
namespace {

// Python before 3.12 collects when an object is made, and then runs finalizers.
class WithoutCollector {
 public:
  WithoutCollector() : was_enabled_(PyGC_Disable() != 0) {}
  ~WithoutCollector() {
    if (was_enabled_) PyGC_Enable();
  }
  WithoutCollector(const WithoutCollector&) = delete;
  WithoutCollector& operator=(const WithoutCollector&) = delete;

 private:
  bool was_enabled_;
};

// tp_traverse is C: an exception must not pass through it.
template <typename Visit>
void for_each_referent(PyObject* thing, Visit visit) {
  struct Call {
    Visit& visit;
    std::exception_ptr error;
  } call{visit, nullptr};
  const traverseproc traverse = Py_TYPE(thing)->tp_traverse;
  if (traverse == nullptr || PyObject_IS_GC(thing) == 0) return;
  const visitproc step = [](PyObject* referent, void* data) {
    auto& current = *static_cast<Call*>(data);
    try {
      current.visit(referent);
      return 0;
    } catch (...) {
      current.error = std::current_exception();
      return 1;
    }
  };
  traverse(thing, step, &call);
  if (call.error) std::rethrow_exception(call.error);
}

// The objects that the collector tracks, and with roots also those reachable from both: gc.freeze() hides objects
// from the collector's lists. Visit runs no Python code.
template <typename Visit>
void for_each_living(const py::handle roots, Visit visit) {
  const py::list objects = py::module_::import("gc").attr("get_objects")();
  if (roots.is_none()) {
    for (const py::handle thing : objects) visit(thing.ptr());
    return;
  }
  std::unordered_set<PyObject*> seen{objects.ptr(), roots.ptr()};
  seen.reserve(2 * objects.size());
  std::vector<PyObject*> waiting;
  const auto meet = [&](PyObject* thing) {
    if (PyObject_GC_IsTracked(thing) != 0 && seen.insert(thing).second) waiting.push_back(thing);
  };
  for_each_referent(objects.ptr(), meet);
  for_each_referent(roots.ptr(), meet);
  while (!waiting.empty()) {
    PyObject* const thing = waiting.back();
    waiting.pop_back();
    visit(thing);
    for_each_referent(thing, meet);
  }
}

// The results of choose(thing) for each living object, without nulls.
template <typename Choose>
std::vector<py::object> collect(const py::object& roots, Choose choose) {
  const WithoutCollector without_collector;
  std::vector<py::object> chosen;
  for_each_living(roots, [&](PyObject* thing) {
    if (PyObject* const found = choose(thing)) chosen.push_back(py::reinterpret_borrow<py::object>(found));
  });
  return chosen;
}

std::vector<py::object> living_types(const py::object& roots) {
  std::unordered_set<PyTypeObject*> seen;
  return collect(roots, [&](PyObject* thing) {
    PyTypeObject* const type = Py_TYPE(thing);
    return seen.insert(type).second ? reinterpret_cast<PyObject*>(type) : nullptr;
  });
}

std::vector<py::object> living_objects(const py::list& types, const py::object& roots) {
  std::unordered_set<PyTypeObject*> wanted;
  for (const py::handle type : types) wanted.insert(reinterpret_cast<PyTypeObject*>(type.ptr()));
  wanted.erase(&PyTuple_Type);
  return collect(roots, [&](PyObject* thing) { return wanted.count(Py_TYPE(thing)) != 0 ? thing : nullptr; });
}

py::list referrer_types(const py::list& things, const py::list& own, const py::object& roots) {
  std::unordered_map<PyObject*, py::object> found;
  std::unordered_set<PyObject*> hidden{things.ptr(), own.ptr()};
  for (const py::handle thing : things) found.emplace(thing.ptr(), py::none());
  for (const py::handle thing : own) hidden.insert(thing.ptr());
  if (!roots.is_none()) {
    for (const py::handle root : roots) hidden.insert(root.ptr());
  }
  const WithoutCollector without_collector;
  for_each_living(roots, [&](PyObject* referrer) {
    if (hidden.count(referrer) != 0 || PyFrame_Check(referrer)) return;
    for_each_referent(referrer, [&](PyObject* thing) {
      const auto place = found.find(thing);
      if (place == found.end() || !place->second.is_none()) return;
      place->second = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(Py_TYPE(referrer)));
    });
  });
  py::list types;
  for (const py::handle thing : things) types.append(found.at(thing.ptr()));
  return types;
}

}  // namespace

void register_living(py::module_& module) {
  module.def("living_types", &living_types, py::arg("roots"));
  module.def("living_objects", &living_objects, py::arg("types"), py::arg("roots"));
  module.def("referrer_types", &referrer_types, py::arg("things"), py::arg("own"), py::arg("roots"));
}

}  // namespace ebbtide::bindings
