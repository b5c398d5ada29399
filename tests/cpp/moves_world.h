#pragma once

#include <functional>
#include <string>
#include <vector>

#include "core_fixture.h"
#include "store_fixture.h"

// The fixture for fault injection of swap, prepare, trim, retained backups and asynchronous resumes: allocations with
// every kind of block that a pause distinguishes, and the checks that must hold at every moment, whatever failed.
namespace ebbtide::testing {

struct ItemSpec {
  std::string tag;
  Policy policy;
  int device = 0;
  std::vector<uint64_t> chunk_blocks;
};

class MovesWorld : public CoreTest {
 protected:
  struct Item {
    ItemSpec spec;
    CUdeviceptr address = 0;
    std::vector<uint64_t> content;  // by block: the content it was written with; 0 reads as zeros
    std::vector<bool> is_unused;    // by block: a pause may skip it, and then it comes back as zeros
  };

  // Frees everything and makes these allocations, each block with its own bytes. Nothing of the earlier allocations may
  // be left.
  void build(const std::vector<ItemSpec>& specs);
  void free_all();
  // Nothing of ebbtide is left except its permanent memory.
  void expect_nothing_left();
  // A small number is one repeated byte; a larger one is the seed of bytes that repeat nowhere.
  void write_block(size_t item, size_t block, uint64_t content);

  // Records the memory that was dropped or skipped as unused until now: it comes back as zeros. expect_sound does it
  // first.
  void note_dropped();
  // Checks invariants 1 to 3 for the present state: addresses, bytes, owners, budgets, the state of each tag.
  void expect_sound(const std::string& when);
  void expect_bytes(const std::string& when);  // all of it resident and right
  std::vector<Place> places() const;
  // The allocation whose bytes are in memory that could not be mapped again.
  bool is_any_detached();

  // The same, with the blocks that are marked unused.
  void pause_but_unused();
  std::vector<Report> swap(const std::vector<std::string>& leaving, const std::vector<std::string>& returning);
  void run_at(OperationKind kind, const std::vector<std::string>& tags, const std::vector<CUdeviceptr>& addresses);

  std::vector<Item> items_;

 private:
  void expect_item_sound(Item& item);
  void expect_budgets_match();
};

// The number of driver calls, of any thread, that act makes.
size_t count_calls(const std::function<void()>& act);

}  // namespace ebbtide::testing
