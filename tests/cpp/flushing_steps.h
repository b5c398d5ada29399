#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <utility>

#include "model_steps.h"
#include "played_step.h"
#include "policy/lms/known_step.h"
#include "policy/lms/step_choice.h"

// Steps that make torch give back its cache, or do not, under the choices of one known step.
namespace ebbtide::policy {

// The first choice evicts, and the last one does not.
class FlushingSteps : public testing::Test {
 protected:
  FlushingSteps() { rules_.limits.has_pages = true; }
  // slowness: how long it takes, as a part of its forecast.
  void note(KnownStep& known, bool had_update, bool has_flushed, const Shortages& shortages = {}, double slowness = 1) {
    rules_.had_update = had_update;
    rules_.has_flushed = has_flushed;
    StepRecord step = known.current().choice().record;
    for (StepEvent& event : step.events) event.seconds *= slowness;
    note(known, std::move(step), shortages);
  }
  void note_larger(KnownStep& known) {
    StepRecord step = known.current().choice().record;
    for (RecordedStorage& storage : step.storages) storage.size_bytes *= 2;
    note(known, std::move(step));
  }
  // One that has all events of the current choice.
  void note(KnownStep& known, StepRecord step, const Shortages& shortages = {}) const {
    MatchedEvents all;
    for (uint32_t event = 0; event < step.events.size(); ++event)
      if (has_anchor(step.events[event].kind) && step.events[event].index != kNone) all.emplace_back(event, event);
    known.note(std::move(step), all, shortages, rules_);
  }
  KnownStep settled_without_evictions() {
    KnownStep known = known_that_evicts_nothing();
    for (int step = 0; step < 4; ++step) note(known, kBetweenSteps, false);
    EXPECT_TRUE(known.is_settled() && known.current().plan().evicts_nothing());
    return known;
  }
  void give_back(KnownStep& known, bool had_update = kBetweenSteps) {
    for (int step = 0; step < 64 && !known.must_give_back(); ++step) note(known, kBetweenSteps, true);
    EXPECT_TRUE(known.must_give_back());
    rules_.was_disturbed = true;  // it maps anew what it uses
    note(known, had_update, true);
    rules_.was_disturbed = false;
  }
  void flush_in_vain(KnownStep& known) {
    give_back(known);
    note(known, kBetweenSteps, true);
  }
  static size_t recomputed(const KnownStep& known) { return known.current().choice().recomputed.size(); }
  size_t recomputed_within(uint64_t limit_bytes) const {
    StepRules rules = rules_;
    rules.limits.limit_bytes = limit_bytes;
    return recomputed_least(KnownStep(record_, rules));
  }
  // By the choice that evicts nothing.
  static size_t recomputed_least(const KnownStep& known) {
    for (const TriedChoice& tried : known.choices())
      if (tried.plan().evicts_nothing()) return tried.choice().recomputed.size();
    ADD_FAILURE() << "there is none";
    return 0;
  }
  KnownStep known_that_evicts_nothing() {
    KnownStep known(record_, rules_);
    EXPECT_EQ(known.choices().size(), 2u);
    for (int step = 0; step < 2; ++step) {
      EXPECT_FALSE(known.current().plan().evicts_nothing());
      note(known, kBetweenSteps, true, {}, 2);
      EXPECT_FALSE(known.must_give_back()) << "the next step would need to flush as well";
    }
    EXPECT_TRUE(known.current().plan().evicts_nothing());
    return known;
  }

  static constexpr bool kBetweenSteps = true, kBetweenMicroBatches = false;
  const StepRecord record_ = transformer_step(1280, 12 * 1024);
  StepRules rules_ = rules_at(at_limit(part_of_peak(record_, 84)));
};

}  // namespace ebbtide::policy
