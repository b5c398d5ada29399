// Replaces one virtual function of a class for all its objects, where a library offers no other way in. The layout is
// that of the Itanium C++ ABI, which gcc and clang use on Linux. No torch, so that the tests can build it.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace ebbtide::lms {

template <typename Class, typename Result, typename... Arguments>
class VirtualEntry {
 public:
  // A virtual member function is called like a plain one that gets the object first.
  using Function = Result (*)(Class* self, Arguments...);

  // The entry of the member in the table of this object's class. The member must be virtual.
  VirtualEntry(Class* object, Result (Class::*member)(Arguments...)) {
    static_assert(sizeof(member) == 2 * sizeof(uintptr_t));
    uintptr_t parts[2];
    std::memcpy(parts, &member, sizeof parts);
#if defined(__aarch64__) || defined(__arm__)
    is_virtual_ = (parts[1] & 1) != 0;  // and the first part is the offset in the table
    const uintptr_t offset = parts[0];
#else
    is_virtual_ = (parts[0] & 1) != 0;  // and the rest is the offset in the table
    const uintptr_t offset = parts[0] - 1;
#endif
    if (!is_virtual_) return;
    std::byte* table = nullptr;
    std::memcpy(&table, static_cast<const void*>(object), sizeof table);
    entry_ = reinterpret_cast<std::atomic<Function>*>(table + offset);
  }

  bool is_virtual() const { return is_virtual_; }
  Function get() const { return entry_->load(); }

  // False if the table can't be written; nothing has changed then.
  bool set(Function function) const {
    const auto page_bytes = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
    void* const page = reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(entry_) / page_bytes * page_bytes);
    if (::mprotect(page, page_bytes, PROT_READ | PROT_WRITE) != 0) return false;
    entry_->store(function);
    ::mprotect(page, page_bytes, PROT_READ);  // as the loader left it; if that fails, it stays writable
    return true;
  }

 private:
  bool is_virtual_ = false;
  std::atomic<Function>* entry_ = nullptr;
};

}  // namespace ebbtide::lms
