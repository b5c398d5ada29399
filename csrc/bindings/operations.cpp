#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/call.h"
#include "bindings/records.h"
#include "bindings/request.h"

// pause, resume and their like, claims, and the bytes that are away.
namespace py = pybind11;

namespace ebbtide::bindings {
namespace {

void abandon(ebbtide_operation* operation) { ebbtide_abandon(operation, nullptr); }

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
  out.run([&] { call(ebbtide_swap, out.get(), in.get(), &paused, &resumed); });
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
      return request.run([&] { return ReportRecord(get<ebbtide_report*>(operate, request.get())); });
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
