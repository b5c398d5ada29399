#pragma once

namespace ebbtide::preload {

// dlsym as this library would find it if it had no hook of its own: the next one in the chain, which may be another preloaded library's.
using FindSymbol = void* (*)(void* handle, const char* symbol);
FindSymbol next_dlsym() noexcept;

}  // namespace ebbtide::preload
