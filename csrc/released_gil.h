#pragma once

#include <Python.h>

// Lets other Python threads run during a call. Unlike pybind11's own guard its destructor may throw: before
// Python 3.14 a daemon thread that asks for the lock at interpreter exit is unwound right here, and a
// destructor that may not throw would turn that into an abort of the process.
class ReleasedGil {
  public:
    ReleasedGil() : state_(PyEval_SaveThread()) {}
    ~ReleasedGil() noexcept(false) { PyEval_RestoreThread(state_); }
    ReleasedGil(const ReleasedGil&) = delete;
    ReleasedGil& operator=(const ReleasedGil&) = delete;

  private:
    PyThreadState* state_;
};
