// The functions of control.h. In a forked child they do nothing, because the tables describe the parent's memory.
#include "sim/control.h"

#include "sim/entry.h"
#include "sim/rules.h"
#include "sim/simulator.h"

using namespace ebbtide::sim;

namespace {

std::string name_or_all(const char* function) {
  return function == nullptr || std::string_view(function) == "*" ? std::string() : std::string(function);
}

bool is_device(int device) { return device >= 0 && device < kMaxDevices; }

}  // namespace

EBBTIDE_SIM_EXPORT void ebbtide_sim_reset(void) {
  if (is_forked_child()) return;
  Simulator& sim = simulator();
  {
    Lock lock(sim.mutex);
    sim.is_initialised = false;
    // Emptying the queues first releases the threads that wait for a stream, before the tables are cleared.
    sim.streams.reset();
    sim.work_done.notify_all();
    while (sim.unlocked_work > 0) sim.work_done.wait(lock);
    sim.streams.reset();
    sim.address_space.reset();
    sim.physical.reset();
    sim.host_memory.reset();
    sim.modules.reset();
    sim.contexts.reset();
    sim.peers.reset();
    sim.driver_version = kDefaultDriverVersion;
    sim.owner = 0;
  }
  rules().reset();
}

EBBTIDE_SIM_EXPORT void ebbtide_sim_set_device_count(int count) {
  if (is_forked_child()) return;
  Lock lock(simulator().mutex);
  if (!simulator().is_initialised) simulator().physical.set_device_count(count);
}

EBBTIDE_SIM_EXPORT void ebbtide_sim_set_capacity(int device, uint64_t bytes) {
  if (is_forked_child() || !is_device(device)) return;
  Lock lock(simulator().mutex);
  simulator().physical.set_capacity(device, bytes);
}

EBBTIDE_SIM_EXPORT void ebbtide_sim_set_foreign_bytes(int device, uint64_t bytes) {
  if (is_forked_child() || !is_device(device)) return;
  Lock lock(simulator().mutex);
  simulator().physical.set_foreign_bytes(device, bytes);
}

EBBTIDE_SIM_EXPORT void ebbtide_sim_set_peers(int device, int peer, int is_reached) {
  if (is_forked_child() || !is_device(device) || !is_device(peer)) return;
  Lock lock(simulator().mutex);
  simulator().peers.set_reach(device, peer, is_reached != 0);
}

EBBTIDE_SIM_EXPORT void ebbtide_sim_set_driver_version(int version) {
  if (is_forked_child()) return;
  Lock lock(simulator().mutex);
  simulator().driver_version = version;
}

EBBTIDE_SIM_EXPORT void ebbtide_sim_hide_function(const char* name) {
  if (!is_forked_child()) rules().hide(name);
}

EBBTIDE_SIM_EXPORT void ebbtide_sim_fail(const char* function, uint64_t k, int code, uint64_t times) {
  if (!is_forked_child()) rules().fail(name_or_all(function), k, static_cast<CUresult>(code), times);
}

EBBTIDE_SIM_EXPORT void ebbtide_sim_clear_failures(void) {
  if (!is_forked_child()) rules().clear_failures();
}

EBBTIDE_SIM_EXPORT void ebbtide_sim_set_delay(const char* function, uint64_t microseconds) {
  if (!is_forked_child() && function != nullptr) rules().set_delay(function, microseconds);
}

EBBTIDE_SIM_EXPORT void ebbtide_sim_set_async(int mode, uint64_t seed) {
  if (is_forked_child() || mode < EBBTIDE_SIM_LATE || mode > EBBTIDE_SIM_RANDOM) return;
  Lock lock(simulator().mutex);
  simulator().streams.set_mode(static_cast<AsyncMode>(mode), seed);
}

EBBTIDE_SIM_EXPORT void ebbtide_sim_run_queued(void) {
  if (is_forked_child()) return;
  Lock lock(simulator().mutex);
  simulator().streams.run_available(lock);
}

EBBTIDE_SIM_EXPORT void ebbtide_sim_live(ebbtide_sim_counts* counts) {
  if (counts == nullptr) return;
  *counts = {};
  if (is_forked_child()) return;
  Simulator& sim = simulator();
  Lock lock(sim.mutex);
  counts->reservations = sim.address_space.reservation_count();
  counts->handles = sim.physical.handle_count();
  counts->mappings = sim.address_space.mapping_count();
  counts->streams = sim.streams.stream_count();
  counts->events = sim.streams.event_count();
  counts->pinned_blocks = sim.host_memory.allocated_count();
  counts->registered_ranges = sim.host_memory.registered_count();
  counts->contexts_retained = sim.contexts.total_retained();
  counts->queued_items = sim.streams.queued_items();
  counts->modules = sim.modules.count();
  counts->device_bytes = sim.physical.device_bytes();
  counts->pinned_bytes = sim.host_memory.allocated_bytes();
}

EBBTIDE_SIM_EXPORT uint64_t ebbtide_sim_calls(const char* function) {
  return is_forked_child() ? 0 : rules().calls(name_or_all(function));
}

EBBTIDE_SIM_EXPORT size_t ebbtide_sim_log(char* buffer, size_t capacity) {
  if (!is_forked_child()) return rules().copy_log(buffer, capacity);
  if (buffer != nullptr && capacity > 0) buffer[0] = '\0';
  return 0;
}

EBBTIDE_SIM_EXPORT void ebbtide_sim_clear_log(void) {
  if (!is_forked_child()) rules().clear_log();
}
