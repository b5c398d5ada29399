#include "torch/lms/saved_hooks.h"

#include <ATen/SavedTensorHooks.h>
#include <c10/core/SafePyObject.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <atomic>
#include <memory>
#include <optional>
#include <utility>

#include "torch/lms/gil.h"
#include "torch/lms/packed.h"
#include "torch/lms/virtual_entry.h"

namespace ebbtide::lms {
namespace {

using torch::autograd::Engine;
using Hooks = torch::autograd::SavedVariableHooks;
using MadeHooks = std::unique_ptr<Hooks>;
using Entry = VirtualEntry<Engine, MadeHooks>;

std::atomic<Entry::Function> former_hooks{nullptr};
std::atomic<PyObject*> unpack_function{nullptr};

// With a limit of 0, everything that can leaves at once.
void evict_at_once() {
  if (!rules().evicts_at_once.load(std::memory_order_relaxed)) return;
  const GilReleased without_gil;
  Ledger::instance().evict(UINT64_MAX);
}

class SavedHooks final : public Hooks {
 public:
  void call_pack_hook(const at::Tensor& tensor) override {
    packed_.emplace(tensor);
    if (packed_->can_leave()) evict_at_once();
  }

  at::Tensor call_unpack_hook() override {
    if (!packed_->may_wait()) return packed_->unpack();
    const GilReleased without_gil;  // a copy, and perhaps another thread's
    return packed_->unpack();
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

// Hooks of the program decide inside them. A trace is to see the tensors themselves: what we keep instead of one would
// become a constant of its graph.
bool must_keep_out() {
  using c10::impl::TorchDispatchModeKey;
  const auto& state = at::SavedTensorDefaultHooks::get_tls_state();
  return !state.stack.empty() || state.is_tracing ||
         c10::impl::TorchDispatchModeTLS::get_mode(TorchDispatchModeKey::PROXY).has_value();
}

MadeHooks make_hooks(Engine* engine) {
  if (!rules().is_on.load(std::memory_order_relaxed) || must_keep_out()) return former_hooks.load()(engine);
  return std::make_unique<SavedHooks>();
}

}  // namespace

std::optional<Packed> packed_of(const torch::autograd::SavedVariable& saved) {
  const auto data = saved.has_hooks() ? saved.retrieve_unpack_hook_data() : std::nullopt;
  if (!data || data->first.ptr(getPyInterpreter()) != unpack_function.load()) return std::nullopt;
  return pybind11::handle(data->second.ptr(getPyInterpreter())).cast<const Packed&>();
}

bool follow_saved_tensors(PyObject* unpack) {
  const Entry entry(&Engine::get_default_engine(), &Engine::get_default_saved_variable_hooks);
  if (!entry.is_virtual()) return false;
  if (former_hooks.load() != nullptr) return true;  // whoever has replaced it since calls ours
  unpack_function.store(unpack);
  former_hooks.store(entry.get());
  const bool is_set = entry.set(&make_hooks);
  if (!is_set) former_hooks.store(nullptr);
  return is_set;
}

}  // namespace ebbtide::lms
