#pragma once

namespace ebbtide::preload {

// dlsym as this library would find it without its own hook: the next one in the chain, which may belong to another
// preloaded library.
using FindSymbol = void* (*)(void* handle, const char* symbol);
FindSymbol next_dlsym() noexcept;

}  // namespace ebbtide::preload
