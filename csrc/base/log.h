#pragma once

#include <initializer_list>
#include <string_view>

namespace ebbtide {

enum class LogLevel { kError = 0, kWarning = 1, kInfo = 2, kDebug = 3 };

// Writes one line to stderr, "ebbtide: <message>", if EBBTIDE_LOG (error, warning, info, debug; default warning) admits
// its level. Errors that can't be thrown are reported here: those of destructors and of callbacks from other libraries.
// Never throws.
//
// The pieces are joined on the stack, without allocating memory. The message is cut at 1,000 bytes.
void log_line(LogLevel level, std::initializer_list<std::string_view> pieces) noexcept;

}  // namespace ebbtide
