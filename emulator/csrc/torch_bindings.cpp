// The Python module: registers the device when it is imported, then settings, counters and reports.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/extension.h>

#include "python_handovers.h"
#include "torch_common.h"
#include "torch_fallback.h"
#include "torch_generator.h"

namespace py = pybind11;

namespace emu {

// torch_device.cpp
void register_hooks();
double event_seconds(uintptr_t event);

namespace {

// Visits each setting with its Python name: the one list that configure() and settings() share.
template <class Visit>
void visit_numbers_and_flags(Settings& settings, Visit&& visit) {
  visit("device_memory", settings.device_memory);
  visit("pinned_memory", settings.pinned_memory);
  visit("quarantine", settings.quarantine);
  visit("seed", settings.seed);
  visit("throttle", settings.throttle);
  visit("dry_run", settings.dry_run);
  visit("race_detector", settings.race_detector);
  visit("poison", settings.poison);
  visit("one_host_clock", settings.one_host_clock);
  visit("guard_pinned", settings.guard_pinned);
  visit("sync_compute", settings.sync_compute);
  visit("alignment_canary", settings.alignment_canary);
  visit("workspace", settings.workspace);
  visit("pageable_bytes_per_second", settings.pageable_bytes_per_second);
  visit("register_seconds_per_gib", settings.register_seconds_per_gib);
  visit("pin_seconds_per_gib", settings.pin_seconds_per_gib);
  visit("segment_seconds", settings.segment_seconds);
  visit("h2d_bytes_per_second", settings.h2d_bytes_per_second);
  visit("d2h_bytes_per_second", settings.d2h_bytes_per_second);
  visit("device_bytes_per_second", settings.device_bytes_per_second);
  visit("flops_per_second", settings.flops_per_second);
  visit("launch_seconds", settings.launch_seconds);
  visit("op_latency_seconds", settings.op_latency_seconds);
  visit("copy_latency_seconds", settings.copy_latency_seconds);
}

constexpr std::pair<const char*, SchedulerKind> kSchedulers[] = {
    {"threads", SchedulerKind::threads},
    {"lazy", SchedulerKind::lazy},
    {"random", SchedulerKind::random}};
constexpr std::pair<const char*, AllocatorKind> kAllocators[] = {
    {"caching", AllocatorKind::caching}, {"exact", AllocatorKind::exact}};

template <class Kind, size_t N>
Kind kind_named(const std::pair<const char*, Kind> (&kinds)[N], const char* setting,
                const std::string& name) {
  std::string known;
  for (auto& [kind_name, kind] : kinds) {
    if (name == kind_name) return kind;
    known += std::string(known.empty() ? "'" : ", '") + kind_name + "'";
  }
  throw py::value_error(std::string(setting) + " is one of " + known + ", not '" + name + "'");
}

template <class Kind, size_t N>
const char* name_of(const std::pair<const char*, Kind> (&kinds)[N], Kind wanted) {
  for (auto& [name, kind] : kinds)
    if (kind == wanted) return name;
  return "";
}

void configure(const py::kwargs& changes) {
  Settings settings = runtime().settings();
  for (auto& [key, value] : changes) {
    auto name = key.cast<std::string>();
    bool known = false;
    if (name == "scheduler") {
      settings.scheduler = kind_named(kSchedulers, "scheduler", value.cast<std::string>());
      known = true;
    } else if (name == "allocator") {
      settings.allocator = kind_named(kAllocators, "allocator", value.cast<std::string>());
      known = true;
    }
    visit_numbers_and_flags(settings, [&](const char* setting, auto& field) {
      if (name != setting) return;
      field = py::handle(value).cast<std::decay_t<decltype(field)>>();
      known = true;
    });
    if (!known) throw py::key_error("emu has no setting '" + name + "'; see emu.settings()");
  }
  // Other Python threads may be needed to let the device come to rest.
  py::gil_scoped_release release;
  runtime().configure(settings);
}

py::dict settings() {
  Settings settings = runtime().settings();
  py::dict values;
  values["scheduler"] = name_of(kSchedulers, settings.scheduler);
  values["allocator"] = name_of(kAllocators, settings.allocator);
  visit_numbers_and_flags(settings, [&](const char* name, auto& field) { values[name] = field; });
  return values;
}

py::dict stats() {
  ScheduleStats schedule = runtime().scheduler.stats();
  DeviceMemoryStats memory = runtime().memory.stats();
  PinnedMemoryStats pinned = runtime().pinned.stats();
  FallbackStats fallback = fallback_stats();
  py::dict values;
  values["operations"] = schedule.operations;
  values["host_syncs"] = schedule.host_syncs;
  values["h2d_bytes"] = schedule.h2d_bytes;
  values["d2h_bytes"] = schedule.d2h_bytes;
  values["compute_busy_seconds"] = schedule.compute_busy;
  values["h2d_busy_seconds"] = schedule.h2d_busy;
  values["d2h_busy_seconds"] = schedule.d2h_busy;
  values["virtual_seconds"] = schedule.virtual_now;
  values["stream_busy_seconds"] = schedule.stream_busy;
  values["allocated_bytes"] = memory.allocated;
  values["peak_allocated_bytes"] = memory.peak_allocated;
  values["reserved_bytes"] = memory.reserved;
  values["peak_reserved_bytes"] = memory.peak_reserved;
  values["segments"] = memory.segments;
  values["allocation_retries"] = memory.retries;
  values["out_of_memory"] = memory.out_of_memory;
  values["pinned_bytes"] = pinned.allocated;
  values["peak_pinned_bytes"] = pinned.peak_allocated;
  values["reserved_pinned_bytes"] = pinned.reserved;
  values["registered_bytes"] = runtime().registered.bytes();
  values["async_operators"] = fallback.asynchronous;
  values["sync_operators"] = fallback.synchronous;
  values["sync_operators_by_name"] = fallback.synchronous_by_operator;
  return values;
}

void reset_stats() {
  runtime().scheduler.reset_stats();
  runtime().memory.reset_stats();
  runtime().pinned.reset_peaks();
  reset_fallback_stats();
}

void host_access(uintptr_t address, size_t bytes, bool is_write, const std::string& what) {
  // Copies of other host memory are over when their calls return.
  if (runtime().is_pinned(address, address + bytes))
    runtime().scheduler.host_access({address, address + bytes, is_write}, what);
}

// The current stream reads and writes the tensor for so long, beside all that others do.
void exchange_with_peers(const at::Tensor& tensor, double seconds) {
  check_live(tensor, "an exchange with peers");
  Operation exchange;
  exchange.label = "peers";
  exchange.engine = Engine::peers;
  exchange.seconds = seconds;
  exchange.accesses = {access_of(tensor, false), access_of(tensor, true)};
  runtime().scheduler.enqueue(current_stream(), std::move(exchange));
}

// (name, tag, stream or -1 for the host, engine, start, end)
py::list take_trace() {
  constexpr const char* kEngines[] = {"", "compute", "h2d", "d2h", "peers"};
  py::list entries;
  for (const TraceEntry& entry : runtime().scheduler.take_trace())
    entries.append(py::make_tuple(entry.name, entry.tag, entry.stream,
                                  kEngines[size_t(entry.engine)], entry.span.start,
                                  entry.span.end));
  return entries;
}

void host_register(uintptr_t begin, size_t bytes) {
  // Until then PyTorch takes it that no memory is pinned, and does not ask.
  at::globalContext().lazyInitDevice(kDeviceType);
  use_current_device("host_register");
  runtime().registered.add(begin, bytes);
}

PYBIND11_MODULE(_C, m) {
  register_allocators();
  register_hooks();
  runtime();
  m.def("configure", &configure);
  m.def("settings", &settings);
  m.def("stats", &stats);
  m.def("reset_stats", &reset_stats);
  m.def("take_reports", [] {
    auto reports = runtime().scheduler.take_reports();
    for (auto& fault : runtime().pinned_guard.take_faults()) reports.push_back(fault);
    return reports;
  });
  m.attr("DEVICE_COUNT") = kDeviceCount;
  m.def("current_device", &current_device);
  m.def("set_device", &set_device);
  m.def("restore_device", &restore_device);
  m.def("set_collecting", &set_collecting);
  m.def("begin_capture", [] { runtime().scheduler.begin_capture(current_stream()); });
  m.def("end_capture", [] { runtime().scheduler.end_capture(); });
  m.def("is_capturing", [] { return runtime().scheduler.is_capturing(current_stream()); });
  m.def("free_workspaces", &free_workspaces);
  m.def("empty_pinned_cache", [] { runtime().pinned.empty_cache(); });
  m.def("contexts", [] {
    py::list found;
    for (const Context& one : contexts())
      found.append(py::make_tuple(one.device, one.thread, one.call));
    return found;
  });
  m.def("spins", [] {
    py::list found;
    for (auto& [thread, spin] : runtime().scheduler.spins())
      found.append(py::make_tuple(thread, spin.is_autograd, spin.seconds));
    return found;
  });
  m.def("virtual_seconds", [] { return runtime().scheduler.host_now(); });
  m.def("event_seconds", &event_seconds);
  m.def("watch_handovers", [](py::handle lock, py::handle reentrant, py::handle queue, py::handle threads,
                              py::handle autograd) {
    watch_handovers(lock.ptr(), reentrant.ptr(), queue.ptr(), threads.ptr(), autograd.ptr());
  });
  m.def("joins_thread", [](unsigned long thread) { runtime().hosts.joins_thread(thread); });
  m.def("host_waits_until", [](double seconds) { runtime().scheduler.host_waits_until(seconds); });
  m.def("host_works", [](double seconds, const std::string& what) {
    runtime().scheduler.host_works(seconds, what);
  });
  m.def("set_own_clock", [](std::optional<double> now) {
    return runtime().scheduler.set_own_clock(now);
  });
  m.def("exchange_with_peers", &exchange_with_peers);
  m.def("start_trace", [] { runtime().scheduler.start_trace(); });
  m.def("take_trace", &take_trace);
  m.def("set_tag", [](std::string tag) { runtime().scheduler.set_tag(std::move(tag)); });
  m.def("host_access", &host_access);
  m.def("host_register", &host_register);
  m.def(
      "host_unregister", [](uintptr_t begin) { runtime().registered.remove(begin); },
      py::call_guard<py::gil_scoped_release>());
  m.def(
      "begin_epoch", [] { runtime().scheduler.begin_epoch(); },
      py::call_guard<py::gil_scoped_release>());
  m.def("get_rng", [](c10::DeviceIndex device) {
    at::Generator& generator = default_generator(device);
    return std::pair(generator.current_seed(), generator.get_offset());
  });
  m.def("set_rng", [](c10::DeviceIndex device, uint64_t seed, uint64_t offset) {
    default_generator(device).set_current_seed(seed);
    default_generator(device).set_offset(offset);
  });
  m.def("shut_down", [] { runtime().ignores_frees = true; });
}

}  // namespace
}  // namespace emu
