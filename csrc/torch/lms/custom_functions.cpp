#include "torch/lms/custom_functions.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/TensorImpl.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_function.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <cstddef>
#include <optional>
#include <utility>
#include <vector>

#include "torch/lms/packed.h"
#include "torch/lms/saved_hooks.h"

namespace py = pybind11;

namespace ebbtide::lms {
namespace {

// A tensor that backward got for one that is gone.
struct StandIn {
  WeakTensor tensor;  // weak, so that no other tensor gets its address
  bool is_needed;     // its memory, by something else
};
using StandIns = std::vector<StandIn>;

// Of the backward that the thread runs, the innermost one.
thread_local StandIns* stand_ins = nullptr;

class Collecting {
 public:
  explicit Collecting(StandIns& found) : before_(std::exchange(stand_ins, &found)) {}
  Collecting(const Collecting&) = delete;
  Collecting& operator=(const Collecting&) = delete;
  ~Collecting() { stand_ins = before_; }

 private:
  StandIns* const before_;
};

bool is_tensor_with_memory(const py::handle& object) {
  return THPVariable_Check(object.ptr()) && THPVariable_Unpack(object.ptr()).has_storage();
}

// What stands for the gradient itself, or for memory that it shares with another one, is copied: torch keeps a gradient
// that nothing else refers to without a copy.
py::object copy_if_shared(const py::handle& gradient, const py::tuple& gradients, const StandIns& found) {
  auto own = py::reinterpret_borrow<py::object>(gradient);
  if (!is_tensor_with_memory(gradient)) return own;
  const at::Tensor& tensor = THPVariable_Unpack(gradient.ptr());
  const auto is_it = [&](const StandIn& each) {
    return each.tensor._unsafe_get_target() == tensor.unsafeGetTensorImpl();
  };
  const auto stands = std::find_if(found.begin(), found.end(), is_it);
  if (stands == found.end()) return own;
  const auto shares = [&](const py::handle& other) {
    return is_tensor_with_memory(other) && THPVariable_Unpack(other.ptr()).storage().is_alias_of(tensor.storage());
  };
  if (!stands->is_needed && std::count_if(gradients.begin(), gradients.end(), shares) < 2) return own;
  return py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor.clone()));
}

}  // namespace

py::object read_saved_tensors(const py::object& getter, const py::object& context) {
  std::vector<std::optional<Packed>> saved;
  if (THPFunction_Check(context.ptr())) {
    for (const auto& each : reinterpret_cast<THPFunction*>(context.ptr())->saved_variables)
      saved.push_back(packed_of(each));
  }
  py::object read = getter(context);
  if (!PyTuple_CheckExact(read.ptr())) return read;
  const auto tensors = py::reinterpret_borrow<py::tuple>(read);
  if (tensors.size() != saved.size()) return read;  // in forward
  py::tuple result(tensors.size());
  for (size_t index = 0; index < tensors.size(); ++index) {
    py::object object = tensors[index];
    if (const auto& packed = saved[index]) {
      if (const at::Tensor original = packed->original(); original.defined()) {
        object = py::reinterpret_steal<py::object>(THPVariable_Wrap(original));
      } else {
        packed->mark(object);
        const bool is_needed =
            torch::autograd::get_current_graph_task_id() != -1 && torch::autograd::get_current_graph_task_keep_graph();
        if (stand_ins != nullptr)
          stand_ins->push_back(
              {WeakTensor(THPVariable_Unpack(object.ptr()).getIntrusivePtr()), is_needed || packed->is_shared()});
      }
    }
    result[index] = std::move(object);
  }
  return result;
}

py::object run_backward(const py::object& apply, const py::args& arguments) {
  StandIns found;
  py::object result;
  {
    const Collecting collecting(found);
    result = apply(*arguments);
  }
  // A gradient that has one itself is never kept without a copy.
  if (found.empty() || at::GradMode::is_enabled()) return result;
  const bool is_tuple = PyTuple_CheckExact(result.ptr());
  const py::tuple gradients = is_tuple ? py::reinterpret_borrow<py::tuple>(result) : py::make_tuple(result);
  py::tuple copied(gradients.size());
  for (size_t index = 0; index < gradients.size(); ++index)
    copied[index] = copy_if_shared(gradients[index], gradients, found);
  return is_tuple ? py::object(std::move(copied)) : py::object(copied[0]);
}

}  // namespace ebbtide::lms
