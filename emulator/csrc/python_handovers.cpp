// How does the emulator see that Python's threads hand work to each other? It watches Python's own locks and queues.
//
// Futures, conditions, events, executors and the queues of the standard library are all made of these three types,
// which are written in C. The entries of their methods are exchanged in place: so this holds for locks that were made
// before, costs no call of Python's, and leaves to Python how it waits and is interrupted.
#include "python_handovers.h"

#include <Python.h>

#include "runtime.h"

namespace emu {
namespace {

// A method takes self and at most four more arguments, whatever its flags say: all of them are in registers, and one
// that takes fewer does not look at the others.
using Method = PyObject* (*)(PyObject*, void*, void*, void*, void*);
using Before = void (*)(PyObject* self);
using After = void (*)(PyObject* self, PyObject* result);

template <int kPlace>
struct Watched {
  static inline Method original;
  static inline Before before;
  static inline After after;

  static PyObject* call(PyObject* self, void* a, void* b, void* c, void* d) {
    if (before) before(self);
    PyObject* result = original(self, a, b, c, d);
    if (after) after(self, result);
    return result;
  }

  static void install(PyMethodDef& method, Before runs_before, After runs_after) {
    original = reinterpret_cast<Method>(reinterpret_cast<void*>(method.ml_meth));
    before = runs_before;
    after = runs_after;
    method.ml_meth = reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&call));
  }
};

PyMethodDef* method_of(PyObject* owner, const char* name) {
  PyObject* found = PyObject_GetAttrString(owner, name);
  if (!found) PyErr_Clear();
  PyMethodDef* method = nullptr;
  if (found && Py_IS_TYPE(found, &PyMethodDescr_Type))
    method = reinterpret_cast<PyMethodDescrObject*>(found)->d_method;
  else if (found && PyCFunction_Check(found))
    method = reinterpret_cast<PyCFunctionObject*>(found)->m_ml;
  Py_XDECREF(found);  // its owner keeps it
  return method;
}

// The entry `name` of a type or module; a release of Python may lack it.
template <int kPlace>
void watch(PyObject* owner, const char* name, Before before, After after) {
  if (PyMethodDef* method = method_of(owner, name)) Watched<kPlace>::install(*method, before, after);
}

HostThreads& hosts() { return Runtime::get().hosts; }

void gives(PyObject* self) { hosts().hands_over(self); }
void takes(PyObject* self, PyObject* result) {
  if (result) hosts().takes_over(self);
}
void takes_if_acquired(PyObject* self, PyObject* result) {
  if (result && result != Py_False) hosts().takes_over(self);
}
void starts(PyObject*) { hosts().starts_thread(); }
void begins_backward(PyObject*) { hosts().begins_backward(); }
void ends_backward(PyObject*, PyObject*) { hosts().ends_backward(); }

}  // namespace

void watch_handovers(PyObject* lock, PyObject* reentrant, PyObject* queue, PyObject* threads, PyObject* autograd) {
  watch<0>(lock, "acquire", nullptr, takes_if_acquired);
  watch<1>(lock, "acquire_lock", nullptr, takes_if_acquired);
  watch<2>(lock, "__enter__", nullptr, takes_if_acquired);
  watch<3>(lock, "release", gives, nullptr);
  watch<4>(lock, "release_lock", gives, nullptr);
  watch<5>(lock, "__exit__", gives, nullptr);
  watch<6>(reentrant, "acquire", nullptr, takes_if_acquired);
  watch<7>(reentrant, "__enter__", nullptr, takes_if_acquired);
  watch<8>(reentrant, "_acquire_restore", nullptr, takes);
  watch<9>(reentrant, "release", gives, nullptr);
  watch<10>(reentrant, "__exit__", gives, nullptr);
  watch<11>(reentrant, "_release_save", gives, nullptr);
  watch<12>(queue, "put", gives, nullptr);
  watch<13>(queue, "put_nowait", gives, nullptr);
  watch<14>(queue, "get", nullptr, takes);
  watch<15>(queue, "get_nowait", nullptr, takes);
  watch<16>(threads, "start_new_thread", starts, nullptr);
  watch<17>(threads, "start_new", starts, nullptr);
  watch<18>(threads, "start_joinable_thread", starts, nullptr);
  watch<19>(autograd, "run_backward", begins_backward, ends_backward);
}

}  // namespace emu
