#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "core/saver.h"

namespace ebbtide {

// Which chunks of an asynchronous resume have arrived, in words of pinned memory, so that streams can wait for them on the device.
//
// A word holds the number of the last resume that it told of, and those numbers rise; a wait is for at least that number. So words can be used again while old waits are still queued: these
// are satisfied for ever. Words are never given back to the system (4 bytes a chunk).
class Arrivals {
 public:
  // Room for so many chunks. Throws DriverError.
  Arrivals(int device, size_t capacity);
  Arrivals(const Arrivals&) = delete;
  Arrivals& operator=(const Arrivals&) = delete;
  ~Arrivals();

  // A chunk that will arrive; its number. Not beyond the capacity.
  size_t expect(CUdeviceptr address, size_t size_bytes);
  void arrive(size_t number) noexcept;
  // Nothing more will come, whether it arrived or not: whoever waits goes on.
  void end() noexcept;

  // Whether every chunk of the range that was expected has arrived.
  bool has_arrived(const AddressRange& range) const;
  // Lets the stream wait for the range's chunks, or for the end. Throws DriverError; StateError where the driver can't.
  void stream_wait(CUstream stream, const AddressRange& range) const;
  void stream_wait_for_end(CUstream stream) const;
  static bool can_stream_wait();

  // For tests that reset the simulator: the words are gone. None may be in use.
  static void forget_all() noexcept;

 private:
  struct Expected {
    CUdeviceptr address;
    size_t size_bytes;
  };
  struct Board {
    uint32_t* words;
    size_t capacity;
  };
  static std::vector<Board>& idle_boards();
  static std::mutex& boards_mutex();
  void wait_for_word(CUstream stream, size_t index) const;
  void set(size_t index) noexcept;

  const uint32_t number_;  // of this resume
  Board board_;
  std::vector<Expected> expected_;  // by number; word number + 1 tells of it, word 0 of the end
};

}  // namespace ebbtide
