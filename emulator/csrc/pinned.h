// Pinned host memory: a caching pool with a ceiling, and a guard over pages that a copy is using.
#pragma once
#include <array>
#include <cstdint>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "arena.h"
#include "scheduler.h"
#include "settings.h"

namespace emu {

struct PinnedMemoryExhausted : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct PinnedMemoryStats {
  int64_t allocated = 0, peak_allocated = 0;  // bytes in blocks that tensors own
  int64_t reserved = 0;                       // the same plus cached blocks; the ceiling is on this
};

// Takes the host's access to whole pages away while a copy uses them. Pages shared with other data
// stay open, so an access there goes unseen.
class PinnedGuard {
 public:
  void protect(const Access& range);    // a copy is in flight
  void unprotect(const Access& range);  // it is done
  // The device itself is about to work through these addresses: registered memory has no others.
  void open(const Access& range);
  void close(const Access& range);
  // Called by the handler of faults: notes the access and lets it pass. False if the page is not guarded.
  bool note_fault(uintptr_t address);
  std::vector<std::string> take_faults();

 private:
  struct PageUse {
    int reading = 0, writing = 0;  // copies in flight
    int open = 0;
    int protection() const;
    bool is_idle() const { return !reading && !writing && !open; }
  };
  void change(uintptr_t first, uintptr_t last, int PageUse::* count, int by);

  std::mutex mutex_;
  std::map<uintptr_t, PageUse> pages_;
  struct Fault {
    uintptr_t address;
    bool being_filled;
    long thread;
  };
  std::array<Fault, 64> faults_;  // nothing is allocated within a handler
  size_t fault_count_ = 0;
};

constexpr double kBytesOfGiB = 1 << 30;

class PinnedMemory {
 public:
  PinnedMemory(const Settings& settings, Arena& arena, Scheduler& scheduler)
      : settings_(settings), arena_(arena), scheduler_(scheduler) {}

  void* allocate(size_t bytes);  // throws PinnedMemoryExhausted
  void free(void* address);
  // The block that holds `address` is not handed out again until `copy` is done, as on CUDA.
  void note_copy(uintptr_t address, const RecordingPtr& copy);
  bool owns(const void* address) const {
    return arena_.was_reserved(reinterpret_cast<uintptr_t>(address));
  }

  PinnedMemoryStats stats();
  void reset_peaks();
  void empty_cache();

 private:
  struct Block {
    size_t bytes;
    bool in_use;
    std::vector<RecordingPtr> copies;
  };
  void* take(uintptr_t address, Block& block);
  bool copies_done(const Block& block);
  void release_cached();
  [[noreturn]] void fail(size_t requested);

  const Settings& settings_;
  Arena& arena_;
  Scheduler& scheduler_;
  std::mutex mutex_;
  std::map<uintptr_t, Block> blocks_;
  std::multimap<size_t, uintptr_t> idle_;  // by bytes
  PinnedMemoryStats stats_;
};

}  // namespace emu
