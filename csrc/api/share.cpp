#include <memory>
#include <vector>

#include "api/ebbtide.h"
#include "api/guard.h"
#include "api/view.h"
#include "share/exports.h"
#include "share/import.h"
#include "share/incoming.h"
#include "share/outgoing.h"

// Memory of several processes.
using namespace ebbtide;
using api::as_address;
using api::guarded;
using api::handles;
using api::require_given;
using api::with_core;

struct ebbtide_import {
  static constexpr const char* kName = "imported memory";
  Import content;
};

struct ebbtide_reception {
  static constexpr const char* kName = "reception";
  std::shared_ptr<Reception> content;
};

namespace {

std::vector<ImportedPiece> read(const ebbtide_piece* pieces, size_t count) {
  if (count > 0) require_given(pieces, "pieces");
  std::vector<ImportedPiece> found;
  for (size_t index = 0; index < count; ++index) found.push_back({pieces[index].file, pieces[index].size_bytes});
  return found;
}

// Its content. The caller makes sure that the handle is not given back meanwhile.
Import& at(ebbtide_import* import) { return const_cast<ebbtide_import&>(handles<ebbtide_import>().at(import)).content; }

// It lives on while a resume or another thread uses it.
std::shared_ptr<Reception> reception_of(const ebbtide_reception* reception) {
  return handles<ebbtide_reception>().at(reception).content;
}

}  // namespace

extern "C" {

ebbtide_status ebbtide_export(const void* address, ebbtide_visit_piece visit, void* user, bool* is_busy,
                              ebbtide_error* error) {
  return with_core(error, [&](Core& core) {
    require_given(visit, "visit");
    require_given(is_busy, "is_busy");
    *is_busy = false;
    std::vector<ExportedPiece> pieces;
    try {
      pieces = export_memory(core, as_address(address));
    } catch (const BusyError&) {
      *is_busy = true;
    }
    for (ExportedPiece& each : pieces) {
      const ebbtide_piece piece = {each.size_bytes, each.file.give()};
      visit(user, &piece);
    }
  });
}

ebbtide_status ebbtide_refuse_moves(const void* address, bool refuses, ebbtide_error* error) {
  return with_core(error, [&](Core& core) { refuse_moves(core, as_address(address), refuses); });
}

ebbtide_status ebbtide_end_export(const void* address, ebbtide_error* error) {
  return with_core(error, [&](Core& core) { end_export(core, as_address(address)); });
}

ebbtide_status ebbtide_keep(const void* address, ebbtide_error* error) {
  return with_core(error, [&](Core& core) { keep(core, as_address(address)); });
}

ebbtide_status ebbtide_end_keep(const void* address, ebbtide_error* error) {
  return with_core(error, [&](Core& core) { end_keep(core, as_address(address)); });
}

ebbtide_status ebbtide_import_memory(int32_t device, const ebbtide_piece* pieces, size_t count, ebbtide_import** import,
                                     void** address, ebbtide_error* error) {
  return with_core(error, [&](Core& core) {
    require_given(import, "import");
    require_given(address, "address");
    std::unique_ptr<ebbtide_import> made(new ebbtide_import{Import(core, device, read(pieces, count))});
    *address = reinterpret_cast<void*>(made->content.address());
    *import = handles<ebbtide_import>().add(std::move(made));
  });
}

ebbtide_status ebbtide_wait_import(ebbtide_import* import, ebbtide_error* error) {
  return with_core(error, [&](Core&) { at(import).wait(); });
}

ebbtide_status ebbtide_unmap_import(ebbtide_import* import, ebbtide_error* error) {
  return with_core(error, [&](Core&) { at(import).unmap(); });
}

ebbtide_status ebbtide_map_import(ebbtide_import* import, const ebbtide_piece* pieces, size_t count,
                                  ebbtide_error* error) {
  return with_core(error, [&](Core&) { at(import).map(read(pieces, count)); });
}

ebbtide_status ebbtide_free_import(ebbtide_import* import, ebbtide_error* error) {
  return with_core(error, [&](Core&) {
    at(import).unmap();
    handles<ebbtide_import>().take(import);
  });
}

ebbtide_status ebbtide_hand_over(const ebbtide_request* request, const ebbtide_receiver* receiver,
                                 ebbtide_report** report, ebbtide_error* error) {
  return with_core(error, [&](Core& core) {
    require_given(receiver, "receiver");
    require_given(receiver->wants, "wants");
    require_given(receiver->give, "give");
    require_given(receiver->released, "released");
    const ebbtide_receiver& given = *receiver;
    const Receiver read = {
        .wants = [&](int device, uint64_t size) { return given.wants(given.user, device, size); },
        .give = [&](int device, uint64_t size, int file) { return given.give(given.user, device, size, file); },
        .note_released = [&](int device, uint64_t size) { given.released(given.user, device, size); }};
    api::hand_out_report(hand_over(core, api::read_request(request), read), report);
  });
}

ebbtide_status ebbtide_find_leaving(const ebbtide_request* request, ebbtide_visit_leaving visit, void* user,
                                    ebbtide_error* error) {
  return with_core(error, [&](Core& core) {
    require_given(visit, "visit");
    for (const Leaving& each : find_leaving(core, api::read_request(request).tags)) {
      const ebbtide_leaving found = {each.kind.size_bytes, each.device, each.kind.is_exportable};
      visit(user, &found);
    }
  });
}

ebbtide_status ebbtide_make_reception(const ebbtide_leaving* leaving, size_t count, bool must_clear,
                                      ebbtide_reception** reception, ebbtide_error* error) {
  return with_core(error, [&](Core& core) {
    require_given(reception, "reception");
    if (count > 0) require_given(leaving, "leaving");
    std::vector<Leaving> read;
    for (size_t index = 0; index < count; ++index)
      read.push_back({leaving[index].device, {leaving[index].size_bytes, leaving[index].exportable}});
    *reception = handles<ebbtide_reception>().add(
        std::make_unique<ebbtide_reception>(ebbtide_reception{std::make_shared<Reception>(core, read, must_clear)}));
  });
}

void ebbtide_free_reception(ebbtide_reception* reception) { handles<ebbtide_reception>().drop(reception); }

ebbtide_status ebbtide_resume_from(const ebbtide_request* request, ebbtide_reception* reception, ebbtide_want want,
                                   void* user, ebbtide_report** report, ebbtide_error* error) {
  return with_core(error, [&](Core& core) {
    require_given(want, "want");
    const auto content = reception_of(reception);
    const auto visit = [&](int device, uint64_t size_bytes) { return want(user, device, size_bytes); };
    api::hand_out_report(resume_from(core, api::read_request(request), *content, visit), report);
  });
}

ebbtide_status ebbtide_receive(ebbtide_reception* reception, int32_t device, uint64_t size_bytes, int32_t file,
                               ebbtide_error* error) {
  return guarded(error, [&] {
    Descriptor owned(file);
    require_not_forked();
    reception_of(reception)->receive(device, size_bytes, std::move(owned));
  });
}

ebbtide_status ebbtide_note_released(ebbtide_reception* reception, int32_t device, uint64_t size_bytes,
                                     ebbtide_error* error) {
  return with_core(error, [&](Core&) { reception_of(reception)->note_released(device, size_bytes); });
}

ebbtide_status ebbtide_end_reception(ebbtide_reception* reception, ebbtide_error* error) {
  return with_core(error, [&](Core&) { reception_of(reception)->end(); });
}

}  // extern "C"
