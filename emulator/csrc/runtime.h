// The emulated device as one object: what the PyTorch side talks to. No PyTorch in here or below.
#pragma once
#include <atomic>
#include <string>

#include "allocator.h"
#include "arena.h"
#include "host_threads.h"
#include "pinned.h"
#include "registered.h"
#include "scheduler.h"
#include "settings.h"

namespace emu {

class Runtime {
 public:
  static Runtime& get();

  const Settings& settings() const { return settings_; }
  void configure(const Settings& settings);  // waits for the device first

  bool is_device_address(uintptr_t address) const { return device_arena_.contains(address); }
  // Where the device side reads and writes the byte that PyTorch knows as `address`. Memory of
  // neither arena (pageable host memory) is its own backing.
  void* backing(uintptr_t address) const;
  void* backing(const void* address) const { return backing(reinterpret_cast<uintptr_t>(address)); }

  // Host memory that copies use without waiting: allocated as pinned, or registered by its owner.
  bool is_pinned(uintptr_t begin, uintptr_t end) const {
    return pinned.owns(reinterpret_cast<void*>(begin)) || registered.owns(begin, end);
  }
  // The memory is not handed out again, and not unregistered unnoticed, until `copy` is done.
  void note_copy(uintptr_t address, const RecordingPtr& copy) {
    pinned.note_copy(address, copy);
    registered.note_copy(address, copy);
  }

 private:
  Runtime();
  std::string describe(uintptr_t begin, uintptr_t end) const;

  Settings settings_;
  Arena device_arena_, pinned_arena_;

 public:
  HostThreads hosts;
  Scheduler scheduler;
  DeviceMemory memory;
  PinnedMemory pinned;
  RegisteredMemory registered;
  PinnedGuard pinned_guard;
  // Set at interpreter exit, and in a forked process: tensors that die then must not reach a half
  // torn down process, nor threads and locks of another one.
  std::atomic<bool> ignores_frees{false};
};

}  // namespace emu
