#include "store/nontemporal_copy.h"

#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace ebbtide {

void copy_nontemporal(std::byte* to, const std::byte* from, size_t size_bytes) noexcept {
#if defined(__SSE2__)
  constexpr size_t kLine = 64;
  const size_t head = (kLine - reinterpret_cast<uintptr_t>(to) % kLine) % kLine;
  if (size_bytes < head + kLine) {
    std::memcpy(to, from, size_bytes);
    return;
  }
  std::memcpy(to, from, head);
  to += head;
  from += head;
  size_bytes -= head;
  for (; size_bytes >= kLine; size_bytes -= kLine, to += kLine, from += kLine) {
    const auto* source = reinterpret_cast<const __m128i*>(from);
    auto* target = reinterpret_cast<__m128i*>(to);
    const __m128i a = _mm_loadu_si128(source);
    const __m128i b = _mm_loadu_si128(source + 1);
    const __m128i c = _mm_loadu_si128(source + 2);
    const __m128i d = _mm_loadu_si128(source + 3);
    _mm_stream_si128(target, a);
    _mm_stream_si128(target + 1, b);
    _mm_stream_si128(target + 2, c);
    _mm_stream_si128(target + 3, d);
  }
  std::memcpy(to, from, size_bytes);
  _mm_sfence();
#else
  std::memcpy(to, from, size_bytes);
#endif
}

}  // namespace ebbtide
