// Which devices reach each other's memory, and which have been told to.
#pragma once

#include <cstdint>
#include <set>
#include <utility>

namespace ebbtide::sim {

class Peers {
 public:
  // All do, until the control says otherwise.
  bool reaches(int device, int peer) const { return device != peer && !apart_.contains({device, peer}); }
  void set_reach(int device, int peer, bool is_reached);

  // From a context to memory of another one; false where that is so already.
  bool enable(uint64_t context, uint64_t peer) { return enabled_.insert({context, peer}).second; }
  bool is_enabled(uint64_t context, uint64_t peer) const { return enabled_.contains({context, peer}); }
  // A context that ends takes along what it enabled, and what was enabled towards it.
  void drop_context(uint64_t context);
  void reset();

 private:
  std::set<std::pair<int, int>> apart_;
  std::set<std::pair<uint64_t, uint64_t>> enabled_;
};

}  // namespace ebbtide::sim
