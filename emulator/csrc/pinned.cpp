#include "pinned.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>

namespace emu {

// ---- guard

int PinnedGuard::PageUse::protection() const {
  if (open) return PROT_READ | PROT_WRITE;
  if (writing) return PROT_NONE;  // a copy fills it: even a read would see half of the data
  if (reading) return PROT_READ;
  return PROT_READ | PROT_WRITE;
}

// The pages that lie wholly in the range.
static std::pair<uintptr_t, uintptr_t> pages_inside(const Access& range) {
  return {round_up(range.begin, kPageBytes), range.end & ~uintptr_t(kPageBytes - 1)};
}

// Those and the ones that it shares with other data.
static std::pair<uintptr_t, uintptr_t> pages_touched(const Access& range) {
  return {range.begin & ~uintptr_t(kPageBytes - 1), round_up(range.end, kPageBytes)};
}

void PinnedGuard::protect(const Access& range) {
  auto [first, last] = pages_inside(range);
  change(first, last, range.is_write ? &PageUse::writing : &PageUse::reading, +1);
}

void PinnedGuard::unprotect(const Access& range) {
  auto [first, last] = pages_inside(range);
  change(first, last, range.is_write ? &PageUse::writing : &PageUse::reading, -1);
}

void PinnedGuard::open(const Access& range) {
  auto [first, last] = pages_touched(range);
  change(first, last, &PageUse::open, +1);
}

void PinnedGuard::close(const Access& range) {
  auto [first, last] = pages_touched(range);
  change(first, last, &PageUse::open, -1);
}

void PinnedGuard::change(uintptr_t first, uintptr_t last, int PageUse::* count, int by) {
  std::lock_guard lock(mutex_);
  for (uintptr_t page = first; page < last; page += kPageBytes) pages_[page].*count += by;
  for (uintptr_t run = first; run < last;) {  // one mprotect for each run of equal pages
    int protection = pages_[run].protection();
    uintptr_t end = run + kPageBytes;
    while (end < last && pages_[end].protection() == protection) end += kPageBytes;
    mprotect(reinterpret_cast<void*>(run), end - run, protection);
    run = end;
  }
  for (uintptr_t page = first; page < last; page += kPageBytes)
    if (auto it = pages_.find(page); it->second.is_idle()) pages_.erase(it);
}

bool PinnedGuard::note_fault(uintptr_t address) {
  std::lock_guard lock(mutex_);  // whoever holds it touches no guarded memory
  uintptr_t page = address & ~uintptr_t(kPageBytes - 1);
  auto it = pages_.find(page);
  if (it == pages_.end() || it->second.is_idle()) return false;
  if (fault_count_ < faults_.size())
    faults_[fault_count_++] = {address, it->second.writing > 0, long(gettid())};
  return !mprotect(reinterpret_cast<void*>(page), kPageBytes, PROT_READ | PROT_WRITE);
}

std::vector<std::string> PinnedGuard::take_faults() {
  std::lock_guard lock(mutex_);
  std::vector<std::string> reports;
  for (size_t i = 0; i < fault_count_; i++)
    reports.push_back(std::string("GUARD: the host touched PINNED memory that a copy in flight ") +
                      (faults_[i].being_filled ? "fills" : "reads, by writing to it") +
                      ", thread " + std::to_string(faults_[i].thread));
  fault_count_ = 0;
  return reports;
}

// ---- pool

void* PinnedMemory::allocate(size_t requested) {
  if (!requested) return nullptr;
  std::lock_guard lock(mutex_);
  size_t bytes = round_up(requested, kPageBytes);
  auto [begin, end] = idle_.equal_range(bytes);
  for (auto it = begin; it != end; ++it) {
    uintptr_t address = it->second;
    Block& block = blocks_.at(address);
    if (!copies_done(block)) continue;
    idle_.erase(it);
    scheduler_.host_access({address, address + bytes, true}, "alloc", true);
    return take(address, block);
  }
  auto fits = [&] { return size_t(stats_.reserved) + bytes <= settings_.pinned_memory; };
  if (!fits()) release_cached();
  if (!fits()) fail(requested);
  stats_.reserved += int64_t(bytes);
  if (settings_.pin_seconds_per_gib > 0)
    scheduler_.host_works(settings_.pin_seconds_per_gib * double(bytes) / kBytesOfGiB, "pin");
  uintptr_t address = arena_.reserve(bytes);
  return take(address, blocks_[address] = Block{bytes, false, {}});
}

void* PinnedMemory::take(uintptr_t address, Block& block) {
  block.in_use = true;
  block.copies.clear();
  stats_.allocated += int64_t(block.bytes);
  stats_.peak_allocated = std::max(stats_.peak_allocated, stats_.allocated);
  return reinterpret_cast<void*>(address);
}

void PinnedMemory::free(void* address) {
  if (!address) return;
  std::lock_guard lock(mutex_);
  auto it = blocks_.find(reinterpret_cast<uintptr_t>(address));
  if (it == blocks_.end() || !it->second.in_use) {
    scheduler_.report("EMU: free of pinned memory that is not allocated");
    return;
  }
  it->second.in_use = false;
  stats_.allocated -= int64_t(it->second.bytes);
  idle_.insert({it->second.bytes, it->first});
}

void PinnedMemory::note_copy(uintptr_t address, const RecordingPtr& copy) {
  std::lock_guard lock(mutex_);
  auto it = blocks_.upper_bound(address);
  if (it == blocks_.begin()) return;
  auto& [begin, block] = *std::prev(it);
  if (address >= begin + block.bytes) return;
  auto& copies = block.copies;
  std::erase_if(copies, [](const RecordingPtr& earlier) { return earlier->done.load(); });
  copies.push_back(copy);
}

bool PinnedMemory::copies_done(const Block& block) {
  return std::all_of(block.copies.begin(), block.copies.end(),
                     [&](const RecordingPtr& copy) { return scheduler_.host_observes(copy); });
}

void PinnedMemory::empty_cache() {
  std::lock_guard lock(mutex_);
  release_cached();
}

void PinnedMemory::release_cached() {
  for (auto [bytes, address] : idle_) {
    for (auto& copy : blocks_.at(address).copies) scheduler_.synchronize(copy);
    stats_.reserved -= int64_t(bytes);
    blocks_.erase(address);
    arena_.discard_pages(address, bytes);
    arena_.release(address, bytes);
  }
  idle_.clear();
}

void PinnedMemory::fail(size_t requested) {
  auto mib = [](auto bytes) { return double(bytes) / (1 << 20); };
  char text[300];
  snprintf(
      text, sizeof text,
      "EMU pinned memory exhausted. Tried to pin %.2f MiB. %.2f MiB of the ceiling of %.2f MiB "
      "are in use; free pinned tensors or raise it: emu.configure(pinned_memory=...)",
      mib(requested), mib(stats_.reserved), mib(settings_.pinned_memory));
  throw PinnedMemoryExhausted(text);
}

PinnedMemoryStats PinnedMemory::stats() {
  std::lock_guard lock(mutex_);
  return stats_;
}

void PinnedMemory::reset_peaks() {
  std::lock_guard lock(mutex_);
  stats_.peak_allocated = stats_.allocated;
}

}  // namespace emu
