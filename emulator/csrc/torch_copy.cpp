// copy_() between host and device and within the device.
//
// The rules of CUDA: asynchronous to the host only when non_blocking is asked for, the host side is
// pinned, and neither a dtype nor a layout has to be converted on the host.
#include <torch/library.h>

#include <cstring>

#include "torch_common.h"

namespace emu {
namespace {

bool is_pinned(const at::Tensor& tensor) {
  Access range = access_of(tensor, false);
  return runtime().is_pinned(range.begin, range.end);
}

at::Tensor empty_contiguous(at::IntArrayRef sizes, at::TensorOptions options) {
  return at::empty(sizes, options.memory_format(at::MemoryFormat::Contiguous));
}

// One copy of dense memory between host and device, on the current stream.
void enqueue_transfer(const at::Tensor& to, const at::Tensor& from, Engine engine,
                      bool host_waits) {
  const Settings& settings = runtime().settings();
  bool onload = engine == Engine::h2d;
  size_t bytes = to.nbytes();
  Access read = access_of(from, false), write = access_of(to, true);
  Access host_side = onload ? read : write;
  bool pinned = is_pinned(onload ? from : to);
  bool guarded = settings.guard_pinned && pinned && !host_waits;
  bool registered = runtime().registered.owns(host_side.begin, host_side.end);

  Operation copy;
  copy.label = onload ? "copy H2D" : "copy D2H";
  copy.engine = engine;
  double rate = onload ? settings.h2d_bytes_per_second : settings.d2h_bytes_per_second;
  if (!pinned) rate = std::min(rate, settings.pageable_bytes_per_second);
  copy.seconds = settings.copy_latency_seconds + double(bytes) / rate;
  copy.accesses = {read, write};
  copy.body = [to = runtime().backing(write.begin), from = runtime().backing(read.begin), bytes,
               guarded, registered, host_side] {
    PinnedGuard& guard = runtime().pinned_guard;
    if (guarded && registered) guard.open(host_side);
    memcpy(to, from, bytes);
    if (guarded) guard.unprotect(host_side);
    if (guarded && registered) guard.close(host_side);
  };
  RecordingPtr done;
  if (pinned && !host_waits) done = copy.records = std::make_shared<Recording>();
  // A dry run runs no body, so nothing would lift the guard.
  if (guarded && !settings.dry_run) runtime().pinned_guard.protect(host_side);
  runtime().scheduler.count_transfer(engine, bytes);
  runtime().scheduler.enqueue(current_stream(), std::move(copy));
  if (done) runtime().note_copy(host_side.begin, done);
  if (host_waits) synchronize_current_stream();
}

// Between two devices the stream of the source copies, and that of the target waits, before and after.
void enqueue_device_copy(const at::Tensor& to, const at::Tensor& from) {
  c10::DeviceGuard guard_source(from.device());
  Scheduler& scheduler = runtime().scheduler;
  int target_stream = stream_of(current_stream_of(to.device()));
  bool to_another = to.device() != from.device();
  if (to_another) scheduler.wait(current_stream(), scheduler.record(target_stream));
  const Settings& settings = runtime().settings();
  Operation copy;
  copy.label = "copy D2D";
  copy.engine = Engine::compute;
  copy.seconds = settings.op_latency_seconds +
                 double(to.nbytes() + from.nbytes()) / settings.device_bytes_per_second;
  copy.accesses = {access_of(from, false), access_of(to, true)};
  copy.body = [to = cpu_alias(to), from = cpu_alias(from)]() mutable {
    BelowAutograd guard;
    to.copy_(from);
  };
  scheduler.enqueue(current_stream(), std::move(copy));
  if (to_another) scheduler.wait(target_stream, scheduler.record(current_stream()));
}

void copy_to_device(const at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  bool direct = from.dtype() == to.dtype() && has_same_dense_layout(from, to);
  at::Tensor source = direct ? from : from.to(to.dtype()).contiguous();
  // From pageable memory the call returns when the source has been read. A converted source is a
  // temporary, which must live until then too.
  bool host_waits = !(non_blocking && direct && is_pinned(source));
  if (has_same_dense_layout(source, to)) {
    enqueue_transfer(to, source, Engine::h2d, host_waits);
    return;
  }
  at::Tensor staging = empty_contiguous(to.sizes(), to.options());
  enqueue_transfer(staging, source, Engine::h2d, true);
  enqueue_device_copy(to, staging);
}

void copy_to_host(const at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  at::Tensor source = from;
  if (from.dtype() != to.dtype() || !has_same_dense_layout(from, to)) {  // converted on the device
    source = empty_contiguous(to.sizes(), from.options().dtype(to.dtype()));
    enqueue_device_copy(source, from);
  }
  if (has_same_dense_layout(source, to)) {
    enqueue_transfer(to, source, Engine::d2h, !(non_blocking && is_pinned(to)));
    return;
  }
  at::Tensor staging = empty_contiguous(to.sizes(), to.options());
  enqueue_transfer(staging, source, Engine::d2h, true);
  to.copy_(staging);
}

// The numbers as they lie in memory: without a conjugation or negation that is still to be done.
at::Tensor stored(const at::Tensor& tensor) {
  at::Tensor plain = tensor.is_conj() ? tensor.conj() : tensor;
  return plain.is_neg() ? at::_neg_view(plain) : plain;
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (!to.numel()) return to;
  bool conjugate = from.is_conj() != to.is_conj(), negate = from.is_neg() != to.is_neg();
  at::Tensor source = stored(from), target = stored(to);
  if (source.sizes() != target.sizes()) source = source.expand(target.sizes());
  if (is_emu(source)) check_live(source, "copy");
  if (is_emu(target)) check_live(target, "copy");
  c10::DeviceGuard guard(is_emu(target) ? target.device() : source.device());
  if (is_emu(source)) {  // on the device, because the host would have to wait for the copy first
    if (conjugate) source = at::conj_physical(source);
    if (negate) source = at::neg(source);
  }
  if (is_emu(source) && is_emu(target)) {
    enqueue_device_copy(target, source);
  } else if (is_emu(target)) {
    copy_to_device(target, source, non_blocking);
    if (conjugate) target.conj_physical_();
    if (negate) target.neg_();
  } else {
    copy_to_host(target, source, non_blocking);
  }
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  resize_tensor(to, from.sizes());
  return copy_from(from, to, false);
}

at::Scalar item(const at::Tensor& tensor) {
  c10::DeviceGuard guard_device(tensor.device());
  check_live(tensor, "item()");
  synchronize_current_stream();
  Access access = access_of(tensor, false);
  runtime().scheduler.host_access(access, "item()");
  if (runtime().settings().dry_run) return 0;  // there are no data
  BelowAutograd guard;
  return cpu_alias(tensor).item();
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", item);
}

// PyTorch would resolve these by a copy, which comes here again, without end.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

}  // namespace
}  // namespace emu
