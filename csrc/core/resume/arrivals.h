#pragma once

#include <memory>
#include <vector>

#include "core/memory/address_ranges.h"
#include "store/delivery.h"

namespace ebbtide {

// Which delivery brings which chunk of a background resume. It outlives the resume: afterwards, everything has arrived.
class Arrivals {
 public:
  // The first `count` pieces of the delivery are in place when the chunk is; none for a chunk that has no bytes to wait
  // for.
  void add(const AddressRange& chunk, std::shared_ptr<const Delivery> delivery, size_t count);
  // Once, after the last chunk.
  void sort();

  // Whether every chunk of the range has arrived. Addresses outside all chunks count as arrived.
  bool have_arrived(const AddressRange& range) const;
  // Lets the stream wait on the device for the ranges' chunks (no range: for all). Throws DriverError; StateError where
  // the driver can't.
  void stream_wait(CUstream stream, const std::vector<AddressRange>& ranges) const;

 private:
  struct Chunk {
    AddressRange range;
    size_t delivery;  // in deliveries_
    size_t count;
  };
  template <typename Visit>
  void visit_chunks(const AddressRange& range, Visit visit) const;

  std::vector<std::shared_ptr<const Delivery>> deliveries_;
  std::vector<Chunk> chunks_;  // by address
};

}  // namespace ebbtide
