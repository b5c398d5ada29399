// Which devices can reach each other's memory, and which contexts have enabled access.
#pragma once

#include <cstdint>
#include <set>
#include <utility>

namespace ebbtide::sim {

class Peers {
 public:
  // Every device reaches every other, unless a test has changed that by ebbtide_sim_set_peers.
  bool reaches(int device, int peer) const { return device != peer && !apart_.contains({device, peer}); }
  void set_reach(int device, int peer, bool is_reached);

  // Enables access from a context to the memory of another one. False if it is enabled already.
  bool enable(uint64_t context, uint64_t peer) { return enabled_.insert({context, peer}).second; }
  bool is_enabled(uint64_t context, uint64_t peer) const { return enabled_.contains({context, peer}); }
  // Removes the access that the context enabled, and the access to it that others enabled.
  void drop_context(uint64_t context);
  void reset();

 private:
  std::set<std::pair<int, int>> apart_;
  std::set<std::pair<uint64_t, uint64_t>> enabled_;
};

}  // namespace ebbtide::sim
