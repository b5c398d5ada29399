#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/call.h"
#include "bindings/records.h"

// pause, resume and their like, claims, and the bytes that are away.
namespace py = pybind11;

namespace ebbtide::bindings {
namespace {

using Ranges = std::vector<std::pair<uint64_t, uint64_t>>;  // address, bytes

void add_name(void* names, const char* name) { static_cast<std::vector<std::string>*>(names)->push_back(name); }

class MovedHandle {
 public:
  MovedHandle() {
    call([&](ebbtide_error* error) { return ebbtide_make_moved(&moved_, error); });
  }
  MovedHandle(const MovedHandle&) = delete;
  MovedHandle& operator=(const MovedHandle&) = delete;
  ~MovedHandle() { ebbtide_free_moved(moved_); }
  ebbtide_moved* get() const { return moved_; }
  std::vector<std::string> tags() const {
    std::vector<std::string> names;
    call([&](ebbtide_error* error) { return ebbtide_visit_moved(moved_, add_name, &names, error); });
    return names;
  }

 private:
  ebbtide_moved* moved_ = nullptr;
};

// A request and what it points to.
class Request {
 public:
  Request(const std::vector<std::string>& tags, bool is_missing_ok) {
    for (const std::string& tag : tags) {
      if (tag.find('\0') != std::string::npos) throw py::value_error("a tag can't hold control characters");
      names_.push_back(tag.c_str());
    }
    request_.tags = names_.data();
    request_.tag_count = names_.size();
    request_.missing_ok = is_missing_ok;
  }
  Request(const Request&) = delete;
  Request& operator=(const Request&) = delete;

  Request& backup(int code) {
    request_.backup = code;
    return *this;
  }
  // A code for each of the tags, or none.
  Request& backups(const std::vector<int>& codes) {
    if (codes.empty()) return *this;
    if (codes.size() != names_.size()) throw py::value_error("backups has a code for each of the tags");
    backups_.assign(codes.begin(), codes.end());
    request_.backups = backups_.data();
    return *this;
  }
  Request& retain(int code) {
    request_.retain = code;
    return *this;
  }
  Request& addresses(const std::vector<uint64_t>& wanted) {
    for (const uint64_t address : wanted) addresses_.push_back(as_pointer(address));
    request_.addresses = addresses_.data();
    request_.address_count = addresses_.size();
    return *this;
  }
  Request& unused(const Ranges& ranges, uint64_t as_of) {
    unused_ = copy(ranges);
    request_.unused = unused_.data();
    request_.unused_count = unused_.size();
    request_.unused_as_of = as_of;
    return *this;
  }
  Request& max_bytes(uint64_t bytes) {
    request_.max_bytes = bytes;
    return *this;
  }
  Request& order(const Ranges& ranges) {
    order_ = copy(ranges);
    request_.order = order_.data();
    request_.order_count = order_.size();
    return *this;
  }
  Request& moved(const MovedHandle* handle) {
    request_.moved = handle == nullptr ? nullptr : handle->get();
    return *this;
  }
  const ebbtide_request* get() const { return &request_; }

  static std::vector<ebbtide_range> copy(const Ranges& ranges) {
    std::vector<ebbtide_range> copied;
    for (const auto& [address, size_bytes] : ranges) copied.push_back({address, size_bytes});
    return copied;
  }

