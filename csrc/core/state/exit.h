#pragma once

#include <string>

// The work that the end of the process waits for. Does nothing in a forked child, or where the process ends without
// running exit handlers.
namespace ebbtide {

struct Core;

// EBBTIDE_SUMMARY=1: one line on stderr at exit, about the most device memory that was held, and bytes that went to the
// host. core lives for ever.
void summarize_at_exit(const Core& core);
// Writes such a line: the program, its PID, and this.
void write_summary_line(const std::string& text);

// Work in a background thread. The process does not end in the middle of it, since the driver would go while the
// thread still uses it. Counted as long as it lives, in whichever thread that is.
class BackgroundWork {
 public:
  BackgroundWork() { change(1); }
  BackgroundWork(BackgroundWork&& other) noexcept : is_counted_(other.is_counted_) { other.is_counted_ = false; }
  BackgroundWork& operator=(BackgroundWork&&) = delete;
  ~BackgroundWork() {
    if (is_counted_) change(-1);
  }
  // Until none is under way in this process.
  static void wait_for_all() noexcept;

 private:
  static void change(int by) noexcept;
  bool is_counted_ = true;
};

}  // namespace ebbtide
