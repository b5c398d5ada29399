#include <memory>
#include <vector>

#include "api/ebbtide.h"
#include "api/guard.h"
#include "api/view.h"
#include "share/exports.h"
#include "share/import.h"

// Memory of several processes.
using namespace ebbtide;
using api::as_address;
using api::handles;
using api::require_given;
using api::with_core;

struct ebbtide_import {
  static constexpr const char* kName = "imported memory";
  Import content;
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

}  // namespace

extern "C" {

ebbtide_status ebbtide_export(const void* address, ebbtide_visit_piece visit, void* user, ebbtide_error* error) {
  return with_core(error, [&](Core& core) {
    require_given(visit, "visit");
    for (ExportedFile& file : export_memory(core, as_address(address))) {
      const ebbtide_piece piece = {file.size_bytes(), file.give()};
      visit(user, &piece);
    }
  });
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

}  // extern "C"
