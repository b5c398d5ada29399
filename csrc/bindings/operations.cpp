#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/call.h"
#include "bindings/records.h"

// pause, resume, claims, and the bytes that are away.
namespace py = pybind11;

namespace ebbtide::bindings {
namespace {

// A request and the strings that it points to.
class Request {
 public:
  Request(const std::vector<std::string>& tags, bool is_missing_ok, int backup,
          const std::vector<uint64_t>& addresses = {}) {
    for (const std::string& tag : tags) {
      if (tag.find('\0') != std::string::npos) throw py::value_error("a tag can't hold control characters");
      names_.push_back(tag.c_str());
    }
    request_.tags = names_.data();
    request_.tag_count = names_.size();
    request_.missing_ok = is_missing_ok ? 1 : 0;
    request_.backup = backup;
    for (const uint64_t address : addresses) addresses_.push_back(as_pointer(address));
    request_.addresses = addresses_.data();
    request_.address_count = addresses_.size();
  }
  const ebbtide_request* get() const { return &request_; }

 private:
  std::vector<const char*> names_;
  std::vector<const void*> addresses_;
  ebbtide_request request_ = EBBTIDE_REQUEST_INIT;
};

class OperationHandle {
 public:
  explicit OperationHandle(ebbtide_operation* operation) : operation_(operation) {}
  OperationHandle(OperationHandle&& other) noexcept : operation_(std::exchange(other.operation_, nullptr)) {}
  OperationHandle& operator=(OperationHandle&&) = delete;
  ~OperationHandle() {
    if (operation_ != nullptr) ebbtide_abandon(operation_, nullptr);
  }
  ReportRecord commit() {
    ebbtide_report* report = nullptr;
    ebbtide_operation* taken = take();
    call([&](ebbtide_error* error) { return ebbtide_commit(taken, &report, error); });
    return read_report(report);
  }
  void abandon() {
    ebbtide_operation* taken = take();
    call([&](ebbtide_error* error) { return ebbtide_abandon(taken, error); });
  }

 private:
  ebbtide_operation* take() {
    if (operation_ == nullptr) throw py::value_error("this operation is over");
    return std::exchange(operation_, nullptr);
  }
  ebbtide_operation* operation_;
};

class BackupView {
 public:
  BackupView(const void* bytes, uint64_t size_bytes, ebbtide_backup* backup)
      : bytes_(bytes), size_bytes_(size_bytes), backup_(backup) {}
  BackupView(BackupView&& other) noexcept
      : bytes_(other.bytes_), size_bytes_(other.size_bytes_), backup_(std::exchange(other.backup_, nullptr)) {}
  BackupView& operator=(BackupView&&) = delete;
  ~BackupView() { ebbtide_release_backup(backup_); }
  uint64_t address() const { return reinterpret_cast<uint64_t>(bytes_); }
  uint64_t size_bytes() const { return size_bytes_; }
  py::buffer_info buffer() const {
    return py::buffer_info(const_cast<void*>(bytes_), 1, py::format_descriptor<uint8_t>::format(), 1,
                           {static_cast<py::ssize_t>(size_bytes_)}, {py::ssize_t{1}}, true);
  }

 private:
  const void* bytes_;
  uint64_t size_bytes_;
  ebbtide_backup* backup_;
};

std::optional<BackupView> backup_of(uint64_t address, uint64_t size_bytes) {
  const void* bytes = nullptr;
  ebbtide_backup* backup = nullptr;
  call(
      [&](ebbtide_error* error) { return ebbtide_backup_of(as_pointer(address), size_bytes, &bytes, &backup, error); });
  if (bytes == nullptr) return std::nullopt;
  return BackupView(bytes, size_bytes, backup);
}

ReportRecord pause(const std::vector<std::string>& tags, bool is_missing_ok, int backup) {
  const Request request(tags, is_missing_ok, backup);
  ebbtide_report* report = nullptr;
  call([&](ebbtide_error* error) { return ebbtide_pause(request.get(), &report, error); });
  return read_report(report);
}

ReportRecord resume(const std::vector<std::string>& tags, bool is_missing_ok, const std::vector<uint64_t>& addresses) {
  const Request request(tags, is_missing_ok, EBBTIDE_BACKUP_AS_ALLOCATED, addresses);
  ebbtide_report* report = nullptr;
  call([&](ebbtide_error* error) { return ebbtide_resume(request.get(), &report, error); });
  return read_report(report);
}

OperationHandle claim(const std::string& kind, const std::vector<std::string>& tags, bool is_missing_ok, int backup) {
  if (kind != "pause" && kind != "resume")
    throw py::value_error("kind is \"pause\" or \"resume\", not \"" + kind + "\"");
  const Request request(tags, is_missing_ok, backup);
  ebbtide_operation* operation = nullptr;
  call([&](ebbtide_error* error) {
    return ebbtide_claim(kind == "pause" ? EBBTIDE_PAUSE : EBBTIDE_RESUME, request.get(), &operation, error);
  });
  return OperationHandle(operation);
}

}  // namespace

void register_operations(py::module_& module) {
  constexpr int kAsAllocated = EBBTIDE_BACKUP_AS_ALLOCATED;
  py::class_<OperationHandle>(module, "Operation")
      .def("commit", &OperationHandle::commit)
      .def("abandon", &OperationHandle::abandon);
  py::class_<BackupView>(module, "Backup", py::buffer_protocol())
      .def_buffer(&BackupView::buffer)
      .def_property_readonly("address", &BackupView::address)
      .def_property_readonly("size_bytes", &BackupView::size_bytes);
  module.def("pause", &pause, py::arg("tags"), py::arg("missing_ok") = false, py::arg("backup") = kAsAllocated);
  module.def("resume", &resume, py::arg("tags"), py::arg("missing_ok") = false,
             py::arg("addresses") = std::vector<uint64_t>{});
  module.def("claim", &claim, py::arg("kind"), py::arg("tags"), py::arg("missing_ok") = false,
             py::arg("backup") = kAsAllocated);
  module.def("backup_of", &backup_of, py::arg("address"), py::arg("size_bytes"));
}

}  // namespace ebbtide::bindings
