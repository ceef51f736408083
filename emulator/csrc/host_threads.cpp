#include "host_threads.h"

#include <pthread.h>

#include <cstring>

namespace emu {

bool is_autograd_thread() {
  char name[16] = "";
  pthread_getname_np(pthread_self(), name, sizeof name);
  return !strncmp(name, "pt_autograd", strlen("pt_autograd"));
}

HostThreads::ThreadPtr HostThreads::new_thread() {
  return std::make_shared<Thread>(Thread{epoch_, host_component(next_number_++), at_starts_});
}

HostThreads::ThreadPtr& HostThreads::autograd() {
  if (!autograd_) autograd_ = new_thread();
  return autograd_;
}

HostThreads::Thread& HostThreads::calling() {
  if (one_clock_) {
    if (!shared_) shared_ = new_thread();
    return *shared_;
  }
  static thread_local ThreadPtr known;
  if (known && known->epoch == epoch_) return *known;
  known = is_autograd_thread() ? autograd() : new_thread();
  threads_[(unsigned long)pthread_self()] = known;
  return *known;
}

HostThreads::Moment HostThreads::act(VectorClock& seen) {
  std::lock_guard lock(mutex_);
  Thread& thread = calling();
  uint64_t tick = component(thread.clock, thread.party) = ++tick_;
  component(all_, thread.party) = tick;
  join(seen, thread.clock);
  return {thread.party, tick};
}

void HostThreads::sees(const VectorClock& clock) {
  std::lock_guard lock(mutex_);
  join(calling().clock, clock);
  join(all_, clock);
}

void HostThreads::join_all(VectorClock& seen) {
  std::lock_guard lock(mutex_);
  join(seen, all_);
}

void HostThreads::hands_over(const void* by) {
  if (is_forked_) return;
  std::lock_guard lock(mutex_);
  join(handed_over_[by], calling().clock);
}

void HostThreads::takes_over(const void* by) {
  if (is_forked_) return;
  std::lock_guard lock(mutex_);
  auto found = handed_over_.find(by);
  if (found != handed_over_.end()) join(calling().clock, found->second);
}

void HostThreads::starts_thread() {
  if (is_forked_) return;
  std::lock_guard lock(mutex_);
  join(at_starts_, calling().clock);
}

void HostThreads::joins_thread(unsigned long thread) {
  if (is_forked_) return;
  std::lock_guard lock(mutex_);
  auto found = threads_.find(thread);
  if (found != threads_.end() && found->second->epoch == epoch_)
    join(calling().clock, found->second->clock);
}

void HostThreads::begins_backward() {
  std::lock_guard lock(mutex_);
  join(autograd()->clock, calling().clock);
}

void HostThreads::ends_backward() {
  std::lock_guard lock(mutex_);
  join(calling().clock, autograd()->clock);
}

void HostThreads::begin_epoch() {
  std::lock_guard lock(mutex_);
  epoch_++;
  next_number_ = 0;
  all_.clear();
  at_starts_.clear();
  autograd_.reset();
  shared_.reset();
  threads_.clear();
  handed_over_.clear();
  calling();  // reports call the first one the host
}

}  // namespace emu
