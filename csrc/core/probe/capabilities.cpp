#include "core/probe/capabilities.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "base/error.h"
#include "base/scope_exit.h"
#include "driver/context.h"
#include "driver/device_kernels.h"
#include "driver/stream.h"
#include "store/host_memory.h"
#include "vmm/mapping.h"
#include "vmm/reservation.h"

namespace ebbtide {
namespace {

// find: what it found; it throws where there is no such capability.
template <typename Find>
Capability probe(const char* name, const char* advice, const Find& find) {
  try {
    return {name, true, find(), ""};
  } catch (const std::exception& error) {
    return {name, false, error.what(), advice};
  }
}

// Memory with an address, that a device uses.
struct MappedMemory {
  PhysicalMemory memory;
  Reservation range;
  Mapping mapping;

  MappedMemory(PhysicalMemory made, int device)
      : memory(std::move(made)),
        range(Reservation::reserve(memory.size_bytes())),
        mapping(Mapping::map(range.address(), memory, device)) {}
};

Capability probe_vmm(int device) {
  return probe("vmm",
               "pause and resume need it: free some device memory, update the driver, or check that the device "
               "supports virtual memory management",
               [&] {
                 const size_t bytes = granularity(device);
                 const MappedMemory mapped(PhysicalMemory::create_on_device(bytes, device), device);
                 return "reserved, created, mapped and released " + format_bytes(bytes) + ", the granularity";
               });
}

Capability probe_rdma(int device) {
  const bool is_available = is_rdma_capable(device);
  return {"rdma", is_available,
          is_available ? "handles are made usable by GPUDirect RDMA"
                       : "the device does not offer GPUDirect RDMA on this memory",
          is_available ? "" : "nothing to do unless network cards read this memory directly"};
}

Capability probe_host_memory(int device) {
  if (speaks_hip()) return {"host_memory", false, "not used with HIP: nothing overflows", ""};
  return probe("host_memory",
               "overflow (split and whole) needs it: update the driver; containers: allow the NUMA calls in the "
               "seccomp profile",
               [&] {
                 HostProbe host = probe_host_location(device);
                 if (!host.location) throw StateError(host.found);
                 try {
                   const size_t bytes = granularity(device);
                   const MappedMemory mapped(PhysicalMemory::create_on_host(bytes, *host.location), device);
                 } catch (const std::exception& error) {
                   throw StateError(host.found + "; mapped for the device: " + error.what());
                 }
                 return host.found;
               });
}

// A little pinned memory and a stream to use it on, idle when it goes; where that can't be had the memory is kept.
class Bench {
 public:
  Bench() : staging_(HostMemory::allocate(4 * kKiB)), stream_(Stream::create()) {}
  Bench(const Bench&) = delete;
  Bench& operator=(const Bench&) = delete;
  ~Bench() {
    if (driver().cuStreamSynchronize(stream()) != CUDA_SUCCESS) staging_->abandon();
  }
  CUstream stream() const { return stream_.get(); }
  template <typename T>
  T& memory() {
    return *reinterpret_cast<T*>(staging_->bytes());
  }
  void wait() const { stream_.synchronize(); }