 private:
  std::vector<const char*> names_;
  std::vector<int32_t> backups_;
  std::vector<const void*> addresses_;
  std::vector<ebbtide_range> unused_, order_;
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
    return ReportRecord(report);
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

class PendingHandle {
 public:
  explicit PendingHandle(ebbtide_pending* pending) : pending_(pending) {}
  PendingHandle(PendingHandle&& other) noexcept : pending_(std::exchange(other.pending_, nullptr)) {}
  PendingHandle& operator=(PendingHandle&&) = delete;
  ~PendingHandle() { ebbtide_free_pending(pending_); }
  void stream_wait(int device, uint64_t stream, const Ranges& ranges) {
    const std::vector<ebbtide_range> copied = Request::copy(ranges);
    call([&](ebbtide_error* error) {
      return ebbtide_pending_stream_wait(pending_, device, reinterpret_cast<void*>(stream), copied.data(),
                                         copied.size(), error);
    });
  }
  bool is_ready(uint64_t address, uint64_t size_bytes) {
    const ebbtide_range range = {address, size_bytes};
    return ask(&range);
  }
  bool is_over() { return ask(nullptr); }
  ReportRecord wait() {
    ebbtide_report* report = nullptr;
    call([&](ebbtide_error* error) { return ebbtide_pending_wait(pending_, &report, error); });
    return ReportRecord(report);
  }

 private:
  bool ask(const ebbtide_range* range) {
    bool ready = false;
    call([&](ebbtide_error* error) { return ebbtide_pending_ready(pending_, range, &ready, error); });
    return ready;
  }
  ebbtide_pending* pending_;
};

class BackupView {
 public:
  BackupView(void* bytes, uint64_t size_bytes, bool is_writable, ebbtide_backup* backup)
      : bytes_(bytes), size_bytes_(size_bytes), is_writable_(is_writable), backup_(backup) {}
  BackupView(BackupView&& other) noexcept
      : bytes_(other.bytes_),
        size_bytes_(other.size_bytes_),
        is_writable_(other.is_writable_),
        backup_(std::exchange(other.backup_, nullptr)) {}
  BackupView& operator=(BackupView&&) = delete;
  ~BackupView() { ebbtide_release_backup(backup_); }
  uint64_t address() const { return reinterpret_cast<uint64_t>(bytes_); }
  uint64_t size_bytes() const { return size_bytes_; }
  py::buffer_info buffer() const {
    return py::buffer_info(bytes_, 1, py::format_descriptor<uint8_t>::format(), 1,
                           {static_cast<py::ssize_t>(size_bytes_)}, {py::ssize_t{1}}, !is_writable_);
  }

 private:
  void* bytes_;
  uint64_t size_bytes_;
  bool is_writable_;
  ebbtide_backup* backup_;
};

std::optional<BackupView> backup_of(uint64_t address, uint64_t size_bytes, bool is_writable, bool is_retained) {
  void* bytes = nullptr;
  ebbtide_backup* backup = nullptr;
  const auto ask = is_retained ? ebbtide_retained_backup_of : ebbtide_backup_of;
  call([&](ebbtide_error* error) { return ask(as_pointer(address), size_bytes, &bytes, &backup, error); });
  if (bytes == nullptr) return std::nullopt;
  return BackupView(bytes, size_bytes, is_writable, backup);
}

// Steps of copies ahead of a pause of one tag.
class CopyAhead {
 public:
  CopyAhead(std::string tag, uint64_t step_bytes, int threads, const Ranges& unused)
      : tag_(std::move(tag)), unused_(Request::copy(unused)) {
    progress_.unused = unused_.data();
    progress_.unused_count = unused_.size();
    progress_.step_bytes = step_bytes;
    progress_.threads = threads;
  }
  ReportRecord step() {
    ebbtide_report* report = nullptr;
    call([&](ebbtide_error* error) { return ebbtide_copy_ahead(tag_.c_str(), &progress_, &report, error); });
    return ReportRecord(report);
  }
  bool is_over() const { return progress_.is_over; }
  bool is_held_up() const { return progress_.is_held_up; }

