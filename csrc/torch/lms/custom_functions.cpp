#include "torch/lms/custom_functions.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/TensorImpl.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_function.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <cstddef>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "torch/lms/packed.h"
#include "torch/lms/saved_hooks.h"

namespace py = pybind11;

namespace ebbtide::lms {
namespace {

using torch::autograd::FunctionPostHook;
using torch::autograd::variable_list;

// After a node: copies gradients that are tensors which it read, where torch would have seen that something else holds
// these: a graph that is kept, another node, another gradient.
class CopyOfSaved final : public FunctionPostHook {
 public:
  // The node's own, which it gets with the first call.
  template <typename Node>
  static CopyOfSaved& of(Node& node) {
    for (const auto& each : node.post_hooks()) {
      if (auto* const found = dynamic_cast<CopyOfSaved*>(each.get())) return *found;
    }
    auto made = std::make_unique<CopyOfSaved>();
    CopyOfSaved& hook = *made;
    node.add_post_hook(std::move(made));
    return hook;
  }

  void add(const at::Tensor& tensor, bool is_needed) {
    read_.push_back({WeakTensor(tensor.getIntrusivePtr()), is_needed});
  }

  variable_list operator()(const variable_list& outputs, const variable_list&) override {
    variable_list copied = outputs;
    for (at::Tensor& gradient : copied) {
      if (gradient.defined() && gradient.has_storage() && must_be_copied(gradient, copied)) gradient = gradient.clone();
    }
    read_.clear();
    return copied;
  }

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override {}  // it does nothing there

 private:
  struct Read {
    WeakTensor tensor;  // weak, so that no other tensor gets an address of theirs
    bool is_needed;     // by something else
  };

  bool must_be_copied(const at::Tensor& gradient, const variable_list& gradients) const {
    const auto is_it = [&](const Read& each) {
      return each.tensor._unsafe_get_target() == gradient.unsafeGetTensorImpl();
    };
    const auto found = std::find_if(read_.begin(), read_.end(), is_it);
    if (found == read_.end()) return false;
    const auto shares = [&](const at::Tensor& other) {
      return other.defined() && other.has_storage() && other.storage().is_alias_of(gradient.storage());
    };
    return found->is_needed || std::count_if(gradients.begin(), gradients.end(), shares) > 1;
  }

  std::vector<Read> read_;
};

// The tensor that `saved` stood for is gone, and `read` is what torch made anew.
void stand_in(const Packed& saved, const py::handle& read) {
  saved.mark(read);
  const auto node = torch::autograd::get_current_node();
  if (!node || at::GradMode::is_enabled()) return;
  const bool is_needed = torch::autograd::get_current_graph_task_keep_graph() || saved.is_shared();
  CopyOfSaved::of(*node).add(THPVariable_Unpack(read.ptr()), is_needed);
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
        stand_in(*packed, object);
      }
    }
    result[index] = std::move(object);
  }
  return result;
}

}  // namespace ebbtide::lms
