#include "torch/lms/custom_functions.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/TensorImpl.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "torch/lms/packed.h"

namespace py = pybind11;

namespace ebbtide::lms {
namespace {

using torch::autograd::FunctionPostHook;
using torch::autograd::variable_list;

// Of the tensors that the thread unpacks, in their order; undefined for one that is gone.
thread_local std::vector<at::Tensor>* originals = nullptr;

class Collecting {
 public:
  explicit Collecting(std::vector<at::Tensor>& found) : before_(std::exchange(originals, &found)) {}
  Collecting(const Collecting&) = delete;
  Collecting& operator=(const Collecting&) = delete;
  ~Collecting() { originals = before_; }

 private:
  std::vector<at::Tensor>* const before_;
};

// After a node: copies the gradients that are tensors which the node read, for a graph that still needs these.
class CopyOfSaved final : public FunctionPostHook {
 public:
  void add(const at::Tensor& tensor) { read_.emplace_back(tensor.getIntrusivePtr()); }

  variable_list operator()(const variable_list& outputs, const variable_list&) override {
    variable_list copied = outputs;
    for (at::Tensor& gradient : copied) {
      const auto is_it = [&](const WeakTensor& each) {
        return each._unsafe_get_target() == gradient.unsafeGetTensorImpl();
      };
      if (gradient.defined() && std::any_of(read_.begin(), read_.end(), is_it)) gradient = gradient.clone();
    }
    read_.clear();
    return copied;
  }

 private:
  std::vector<WeakTensor> read_;  // weak, so that no other tensor gets an address of theirs
};

void copy_if_returned(const at::Tensor& tensor) {
  const auto node = torch::autograd::get_current_node();
  if (!node || at::GradMode::is_enabled() || !torch::autograd::get_current_graph_task_keep_graph()) return;
  CopyOfSaved* hook = nullptr;
  for (const auto& each : node->post_hooks()) hook = hook == nullptr ? dynamic_cast<CopyOfSaved*>(each.get()) : hook;
  if (hook == nullptr) {
    auto made = std::make_unique<CopyOfSaved>();
    hook = made.get();
    node->add_post_hook(std::move(made));
  }
  hook->add(tensor);
}

// None, and numbers that torch made tensors of, go by no hook.
bool goes_by_hook(PyObject* object) {
  return THPVariable_Check(object) && !THPVariable_Unpack(object).unsafeGetTensorImpl()->is_wrapped_number();
}

}  // namespace

void note_unpacked(const Packed& packed) {
  if (originals != nullptr) originals->push_back(packed.original());
}

py::object read_saved_tensors(const py::object& getter, const py::object& context) {
  std::vector<at::Tensor> found;
  py::object read;
  {
    const Collecting collecting(found);
    read = getter(context);
  }
  if (found.empty() || !PyTuple_CheckExact(read.ptr())) return read;
  const auto saved = py::reinterpret_borrow<py::tuple>(read);
  const auto count =
      std::count_if(saved.begin(), saved.end(), [](const py::handle& each) { return goes_by_hook(each.ptr()); });
  if (static_cast<size_t>(count) != found.size()) return read;
  py::tuple result(saved.size());
  auto original = found.begin();
  for (size_t index = 0; index < saved.size(); ++index) {
    py::object object = saved[index];
    if (goes_by_hook(object.ptr())) {
      if (original->defined()) {
        object = py::reinterpret_steal<py::object>(THPVariable_Wrap(*original));
      } else {
        copy_if_returned(THPVariable_Unpack(object.ptr()));
      }
      ++original;
    }
    result[index] = std::move(object);
  }
  return result;
}

}  // namespace ebbtide::lms
