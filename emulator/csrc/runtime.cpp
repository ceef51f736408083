#include "runtime.h"

#include <pthread.h>
#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>

#include "fault_handler.h"

namespace emu {

// Sparse: only touched pages cost RAM. Wide, because the exact allocator never reuses an address.
static size_t arena_bytes(size_t default_gib) {
  const char* text = getenv("EMU_ARENA_GIB");
  return (text ? strtoull(text, nullptr, 10) : default_gib) << 30;
}

Runtime& Runtime::get() {
  // Never destroyed: worker threads and late tensors may use it until the process is gone.
  static Runtime* runtime = new Runtime;
  return *runtime;
}

Runtime::Runtime()
    : device_arena_("emu-device", arena_bytes(4096), PROT_NONE),
      pinned_arena_("emu-pinned", arena_bytes(1024), PROT_READ | PROT_WRITE),
      scheduler(settings_, hosts, [this](uintptr_t begin, uintptr_t end) { return describe(begin, end); }),
      memory(settings_, device_arena_, scheduler),
      pinned(settings_, pinned_arena_, scheduler),
      registered(settings_, scheduler, pinned) {
  install_fault_handler(device_arena_, pinned_guard);
  pthread_atfork(nullptr, nullptr, [] {
    get().ignores_frees = true;
    get().hosts.forget_in_fork();
  });
}

void Runtime::configure(const Settings& settings) {
  install_fault_handler(device_arena_, pinned_guard);
  if (settings.allocator != settings_.allocator)
    for (int device = 0; device < kDeviceCount; device++) memory.empty_cache(device);
  scheduler.configure([&] { settings_ = settings; });
  hosts.share_one_clock(settings.one_host_clock);
}

void* Runtime::backing(uintptr_t address) const {
  if (device_arena_.contains(address)) return device_arena_.backing(address);
  if (pinned_arena_.contains(address)) return pinned_arena_.backing(address);
  return reinterpret_cast<void*>(address);
}

std::string Runtime::describe(uintptr_t begin, uintptr_t end) const {
  const char* where = "host";
  uintptr_t base = 0;
  for (auto [arena, name] : {std::pair(&device_arena_, "device"), std::pair(&pinned_arena_, "pinned")})
    if (arena->contains(begin)) where = name, base = arena->begin();
  if (auto offset = registered.offset_of(begin)) where = "registered", base = begin - *offset;
  char text[100];
  snprintf(text, sizeof text, "%s bytes [0x%zx, 0x%zx)", where, size_t(begin - base),
           size_t(end - base));
  return text;
}

}  // namespace emu
