#include "torch/lms/write_watch.h"

#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <cstddef>
#include <memory>
#include <optional>
#include <utility>

#include "torch/lms/weights.h"

namespace ebbtide::lms {
namespace {

thread_local at::CallbackHandle watch = at::INVALID_CALLBACK_HANDLE;
thread_local bool is_written = false;

bool is_weight(const at::Tensor& tensor) {
  return tensor.defined() && tensor.has_storage() && Weights::instance().is_weight(tensor.storage());
}

bool holds_weight(const c10::IValue& value) {
  if (value.isTensor()) return is_weight(value.toTensor());
  if (!value.isList()) return false;
  const auto elements = value.toListRef();
  return std::any_of(elements.begin(), elements.end(), holds_weight);
}

bool writes(const c10::FunctionSchema& schema, size_t index) {
  if (schema.name().starts_with("c10d::")) return true;  // its schemas do not say which arguments they write
  if (index >= schema.arguments().size()) return false;
  const c10::AliasInfo* const alias = schema.arguments()[index].alias_info();
  return alias != nullptr && alias->isWrite();
}

std::unique_ptr<at::ObserverContext> on_operator(const at::RecordFunction& function) {
  const auto inputs = function.inputs();
  std::optional<c10::FunctionSchema> schema;  // it is copied, so only where it is needed
  for (size_t index = 0; index < inputs.size() && !is_written; ++index) {
    if (!holds_weight(inputs[index])) continue;
    if (!schema) schema = function.operator_schema();
    is_written = schema && writes(*schema, index);
  }
  return nullptr;
}

}  // namespace

void begin_write_watch() {
  is_written = false;
  if (watch != at::INVALID_CALLBACK_HANDLE) return;
  watch = at::addThreadLocalCallback(
      at::RecordFunctionCallback(&on_operator).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
}

void end_write_watch() noexcept {
  if (watch != at::INVALID_CALLBACK_HANDLE) at::removeCallback(watch);
  watch = at::INVALID_CALLBACK_HANDLE;
}

bool take_written_weights() noexcept { return std::exchange(is_written, false); }

}  // namespace ebbtide::lms
