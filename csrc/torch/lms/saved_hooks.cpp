#include "torch/lms/saved_hooks.h"

#include "torch/lms/gil.h"
#include "torch/lms/packed.h"

#if EBBTIDE_TORCH_VERSION >= 211
#include <ATen/SavedTensorHooks.h>
#include <c10/core/SafePyObject.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <atomic>
#include <memory>
#include <optional>
#include <utility>

#include "torch/lms/virtual_entry.h"
#endif

namespace ebbtide::lms {

void evict_at_once(bool can_leave) {
  if (!can_leave || !rules().evicts_at_once.load(std::memory_order_relaxed)) return;
  const GilReleased without_gil;
  Ledger::instance().evict(UINT64_MAX);
}

#if EBBTIDE_TORCH_VERSION >= 211
namespace {

using torch::autograd::Engine;
using Hooks = torch::autograd::SavedVariableHooks;
using MadeHooks = std::unique_ptr<Hooks>;
using Entry = VirtualEntry<Engine, MadeHooks>;

std::atomic<Entry::Function> former{nullptr};
std::atomic<PyObject*> pack_function{nullptr}, unpack_function{nullptr};

class SavedHooks final : public Hooks {
 public:
  void call_pack_hook(const at::Tensor& tensor) override {
    packed_.emplace(tensor);
    evict_at_once(packed_->can_leave());
  }

  at::Tensor call_unpack_hook() override {
    const GilReleased without_gil;  // a copy, and perhaps another thread's
    return packed_.value().unpack();
  }

  std::optional<std::pair<c10::SafePyObject, c10::SafePyObject>> retrieve_unpack_hook_data() const override {
    const pybind11::gil_scoped_acquire gil;
    auto unpack = pybind11::reinterpret_borrow<pybind11::object>(unpack_function.load());
    pybind11::object packed = pybind11::cast(std::make_unique<Packed>(packed_.value()));
    return std::make_pair(c10::SafePyObject(unpack.release().ptr(), getPyInterpreter()),
                          c10::SafePyObject(packed.release().ptr(), getPyInterpreter()));
  }

 private:
  std::optional<Packed> packed_;
};

bool are_ours_innermost() {
  const auto& state = at::SavedTensorDefaultHooks::get_tls_state();
  return !state.stack.empty() && !state.is_tracing &&
         state.stack.top().first.ptr(getPyInterpreter()) == pack_function.load(std::memory_order_relaxed);
}

MadeHooks make_hooks(Engine* engine) {
  return are_ours_innermost() ? std::make_unique<SavedHooks>() : former.load()(engine);
}

}  // namespace

bool follow_saved_tensors(PyObject* pack, PyObject* unpack) {
  const Entry entry(&Engine::get_default_engine(), &Engine::get_default_saved_variable_hooks);
  if (!entry.is_virtual()) return false;
  if (entry.get() == &make_hooks) return true;
  pack_function.store(pack);
  unpack_function.store(unpack);
  former.store(entry.get());
  return entry.set(&make_hooks);
}

#else

bool follow_saved_tensors(PyObject* /*pack*/, PyObject* /*unpack*/) { return false; }

#endif

}  // namespace ebbtide::lms
