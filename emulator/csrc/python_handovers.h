// Watches Python's locks, queues, starts of threads and backwards from now on. To be called once.
#pragma once

struct _object;  // PyObject

namespace emu {

void watch_handovers(_object* lock, _object* reentrant, _object* queue, _object* threads, _object* autograd);

}  // namespace emu
