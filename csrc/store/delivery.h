#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "driver/device_kernels.h"
#include "store/copy_engine.h"
#include "store/delivery_board.h"
#include "store/store.h"

// A copy to the device that makes no driver calls once it has begun. One kernel does all of it, in the order of its
// pieces; threads fill the slots that it reads, and follow its progress through words of pinned memory. So streams may
// wait for it: a driver call that waits for the device (loading a kernel, cudaFree) waits for the delivery, but the
// delivery never waits for such a call.
namespace ebbtide {

class Delivery {
 public:
  // Whether the device's kernels can access host memory at its host addresses, and may run without a time limit.
  static bool is_possible(int device);

  // Throw only if host memory is short. Bytes arrive in the order of the additions. The engine lives until finish().
  explicit Delivery(CopyEngine& engine, bool has_files = false) : engine_(engine), has_files_(has_files) {}
  Delivery(const Delivery&) = delete;
  Delivery& operator=(const Delivery&) = delete;
  // finish() must have been called if launch() was.
  ~Delivery();
  // The number of additions to expect.
  void reserve(size_t size_bytes);
  // size_bytes: a multiple of kernels::kPieceUnit, as is everything here.
  void add_copy(CUdeviceptr target, Backup& backup, size_t offset, size_t size_bytes);
  void add_value(CUdeviceptr target, kernels::Value value, size_t size_bytes);
  size_t piece_count() const { return sources_.size(); }
  size_t staged_bytes() const { return staged_bytes_; }

  // The pinned memory that prepare() needs for its table.
  size_t table_bytes() const { return pieces_.size() * sizeof(kernels::Piece); }
  // Called once, after everything has been added. Takes the resources that it needs beside the ring, and begins to fill
  // the ring. table must not change until finish(). Throws DriverError, and StateError if the system starts no thread.
  void prepare(std::byte* table, int threads);
  // Called once, after prepare(). Queues everything on the engine's side stream. The device's context is current.
  // Throws DriverError, with nothing queued.
  void launch(const DeviceKernels& kernels);

  // The number of pieces in place before the first one that is not. By any thread.
  size_t arrived() const;
  // Waits until this many have arrived, or something failed, which finish() throws.
  void wait_for(size_t count);
  // Waits for the end, successful or not; after it, nothing uses the engine. Called by one thread. Each call throws
  // the failure: the store's error, DriverError, or StateError if the delivery was cancelled before all bytes had
  // arrived.
  void finish();
  // Cancels the rest. By any thread.
  void cancel() noexcept;

  // Makes the stream wait on the device for the first count pieces, or for the end. Any thread may call it after the
  // launch. Throws DriverError: with CUDA_ERROR_NOT_SUPPORTED where the device has no such waits.
  void stream_wait(CUstream stream, size_t count) const;

 private:
  struct Source {
    Backup* backup;  // null: a value
    size_t offset;
  };
  size_t slot_bytes() const;
  uint32_t lane_slots() const;
  void start_threads(int threads);
  void feed() noexcept;
  void fill_slot(size_t index);
  bool await_slot(uint32_t lane, uint32_t number) const;
  void fail(std::exception_ptr error) noexcept;
  void ask_driver(size_t count) noexcept;
  std::exception_ptr try_synchronize() noexcept;
  void drain() noexcept;

  CopyEngine& engine_;
  const bool has_files_;  // some of it comes from files
  std::vector<kernels::Piece> pieces_;
  std::vector<Source> sources_;  // parallel to pieces_
  size_t staged_bytes_ = 0;
  std::unique_ptr<DeliveryBoard> board_;
  std::byte* table_ = nullptr;
  bool has_ended_ = false;
  std::atomic<size_t> next_{0};
  std::atomic<bool> is_given_up_{false};
  std::atomic<bool> has_failed_{false};
  mutable std::mutex mutex_;
  std::exception_ptr failure_;
  std::jthread threads_;
};

}  // namespace ebbtide
