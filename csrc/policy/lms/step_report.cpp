#include "policy/lms/step_report.h"

#include <algorithm>
#include <map>

namespace ebbtide::policy {
namespace {

std::vector<ModuleReport> modules_of(const StepChoice& choice) {
  const StepRecord& record = choice.record;
  std::vector<bool> is_saved(record.storages.size(), false), is_evicted(record.storages.size(), false);
  for (const StepEvent& event : record.events)
    if (!is_of_call(event.kind) && event.index < is_saved.size()) is_saved[event.index] = true;
  for (const Departure& departure : choice.plan.departures) is_evicted[departure.storage] = true;
  std::map<uint64_t, ModuleReport> by_module;
  for (size_t index = 0; index < record.storages.size(); ++index) {
    const RecordedStorage& storage = record.storages[index];
    const uint64_t module = storage.call < record.calls.size() ? record.calls[storage.call].module : 0;
    ModuleReport& report = by_module[module];
    report.module = module;
    // What recomputing drops happens in no event.
    uint64_t& bytes = !is_saved[index]    ? report.recomputed_bytes
                      : is_evicted[index] ? report.evicted_bytes
                                          : report.kept_bytes;
    bytes += storage.size_bytes;
  }
  std::vector<ModuleReport> modules;
  for (const auto& [module, report] : by_module) modules.push_back(report);
  return modules;
}

Usage usage_of(const StepRecord& record, const std::vector<uint64_t>& away_bytes) {
  Usage usage;
  double latest = 0;
  for (size_t event = 0; event < record.events.size(); ++event) {
    const uint64_t demand_bytes = record.events[event].demand_bytes;
    const uint64_t away = event < away_bytes.size() ? std::min(away_bytes[event], demand_bytes) : 0;
    latest = std::max(latest, record.events[event].seconds);
    usage.emplace_back(latest, demand_bytes - away);
  }
  return usage;
}

Forecast forecast_of(const StepChoice& choice) {
  return {choice.seconds, choice.moved_bytes, choice.recomputed.size(), choice.state_bytes};
}

std::vector<ChoiceReport> choices_of(const KnownStep& step) {
  std::vector<ChoiceReport> found;
  for (const TriedChoice& tried : step.choices()) {
    const double seconds = tried.measured_steps() == 0 ? 0 : tried.measured_seconds();
    found.push_back({forecast_of(tried.choice()), seconds, &tried == &step.current()});
  }
  return found;
}

}  // namespace

StepReport report_on(const KnownStep& step, uint64_t elsewhere_bytes) {
  const StepChoice& choice = step.current().choice();
  StepReport report{.limit_bytes = step.limits().limit_bytes,
                    .modules = modules_of(choice),
                    .without = usage_of(step.whole(), {}),
                    .with = usage_of(choice.record, step.current().away_bytes()),
                    .choices = choices_of(step)};
  for (auto& [seconds, bytes] : report.with) bytes -= std::min(bytes, choice.state_bytes + elsewhere_bytes);
  for (const StepEvent& event : step.whole().events)
    report.peak_bytes = std::max(report.peak_bytes, step.limit_without_evictions(event.demand_bytes));
  for (uint64_t* bytes : {&report.limit_bytes, &report.peak_bytes}) *bytes -= std::min(*bytes, elsewhere_bytes);
  return report;
}

Forecast forecast_at(const KnownStep& step, uint64_t limit_bytes) {
  return forecast_of(step.choice_within(limit_bytes));
}

}  // namespace ebbtide::policy
