#pragma once

#include <pybind11/stl.h>

#include <exception>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bindings/call.h"

namespace ebbtide::bindings {

namespace py = pybind11;

using Ranges = std::vector<std::pair<uint64_t, uint64_t>>;  // address, bytes

inline void add_name(void* names, const char* name) { static_cast<std::vector<std::string>*>(names)->push_back(name); }

template <auto Free>
struct Freeing {
  template <typename Handle>
  void operator()(Handle* handle) const {
    const py::gil_scoped_release released;  // it may wait for the device
    Free(handle);
  }
};

template <typename Handle, auto Free>
using Owned = std::unique_ptr<Handle, Freeing<Free>>;

class PausedSetHandle {
 public:
  ebbtide_paused_set* handle() const { return set_.get(); }
  std::vector<std::string> tags() const {
    std::vector<std::string> names;
    call(ebbtide_visit_paused_set, handle(), add_name, &names);
    return names;
  }

 private:
  Owned<ebbtide_paused_set, ebbtide_free_paused_set> set_{get<ebbtide_paused_set*>(ebbtide_make_paused_set)};
};

inline std::vector<ebbtide_range> copy(const Ranges& ranges) {
  std::vector<ebbtide_range> copied;
  for (const auto& [address, size_bytes] : ranges) copied.push_back({address, size_bytes});
  return copied;
}

// A request and the arrays that it points to. Its tags live as long as the caller's.
class Request {
 public:
  // options: fields of ebbtide_request by name. A list stands for a pointer and its count.
  Request(const std::vector<std::string>& tags, bool is_missing_ok, const py::dict& options = {}) {
    for (const std::string& tag : tags) names_.push_back(check_text(tag));
    request_.tags = names_.data();
    request_.tag_count = names_.size();
    request_.missing_ok = is_missing_ok;
    for (const auto& [name, value] : options) set(name.cast<std::string>(), value);
  }
  Request(const Request&) = delete;
  Request& operator=(const Request&) = delete;
  const ebbtide_request* get() const { return &request_; }
  // Runs body, which makes the call. What before_moving has raised is the error of the call.
  template <typename Body>
  auto run(const Body& body) const {
    try {
      return body();
    } catch (...) {
      if (raised_) std::rethrow_exception(std::exchange(raised_, nullptr));
      throw;
    }
  }

 private:
  void set(const std::string& name, const py::handle value) {
    if (name == "backup") {
      request_.backup = value.cast<int>();
    } else if (name == "backups") {
      set_backups(value.cast<std::vector<int32_t>>());
    } else if (name == "retain") {
      request_.retain = value.cast<int>();
    } else if (name == "max_bytes") {
      request_.max_bytes = value.cast<uint64_t>();
    } else if (name == "addresses") {
      for (const auto address : value.cast<std::vector<uint64_t>>()) addresses_.push_back(as_pointer(address));
      request_.addresses = addresses_.data();
      request_.address_count = addresses_.size();
    } else if (name == "order") {
      order_ = copy(value.cast<Ranges>());
      request_.order = order_.data();
      request_.order_count = order_.size();
    } else if (name == "unused") {
      unused_ = copy(value.cast<Ranges>());
      request_.unused = unused_.data();
      request_.unused_count = unused_.size();
    } else if (name == "unused_as_of") {
      request_.unused_as_of = value.cast<uint64_t>();
    } else if (name == "before_moving") {
      before_moving_ = value.cast<py::function>();
      request_.before_moving = [](void* user) { return static_cast<Request*>(user)->call_before(); };
      request_.before_moving_user = this;
    } else if (name == "paused_set") {
      request_.paused_set = value.is_none() ? nullptr : value.cast<PausedSetHandle&>().handle();
    } else {
      throw py::type_error("an operation has no option '" + name + "'");
    }
  }
  bool call_before() noexcept {
    const py::gil_scoped_acquire gil;
    try {
      before_moving_();
      return true;
    } catch (...) {
      raised_ = std::current_exception();
      return false;
    }
  }
  // A code for each of the tags, or none.
  void set_backups(std::vector<int32_t> codes) {
    if (codes.empty()) return;
    if (codes.size() != names_.size()) throw py::value_error("backups has a code for each of the tags");
    backups_ = std::move(codes);
    request_.backups = backups_.data();
  }

  std::vector<const char*> names_;
  std::vector<int32_t> backups_;
  std::vector<const void*> addresses_;
  std::vector<ebbtide_range> unused_, order_;
  py::function before_moving_;
  mutable std::exception_ptr raised_;
  ebbtide_request request_ = EBBTIDE_REQUEST_INIT;
};

}  // namespace ebbtide::bindings
