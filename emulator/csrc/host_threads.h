// What has each host thread seen? A thread knows what it has waited for, and what others that hand work to it know.
//
// Handing over is what Python's locks and queues do (python_handovers.cpp), the start and the join of a thread, and
// a backward. Threads of autograd count as one: they work while somebody waits for a backward.
#pragma once
#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "vector_clock.h"

namespace emu {

bool is_autograd_thread();

// Thread safe; it calls nobody while it holds its lock.
class HostThreads {
 public:
  struct Moment {
    size_t party;  // component of the vector clock
    uint64_t tick;
  };
  // The calling thread does something now: `seen` learns of it, and of all that the thread knows.
  Moment act(VectorClock& seen);
  void sees(const VectorClock& clock);
  // What any thread knows. Memory is given back by whoever drops the last reference, after all others dropped theirs.
  void join_all(VectorClock& seen);

  void hands_over(const void* by);  // by a lock or a queue
  void takes_over(const void* by);
  void starts_thread();
  void joins_thread(unsigned long thread);  // a pthread_t
  void begins_backward();
  void ends_backward();

  void begin_epoch();
  void share_one_clock(bool one) { one_clock_ = one; }  // all threads know what any of them has waited for
  void forget_in_fork() { is_forked_ = true; }  // another thread may have held the lock

 private:
  struct Thread {
    uint64_t epoch;
    size_t party;
    VectorClock clock;
  };
  using ThreadPtr = std::shared_ptr<Thread>;
  ThreadPtr new_thread();
  ThreadPtr& autograd();
  Thread& calling();

  std::atomic<bool> is_forked_{false}, one_clock_{false};
  std::mutex mutex_;
  uint64_t epoch_ = 0;
  uint64_t tick_ = 0;  // of all threads and epochs: a clock of an earlier epoch covers nothing of this one
  int next_number_ = 0;
  VectorClock all_, at_starts_;  // at_starts_: what a thread knew that started another
  ThreadPtr autograd_, shared_;
  std::unordered_map<unsigned long, ThreadPtr> threads_;
  std::unordered_map<const void*, VectorClock> handed_over_;
};

}  // namespace emu
