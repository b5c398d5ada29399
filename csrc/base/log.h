#pragma once

#include <initializer_list>
#include <string_view>

namespace ebbtide {

enum class LogLevel { kError = 0, kWarning = 1, kInfo = 2 };

// One line on stderr, "ebbtide: <message>", where EBBTIDE_LOG (error, warning, info; default warning) admits its level. The one sink for what can't be
// thrown: destructors, callbacks of other libraries. Never throws.
//
// The message is given in pieces and put together on the stack: nothing here needs memory that may be gone. Cut at 1,000 bytes.
void log_line(LogLevel level, std::initializer_list<std::string_view> pieces) noexcept;

}  // namespace ebbtide
