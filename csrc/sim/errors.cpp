// The names and texts of errors.
#include "sim/entry.h"

namespace ebbtide::sim {
namespace {

struct ErrorText {
  CUresult code;
  const char* name;
  const char* text;
};

constexpr ErrorText kErrors[] = {
#define EBBTIDE_ERROR(code, text) {code, #code, text},
#include "sim/errors.def"
#undef EBBTIDE_ERROR
};

const ErrorText* find_error(CUresult code) {
  for (const ErrorText& error : kErrors) {
    if (error.code == code) return &error;
  }
  return nullptr;
}

CUresult error_name(CUresult error, const char** pStr) {
  if (pStr == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const ErrorText* found = find_error(error);
  *pStr = found == nullptr ? nullptr : found->name;
  return found == nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult error_string(CUresult error, const char** pStr) {
  if (pStr == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const ErrorText* found = find_error(error);
  *pStr = found == nullptr ? nullptr : found->text;
  return found == nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

}  // namespace
}  // namespace ebbtide::sim

using namespace ebbtide::sim;

EBBTIDE_SIM_EXPORT CUresult cuGetErrorName(CUresult error, const char** pStr) {
  EBBTIDE_SIM_FORWARD(cuGetErrorName, kStateless, error_name, error, pStr);
}

EBBTIDE_SIM_EXPORT CUresult cuGetErrorString(CUresult error, const char** pStr) {
  EBBTIDE_SIM_FORWARD(cuGetErrorString, kStateless, error_string, error, pStr);
}
