// Which device does the calling thread use, and on which devices are there contexts? As CUDA 12 has it.
//
// A thread's current device is the first one until it chooses another. Whoever changes it makes a context there, which
// on CUDA takes half a gigabyte: a thread that never chose, and visits another device's stream or event, makes one on
// the first device when it goes back.
#pragma once
#include <string>
#include <vector>

namespace emu {

constexpr int kDeviceCount = 2;

int current_device();
void set_device(int device);      // cudaSetDevice: makes a context, unless it is the current one already
void restore_device(int device);  // as a guard does at its end: takes effect only where there is a context
void use_current_device(const char* call);  // a call that needs a context on the current device

struct Context {
  int device;
  long thread;  // the system's number of the one that made it
  std::string call;
};
bool has_context(int device);
std::vector<Context> contexts();
void forget_contexts();

// For the calling thread: its visits go back softly, as nobody can choose the thread that the garbage collector takes.
void set_collecting(bool collecting);

// On `device` for the length of a scope. It goes back as PyTorch's calls on events do, which makes a context.
class HardVisit {
 public:
  HardVisit(int device, const char* call) : before_(current_device()), call_(call) { go(device); }
  ~HardVisit() { go(before_); }

 private:
  void go(int device);
  int before_;
  const char* call_;
};

}  // namespace emu
