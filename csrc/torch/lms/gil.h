#pragma once

#include <Python.h>

namespace ebbtide::lms {

// For a wait for another thread, which may want the GIL. No lock is held at the construction and the destruction.
class GilReleased {
 public:
  GilReleased() : state_(Py_IsInitialized() != 0 && PyGILState_Check() != 0 ? PyEval_SaveThread() : nullptr) {}
  GilReleased(const GilReleased&) = delete;
  GilReleased& operator=(const GilReleased&) = delete;
  ~GilReleased() {
    if (state_ != nullptr) PyEval_RestoreThread(state_);
  }

 private:
  PyThreadState* const state_;
};

}  // namespace ebbtide::lms