 private:
  std::unique_ptr<HostMemory> staging_;
  Stream stream_;
};

// Whether the kernels on the device do what they do on the processor: fills a block and digests it.
bool kernels_agree(const DeviceKernels& device_kernels, int device) {
  const size_t bytes = round_up(kernels::kBlockBytes, granularity(device));
  const MappedMemory mapped(PhysicalMemory::create_on_device(bytes, device), device);
  const CUdeviceptr address = mapped.range.address();
  constexpr kernels::Digest kSeed{1, 2};
  struct Lists {
    kernels::BlockFill fill;
    uint64_t address;
    kernels::BlockReport report;
  };
  Bench bench;  // after the mapping, which must not go before the stream is idle
  auto& lists = bench.memory<Lists>();
  lists = {{address, {3, 4}}, address, {}};
  device_kernels.fill(bench.stream(), &lists.fill, 1);
  device_kernels.digest(bench.stream(), &lists.address, &lists.report, kSeed, 1);
  bench.wait();
  std::vector<std::byte> block(kernels::kBlockBytes);
  kernels::fill_block(block.data(), lists.fill.value);
  return lists.report == kernels::digest_block(block.data(), kSeed);
}

Capability probe_kernels(int device) {
  return probe("kernels", "blocks that did not change are copied like all others; a newer driver may take the kernels",
               [&] {
                 const DeviceKernels* device_kernels = DeviceKernels::of(device);
                 if (device_kernels == nullptr) throw StateError("the device does not take them");
                 if (!kernels_agree(*device_kernels, device))
                   throw StateError("the device and the processor digest a block differently");
                 return "filled and digested a block as the processor does";
               });
}

Capability probe_stream_wait_value() {
  return probe("stream_wait_value", "nothing to do: streams wait for events instead", [] {
    const Driver& table = driver();
    Bench bench;
    auto& number = bench.memory<uint32_t>();
    number = 0;
    const auto address = reinterpret_cast<CUdeviceptr>(&number);
    // The other way round it would wait for ever.
    check(table.cuStreamWriteValue32(bench.stream(), address, 1, CU_STREAM_WRITE_VALUE_DEFAULT),
          "cuStreamWriteValue32");
    check(table.cuStreamWaitValue32(bench.stream(), address, 1, CU_STREAM_WAIT_VALUE_GEQ), "cuStreamWaitValue32");
    bench.wait();
    return "a stream wrote a number and waited for it";
  });
}

uint64_t free_bytes_now() {
  size_t free_bytes = 0, total_bytes = 0;
  check(driver().cuMemGetInfo(&free_bytes, &total_bytes), "cuMemGetInfo");
  return free_bytes;
}

// The next two are of AMD's drivers (csrc/DESIGN.md, F48, F49, F51). ebbtide is right with whatever they find.

Capability probe_freed_memory(int device) {
  return probe("freed_memory", "free 64 MiB of the device, and ask again", [&] {
    constexpr std::chrono::seconds kPatience{1};
    const size_t bytes = round_up(64 * kMiB, granularity(device));
    const uint64_t before = free_bytes_now();
    CUdeviceptr range = 0;
    check(driver().cuMemAddressReserve(&range, bytes, 0, 0, 0), "cuMemAddressReserve");
    const ScopeExit free_range([&]() noexcept { Undo{Undo::Kind::kAddressFree, range, bytes}.undo(); });
    {
      const PhysicalMemory memory = PhysicalMemory::create_on_device(bytes, device);
      check(driver().cuMemMap(range, bytes, 0, memory.handle(), 0), "cuMemMap");
      Undo{Undo::Kind::kUnmap, range, bytes}.undo();
    }
    const auto start = std::chrono::steady_clock::now();
    while (free_bytes_now() < before) {
      if (std::chrono::steady_clock::now() - start > kPatience)
        return std::string("memory is not free while its addresses are reserved, or later than after a second");
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    const auto passed = std::chrono::steady_clock::now() - start;
    const auto late = std::chrono::duration_cast<std::chrono::milliseconds>(passed).count();
    return late < 2 ? "memory is free at once" : "memory is free after " + std::to_string(late) + " ms";
  });
}

Capability probe_new_memory(int device) {
  return probe("new_memory", "free some device memory, and ask again", [&] {
    const size_t bytes = granularity(device);
    std::vector<unsigned char> found(bytes);
    for (const bool is_first : {true, false}) {
      const MappedMemory mapped(PhysicalMemory::create_on_device(bytes, device), device);
      const CUdeviceptr address = mapped.range.address();
      check(driver().cuMemcpyDtoH(found.data(), address, bytes), "cuMemcpyDtoH");
      if (!is_first) break;
      const Bench bench;
      check(driver().cuMemsetD8Async(address, 0xff, bytes, bench.stream()), "cuMemsetD8Async");
      bench.wait();
    }
    const bool is_clear = std::all_of(found.begin(), found.end(), [](unsigned char byte) { return byte == 0; });
    return is_clear ? "new memory read as zeros" : "new memory shows old bytes: it is cleared where that matters";
  });
}

Capability probe_version() {
  int version = 0;
  check(driver().cuDriverGetVersion(&version), "cuDriverGetVersion");
  const int major = speaks_hip() ? version / 10000000 : version / 1000;
  const int minor = speaks_hip() ? version / 100000 % 100 : version % 1000 / 10;
  const char* const name = speaks_hip() ? "HIP " : "CUDA ";
  return {"driver", true, name + std::to_string(major) + "." + std::to_string(minor), ""};
}

}  // namespace

DeviceFacts describe_device(int device) {
  const ContextScope scope(device);
  DeviceFacts facts;
  char name[128] = {};
  check(driver().cuDeviceGetName(name, sizeof name, device_handle(device)), "cuDeviceGetName");
  facts.name = name;
  CUuuid uuid{};
  check(driver().cuDeviceGetUuid(&uuid, device_handle(device)), "cuDeviceGetUuid");
  std::memcpy(facts.uuid.data(), uuid.bytes, facts.uuid.size());
  facts.compute_capability = device_attribute(device, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR) * 10 +
                             device_attribute(device, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
  size_t free_bytes = 0;
  size_t total_bytes = 0;
  check(driver().cuMemGetInfo(&free_bytes, &total_bytes), "cuMemGetInfo");
  facts.free_bytes = free_bytes;
  facts.total_bytes = total_bytes;
  facts.granularity_bytes = granularity(device);
  return facts;
}

std::vector<Capability> probe_capabilities(int device) {
  const ContextScope scope(device);
  std::vector<Capability> found = {probe_version(),           probe_vmm(device),     probe_rdma(device),
                                   probe_host_memory(device), probe_kernels(device), probe_stream_wait_value()};
  if (speaks_hip()) {
    found.push_back(probe_freed_memory(device));
    found.push_back(probe_new_memory(device));
  }
  return found;
}

}  // namespace ebbtide
