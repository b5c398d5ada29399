#include <memory>

#include "api/guard.h"
#include "api/handles.h"
#include "core/operation/backup_view.h"

// The stored bytes.
using namespace ebbtide;
using api::guarded;
using api::require;

struct ebbtide_backup {
  BackupView view;
};

namespace {

// Leaked on purpose: handles are given back after static destructors have run, too.
api::Handles<ebbtide_backup>& backups() {
  static auto* const table = new api::Handles<ebbtide_backup>("backup");
  return *table;
}

ebbtide_status view(ViewKind kind, const void* address, uint64_t size_bytes, void** bytes, ebbtide_backup** backup,
                    ebbtide_error* error) {
  return guarded(error, [&] {
    require(bytes != nullptr && backup != nullptr, "bytes or backup is null");
    require_not_forked();
    auto view = view_backup(Core::instance(), {reinterpret_cast<CUdeviceptr>(address), size_bytes}, kind);
    *bytes = nullptr;
    *backup = nullptr;
    if (!view) return;
    auto handle = std::make_unique<ebbtide_backup>(ebbtide_backup{std::move(*view)});
    std::byte* const shown = handle->view.bytes();
    *backup = backups().add(std::move(handle));
    *bytes = shown;
  });
}

}  // namespace

extern "C" {

ebbtide_status ebbtide_backup_of(const void* address, uint64_t size_bytes, void** bytes, ebbtide_backup** backup,
                                 ebbtide_error* error) {
  return view(ViewKind::kSnapshot, address, size_bytes, bytes, backup, error);
}

ebbtide_status ebbtide_retained_backup_of(const void* address, uint64_t size_bytes, void** bytes,
                                          ebbtide_backup** backup, ebbtide_error* error) {
  return view(ViewKind::kWindow, address, size_bytes, bytes, backup, error);
}

void ebbtide_release_backup(ebbtide_backup* backup) { backups().drop(backup); }

}  // extern "C"
