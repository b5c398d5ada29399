// Copies of large model support: their bytes, their order among streams, their events, and captures.
#include <set>
#include <thread>

#include "lms_copies_world.h"

namespace ebbtide::testing {
namespace {

TEST_F(CopiesTest, BytesAreThereAfterTheWaitAndComeBack) {
  const CUdeviceptr address = alloc("lms", kChunk);
  std::byte* const piece = memory_->take(0, kChunk);
  uint64_t seed = 0;
  in_each_mode([&] {
    fill(address, kChunk, ++seed);
    const auto out = to_host(piece, address, kChunk, nullptr);
    out->wait();
    EXPECT_TRUE(out->is_done());
    EXPECT_TRUE(holds(reinterpret_cast<CUdeviceptr>(piece), kChunk, seed));
    out->end();
    std::memset(reinterpret_cast<void*>(address), 0, kChunk);
    const auto back = to_device(address, piece, kChunk, nullptr);
    back->end();
    EXPECT_TRUE(holds(address, kChunk, seed));
  });
  memory_->give_back(piece);
}

TEST_F(CopiesTest, PollingGetsThereAndTheBytesAreThereThen) {
  const CUdeviceptr address = alloc("lms", kChunk);
  std::byte* const piece = memory_->take(0, kChunk);
  uint64_t seed = 0;
  in_each_mode([&] {
    fill(address, kChunk, ++seed);
    const auto out = to_host(piece, address, kChunk, nullptr);
    int polls = 0;
    while (!out->is_done()) ASSERT_LT(++polls, 100);
    EXPECT_TRUE(holds(reinterpret_cast<CUdeviceptr>(piece), kChunk, seed));
    const uint64_t queries = sim().calls("cuEventQuery");
    EXPECT_TRUE(out->is_done());
    EXPECT_EQ(sim().calls("cuEventQuery"), queries) << "a complete copy stays complete";
    out->end();
  });
  const auto late = to_host(piece, address, kChunk, nullptr);
  EXPECT_FALSE(late->is_done()) << "its work is queued still";
  late->end();
}

TEST_F(CopiesTest, BeginsAfterQueuedWorkInTheCallersStream) {
  const CUdeviceptr address = alloc("lms", kChunk);
  std::byte* const piece = memory_->take(0, kChunk);
  const Stream stream = Stream::create();
  CUstream blocking = nullptr;
  check(driver().cuStreamCreate(&blocking, CU_STREAM_DEFAULT), "cuStreamCreate");
  unsigned char value = 0;
  in_each_mode([&] {
    set(address, ++value, kChunk, stream.get());
    to_host(piece, address, kChunk, stream.get())->end();
    EXPECT_TRUE(is_all(piece, value, kChunk));
    // The legacy stream comes after blocking ones.
    set(address, ++value, kChunk, blocking);
    to_host(piece, address, kChunk, nullptr)->end();
    EXPECT_TRUE(is_all(piece, value, kChunk));
    // Later work does not hold the copy up, and does not change the bytes that it reads once it is ordered.
    set(address, ++value, kChunk, stream.get());
    const auto copy = to_host(piece, address, kChunk, stream.get());
    copy->order_before(stream.get());
    set(address, 255, kChunk, stream.get());
    stream.synchronize();
    EXPECT_TRUE(is_all(piece, value, kChunk)) << "the later write came before the copy";
    EXPECT_TRUE(is_all_on_device(address, 255, kChunk));
    copy->end();
  });
  check(driver().cuStreamDestroy(blocking), "cuStreamDestroy");
}

TEST_F(CopiesTest, LaterWorkOfAnOrderedStreamReadsWhatWasCopied) {
  const CUdeviceptr address = alloc("lms", 2 * kChunk);
  const CUdeviceptr elsewhere = address + kChunk;
  std::byte* const piece = memory_->take(0, kChunk);
  const Stream stream = Stream::create();
  unsigned char value = 100;
  in_each_mode([&] {
    for (CUstream reader : {stream.get(), static_cast<CUstream>(nullptr)}) {
      std::memset(piece, ++value, kChunk);
      const auto copy = to_device(address, piece, kChunk, stream.get());
      copy->order_before(reader);
      check(driver().cuMemcpyDtoDAsync(elsewhere, address, kChunk, reader), "cuMemcpyDtoDAsync");
      const uint64_t waits = sim().calls("cuEventSynchronize");
      check(driver().cuStreamSynchronize(reader), "cuStreamSynchronize");
      EXPECT_EQ(sim().calls("cuEventSynchronize"), waits) << "the thread never waited for the copy";
      EXPECT_TRUE(is_all_on_device(elsewhere, value, kChunk));
      copy->end();
    }
  });
}

TEST_F(CopiesTest, ThereAndBackBehindOneAnotherWithoutAWait) {
  const CUdeviceptr address = alloc("lms", kChunk);
  std::byte* const piece = memory_->take(0, kChunk);
  const Stream stream = Stream::create();
  in_each_mode([&] {
    set(address, 7, kChunk, stream.get());
    const auto out = to_host(piece, address, kChunk, stream.get());
    out->order_before(stream.get());
    set(address, 8, kChunk, stream.get());
    const auto back = to_device(address, piece, kChunk, stream.get());  // after the copy, by way of `stream`
    back->order_before(stream.get());
    stream.synchronize();
    EXPECT_TRUE(is_all_on_device(address, 7, kChunk));
    back->end();
    out->end();
  });
}

TEST_F(CopiesTest, PageableMemoryIsCopiedAsWell) {
  const CUdeviceptr address = alloc("lms", kChunk);
  std::vector<std::byte> bytes(kChunk, std::byte{9});
  in_each_mode([&] {
    to_device(address, bytes.data(), kChunk, nullptr)->end();
    std::vector<std::byte> copied(kChunk);
    to_host(copied.data(), address, kChunk, nullptr)->end();
    EXPECT_EQ(copied, bytes);
  });
}

TEST_F(CopiesTest, ManyAreUnderWayAndTheirEventsAreUsedAgain) {
  constexpr size_t kCount = 300;
  constexpr size_t kBytes = 4096;
  const CUdeviceptr address = alloc("lms", kChunk);
  std::byte* const piece = memory_->take(0, kCount * kBytes);
  uint64_t made = 0;
  const auto before = Live::now();
  in_each_mode([&] {
    std::vector<std::unique_ptr<lms::Copy>> under_way;
    for (size_t index = 0; index < kCount; ++index) {
      set(address + index * kBytes, static_cast<unsigned char>(index + made), kBytes, nullptr);
      under_way.push_back(to_host(piece + index * kBytes, address + index * kBytes, kBytes, nullptr));
    }
    for (size_t index = kCount; index-- > 0;) {
      if (index % 3 == 0) under_way[index]->wait();
      under_way[index]->end();
      ASSERT_TRUE(is_all(piece + index * kBytes, static_cast<unsigned char>(index + made), kBytes));
    }
    const uint64_t events = sim().calls("cuEventCreate");
    if (made != 0) EXPECT_EQ(events, made) << "no new events in a later round";
    made = events;
  });
  EXPECT_EQ(Live::now().events, before.events + 3 * kCount + 1);
  EXPECT_EQ(Live::now().streams, before.streams + 1);
  copies_.reset();
  EXPECT_EQ(Live::now().events, before.events);
  EXPECT_EQ(Live::now().streams, before.streams);
}

TEST_F(CopiesTest, ThreadsCopyBesideOneAnother) {
  constexpr int kThreads = 6;
  constexpr size_t kBytes = 64 * kKiB;
  const CUdeviceptr address = alloc("lms", kThreads * kChunk);
  sim().set_async(EBBTIDE_SIM_RANDOM, 4);
  std::vector<std::thread> threads;
  for (int thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&, thread] {
      const ContextScope scope(0);
      const Stream stream = Stream::create();
      const CUdeviceptr own = address + static_cast<size_t>(thread) * kChunk;
      for (int round = 0; round < 40; ++round) {
        const auto value = static_cast<unsigned char>(thread * 40 + round);
        std::byte* const piece = memory_->take(0, kBytes);
        set(own, value, kBytes, stream.get());
        const auto out = to_host(piece, own, kBytes, stream.get());
        while (round % 2 == 0 && !out->is_done()) std::this_thread::yield();
        out->end();
        EXPECT_TRUE(is_all(piece, value, kBytes));
        const auto back = to_device(own + kBytes, piece, kBytes, stream.get());
        back->order_before(stream.get());
        stream.synchronize();
        EXPECT_TRUE(is_all_on_device(own + kBytes, value, kBytes));
        back->end();
        memory_->give_back(piece);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(memory_->usage().used_bytes, 0u);
}

TEST_F(CopiesTest, DevicesAndDirectionsHaveStreamsOfTheirOwn) {
  const CUdeviceptr first = alloc("lms", kChunk);
  const CUdeviceptr second = alloc("lms", kChunk, BackupKind::kRam, 1);
  std::byte* const piece = memory_->take(1, kChunk);
  const uint64_t before = Live::now().streams;
  fill(second, kChunk, 3);
  check(driver().cuCtxSetCurrent(nullptr), "cuCtxSetCurrent");
  const auto out = to_host(piece, second, kChunk, nullptr, 1);
  out->order_before(nullptr);
  EXPECT_FALSE(out->is_done());
  out->wait();
  CUcontext current = primary_context(0);
  check(driver().cuCtxGetCurrent(&current), "cuCtxGetCurrent");
  EXPECT_EQ(current, is_hip() ? primary_context(0) : nullptr) << "the caller's context is restored";
  out->end();
  check(driver().cuCtxSetCurrent(primary_context(0)), "cuCtxSetCurrent");
  EXPECT_EQ(Live::now().streams, before + 1);
  to_device(first, piece, kChunk, nullptr, 0)->end();
  EXPECT_TRUE(holds(first, kChunk, 3));
  EXPECT_EQ(Live::now().streams, before + 2);
  to_host(piece, second, kChunk, nullptr, 1)->end();
  to_device(first, piece, kChunk, nullptr, 0)->end();
  EXPECT_EQ(Live::now().streams, before + 2);
  EXPECT_THROW(to_host(piece, first, kChunk, nullptr, kDevices), InvalidArgument);
}

TEST_F(CopiesTest, TheDurationIsThatOfTheCopyItself) {
  const CUdeviceptr address = alloc("lms", kChunk);
  std::byte* const piece = memory_->take(0, kChunk);
  const Stream stream = Stream::create();
  // The work before the copy takes 50 ms.
  const auto wait = [](void*) { std::this_thread::sleep_for(std::chrono::milliseconds(50)); };
  check(driver().cuLaunchHostFunc(stream.get(), wait, nullptr), "cuLaunchHostFunc");
  const auto begin = std::chrono::steady_clock::now();
  const double seconds = to_host(piece, address, kChunk, stream.get())->end().copying;
  const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - begin;
  EXPECT_GT(seconds, 0);
  EXPECT_GT(waited.count(), 0.05);
  EXPECT_LT(seconds, waited.count() - 0.045);
  sim().fail("cuEventElapsedTime", 1, 999, 1);
  EXPECT_EQ(to_host(piece, address, kChunk, stream.get())->end().copying, 0) << "and no failure: the bytes are there";
}

TEST_F(CopiesTest, TheWaitOfAStreamIsTimedApart) {
  const CUdeviceptr address = alloc("lms", kChunk);
  std::byte* const piece = memory_->take(0, kChunk);
  const Stream busy = Stream::create(), idle = Stream::create();
  const auto work_in = [](const Stream& stream) {
    const auto work = [](void*) { std::this_thread::sleep_for(std::chrono::milliseconds(50)); };
    check(driver().cuLaunchHostFunc(stream.get(), work, nullptr), "cuLaunchHostFunc");
  };
  work_in(busy);
  const auto awaited = to_host(piece, address, kChunk, busy.get());
  awaited->order_before(idle.get());
  idle.synchronize();
  const lms::CopySeconds seconds = awaited->end();
  EXPECT_GT(seconds.waited, 0.045);
  EXPECT_LT(seconds.copying, 0.045);

  const auto complete = to_host(piece, address, kChunk, nullptr);
  complete->wait();
  complete->order_before(idle.get());
  EXPECT_EQ(complete->end().waited, 0);

  work_in(busy);  // which has not come to the copy when that is complete
  const auto early = to_host(piece, address, kChunk, nullptr);
  early->order_before(busy.get());
  early->wait();
  EXPECT_EQ(early->end().waited, 0);
  busy.synchronize();

  EXPECT_EQ(to_host(piece, address, kChunk, nullptr)->end().waited, 0) << "no stream waits";
}

TEST_F(CopiesTest, AStreamWhoseWaitCantBeTimedWaitsAllTheSame) {
  const CUdeviceptr address = alloc("lms", kChunk);
  const CUdeviceptr elsewhere = alloc("lms", kChunk);
  std::byte* const piece = memory_->take(0, kChunk);
  const Stream stream = Stream::create();
  std::memset(piece, 7, kChunk);
  const auto copy = to_device(address, piece, kChunk, nullptr);
  sim().fail("cuEventRecord", 1, 400, 1);
  copy->order_before(stream.get());
  check(driver().cuMemcpyDtoDAsync(elsewhere, address, kChunk, stream.get()), "cuMemcpyDtoDAsync");
  stream.synchronize();
  EXPECT_TRUE(is_all_on_device(elsewhere, 7, kChunk));
  EXPECT_EQ(copy->end().waited, 0);
}

class CopiesAndCaptures : public CopiesTest {
 protected:
  void begin_capture(CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_GLOBAL) {
    check(driver().cuStreamBeginCapture(capturing_.get(), mode), "cuStreamBeginCapture");
  }
  // Fails if anything has broken the capture.
  void end_capture() {
    CUgraph graph = nullptr;
    check(driver().cuStreamEndCapture(capturing_.get(), &graph), "cuStreamEndCapture");
    check(driver().cuGraphDestroy(graph), "cuGraphDestroy");
  }

  const CUdeviceptr address_ = alloc("lms", kChunk);
  std::byte* const piece_ = memory_->take(0, kChunk);
  const Stream capturing_ = Stream::create();
  const Stream stream_ = Stream::create();
};

TEST_F(CopiesAndCaptures, OneThatIsKnownIsNotPolledButMayBeWaitedBeside) {
  fill(address_, kChunk, 5);
  const auto copy = to_host(piece_, address_, kChunk, nullptr);
  const auto other = to_host(piece_, address_, kChunk, nullptr);
  core().capture_gate.begin_capture();
  begin_capture();
  const uint64_t queries = sim().calls("cuEventQuery");
  for (int poll = 0; poll < 10; ++poll) EXPECT_FALSE(copy->is_done());
  EXPECT_EQ(sim().calls("cuEventQuery"), queries);
  EXPECT_THROW(to_host(piece_, address_, kChunk, nullptr), StateError);
  EXPECT_THROW(to_host(piece_, address_, kChunk, stream_.get()), StateError);
  copy->order_before(stream_.get());
  copy->wait();
  EXPECT_TRUE(copy->is_done()) << "that it is complete is known";
  EXPECT_TRUE(holds(reinterpret_cast<CUdeviceptr>(piece_), kChunk, 5));
  copy->end();
  other->end();
  end_capture();
  core().capture_gate.end_capture();
  to_host(piece_, address_, kChunk, nullptr)->end();
}

TEST_F(CopiesAndCaptures, AStreamThatCapturesIsNeitherRecordedNorMadeToWait) {
  for (const auto mode :
       {CU_STREAM_CAPTURE_MODE_GLOBAL, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL, CU_STREAM_CAPTURE_MODE_RELAXED}) {
    const auto copy = to_host(piece_, address_, kChunk, nullptr);
    begin_capture(mode);
    EXPECT_THROW(to_host(piece_, address_, kChunk, capturing_.get()), StateError);
    EXPECT_THROW(copy->order_before(capturing_.get()), StateError);
    copy->wait();
    EXPECT_THROW(copy->order_before(capturing_.get()), StateError) << "whether or not it is complete";
    copy->end();
    end_capture();
  }
}

TEST_F(CopiesAndCaptures, OneOnABlockingStreamRefusesTheLegacyStream) {
  CUstream blocking = nullptr;
  check(driver().cuStreamCreate(&blocking, CU_STREAM_DEFAULT), "cuStreamCreate");
  const auto copy = to_host(piece_, address_, kChunk, nullptr);
  check(driver().cuStreamBeginCapture(blocking, CU_STREAM_CAPTURE_MODE_RELAXED), "cuStreamBeginCapture");
  EXPECT_THROW(to_host(piece_, address_, kChunk, nullptr), StateError);
  EXPECT_THROW(copy->order_before(nullptr), StateError);
  copy->end();
  CUgraph graph = nullptr;
  check(driver().cuStreamEndCapture(blocking, &graph), "cuStreamEndCapture");
  check(driver().cuGraphDestroy(graph), "cuGraphDestroy");
  check(driver().cuStreamDestroy(blocking), "cuStreamDestroy");
}

// In another thread, in the global mode, unknown to ebbtide.
TEST_F(CopiesAndCaptures, AnUnknownOneStaysWhole) {
  fill(address_, kChunk, 6);
  begin_capture();
  std::thread([&] {
    const ContextScope scope(0);
    const auto copy = to_host(piece_, address_, kChunk, stream_.get());
    while (!copy->is_done()) std::this_thread::yield();
    copy->order_before(stream_.get());
    copy->end();
    to_host(piece_, address_, kChunk, nullptr)->end();
  }).join();
  end_capture();
  EXPECT_TRUE(holds(reinterpret_cast<CUdeviceptr>(piece_), kChunk, 6));
}

}  // namespace
}  // namespace ebbtide::testing
