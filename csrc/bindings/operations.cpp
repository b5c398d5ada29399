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

void abandon(ebbtide_operation* operation) { ebbtide_abandon(operation, nullptr); }

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

std::vector<ebbtide_range> copy(const Ranges& ranges) {
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
    } else if (name == "paused_set") {
      request_.paused_set = value.is_none() ? nullptr : value.cast<PausedSetHandle&>().handle();
    } else {
      throw py::type_error("an operation has no option '" + name + "'");
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
  ebbtide_request request_ = EBBTIDE_REQUEST_INIT;
};

class OperationHandle {
 public:
  explicit OperationHandle(ebbtide_operation* operation) : operation_(operation) {}
  ReportRecord commit() { return ReportRecord(get<ebbtide_report*>(ebbtide_commit, take())); }
  void abandon() { call(ebbtide_abandon, take()); }

 private:
  ebbtide_operation* take() {
    if (operation_ == nullptr) throw py::value_error("this operation is over");
    return operation_.release();
  }
  Owned<ebbtide_operation, bindings::abandon> operation_;
};

class PendingHandle {
 public:
  explicit PendingHandle(ebbtide_pending* pending) : pending_(pending) {}
  void stream_wait(int device, uint64_t stream, const Ranges& ranges) {
    const std::vector<ebbtide_range> copied = copy(ranges);
    call(ebbtide_pending_stream_wait, pending_.get(), device, reinterpret_cast<void*>(stream), copied.data(),
         copied.size());
  }
  bool is_ready(uint64_t address, uint64_t size_bytes) {
    const ebbtide_range range = {address, size_bytes};
    return get<bool>(ebbtide_pending_ready, pending_.get(), &range);
  }
  bool is_over() { return get<bool>(ebbtide_pending_ready, pending_.get(), nullptr); }
  ReportRecord wait() { return ReportRecord(get<ebbtide_report*>(ebbtide_pending_wait, pending_.get())); }

 private:
  Owned<ebbtide_pending, ebbtide_free_pending> pending_;
};

class BackupView {
 public:
  BackupView(void* bytes, uint64_t size_bytes, bool is_writable, ebbtide_backup* backup)
      : bytes_(bytes), size_bytes_(size_bytes), is_writable_(is_writable), backup_(backup) {}
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
  Owned<ebbtide_backup, ebbtide_release_backup> backup_;
};

std::optional<BackupView> backup_of(uint64_t address, uint64_t size_bytes, bool is_writable, bool is_retained) {
  void* bytes = nullptr;
  ebbtide_backup* backup = nullptr;
  call(is_retained ? ebbtide_retained_backup_of : ebbtide_backup_of, as_pointer(address), size_bytes, &bytes, &backup);
  if (bytes == nullptr) return std::nullopt;
  return BackupView(bytes, size_bytes, is_writable, backup);
}

// Steps of copies ahead of a pause of one tag.
class CopyAhead {
 public:
  CopyAhead(std::string tag, uint64_t step_bytes, int threads, const Ranges& unused)
      : tag_(std::move(tag)), unused_(copy(unused)) {
    progress_.unused = unused_.data();
    progress_.unused_count = unused_.size();
    progress_.step_bytes = step_bytes;
    progress_.threads = threads;
  }
  ReportRecord step() { return ReportRecord(get<ebbtide_report*>(ebbtide_copy_ahead, tag_.c_str(), &progress_)); }
  bool is_over() const { return progress_.is_over; }
  bool is_held_up() const { return progress_.is_held_up; }

 private:
  const std::string tag_;
  const std::vector<ebbtide_range> unused_;
  ebbtide_ahead progress_ = EBBTIDE_AHEAD_INIT;
};

using Operate = ebbtide_status (*)(const ebbtide_request*, ebbtide_report**, ebbtide_error*);

constexpr std::pair<const char*, Operate> kOperations[] = {{"pause", ebbtide_pause},     {"resume", ebbtide_resume},
                                                           {"prepare", ebbtide_prepare}, {"promote", ebbtide_promote},
                                                           {"demote", ebbtide_demote},   {"trim", ebbtide_trim}};

std::pair<ReportRecord, ReportRecord> swap(const std::vector<std::string>& leaving,
                                           const std::vector<std::string>& returning, bool is_missing_ok, int retain,
                                           const py::kwargs& options) {
  const Request out(leaving, is_missing_ok, options);
  const Request in(returning, is_missing_ok, py::dict(py::arg("retain") = retain));
  ebbtide_report* paused = nullptr;
  ebbtide_report* resumed = nullptr;
  call(ebbtide_swap, out.get(), in.get(), &paused, &resumed);
  ReportRecord first = ReportRecord(paused);
  return {std::move(first), ReportRecord(resumed)};
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
                                 const py::kwargs& options) {
  const Request request(tags, is_missing_ok, options);
  std::vector<std::string> names;
  call(ebbtide_preview, kind_of(kind), request.get(), add_name, &names);
  return names;
}

}  // namespace

void register_operations(py::module_& module) {
  const py::arg tags("tags");
  const py::arg_v missing_ok = py::arg("missing_ok") = false;
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
  py::class_<PausedSetHandle>(module, "PausedSet").def(py::init<>()).def("tags", &PausedSetHandle::tags);
  module.def("pause_count", [](const std::string& tag) { return get<uint64_t>(ebbtide_pause_count, tag.c_str()); });
  for (const auto& [name, operate] : kOperations) {
    const auto run = [operate = operate](const std::vector<std::string>& names, bool is_missing_ok,
                                         const py::kwargs& options) {
      const Request request(names, is_missing_ok, options);
      return ReportRecord(get<ebbtide_report*>(operate, request.get()));
    };
    module.def(name, run, tags, missing_ok);
  }
  module.def(
      "resume_async",
      [](const std::vector<std::string>& names, bool is_missing_ok, const py::kwargs& options) {
        const Request request(names, is_missing_ok, options);
        return PendingHandle(get<ebbtide_pending*>(ebbtide_resume_async, request.get()));
      },
      tags, missing_ok);
  module.def("swap", &swap, py::arg("leaving"), py::arg("returning"), missing_ok, py::arg("retain") = -1);
  module.def("preview", &preview, py::arg("kind"), tags, missing_ok);
  module.def(
      "wait_for_tags",
      [](const std::vector<std::string>& names) { call(ebbtide_wait_for_tags, Request(names, true).get()); }, tags);
  module.def(
      "claim",
      [](const std::string& kind, const std::vector<std::string>& names, bool is_missing_ok,
         const py::kwargs& options) {
        const Request request(names, is_missing_ok, options);
        return OperationHandle(get<ebbtide_operation*>(ebbtide_claim, kind_of(kind), request.get()));
      },
      py::arg("kind"), tags, missing_ok);
  module.def("backup_of", &backup_of, py::arg("address"), py::arg("size_bytes"), py::arg("writable") = false,
             py::arg("retained") = false);
}

}  // namespace ebbtide::bindings
