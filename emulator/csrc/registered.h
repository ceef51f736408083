// The caller's own memory as pinned memory: what cudaHostRegister is to CUDA.
//
// It has one mapping only, so the device side works through the same addresses as the host.
#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "pinned.h"
#include "scheduler.h"
#include "settings.h"

namespace emu {

class RegisteredMemory {
 public:
  RegisteredMemory(const Settings& settings, Scheduler& scheduler, PinnedMemory& pinned)
      : settings_(settings), scheduler_(scheduler), pinned_(pinned) {}

  // Throws invalid_argument for a range that can never be registered, runtime_error for one that
  // cannot be now: it overlaps a registered one, or the ceiling on pinned memory is reached.
  void add(uintptr_t begin, size_t bytes);
  // Reports copies that the host has not waited for, and waits for them.
  void remove(uintptr_t begin);

  bool owns(uintptr_t begin, uintptr_t end) const;
  void note_copy(uintptr_t address, const RecordingPtr& copy);
  // Offsets in the registered range: reports do not depend on where the memory happens to lie.
  std::optional<size_t> offset_of(uintptr_t address) const;
  int64_t bytes() const;

 private:
  struct Region {
    uintptr_t end;
    std::vector<RecordingPtr> copies = {};  // that may be in flight
  };
  using Regions = std::map<uintptr_t, Region>;  // by begin
  Regions::const_iterator region_of(uintptr_t address) const;

  const Settings& settings_;
  Scheduler& scheduler_;
  PinnedMemory& pinned_;
  // Taken under the scheduler's lock (reports), so never held when the scheduler is called.
  mutable std::mutex mutex_;
  Regions regions_;
  int64_t bytes_ = 0;
};

}  // namespace emu
