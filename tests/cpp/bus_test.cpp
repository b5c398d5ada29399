// The expected rate of the bus, read from a faked system.
#include "driver/bus.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <locale>

#include "core_fixture.h"

namespace ebbtide::testing {
namespace {

class BusTest : public CoreTest {
 protected:
  BusTest() { std::filesystem::create_directories(device()); }
  ~BusTest() override { std::filesystem::remove_all(folder_); }

  std::filesystem::path device() const { return folder_ / "ffff:01:00.0"; }  // simulated device 0
  void say(const std::string& name, const std::string& words) { std::ofstream(device() / name) << words << "\n"; }

  std::filesystem::path folder_ =
      std::filesystem::temp_directory_path() / ("ebbtide-bus-" + std::to_string(::getpid()));
};

TEST_F(BusTest, TheRateFollowsFromTheLink) {
  say("max_link_speed", "32.0 GT/s PCIe");
  say("current_link_width", "16");
  EXPECT_EQ(expected_read_rate(0, folder_), 51'200'000'000u);
  say("max_link_speed", "16.0 GT/s PCIe");
  say("current_link_width", "8");
  EXPECT_EQ(expected_read_rate(0, folder_), 12'800'000'000u);
}

// A locale in which "32.0" is no number: points separate groups of three digits.
class GroupedByPoints : public std::numpunct<char> {
  char do_decimal_point() const override { return ','; }
  char do_thousands_sep() const override { return '.'; }
  std::string do_grouping() const override { return "\3"; }
};

TEST_F(BusTest, TheProgramsLocaleDoesNotMatter) {
  say("max_link_speed", "32.0 GT/s PCIe");
  say("current_link_width", "16");
  const std::locale before = std::locale::global(std::locale(std::locale::classic(), new GroupedByPoints));
  const auto rate = expected_read_rate(0, folder_);
  std::locale::global(before);
  EXPECT_EQ(rate, 51'200'000'000u);
}

TEST_F(BusTest, WhereTheSystemDoesNotTellThereIsNone) {
  EXPECT_FALSE(expected_read_rate(0, folder_));
  say("max_link_speed", "Unknown");
  say("current_link_width", "16");
  EXPECT_FALSE(expected_read_rate(0, folder_));
  say("max_link_speed", "32.0 GT/s PCIe");
  say("current_link_width", "0");
  EXPECT_FALSE(expected_read_rate(0, folder_));
  EXPECT_FALSE(expected_read_rate(4711, folder_));
  EXPECT_EQ(describe_reads(0), "reads over the bus");
}

}  // namespace
}  // namespace ebbtide::testing
