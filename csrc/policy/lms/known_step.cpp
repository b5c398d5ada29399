#include "policy/lms/known_step.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <utility>

namespace ebbtide::policy {
namespace {

// A plan whose times or rates are off by more than this part is made anew.
constexpr double kTolerance = 0.25;
constexpr double kFasterTolerance = 0.15;
// A limit that differs, or a demand that grows, by more than this part of the limit asks for another choice, not only
// for another plan.
constexpr uint64_t kOtherLimitPart = 8;
constexpr size_t kStepsOfChoice = 2, kStepsOfFastest = 4;  // they are measured in
// By so much of the limit the margin grows at most in a step where memory has pages: a step that evicts on demand finds
// free memory in more pieces than later ones will.
constexpr uint64_t kMostPagesPart = 16;
// In pages, a plan that evicts nothing leaves this part of the limit free, one in so many.
constexpr uint64_t kUnmovedPart = 32;
// Choices are made for so much less than the limit where giving back the cache did not help for long, at most so often:
// what torch caches for other streams is lost to the blocks', and large tensors find no place between others.
constexpr uint64_t kRoomPart = 16;
constexpr uint64_t kMostRooms = 2;

bool has_moved(double before, double now) { return !(std::abs(now - before) <= kTolerance * before); }

double duration(const StepRecord& record) {
  return record.events.empty() ? 0 : record.events.back().seconds - record.events.front().seconds;
}

size_t count_anchors(const StepRecord& record) {
  return static_cast<size_t>(std::count_if(record.events.begin(), record.events.end(),
                                           [](const StepEvent& event) { return has_anchor(event.kind); }));
}

bool moves_nothing(const StepChoice& choice) { return choice.plan.evicts_nothing(); }

// Of what is on the device where nothing leaves in the step, without states that lie on the host.
uint64_t peak_bytes(const StepRecord& record, uint64_t state_bytes) {
  uint64_t most_bytes = 0;
  for (const StepEvent& event : record.events) most_bytes = std::max<uint64_t>(most_bytes, event.demand_bytes);
  return most_bytes - std::min(most_bytes, state_bytes);
}

}  // namespace

// What the program has made in the step, and after it, and keeps, such as optimizer states, is part of the demand from
// now on.
KnownStep::KnownStep(StepRecord record, const StepRules& rules, uint64_t useless_bytes) : whole_(std::move(record)) {
  use_typical_times(whole_);
  const uint64_t before_bytes = whole_.events.empty() ? 0 : whole_.events.front().demand_bytes;
  const uint64_t grown_bytes = rules.demand_bytes - std::min(rules.demand_bytes, before_bytes);
  for (StepEvent& event : whole_.events) event.demand_bytes += std::min(grown_bytes, kMostDemandBytes);
  if (rules.limits.has_pages)
    margin_.note(std::min(useless_bytes, rules.limits.limit_bytes / kMostPagesPart), rules.limits.limit_bytes);
  choose(rules);
}

StepLimits KnownStep::with_margin(StepLimits limits) const {
  if (limits.has_pages) {
    const uint64_t spare_bytes = limits.limit_bytes / kUnmovedPart + unmoved_margin_.bytes(limits.limit_bytes);
    limits.unmoved_bytes = limits.limit_bytes - spare_bytes;
  }
  limits.limit_bytes -= margin_.bytes(limits.limit_bytes);
  return limits;
}

uint64_t KnownStep::margin_within(const StepLimits& limits) const {
  return limits.limit_bytes - planned_limit(with_margin(limits), current().plan());
}

uint64_t KnownStep::limit_without_evictions(uint64_t demand_bytes) const {
  const uint64_t limit_bytes = demand_bytes + margin_.bytes(limits_.limit_bytes);
  if (!limits_.has_pages) return limit_bytes;
  const uint64_t left_bytes = demand_bytes + unmoved_margin_.bytes(limits_.limit_bytes);
  return std::min(limit_bytes, left_bytes + left_bytes / (kUnmovedPart - 1) + 1);
}

// So many bytes were missing in a step, beside those that its plan left free. Returns whether plans will leave others.
bool KnownStep::learn_margin(uint64_t missing_bytes, const StepLimits& held) {
  const bool evicts = !current().plan().evicts_nothing();
  if (limits_.has_pages) missing_bytes = std::min(missing_bytes, limits_.limit_bytes / kMostPagesPart);
  const uint64_t needed_bytes = missing_bytes == 0 ? 0 : missing_bytes + margin_within(held);
  const auto learn = [&](Margin& margin, uint64_t more_bytes) {
    const uint64_t known_bytes = margin.bytes(held.limit_bytes) + more_bytes;
    return margin.note(needed_bytes - std::min(needed_bytes, known_bytes), limits_.limit_bytes);
  };
  const bool has_other = learn(margin_, 0);
  if (!limits_.has_pages || evicts) return has_other;
  return learn(unmoved_margin_, held.limit_bytes / kUnmovedPart) || has_other;
}

std::vector<uint64_t> KnownStep::candidates() const {
  const auto recomputes = [](const TriedChoice& tried) { return !tried.choice().recomputed.empty(); };
  std::vector<uint64_t> modules;
  if (std::none_of(choices_.begin(), choices_.end(), recomputes)) return modules;
  for (const Block& block : blocks_for(rules_)) modules.push_back(whole_.calls[block.call].module);
  return modules;
}

// With a plan that was given those that it names, also inside others that might be blocks.
std::vector<Block> KnownStep::blocks_for(const StepRules& rules) const {
  if (!rules.may_recompute) return {};
  if (rules.forced == nullptr) return find_blocks(whole_, rules.forbidden);
  std::unordered_set<uint64_t> named, others = rules.forbidden;
  for (const ModuleCall& call : whole_.calls)
    if (rules.forced->recomputed.contains(call.name)) named.insert(call.module);
  for (const ModuleCall& call : whole_.calls)
    if (!named.contains(call.module)) others.insert(call.module);
  return find_blocks(whole_, others);
}

std::vector<StepChoice> KnownStep::choices_for(const StepRules& rules, uint64_t rooms) const {
  const std::vector<Block> blocks = blocks_for(rules);
  if (rules.forced != nullptr) return {choose_forced(whole_, with_margin(rules.limits), blocks, *rules.forced)};
  StepLimits limits = rules.limits;
  limits.limit_bytes -= limits.limit_bytes / kRoomPart * rooms;
  return choose_steps(whole_, with_margin(limits), blocks);
}

StepChoice KnownStep::choice_within(uint64_t limit_bytes) const {
  StepRules rules = rules_;
  rules.limits.limit_bytes = limit_bytes;
  rules.forced.reset();
  return choices_for(rules, 0).front();
}

void KnownStep::choose(const StepRules& rules) { choose(rules, !choices_.empty() && has_changed(rules)); }

// are_other: what holds has changed since the last time, so that room may not be needed any more.
void KnownStep::choose(const StepRules& rules, bool are_other) {
  if (!rules.limits.has_pages || are_other) rooms_ = 0;
  rules_ = rules;
  limits_ = rules.limits;
  chosen_seconds_ = duration(whole_);
  choices_.clear();
  if (!must_give_back()) flushes_ = {};  // others find other islands, but none where all is given back before them
  std::vector<StepChoice> found = choices_for(rules, rooms_);
  while (rooms_ > 0 && std::none_of(found.begin(), found.end(), moves_nothing)) found = choices_for(rules, --rooms_);
  // What evicts for the room alone would be the choice from before, without evictions, as soon as it is planned again.
  if (rooms_ > 0) std::erase_if(found, [](const StepChoice& choice) { return !moves_nothing(choice); });
  for (StepChoice& choice : found) choices_.emplace_back(std::move(choice));
  current_ = 0;
  is_settled_ = false;
}

uint32_t KnownStep::distance(const RecordedStorage& first) const {
  if (whole_.storages.empty() || whole_.storages.front().key != first.key) return kNone;
  // In steps of a fifth.
  const auto size_class = [](uint64_t bytes) { return std::lround(4 * std::log2(static_cast<double>(bytes) + 1)); };
  return static_cast<uint32_t>(std::abs(size_class(whole_.storages.front().size_bytes) - size_class(first.size_bytes)));
}

// Whether another choice may be better now.
bool KnownStep::has_changed(const StepRules& rules) const {
  const StepLimits &before = rules_.limits, &now = rules.limits;
  const auto is_other = [&](uint64_t one, uint64_t other) {
    return std::max(one, other) - std::min(one, other) > before.limit_bytes / kOtherLimitPart;
  };
  if (is_other(before.limit_bytes, now.limit_bytes) || is_other(before.state_bytes, now.state_bytes)) return true;
  if (rules.may_recompute != rules_.may_recompute || rules.forced != rules_.forced) return true;
  const std::vector<Block>& recomputed = current().choice().recomputed;
  const auto is_forbidden = [&](const Block& block) {
    return rules.forbidden.contains(whole_.calls[block.call].module);
  };
  return std::any_of(recomputed.begin(), recomputed.end(), is_forbidden);
}

// Whether copies are faster or slower than they were, or computation is faster than it was where the choice was made.
bool KnownStep::has_other_times(const StepRules& rules) const {
  if (retimings_left_ == 0) return false;
  const StepLimits &before = rules_.limits, &now = rules.limits;
  const bool has_copies = !current().plan().departures.empty();
  return (has_copies && (has_moved(before.out_bytes_per_second, now.out_bytes_per_second) ||
                         has_moved(before.in_bytes_per_second, now.in_bytes_per_second))) ||
         duration(whole_) < (1 - kFasterTolerance) * chosen_seconds_;
}

bool KnownStep::note(StepRecord step, const MatchedEvents& matched, const Shortages& shortages, StepRules rules) {
  TriedChoice& tried = choices_[current_];
  const bool is_lesson = !rules.was_disturbed;
  steps_of_another_ = tried.is_of_another(matched) ? steps_of_another_ + 1 : 0;
  const bool is_as_large = tried.is_as_large(step);
  rules.is_timed &= is_as_large;
  const bool are_other = has_changed(rules);
  bool has_other_margin = false, must_choose = are_other;
  advice_ = Flushes::Advice::kKeep;
  bool was_in_vain = false;
  if (rules.limits.has_pages && tried.plan().evicts_nothing()) {  // what evicts makes islands in each step
    advice_ = flushes_.note(rules.has_flushed && is_lesson, rules.had_update);
    was_in_vain = is_as_large && flushes_.was_in_vain();
  } else {
    flushes_ = {};
  }
  if (is_lesson) {
    // A step whose flushes later ones will be spared is the first of its choice, at most.
    const bool is_first_only = advice_ != Flushes::Advice::kKeep && tried.measured_steps() > 0;
    tried.note(step, matched, rules.is_timed && !is_settled_ && !is_first_only ? duration(step) : 0);
    StepLimits held = limits_;  // the limit may have been lower in the step
    held.limit_bytes = std::min(held.limit_bytes, rules.least_limit_bytes);
    const uint64_t missing_bytes =
        advice_ != Flushes::Advice::kKeep ? 0 : tried.unexplained_bytes(matched, shortages, held, margin_within(held));
    has_other_margin = learn_margin(missing_bytes, held);
    // A choice that knew of no margin may not be the best one with it.
    const bool was_short = has_other_margin && missing_bytes > 0 && shortages_left_ > 0;
    if (was_short) --shortages_left_;
    const bool has_more_room = was_in_vain && makes_room(rules);
    must_choose = must_choose || was_short || has_more_room;
    must_choose = learn(std::move(step), matched, rules, must_choose);
  }
  if (must_choose) {
    choose(rules, are_other);
    return true;
  }
  const bool is_compared = is_as_large && rules.are_compared;
  const bool is_new = is_lesson && (is_compared ? rules.is_timed && take_next_choice() : settle());
  TriedChoice& next = choices_[current_];
  const bool has_other_limit =
      limits_.limit_bytes != rules.limits.limit_bytes || limits_.has_pages != rules.limits.has_pages;
  limits_.limit_bytes = rules.limits.limit_bytes;
  limits_.has_pages = rules.limits.has_pages;
  if (!has_other_limit && !has_other_margin && !next.is_outdated(with_margin(limits_))) return is_new;
  next.plan_again(with_margin(limits_));
  return true;
}

// What the step shows of later ones. Returns whether there has to be another choice for those.
bool KnownStep::learn(StepRecord step, const MatchedEvents& matched, const StepRules& rules, bool must_choose) {
  const TriedChoice& tried = choices_[current_];
  const bool is_whole = !tried.has_recomputed(step);
  const bool is_other = is_whole && 2 * matched.size() < count_anchors(step);
  if (rules.is_timed && !is_other) tried.shorten(whole_, step, matched);
  const bool is_retimed = has_other_times(rules);
  const bool has_grown = tried.growth_bytes() > rules.limits.limit_bytes / kOtherLimitPart;
  if (is_retimed) --retimings_left_;
  if (!is_other && !is_retimed && !has_grown && !must_choose) return false;
  if (is_whole && (is_other || has_grown)) {
    whole_ = tried.with_demands(std::move(step), matched);
  } else {
    whole_ = tried.with_growth(std::move(whole_));
  }
  use_typical_times(whole_);
  return true;
}

// Each choice is measured for some steps. The fastest one stays, if it is that after some more.
bool KnownStep::take_next_choice() {
  if (is_settled_ || (choices_.size() > 1 && current().measured_steps() < kStepsOfChoice)) return false;
  const auto is_unknown = [](const TriedChoice& choice) { return choice.measured_steps() == 0; };
  auto next = std::find_if(choices_.begin(), choices_.end(), is_unknown);
  if (next == choices_.end())
    next = std::min_element(choices_.begin(), choices_.end(), [](const auto& one, const auto& other) {
      return one.measured_seconds() < other.measured_seconds();
    });
  is_settled_ = choices_.size() == 1 || next->measured_steps() >= kStepsOfFastest;
  const auto number = static_cast<size_t>(next - choices_.begin());
  return std::exchange(current_, number) != number;
}

// Whether choices leave more free from now on. Those that evict flush in each step: where none else holds the limit
// then, or a plan was given, all stays.
bool KnownStep::makes_room(const StepRules& rules) {
  const StepChoice& now = current().choice();
  const uint64_t now_bytes =
      peak_bytes(now.recomputed.empty() ? whole_ : with_recomputation(whole_, now.recomputed), now.state_bytes);
  const auto is_roomier = [&](const StepChoice& choice) {
    return moves_nothing(choice) && peak_bytes(choice.record, choice.state_bytes) < now_bytes;
  };
  for (uint64_t rooms = rooms_ + 1; rooms <= kMostRooms; ++rooms) {
    const std::vector<StepChoice> found = choices_for(rules, rooms);
    if (std::none_of(found.begin(), found.end(), is_roomier)) continue;
    rooms_ = rooms;
    return true;
  }
  return false;
}

// Where steps are not alike, or wait for other ranks, times tell nothing, and the choice with the best forecast stays.
// Returns whether it is another one.
bool KnownStep::settle() { return !std::exchange(is_settled_, true) && std::exchange(current_, 0) != 0; }

}  // namespace ebbtide::policy
