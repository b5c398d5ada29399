// Memory of several processes: exports, what is kept where it is, and imports.
#include "share/exports.h"

#include <unistd.h>

#include "base/error.h"
#include "share/import.h"
#include "share_fixture.h"

namespace ebbtide::testing {
namespace {

class Files {
 public:
  explicit Files(std::vector<ExportedPiece> exported) {
    for (ExportedPiece& each : exported) pieces_.push_back({each.file.give(), each.size_bytes});
  }
  Files(const Files&) = delete;
  Files& operator=(const Files&) = delete;
  ~Files() {
    for (const ImportedPiece& piece : pieces_) close(piece.file);
  }
  const std::vector<ImportedPiece>& pieces() const { return pieces_; }

 private:
  std::vector<ImportedPiece> pieces_;
};

class ExportTest : public ShareTest {
 protected:
  CUdeviceptr alloc_exportable(uint64_t size_bytes, const std::string& tag = "w") {
    return allocate(core(), core().registry.tag(tag), kExportable, 0, size_bytes);
  }
  CUdeviceptr alloc_filled(uint64_t seed = 1) {
    const CUdeviceptr address = alloc_exportable(4 * kChunk);
    fill(address, 4 * kChunk, seed);
    return address;
  }
};

TEST_F(ExportTest, AnImportIsTheSameMemory) {
  const CUdeviceptr address = alloc_filled();
  const Files files(export_memory(core(), address + kChunk));
  ASSERT_EQ(files.pieces().size(), 1u);
  Import import(core(), 0, files.pieces());
  EXPECT_TRUE(holds(import.address(), 4 * kChunk, 1));
  fill(import.address(), 4 * kChunk, 2);
  EXPECT_TRUE(holds(address, 4 * kChunk, 2));
  import.unmap();
  import.unmap();
  import.map(files.pieces());
  EXPECT_TRUE(holds(import.address(), 4 * kChunk, 2));
  EXPECT_THROW(import.map(files.pieces()), StateError);
  import.unmap();
  end_export(core(), address);
  end_export(core(), address);  // one too many does nothing
  end_export(core(), 4096);
  pause();
  resume();
  EXPECT_TRUE(holds(address, 4 * kChunk, 2));
}

TEST_F(ExportTest, WhatIsExportedLeavesWhenAllHaveLetGo) {
  const CUdeviceptr address = alloc_filled();
  {
    const Files first(export_memory(core(), address)), second(export_memory(core(), address));
  }
  for (const OperationKind kind : {OperationKind::kPause, OperationKind::kDemote})
    EXPECT_THROW(claim(kind), StateError);
  end_export(core(), address);
  try {
    pause();
    ADD_FAILURE();
  } catch (const StateError& error) {
    EXPECT_EQ(error.cause, Cause::kLent);
  }
  EXPECT_FALSE(is_partial("w"));
  end_export(core(), address);
  EXPECT_EQ(pause().totals().bytes, 4 * kChunk);
}

TEST_F(ExportTest, BorrowersAreAskedOnceAllIsReady) {
  const CUdeviceptr address = alloc_filled();
  {
    const Files files(export_memory(core(), address));
  }
  bool may_move = false;
  int asked = 0;
  const auto pause_asking = [&] {
    OperationRequest request;
    request.before_moving = [&] {
      ++asked;
      EXPECT_THROW(export_memory(core(), address), BusyError);
      return may_move;
    };
    return Operation::claim(core(), OperationKind::kPause, std::move(request))->commit().front();
  };
  EXPECT_THROW(pause_asking(), StateError);
  EXPECT_EQ(asked, 1);
  EXPECT_TRUE(holds(address, 4 * kChunk, 1));
  EXPECT_FALSE(is_partial("w"));
  refuse_moves(core(), address, true);
  EXPECT_THROW(pause_asking(), StateError);
  EXPECT_EQ(asked, 1) << "who refuses is not asked";
  refuse_moves(core(), address, false);
  may_move = true;
  EXPECT_EQ(pause_asking().totals().bytes, 4 * kChunk);
  resume();
  EXPECT_TRUE(holds(address, 4 * kChunk, 1));
}

TEST_F(ExportTest, MemoryOutlivesItsExporter) {
  const CUdeviceptr address = alloc_filled();
  Import import = [&] {
    const Files files(export_memory(core(), address));
    return Import(core(), 0, files.pieces());
  }();
  deallocate(core(), address);
  EXPECT_TRUE(holds(import.address(), 4 * kChunk, 1));
  import.unmap();
}

TEST_F(ExportTest, WhatCanNotBeExported) {
  EXPECT_THROW(export_memory(core(), 4096), InvalidArgument);
  EXPECT_THROW(export_memory(core(), alloc("plain", kChunk)), StateError);
  const CUdeviceptr address = alloc_filled();
  pause({"w"});
  EXPECT_THROW(export_memory(core(), address), StateError);
  resume({"w"});
  claim(OperationKind::kDemote, {"w"})->commit();
  EXPECT_THROW(export_memory(core(), address), StateError);
}

TEST_F(ExportTest, WhatCanNotBeImported) {
  EXPECT_THROW(Import(core(), 0, {}), InvalidArgument);
  EXPECT_THROW(Import(core(), 0, {{0, 0}}), InvalidArgument);
  EXPECT_THROW(Import(core(), 0, {{0, UINT64_MAX}, {0, 2}}), InvalidArgument);
  EXPECT_THROW(Import(core(), 0, {{-1, kChunk}}), DriverError);
  const CUdeviceptr address = alloc_filled();
  const Files files(export_memory(core(), address));
  EXPECT_THROW(Import(core(), 0, {{files.pieces()[0].file, kChunk}}), DriverError) << "another size";
  Import import(core(), 0, files.pieces());
  import.unmap();
  EXPECT_THROW(import.map({{files.pieces()[0].file, kChunk}}), InvalidArgument);
}

TEST_F(ExportTest, Invariant9_AnImportIsNotGivenUpDuringACapture) {
  const CUdeviceptr address = alloc_filled();
  const Files files(export_memory(core(), address));
  Import import(core(), 0, files.pieces());
  core().capture_gate.begin_capture();
  EXPECT_THROW(import.unmap(), CaptureError);
  EXPECT_TRUE(import.is_mapped() && holds(import.address(), 4 * kChunk, 1));
  core().capture_gate.end_capture();
  import.unmap();
}

TEST_F(ExportTest, Invariant5_AnImportIsUnmappedOnceTheDeviceIsIdle) {
  const CUdeviceptr address = alloc_filled();
  const Files files(export_memory(core(), address));
  Import import(core(), 0, files.pieces());
  sim().clear_log();
  import.unmap();
  const auto names = logged_calls();
  const auto idle = std::find(names.begin(), names.end(), "cuCtxSynchronize");
  ASSERT_NE(idle, names.end());
  EXPECT_EQ(std::find(names.begin(), idle, "cuMemUnmap"), idle);
  EXPECT_NE(std::find(idle, names.end(), "cuMemUnmap"), names.end());
}

// Its own handle also after a resume, so that an importer gets none of the neighbours.
TEST_F(ExportTest, ExportableMemorySharesNoHandle) {
  const CUdeviceptr first = alloc_exportable(kChunk), second = alloc_exportable(kChunk);
  pause();
  resume();
  EXPECT_FALSE(is_any_shared({first}) || is_any_shared({second}));
  const Files files(export_memory(core(), first));
  EXPECT_EQ(files.pieces().front().size_bytes, kChunk);
}

TEST_F(ExportTest, InASwapExportableMemoryIsHandedToItsLike) {
  const CUdeviceptr plain = alloc("plain", kChunk), address = alloc_exportable(kChunk);
  fill(plain, kChunk, 5);
  pause({"w"});
  swap({"plain"}, {"w"});
  {
    const Files files(export_memory(core(), address));
  }
  end_export(core(), address);
  pause({"w"});
  resume({"plain"});
  EXPECT_TRUE(holds(plain, kChunk, 5));
}

TEST_F(ExportTest, WhatIsKeptStaysThroughEveryOperation) {
  const CUdeviceptr kept = alloc("w", kChunk), other = alloc("w", kChunk);
  fill(kept, kChunk, 3);
  fill(other, kChunk, 4);
  keep(core(), kept);
  EXPECT_EQ(pause().totals().bytes, kChunk);
  EXPECT_TRUE(holds(kept, kChunk, 3));
  resume();
  EXPECT_EQ(claim(OperationKind::kDemote)->commit().front().totals().bytes, kChunk);
  claim(OperationKind::kPromote)->commit();
  end_keep(core(), kept);
  end_keep(core(), kept);
  EXPECT_EQ(pause().totals().bytes, 2 * kChunk);
  resume();
  EXPECT_TRUE(holds(kept, kChunk, 3));
  EXPECT_TRUE(holds(other, kChunk, 4));
}

TEST_F(ExportTest, WhatIsKeptGetsAHandleOfItsOwn) {
  const auto parts = make("w", 3);
  come_back();
  EXPECT_EQ(handles(), 1u);
  keep(core(), parts[1]);
  EXPECT_EQ(pause().totals().bytes, 2 * kChunk);
  resume();
  expect_whole(parts);
  end_keep(core(), parts[1]);
}

TEST_F(ExportTest, AFreedAllocationIsKeptNoMore) {
  const CUdeviceptr kept = alloc("w", kChunk);
  keep(core(), kept);
  deallocate(core(), kept);
  end_keep(core(), kept);
  EXPECT_EQ(core().registry.find(kept), nullptr);
  expect_no_leak();
}

// --- each driver call fails ---

class ExportFaults : public ExportTest {
 protected:
  void sweep(const Act& begin, const Act& act, const Act& check) {
    ExportTest::sweep(begin, act, [&] {
      check();
      expect_no_leak();
    });
  }
  void lend() {
    address_ = alloc_filled();
    files_ = std::make_unique<Files>(export_memory(core(), address_));
  }
  void import() { import_ = std::make_unique<Import>(core(), 0, files_->pieces()); }
  void expect_import_whole() {
    EXPECT_TRUE(holds(import_->address(), 4 * kChunk, 1));
    import_->unmap();
    import_.reset();
    files_.reset();
  }
  CUdeviceptr address_ = 0;
  std::unique_ptr<Files> files_;
  std::unique_ptr<Import> import_;
};

TEST_F(ExportFaults, Invariant3_Exports) {
  sweep([&] { address_ = alloc_filled(); }, [&] { const Files files(export_memory(core(), address_)); },
        [&] {
          end_export(core(), address_);
          pause();
          resume();
          EXPECT_TRUE(holds(address_, 4 * kChunk, 1));
        });
}

TEST_F(ExportFaults, Invariant3_Imports) {
  sweep([&] { lend(); }, [&] { import(); },
        [&] {
          if (import_ == nullptr) import();
          expect_import_whole();
        });
}

TEST_F(ExportFaults, Invariant3_ImportsThatLeaveAndComeBack) {
  const auto leave_and_return = [&] {
    import_->unmap();
    import_->map(files_->pieces());
  };
  sweep(
      [&] {
        lend();
        import();
      },
      leave_and_return,
      [&] {
        leave_and_return();
        expect_import_whole();
      });
}

TEST_F(ExportFaults, Invariant3_Keeps) {
  std::vector<CUdeviceptr> parts;
  sweep(
      [&] {
        parts = make("w", 3);
        come_back();
      },
      [&] { keep(core(), parts[1]); },
      [&] {
        end_keep(core(), parts[1]);
        resume();
        pause();
        resume();
        expect_whole(parts);
      });
}

}  // namespace
}  // namespace ebbtide::testing
