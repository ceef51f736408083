#include "registered.h"

#include <cstdio>
#include <string>

namespace emu {

static std::string hexadecimal(uintptr_t address) {
  char text[20];
  snprintf(text, sizeof text, "0x%zx", size_t(address));
  return text;
}

RegisteredMemory::Regions::const_iterator RegisteredMemory::region_of(uintptr_t address) const {
  auto it = regions_.upper_bound(address);
  if (it == regions_.begin()) return regions_.end();
  --it;
  return address < it->second.end ? it : regions_.end();
}

void RegisteredMemory::add(uintptr_t begin, size_t bytes) {
  std::string range = std::to_string(bytes) + " bytes at " + hexadecimal(begin);
  if (!begin || begin % kPageBytes)
    throw std::invalid_argument("EMU: host_register of " + range +
                                ": the address must be a multiple of the page size, " +
                                std::to_string(kPageBytes));
  if (!bytes) throw std::invalid_argument("EMU: host_register of no bytes");
  if (pinned_.owns(reinterpret_cast<void*>(begin)))
    throw std::runtime_error("EMU: host_register of " + range + ": it is pinned memory already");
  int64_t reserved = pinned_.stats().reserved;
  {
    std::lock_guard lock(mutex_);
    auto next = regions_.lower_bound(begin);
    bool overlaps = next != regions_.end() && next->first < begin + bytes;
    if (overlaps || region_of(begin) != regions_.end())
      throw std::runtime_error("EMU: host_register of " + range +
                               ": it overlaps memory that is registered already");
    if (size_t(reserved + bytes_) + bytes > settings_.pinned_memory)
      throw std::runtime_error("EMU: host_register of " + range + " exceeds the ceiling of " +
                               std::to_string(settings_.pinned_memory) +
                               " bytes on pinned memory, of which " +
                               std::to_string(reserved + bytes_) +
                               " are in use; raise it: emu.configure(pinned_memory=...)");
    regions_.emplace(begin, Region{begin + bytes});
    bytes_ += int64_t(bytes);
  }
  scheduler_.host_works(settings_.register_seconds_per_gib * double(bytes) / kBytesOfGiB, "host_register");
  // A copy in flight that still uses these addresses belongs to memory that was given back too
  // early.
  scheduler_.host_access({begin, begin + bytes, true}, "host_register", true);
}

void RegisteredMemory::remove(uintptr_t begin) {
  Region region;
  {
    std::lock_guard lock(mutex_);
    auto it = regions_.find(begin);
    if (it == regions_.end())
      throw std::runtime_error("EMU: host_unregister of " + hexadecimal(begin) +
                               ", where no registered memory begins");
    region = it->second;
  }
  scheduler_.host_access({begin, region.end, true}, "host_unregister", true);
  for (auto& copy : region.copies)
    if (!scheduler_.host_observes(copy)) scheduler_.synchronize(copy);
  std::lock_guard lock(mutex_);
  regions_.erase(begin);
  bytes_ -= int64_t(region.end - begin);
}

bool RegisteredMemory::owns(uintptr_t begin, uintptr_t end) const {
  std::lock_guard lock(mutex_);
  auto it = region_of(begin);
  return it != regions_.end() && end <= it->second.end;
}

void RegisteredMemory::note_copy(uintptr_t address, const RecordingPtr& copy) {
  std::lock_guard lock(mutex_);
  auto it = region_of(address);
  if (it == regions_.end()) return;
  auto& copies = regions_.at(it->first).copies;
  std::erase_if(copies, [](const RecordingPtr& earlier) { return earlier->done.load(); });
  copies.push_back(copy);
}

std::optional<size_t> RegisteredMemory::offset_of(uintptr_t address) const {
  std::lock_guard lock(mutex_);
  auto it = region_of(address);
  if (it == regions_.end()) return std::nullopt;
  return address - it->first;
}

int64_t RegisteredMemory::bytes() const {
  std::lock_guard lock(mutex_);
  return bytes_;
}

}  // namespace emu
