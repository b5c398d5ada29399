#include <memory>
#include <string>

#include "api/ebbtide.h"
#include "api/guard.h"
#include "api/handles.h"
#include "api/view.h"

// What a pause has moved.
using namespace ebbtide;
using api::guarded;
using api::require;

struct ebbtide_moved {
  std::shared_ptr<Moved> moved = std::make_shared<Moved>();
};

namespace {

// Leaked on purpose: handles are given back after static destructors have run, too.
api::Handles<ebbtide_moved>& handles() {
  static auto* const table = new api::Handles<ebbtide_moved>("record of a pause");
  return *table;
}

}  // namespace

namespace ebbtide::api {

std::shared_ptr<Moved> find_moved(const ebbtide_moved* moved) { return handles().at(moved).moved; }

}  // namespace ebbtide::api

extern "C" {

ebbtide_status ebbtide_make_moved(ebbtide_moved** moved, ebbtide_error* error) {
  return guarded(error, [&] {
    require(moved != nullptr, "moved is null");
    require_not_forked();
    *moved = handles().add(std::make_unique<ebbtide_moved>());
  });
}

ebbtide_status ebbtide_visit_moved(const ebbtide_moved* moved, ebbtide_visit_name visit, void* user,
                                   ebbtide_error* error) {
  return guarded(error, [&] {
    require(moved != nullptr, "moved is null");
    require(visit != nullptr, "visit is null");
    for (const std::string& tag : api::find_moved(moved)->tags()) visit(user, tag.c_str());
  });
}

void ebbtide_free_moved(ebbtide_moved* moved) { handles().drop(moved); }

ebbtide_status ebbtide_pause_count(const char* tag, uint64_t* count, ebbtide_error* error) {
  return guarded(error, [&] {
    require(tag != nullptr, "tag is null");
    require(count != nullptr, "count is null");
    require_not_forked();
    *count = Core::instance().registry.pause_count(tag);
  });
}

}  // extern "C"
