// What autograd keeps instead of a tensor that it saves for backward.
//
// While the tensor lives, unpacking gives that very tensor: torch and programs decide by its identity, its reference
// count and its attributes. A tensor that does not move is kept; if it has a node, an alias without the node is kept,
// since a node that keeps its own output never dies.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SafePyObject.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/UndefinedTensorImpl.h>
#include <c10/util/intrusive_ptr.h>
#include <pybind11/pybind11.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "torch/lms/ledger.h"

namespace ebbtide::lms {

// Which saved tensors may leave. Read and set by any thread.
struct Rules {
  std::atomic<bool> is_on{false};
  std::atomic<c10::DeviceType> device_type{c10::DeviceType::CPU};
  std::atomic<uint64_t> min_bytes{uint64_t{1} << 20};
  std::atomic<bool> evicts_at_once{false};  // a limit of 0: as little as can be stays on the device
};
Rules& rules();

// Whether it is a view of bytes on a device of that kind, and no fewer than the rules say.
bool is_large(const at::Tensor& tensor);

// Whether the storage owns memory that LMS may move. Memory of regions may be paused, and other memory may be reached
// by owners that torch does not know: an array of numpy, another storage.
bool owns_memory(const c10::Storage& storage);

using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

class Packed {
 public:
  explicit Packed(const at::Tensor& tensor);
  // Throws std::runtime_error, in torch's words, if the tensor was changed in place since, and what bring_back throws.
  at::Tensor unpack() const;
  // The tensor that was saved; undefined if it is gone.
  at::Tensor original() const;
  // Gives a tensor that stands for one that is gone the class and the attributes which that had.
  void mark(const pybind11::handle& tensor) const;
  // Whether something else than one node needs the memory. There are two of this: the node's, and a copy.
  bool is_shared() const;
  bool can_leave() const { return saved_ != nullptr; }
  bool may_wait() const { return can_leave() || is_weight_; }  // to be unpacked

 private:
  // A view of a storage that may leave.
  struct View {
    c10::DispatchKeySet keys;
    caffe2::TypeMeta type;
    int64_t offset;
    std::vector<int64_t> sizes, strides;
  };

  // Of a tensor that Python saved, where it differs from a plain one.
  struct Marks {
    c10::SafePyObject type, attributes;
    bool can_be_given;  // to another tensor: the class has no slots of its own
  };
  static std::shared_ptr<Marks> marks_of(const at::Tensor& tensor);

  at::Tensor kept_;  // a tensor that stays; undefined for the others
  std::optional<WeakTensor> original_;
  std::shared_ptr<Marks> marks_;
  std::shared_ptr<SavedStorage> saved_;
  std::optional<View> view_;
  c10::VariableVersion version_;
  bool has_version_;
  bool is_weight_ = false;  // kept_ is
  uint32_t saved_version_ = 0;
};

}  // namespace ebbtide::lms
