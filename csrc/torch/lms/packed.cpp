#include "torch/lms/packed.h"

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <cstring>
#include <stdexcept>
#include <string>
#include <string_view>
#include <typeinfo>
#include <utility>

#include "api/ebbtide.h"
#include "torch/lms/weights.h"

namespace ebbtide::lms {
namespace {

constexpr const char* kTag = "lms";  // python/ebbtide/lms/devices.py

// Tensors whose content is not just a view of bytes, and those that a transform or a subclass stands before, stay.
bool is_plain(const at::Tensor& tensor) {
  constexpr c10::DispatchKeySet kOthers({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot,
                                         c10::DispatchKey::Functionalize, c10::DispatchKey::FuncTorchBatched,
                                         c10::DispatchKey::FuncTorchGradWrapper, c10::DispatchKey::NestedTensor,
                                         c10::DispatchKey::ZeroTensor});
  return tensor.layout() == c10::kStrided && tensor.device().type() == rules().device_type.load() &&
         tensor.has_storage() && !tensor.is_quantized() && !tensor.is_inference() && !tensor.key_set().has_any(kOthers);
}

bool may_leave(const at::Tensor& tensor) {
  return rules().is_on.load(std::memory_order_relaxed) && is_large(tensor) && owns_memory(tensor.storage());
}

// A node that saves its own output is handed the output itself: kept as it is, the node would keep itself for ever.
// torch puts the node back as it unpacks. A leaf has none. No mode of the program sees it, and subclasses, which might
// refuse, stay as they are.
at::Tensor without_node(const at::Tensor& tensor) {
  constexpr c10::DispatchKeySet kOfPython({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot});
  if (!tensor.defined() || tensor.is_leaf() || tensor.key_set().has_any(kOfPython)) return tensor;
  const c10::impl::ExcludeDispatchKeyGuard unseen(kOfPython);
  return tensor.tensor_data();  // with the same version counter
}

std::string describe_change(c10::ScalarType type, c10::IntArrayRef sizes, uint32_t version, uint32_t expected) {
  std::string shape;
  for (const int64_t size : sizes) shape += (shape.empty() ? "" : ", ") + std::to_string(size);
  return "one of the variables needed for gradient computation has been modified by an inplace operation: [torch." +
         std::string(c10::toString(type)) + "Tensor [" + shape + "]] is at version " + std::to_string(version) +
         "; expected version " + std::to_string(expected) +
         " instead. Hint: enable anomaly detection to find the operation that failed to compute its gradient, with "
         "torch.autograd.set_detect_anomaly(True).";
}

}  // namespace

bool is_large(const at::Tensor& tensor) {
  return is_plain(tensor) && tensor.storage().nbytes() >= rules().min_bytes.load(std::memory_order_relaxed);
}

bool owns_memory(const c10::Storage& storage) {
  const c10::DataPtr& data = storage.data_ptr();
  const bool is_owner =
      data.get_deleter() == c10::GetAllocator(storage.device_type())->raw_deleter() && data.get() == data.get_context();
  if (!is_owner) return false;
  bool is_found = false;
  ebbtide_allocation_info info{};
  if (ebbtide_find(data.get(), &is_found, &info, nullptr) != EBBTIDE_OK) return false;
  return storage.device_type() == c10::DeviceType::CPU ? is_found && std::strcmp(info.tag, kTag) == 0 : !is_found;
}

Rules& rules() {
  static Rules& only = *new Rules();
  return only;
}

Packed::Packed(const at::Tensor& tensor) : has_version_(tensor.defined() && !tensor.is_inference()) {
  if (tensor.defined()) {
    original_.emplace(tensor.getIntrusivePtr());
    marks_ = marks_of(tensor);
  }
  if (has_version_) {
    version_ = tensor.unsafeGetTensorImpl()->version_counter();
    saved_version_ = version_.current_version();
  }
  if (!tensor.defined() || !may_leave(tensor) || (marks_ != nullptr && !marks_->can_be_given)) {
    kept_ = without_node(tensor);
    is_weight_ = tensor.defined() && rules().is_on.load(std::memory_order_relaxed) && is_large(tensor) &&
                 Weights::instance().is_weight(tensor.storage());
    return;
  }
  view_ = View{tensor.key_set(), tensor.dtype(), tensor.storage_offset(), tensor.sizes().vec(), tensor.strides().vec()};
  saved_ = Ledger::instance().save(tensor.storage());
}

at::Tensor Packed::original() const { return original_ ? at::Tensor(original_->lock()) : at::Tensor(); }

// A built-in function saves without the GIL, and reads no attributes. The output of a function in Python is left out:
// an attribute may lead back to it, and torch drops them, too.
std::shared_ptr<Packed::Marks> Packed::marks_of(const at::Tensor& tensor) {
  if (PyGILState_Check() == 0) return nullptr;
  // torch exports no typeinfo of it.
  const auto is_in_python = [](const auto& node) {
    return node && std::string_view(typeid(*node).name()) == "N5torch8autograd6PyNodeE";
  };
  if (is_in_python(tensor.grad_fn())) return nullptr;
  const auto object = pybind11::reinterpret_steal<pybind11::object>(THPVariable_Wrap(tensor));
  pybind11::object attributes = object.attr("__dict__");
  pybind11::object type = pybind11::type::of(object);
  if (type.ptr() == THPVariableClass && pybind11::len(attributes) == 0) return nullptr;
  const auto size_of = [](PyObject* each) { return reinterpret_cast<PyTypeObject*>(each)->tp_basicsize; };
  const bool can_be_given = size_of(type.ptr()) == size_of(THPVariableClass);
  return std::make_shared<Marks>(Marks{c10::SafePyObject(type.release().ptr(), getPyInterpreter()),
                                       c10::SafePyObject(attributes.release().ptr(), getPyInterpreter()),
                                       can_be_given});
}

void Packed::mark(const pybind11::handle& tensor) const {
  if (marks_ == nullptr || !marks_->can_be_given) return;
  const pybind11::handle type(marks_->type.ptr(getPyInterpreter()));
  if (!pybind11::type::of(tensor).is(type)) tensor.attr("__class__") = type;
  tensor.attr("__dict__").attr("update")(pybind11::handle(marks_->attributes.ptr(getPyInterpreter())));
}

bool Packed::is_shared() const {
  if (saved_ != nullptr) return saved_.use_count() > 2;
  return kept_.has_storage() && kept_.storage().use_count() > 2;  // its own, and that of the tensor made of it
}

at::Tensor Packed::unpack() const {
  if (has_version_ && version_.current_version() != saved_version_) {
    throw std::runtime_error(describe_change(view_ ? view_->type.toScalarType() : kept_.scalar_type(),
                                             view_ ? c10::IntArrayRef(view_->sizes) : kept_.sizes(),
                                             version_.current_version(), saved_version_));
  }
  const at::Tensor alive = original();
  if (saved_ == nullptr) {
    if (is_weight_) Weights::instance().use_in_backward(kept_.storage().data());
    return alive.defined() ? alive : kept_;
  }
  c10::Storage storage = Ledger::instance().bring_back(*saved_);
  if (alive.defined()) return alive;
  const c10::InferenceMode as_it_was_saved(false);
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), view_->keys, view_->type);
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(view_->sizes, view_->strides, view_->offset);
  tensor.unsafeGetTensorImpl()->set_version_counter(version_);  // a change of this tensor is one of the saved tensor
  return tensor;
}

}  // namespace ebbtide::lms
