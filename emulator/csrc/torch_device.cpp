// Devices, streams and events as PyTorch asks for them: the device guard and the PrivateUse1 hooks.
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <unistd.h>

#include <cstring>
#include <mutex>
#include <set>

#include "torch_common.h"
#include "torch_generator.h"

namespace emu {
namespace {

constexpr c10::DeviceIndex kDeviceCount = 1;

struct Event {
  RecordingPtr recording;  // the latest
};

RecordingPtr recording_of(void* event) {
  return event ? static_cast<Event*>(event)->recording : nullptr;
}

// CUDA has a current device for each thread, the first one until the thread chooses. A thread that touches an event or a
// stream of another device goes back to that first one afterwards, which makes a context there.
thread_local bool has_chosen_device = false;
std::mutex undecided_mutex;
std::set<long> undecided;  // the system's numbers of threads

void touch() {
  if (has_chosen_device) return;
  std::lock_guard lock(undecided_mutex);
  undecided.insert(long(gettid()));
}

c10::Stream torch_stream(int id) { return c10::Stream(c10::Stream::UNSAFE, device(), id); }

struct DeviceGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDeviceType; }
  c10::DeviceIndex deviceCount() const noexcept override { return kDeviceCount; }
  c10::Device getDevice() const override { return device(); }
  c10::Device exchangeDevice(c10::Device) const override { return device(); }
  void setDevice(c10::Device to) const override {
    TORCH_CHECK(to.index() <= 0, "emu has one device, there is no ", to);
    has_chosen_device = true;
  }
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceCapability getDeviceCapability(c10::Device) const override { return {}; }

  c10::Stream getStream(c10::Device) const noexcept override {
    return torch_stream(current_stream());
  }
  c10::Stream getDefaultStream(c10::Device) const override { return torch_stream(0); }
  // A new stream each time. CUDA hands out 32 in turn; two users of one stream would hide a race.
  c10::Stream getNewStream(c10::Device, int = 0) const override {
    return torch_stream(runtime().scheduler.new_stream());
  }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool = false) const override {
    return torch_stream(runtime().scheduler.new_stream());
  }
  c10::Stream exchangeStream(c10::Stream to) const noexcept override {
    int from = current_stream();
    current_stream() = int(to.id());
    return torch_stream(from);
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return reinterpret_cast<void*>(stream.id() + 1);  // never null
  }
  bool queryStream(const c10::Stream& stream) const override {
    touch();
    return runtime().scheduler.query_stream(int(stream.id()));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    touch();
    runtime().scheduler.synchronize_stream(int(stream.id()));
    runtime().scheduler.rethrow_late_error();
  }
  void synchronizeDevice(c10::DeviceIndex) const override {
    runtime().scheduler.synchronize_device();
    runtime().scheduler.rethrow_late_error();
  }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex,
              c10::EventFlag) const override {
    touch();
    if (!*event) *event = new Event;
    static_cast<Event*>(*event)->recording = runtime().scheduler.record(int(stream.id()));
  }
  void block(void* event, const c10::Stream& stream) const override {
    touch();
    runtime().scheduler.wait(int(stream.id()), recording_of(event));
  }
  bool queryEvent(void* event) const override {
    touch();
    return runtime().scheduler.query(recording_of(event));
  }
  void synchronizeEvent(void* event) const override {
    touch();
    runtime().scheduler.synchronize(recording_of(event));
    runtime().scheduler.rethrow_late_error();
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    touch();
    delete static_cast<Event*>(event);
  }
  double elapsedTime(void* from, void* to, c10::DeviceIndex) const override {
    RecordingPtr start = recording_of(from), end = recording_of(to);
    TORCH_CHECK(start && end, "both events must be recorded before the elapsed time is taken");
    runtime().scheduler.synchronize(start);
    runtime().scheduler.synchronize(end);
    // Real time means something only when operations last as long as they are modelled to.
    bool real = runtime().settings().throttle && !runtime().settings().dry_run;
    return 1e3 * (real ? end->real_end - start->real_end : end->virtual_end - start->virtual_end);
  }

  void recordDataPtrOnStream(const c10::DataPtr& pointer,
                             const c10::Stream& stream) const override {
    runtime().memory.record_stream(pointer.get(), int(stream.id()));
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDeviceCount; }
  void setCurrentDevice(c10::DeviceIndex) const override { has_chosen_device = true; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }

  bool isPinnedPtr(const void* address) const override {
    auto begin = reinterpret_cast<uintptr_t>(address);
    return runtime().is_pinned(begin, begin + 1);
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  at::Device getDeviceFromPtr(void*) const override { return device(); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return default_generator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return new_generator(); }

  // storage.resize_(): a new block, and the bytes that fit are copied on the current stream.
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    at::DataPtr resized = device_allocator()->allocate(bytes);
    if (size_t kept = std::min(impl->nbytes(), bytes)) {
      auto from = reinterpret_cast<uintptr_t>(impl->data());
      auto to = reinterpret_cast<uintptr_t>(resized.get());
      Operation copy;
      copy.label = "resize copy";
      copy.engine = Engine::compute;
      copy.seconds = 2.0 * double(kept) / runtime().settings().device_bytes_per_second;
      copy.accesses = {{from, from + kept, false}, {to, to + kept, true}};
      copy.body = [target = runtime().backing(to), source = runtime().backing(from), kept] {
        memcpy(target, source, kept);
      };
      runtime().scheduler.enqueue(current_stream(), std::move(copy));
    }
    impl->set_data_ptr(std::move(resized));
    impl->set_nbytes(bytes);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, DeviceGuard);

}  // namespace

// Virtual time of the latest recording; `event` is torch.Event.event_id.
double event_seconds(uintptr_t event) {
  RecordingPtr recording = recording_of(reinterpret_cast<void*>(event));
  TORCH_CHECK(recording, "the event has not been recorded");
  return recording->virtual_end;
}

std::vector<long> take_threads_without_device() {
  std::lock_guard lock(undecided_mutex);
  std::vector<long> found(undecided.begin(), undecided.end());
  undecided.clear();
  return found;
}

void register_hooks() { at::RegisterPrivateUse1HooksInterface(new Hooks); }

}  // namespace emu
