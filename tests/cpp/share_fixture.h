#pragma once

#include "shared_fixture.h"
#include "sweep.h"

// Memory that other processes may have. Here one process is both sides.
namespace ebbtide::testing {

inline constexpr Policy kExportable{.backup = BackupKind::kRam, .is_exportable = true};

class ShareTest : public SharedTest {
 protected:
  // Runs act, and again with each of its driver calls failing; `check` follows each time.
  void sweep(const Act& begin, const Act& act, const Act& check) {
    begin();
    sim().clear_log();
    act();
    const auto failures = failures_of(logged_calls());
    check();
    EXPECT_FALSE(failures.empty());
    for (const CallFailure& failure : failures) {
      SCOPED_TRACE(failure.text());
      const bool is_for_good = failure.times == 0;
      may_lose_streams_ = is_for_good || failure.name == "cuStreamDestroy";
      restart();
      begin();
      failure.inject();
      fails(act);
      sim().clear_failures();
      check();
    }
    may_lose_streams_ = false;
  }
};

}  // namespace ebbtide::testing
