#include "current_device.h"

#include <unistd.h>

#include <array>
#include <atomic>
#include <map>
#include <mutex>

#include "host_threads.h"

namespace emu {

static thread_local int of_driver = 0;
static thread_local int wanted = -1;  // what a guard went back to where there was no context
static thread_local bool collecting = false;

static std::array<std::atomic<bool>, kDeviceCount> has;
static std::mutex made_mutex;
static std::map<int, Context> made;

static void make_context(int device, const char* call) {
  if (has[size_t(device)].exchange(true)) return;
  std::lock_guard lock(made_mutex);
  made.emplace(device, Context{device, long(gettid()), call});
}

static void change_device(int device, const char* call) {
  wanted = -1;
  if (device == of_driver) return;
  of_driver = device;
  make_context(device, call);
}

int current_device() { return wanted >= 0 ? wanted : of_driver; }

void set_device(int device) {
  // PyTorch that is built for CUDA lets a thread of autograd choose a device only where there is a context.
  if (device != of_driver && !has_context(device) && is_autograd_thread())
    wanted = device;
  else
    change_device(device, "choosing the device");
}

void restore_device(int device) {
  if (device == of_driver || has_context(device))
    change_device(device, "");
  else
    wanted = device;
}

void use_current_device(const char* call) {
  of_driver = current_device();
  wanted = -1;
  make_context(of_driver, call);
}

void set_collecting(bool now) { collecting = now; }

void HardVisit::go(int device) {
  if (collecting)
    restore_device(device);
  else
    change_device(device, call_);
}

bool has_context(int device) { return has[size_t(device)]; }

std::vector<Context> contexts() {
  std::lock_guard lock(made_mutex);
  std::vector<Context> found;
  for (auto& [device, context] : made) found.push_back(context);
  return found;
}

void forget_contexts() {
  std::lock_guard lock(made_mutex);
  made.clear();
  for (auto& one : has) one = false;
}

}  // namespace emu
