// A virtual function that is replaced for all objects of a class, as torch's allocator is followed on a GPU.
#include "torch/lms/virtual_entry.h"

#include <gtest/gtest.h>

#include <memory>
#include <stdexcept>
#include <string>

namespace ebbtide::lms {
namespace {

// Returned through memory, as torch's DataPtr is.
struct Piece {
  std::string name;
  size_t size_bytes = 0;
};

class Source {
 public:
  virtual ~Source() = default;
  virtual Piece take(size_t size_bytes) = 0;
  virtual int count() const = 0;
  size_t plain(size_t size_bytes) { return size_bytes; }
};

class Shop final : public Source {
 public:
  explicit Shop(std::string name) : name_(std::move(name)) {}
  Piece take(size_t size_bytes) override {
    if (size_bytes > 100) throw std::length_error(name_);
    ++count_;
    return {name_, size_bytes};
  }
  int count() const override { return count_; }

 private:
  std::string name_;
  int count_ = 0;
};

using Entry = VirtualEntry<Source, Piece, size_t>;
Entry::Function former = nullptr;

Piece take_half(Source* self, size_t size_bytes) {
  try {
    return former(self, size_bytes);
  } catch (const std::length_error&) {
    return former(self, size_bytes / 2);
  }
}

// The compiler must not know the class.
__attribute__((noinline)) std::unique_ptr<Source> open_shop(const char* name) { return std::make_unique<Shop>(name); }

TEST(VirtualEntry, AFunctionIsReplacedForAllObjectsAndPutBack) {
  const auto first = open_shop("a name that is too long for the small string optimisation");
  const auto second = open_shop("second");
  const Entry entry(first.get(), &Source::take);
  ASSERT_TRUE(entry.is_virtual());
  former = entry.get();
  EXPECT_EQ(former(first.get(), 7).size_bytes, 7u);
  EXPECT_THROW(second->take(160), std::length_error);

  ASSERT_TRUE(entry.set(&take_half));
  EXPECT_EQ(entry.get(), &take_half);
  const Piece piece = first->take(160);
  EXPECT_EQ(piece.size_bytes, 80u);
  EXPECT_EQ(piece.name, "a name that is too long for the small string optimisation");
  EXPECT_EQ(second->take(160).name, "second");
  EXPECT_EQ(second->count(), 1) << "the entries beside it are as they were";
  EXPECT_THROW(second->take(1000), std::length_error);

  ASSERT_TRUE(entry.set(former));
  EXPECT_THROW(second->take(160), std::length_error);
}

TEST(VirtualEntry, APlainFunctionHasNone) {
  const auto shop = open_shop("shop");
  EXPECT_FALSE((VirtualEntry<Source, size_t, size_t>(shop.get(), &Source::plain).is_virtual()));
}

}  // namespace
}  // namespace ebbtide::lms
