#include "core_fixture.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>

#include "core/operation/pending.h"
#include "driver/context.h"
#include "driver/device_kernels.h"
#include "driver/peers.h"
#include "store/delivery_board.h"
#include "vmm/deferred_undos.h"
#include "vmm/held_addresses.h"
#include "vmm/late_memory.h"

namespace ebbtide::testing {
namespace {

// The core never releases the contexts that it has retained, but a reset of the simulator forgets them. Retaining them
// again gives the same handles.
void reset_simulator() {
  DeviceKernels::forget_all();
  DeliveryBoard::forget_all();
  forget_host_locations();
  late_memory::forget();
  forget_peers();
  sim().reset();
  sim().set_device_count(kDevices);
  for (int device = 0; device < kDevices; ++device) sim().set_capacity(device, kGiB);
  use_driver("sim");
  check(driver().cuInit(0), "cuInit");
  for (int device = 0; device < kDevices; ++device) {
    primary_context(device);
    granularity(device);
    CUcontext context = nullptr;
    check(driver().cuDevicePrimaryCtxRetain(&context, device), "cuDevicePrimaryCtxRetain");
    ASSERT_EQ(context, primary_context(device));
  }
  // Queried once, as the granularity is, so that every run makes the same calls.
  for (int device = 0; device < kDevices; ++device) peers_of(device, live_devices());
  check(driver().cuCtxSetCurrent(primary_context(0)), "cuCtxSetCurrent");
}

uint64_t word(uint64_t seed, uint64_t index) {
  return (index + 1) * 0x9E3779B97F4A7C15ULL + seed * 0xD1B54A32D192ED03ULL;
}

}  // namespace

Live Live::now() {
  Live live;
  sim().live(&live);
  live.contexts_retained = live.modules = 0;
  // The driver has ranges for mappings alone there; those that the process holds count in their place.
  if (is_hip()) live.reservations += held_addresses::count() - live.mappings;
  return live;
}

std::string Live::text() const {
  return "reservations=" + std::to_string(reservations) + " handles=" + std::to_string(handles) +
         " mappings=" + std::to_string(mappings) + " streams=" + std::to_string(streams) +
         " events=" + std::to_string(events) + " pinned_blocks=" + std::to_string(pinned_blocks) +
         " registered=" + std::to_string(registered_ranges) + " queued=" + std::to_string(queued_items) +
         " device_bytes=" + std::to_string(device_bytes) + " pinned_bytes=" + std::to_string(pinned_bytes);
}

bool operator==(const Live& a, const Live& b) { return a.text() == b.text(); }
std::ostream& operator<<(std::ostream& out, const Live& live) { return out << live.text(); }

CoreTest::CoreTest() {
  ::setenv("EBBTIDE_COPY_THREADS", "1", 1);
  ::setenv("EBBTIDE_LOG", "error", 0);
  restart();
}

// A resume in the background may still be releasing what was freed meanwhile.
void CoreTest::end_core() {
  BackgroundWork::wait_for_all();
  core_.reset();
}

CoreTest::~CoreTest() {
  sim().clear_failures();
  if (core_ != nullptr) expect_right_amounts();
  end_core();
  deferred_undos::retry(true);
}

void CoreTest::restart() {
  sim().clear_failures();
  end_core();
  deferred_undos::retry(true);
  reset_simulator();
  core_ = std::make_unique<Core>();
  core_->budgets.host.set_margin(0);
}

void CoreTest::expect_no_leak() {
  end_core();
  deferred_undos::retry(true);
  EXPECT_EQ(deferred_undos::count(), 0u);
  Live live = Live::now();
  if (may_lose_streams_) live.streams = 0;
  EXPECT_EQ(live, Live{});
  core_ = std::make_unique<Core>();
  core_->budgets.host.set_margin(0);
}

void CoreTest::fill(CUdeviceptr address, size_t size_bytes, uint64_t seed) {
  auto* words = reinterpret_cast<uint64_t*>(address);
  for (size_t index = 0; index < size_bytes / sizeof *words; ++index) words[index] = word(seed, index);
}

::testing::AssertionResult CoreTest::holds(CUdeviceptr address, size_t size_bytes, uint64_t seed) {
  const auto* words = reinterpret_cast<const uint64_t*>(address);
  for (size_t index = 0; index < size_bytes / sizeof *words; ++index) {
    if (words[index] != word(seed, index))
      return ::testing::AssertionFailure() << "word " << index << " differs from what seed " << seed << " wrote";
  }
  return ::testing::AssertionSuccess();
}

void CoreTest::expect_right_amounts() {
  BackgroundWork::wait_for_all();
  core_->registry.visit_tags([](const Tag& tag) {
    std::map<int, Amounts> found;
    for (const auto& [sequence, allocation] : tag.allocations) found[allocation->device] += allocation->amounts();
    for (const auto& [device, on_device] : tag.devices)
      EXPECT_EQ(on_device.amounts, found[device]) << "what is counted of '" << tag.name << "' on device " << device;
  });
}

::testing::AssertionResult CoreTest::is_zero(CUdeviceptr address, size_t size_bytes) {
  const auto* bytes = reinterpret_cast<const unsigned char*>(address);
  // Each byte is like the one before it.
  if (size_bytes == 0 || (bytes[0] == 0 && std::memcmp(bytes, bytes + 1, size_bytes - 1) == 0))
    return ::testing::AssertionSuccess();
  const unsigned char* const found =
      std::find_if(bytes, bytes + size_bytes, [](unsigned char byte) { return byte != 0; });
  return ::testing::AssertionFailure() << "byte " << found - bytes << " is not zero";
}

CUdeviceptr CoreTest::written(CUdeviceptr address, size_t size_bytes) {
  // Not elsewhere: another thread may move it already.
  const char* const quirks = std::getenv("EBBTIDE_SIM_QUIRKS");
  if (quirks != nullptr && std::strcmp(quirks, "none") != 0)
    std::memset(reinterpret_cast<void*>(address), 0, size_bytes);
  return address;
}

CUdeviceptr CoreTest::alloc_chunks(const std::string& tag, const Policy& policy, int device,
                                   const std::vector<uint64_t>& chunk_bytes) {
  const ContextScope scope(device);
  core().peers.refresh(false);
  uint64_t size_bytes = 0;
  for (const uint64_t bytes : chunk_bytes) size_bytes += bytes;
  auto allocation = std::make_shared<Allocation>();
  allocation->tag = &core().registry.tag(tag);
  allocation->policy = policy;
  allocation->device = device;
  DeviceCharge charge = core().budgets.device.charge(device, size_bytes);
  allocation->addresses = std::make_shared<const Addresses>(allocation->tag->arena(device).take(size_bytes));
  uint64_t offset = 0;
  for (const uint64_t bytes : chunk_bytes) {
    Chunk& chunk = allocation->chunks.emplace_back(allocation->chunks.size(), offset, bytes);
    Backing& backing = *chunk.backing;
    backing.charge = charge.split(bytes);
    backing.memory = PhysicalMemory::create_on_device(bytes, device);
    backing.mapping = core().peers.map(allocation->address() + offset, backing.memory, device, core().peers.of(device));
    offset += bytes;
  }
  allocation->sequence = core().registry.next_sequence();
  const CUdeviceptr address = allocation->address();
  core().registry.insert(std::move(allocation));
  return written(address, size_bytes);
}

bool CoreTest::is_partial(const std::string& tag) {
  bool found = false;
  core().registry.visit_tags([&](const Tag& known) { found |= known.name == tag && known.is_partial; });
  return found;
}

uint64_t CoreTest::resident_bytes(const std::string& tag) {
  uint64_t total = 0;
  core().registry.visit_tags([&](const Tag& known) {
    if (known.name != tag) return;
    for (const auto& [sequence, allocation] : known.allocations) total += allocation->resident_bytes();
  });
  return total;
}

size_t CoreTest::allocation_count() {
  size_t count = 0;
  core().registry.visit_tags([&](const Tag& tag) { count += tag.allocations.size(); });
  return count;
}

Amounts CoreTest::amounts(const std::string& tag) {
  Amounts found;
  core().registry.visit_tag(tag, [&](const Tag& known) { found = known.total_now(); });
  return found;
}

::testing::AssertionResult CoreTest::has_every_byte_once(const Amounts& amounts) {
  const uint64_t parts = amounts.resident_bytes + amounts.stored_bytes + amounts.dropped_bytes +
                         amounts.detached_bytes + amounts.trimmed_bytes;
  if (parts == amounts.size_bytes) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << "of " << amounts.size_bytes << " bytes, " << parts << " are counted";
}

}  // namespace ebbtide::testing