 private:
  const std::string tag_;
  const std::vector<ebbtide_range> unused_;
  ebbtide_ahead progress_ = EBBTIDE_AHEAD_INIT;
};

using Operate = ebbtide_status (*)(const ebbtide_request*, ebbtide_report**, ebbtide_error*);

ReportRecord operate(Operate operation, const Request& request) {
  ebbtide_report* report = nullptr;
  call([&](ebbtide_error* error) { return operation(request.get(), &report, error); });
  return ReportRecord(report);
}

ReportRecord pause(const std::vector<std::string>& tags, bool is_missing_ok, int backup, const Ranges& unused,
                   uint64_t unused_as_of, const MovedHandle* moved, const std::vector<int>& backups) {
  Request request(tags, is_missing_ok);
  request.backup(backup).backups(backups).unused(unused, unused_as_of).moved(moved);
  return operate(ebbtide_pause, request);
}

ReportRecord resume(const std::vector<std::string>& tags, bool is_missing_ok, const std::vector<uint64_t>& addresses,
                    int retain, const Ranges& order, const Ranges& unused, uint64_t unused_as_of,
                    const MovedHandle* moved) {
  Request request(tags, is_missing_ok);
  request.addresses(addresses).retain(retain).order(order).unused(unused, unused_as_of).moved(moved);
  return operate(ebbtide_resume, request);
}

PendingHandle resume_async(const std::vector<std::string>& tags, bool is_missing_ok, int retain, const Ranges& order,
                           const Ranges& unused, uint64_t unused_as_of) {
  Request request(tags, is_missing_ok);
  request.retain(retain).order(order).unused(unused, unused_as_of);
  ebbtide_pending* pending = nullptr;
  call([&](ebbtide_error* error) { return ebbtide_resume_async(request.get(), &pending, error); });
  return PendingHandle(pending);
}

std::pair<ReportRecord, ReportRecord> swap(const std::vector<std::string>& leaving,
                                           const std::vector<std::string>& returning, bool is_missing_ok, int backup,
                                           int retain, const Ranges& unused, uint64_t unused_as_of,
                                           const std::vector<int>& backups) {
  Request out(leaving, is_missing_ok);
  out.backup(backup).backups(backups).unused(unused, unused_as_of);
  Request in(returning, is_missing_ok);
  in.retain(retain);
  ebbtide_report* paused = nullptr;
  ebbtide_report* resumed = nullptr;
  call([&](ebbtide_error* error) { return ebbtide_swap(out.get(), in.get(), &paused, &resumed, error); });
  ReportRecord first(paused);
  return {std::move(first), ReportRecord(resumed)};
}

ReportRecord prepare(const std::vector<std::string>& tags, bool is_missing_ok) {
  return operate(ebbtide_prepare, Request(tags, is_missing_ok));
}

ReportRecord promote(const std::vector<std::string>& tags, bool is_missing_ok, uint64_t max_bytes) {
  return operate(ebbtide_promote, Request(tags, is_missing_ok).max_bytes(max_bytes));
}

ReportRecord demote(const std::vector<std::string>& tags, bool is_missing_ok, uint64_t max_bytes) {
  return operate(ebbtide_demote, Request(tags, is_missing_ok).max_bytes(max_bytes));
}

ReportRecord trim(const std::vector<std::string>& tags, const std::vector<uint64_t>& addresses) {
  return operate(ebbtide_trim, Request(tags, false).addresses(addresses));
}

ebbtide_operation_kind kind_of(const std::string& name) {
  if (name == "pause") return EBBTIDE_PAUSE;
  if (name == "resume") return EBBTIDE_RESUME;
  if (name == "trim") return EBBTIDE_TRIM;
  if (name == "promote") return EBBTIDE_PROMOTE;
  if (name == "demote") return EBBTIDE_DEMOTE;
  throw py::value_error("there is no operation \"" + name + "\"");
}

std::vector<std::string> preview(const std::string& kind, const std::vector<std::string>& tags, bool is_missing_ok,
                                 const MovedHandle* moved) {
  Request request(tags, is_missing_ok);
  request.moved(moved);
  const ebbtide_operation_kind code = kind_of(kind);
  std::vector<std::string> names;
  call([&](ebbtide_error* error) { return ebbtide_preview(code, request.get(), add_name, &names, error); });
  return names;
}

void wait_for_tags(const std::vector<std::string>& tags) {
  const Request request(tags, true);
  call([&](ebbtide_error* error) { return ebbtide_wait_for_tags(request.get(), error); });
}

OperationHandle claim(const std::string& kind, const std::vector<std::string>& tags, bool is_missing_ok, int backup) {
  Request request(tags, is_missing_ok);
  request.backup(backup);
  const ebbtide_operation_kind code = kind_of(kind);
  ebbtide_operation* operation = nullptr;
  call([&](ebbtide_error* error) { return ebbtide_claim(code, request.get(), &operation, error); });
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
  py::class_<PendingHandle>(module, "Pending")
      .def("stream_wait", &PendingHandle::stream_wait, py::arg("device"), py::arg("stream"),
           py::arg("ranges") = Ranges{})
      .def("is_ready", &PendingHandle::is_ready, py::arg("address"), py::arg("size_bytes"))
      .def("is_over", &PendingHandle::is_over)
      .def("wait", &PendingHandle::wait);
  py::class_<CopyAhead>(module, "CopyAhead")
      .def(py::init<std::string, uint64_t, int, Ranges>(), py::arg("tag"), py::arg("step_bytes"), py::arg("threads"),
           py::arg("unused"))
      .def("step", &CopyAhead::step)
      .def_property_readonly("is_over", &CopyAhead::is_over)
      .def_property_readonly("is_held_up", &CopyAhead::is_held_up);
  py::class_<MovedHandle>(module, "Moved").def(py::init<>()).def("tags", &MovedHandle::tags);
  module.def("pause_count", [](const std::string& tag) {
    uint64_t count = 0;
    call([&](ebbtide_error* error) { return ebbtide_pause_count(tag.c_str(), &count, error); });
    return count;
  });
  module.def("pause", &pause, py::arg("tags"), py::arg("missing_ok") = false, py::arg("backup") = kAsAllocated,
             py::arg("unused") = Ranges{}, py::arg("unused_as_of") = 0, py::arg("moved") = nullptr,
             py::arg("backups") = std::vector<int>{});
  module.def("resume", &resume, py::arg("tags"), py::arg("missing_ok") = false,
             py::arg("addresses") = std::vector<uint64_t>{}, py::arg("retain") = -1, py::arg("order") = Ranges{},
             py::arg("unused") = Ranges{}, py::arg("unused_as_of") = 0, py::arg("moved") = nullptr);
  module.def("resume_async", &resume_async, py::arg("tags"), py::arg("missing_ok") = false, py::arg("retain") = -1,
             py::arg("order") = Ranges{}, py::arg("unused") = Ranges{}, py::arg("unused_as_of") = 0);
  module.def("swap", &swap, py::arg("leaving"), py::arg("returning"), py::arg("missing_ok") = false,
             py::arg("backup") = kAsAllocated, py::arg("retain") = -1, py::arg("unused") = Ranges{},
             py::arg("unused_as_of") = 0, py::arg("backups") = std::vector<int>{});
  module.def("prepare", &prepare, py::arg("tags"), py::arg("missing_ok") = false);
  module.def("promote", &promote, py::arg("tags"), py::arg("missing_ok") = false, py::arg("max_bytes") = UINT64_MAX);
  module.def("demote", &demote, py::arg("tags"), py::arg("missing_ok") = false, py::arg("max_bytes") = UINT64_MAX);
  module.def("trim", &trim, py::arg("tags"), py::arg("addresses"));
  module.def("preview", &preview, py::arg("kind"), py::arg("tags"), py::arg("missing_ok") = false,
             py::arg("moved") = nullptr);
  module.def("wait_for_tags", &wait_for_tags, py::arg("tags"));
  module.def("claim", &claim, py::arg("kind"), py::arg("tags"), py::arg("missing_ok") = false,
             py::arg("backup") = kAsAllocated);
  module.def("backup_of", &backup_of, py::arg("address"), py::arg("size_bytes"), py::arg("writable") = false,
             py::arg("retained") = false);
}

}  // namespace ebbtide::bindings
