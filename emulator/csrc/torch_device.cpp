// Devices, streams and events as PyTorch asks for them: the device guard and the PrivateUse1 hooks.
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstring>

#include "torch_common.h"
#include "torch_generator.h"

namespace emu {
namespace {

struct Event {
  RecordingPtr recording;  // the latest
};

RecordingPtr recording_of(void* event) {
  return event ? static_cast<Event*>(event)->recording : nullptr;
}

c10::DeviceIndex index_of(c10::Device of) { return of.has_index() ? of.index() : device().index(); }

void check_exists(c10::DeviceIndex index) {
  TORCH_CHECK(index < kDeviceCount, "emu has ", kDeviceCount, " devices, there is no emu:", int(index));
}

void choose_device(c10::DeviceIndex index) {
  check_exists(index);
  if (index >= 0) set_device(index);
}

c10::DeviceIndex exchange_device(c10::DeviceIndex index) {
  c10::DeviceIndex before = device().index();
  choose_device(index);
  return before;
}

c10::Stream new_stream(c10::Device of, int priority) {
  c10::DeviceGuard guard({kDeviceType, index_of(of)});
  use_current_device("a new stream");
  int number = shown_number(runtime().scheduler.new_stream(current_device(), priority));
  return c10::Stream(c10::Stream::UNSAFE, device(), number);
}

struct DeviceGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDeviceType; }
  c10::DeviceIndex deviceCount() const noexcept override { return kDeviceCount; }
  c10::Device getDevice() const override { return device(); }
  c10::Device exchangeDevice(c10::Device to) const override {
    return {kDeviceType, exchange_device(to.index())};
  }
  void setDevice(c10::Device to) const override { choose_device(to.index()); }
  void uncheckedSetDevice(c10::Device to) const noexcept override { restore_device(to.index()); }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override { return {}; }

  c10::Stream getStream(c10::Device of) const noexcept override { return current_stream_of(of); }
  c10::Stream getDefaultStream(c10::Device of) const override {
    return c10::Stream(c10::Stream::DEFAULT, {kDeviceType, index_of(of)});
  }
  c10::Stream getNewStream(c10::Device of, int priority = 0) const override {
    return new_stream(of, priority);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device of, bool is_high = false) const override {
    return new_stream(of, is_high ? -1 : 0);
  }
  c10::Stream exchangeStream(c10::Stream to) const noexcept override {
    return exchange_current_stream(to);
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return reinterpret_cast<void*>(intptr_t(stream_of(stream)) + 1);  // never null
  }
  bool isStreamCapturing(const c10::Stream& stream) const {  // an override from PyTorch 2.13 on
    return runtime().scheduler.is_capturing(stream_of(stream));
  }
  bool queryStream(const c10::Stream& stream) const override {
    return runtime().scheduler.query_stream(stream_of(stream));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    runtime().scheduler.host_spins_until(stream_of(stream));
    runtime().scheduler.synchronize_stream(stream_of(stream));
    runtime().scheduler.rethrow_late_error();
  }
  void synchronizeDevice(c10::DeviceIndex index) const override {
    HardVisit visit(index < 0 ? current_device() : index, "a synchronization");
    runtime().scheduler.synchronize_device(current_device());
    runtime().scheduler.rethrow_late_error();
  }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex,
              c10::EventFlag) const override {
    HardVisit visit(stream.device_index(), "recording an event");
    if (!*event) *event = new Event;
    static_cast<Event*>(*event)->recording = runtime().scheduler.record(stream_of(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    HardVisit visit(stream.device_index(), "waiting for an event");
    runtime().scheduler.wait(stream_of(stream), recording_of(event));
  }
  bool queryEvent(void* event) const override {
    return runtime().scheduler.query(recording_of(event));
  }
  void synchronizeEvent(void* event) const override {
    runtime().scheduler.host_spins_until(recording_of(event));
    runtime().scheduler.synchronize(recording_of(event));
    runtime().scheduler.rethrow_late_error();
  }
  void destroyEvent(void* event, c10::DeviceIndex index) const noexcept override {
    if (!event) return;
    HardVisit visit(index, "destroying an event");
    delete static_cast<Event*>(event);
  }
  double elapsedTime(void* from, void* to, c10::DeviceIndex index) const override {
    RecordingPtr start = recording_of(from), end = recording_of(to);
    TORCH_CHECK(start && end, "both events must be recorded before the elapsed time is taken");
    TORCH_CHECK(start->done && end->done,
                "Both events must be completed before calculating elapsed time.");
    HardVisit visit(index, "the time between events");
    // Real time means something only when operations last as long as they are modelled to.
    bool real = runtime().settings().throttle && !runtime().settings().dry_run;
    return 1e3 * (real ? end->real_end - start->real_end : end->virtual_end - start->virtual_end);
  }

  void recordDataPtrOnStream(const c10::DataPtr& pointer,
                             const c10::Stream& stream) const override {
    runtime().memory.record_stream(pointer.get(), stream_of(stream));
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex index) const override { return has_context(index); }
  c10::DeviceIndex deviceCount() const override { return kDeviceCount; }
  void setCurrentDevice(c10::DeviceIndex index) const override { choose_device(index); }
  c10::DeviceIndex getCurrentDevice() const override { return device().index(); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    return exchange_device(index);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    check_exists(index);
    c10::DeviceIndex before = device().index();
    restore_device(index);
    return before;
  }

  bool isPinnedPtr(const void* address) const override {
    auto begin = reinterpret_cast<uintptr_t>(address);
    return runtime().is_pinned(begin, begin + 1);
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  at::Device getDeviceFromPtr(void* address) const override {
    int found = runtime().memory.device_of(reinterpret_cast<uintptr_t>(address));
    TORCH_CHECK(found >= 0, "EMU: the address is not in device memory");
    return {kDeviceType, c10::DeviceIndex(found)};
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    return default_generator(index < 0 ? device().index() : index);
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return new_generator(index < 0 ? device().index() : index);
  }

  // storage.resize_(): a new block, and the bytes that fit are copied on the current stream.
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    c10::DeviceGuard guard(storage.device());
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

void register_hooks() { at::RegisterPrivateUse1HooksInterface(new Hooks); }

}  // namespace emu
