"""The native thread pool with Python threads, fork and interpreter exit."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.kernels.kernel_cases import assert_same_bits

_native = pytest.importorskip("tide_core.kernels._native", reason="the native module is not built")
native = importlib.import_module("tide_core.kernels.cpu.ops")


def run_script(body: str) -> subprocess.CompletedProcess[str]:
    """The module alone, in a process of its own: importing Torch takes seconds, and its own calls abort a process that
    ends meanwhile; a child may find a lock of it held by a thread that does not exist there."""
    header = """
        import ctypes, importlib.util, os, sys, threading, time
        spec = importlib.util.spec_from_file_location("_native", sys.argv[1])
        _native = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(_native)
        ones = lambda count: (ctypes.c_float * count)(*[1.0] * count)
        x, weight = ones(4 * 512), ones(2048 * 512)
        def linear(y):
            addresses = ctypes.addressof(x), ctypes.addressof(weight), 0, ctypes.addressof(y)
            _native.linear(0, 0, *addresses, 4, 512, 2048)
        def right():
            y = ones(4 * 2048)
            linear(y)
            return set(y) == {512.0}
        default = _native.num_threads()
        _native.set_num_threads(3)
    """
    script = textwrap.dedent(header) + textwrap.dedent(body)
    command = [sys.executable, "-c", script, _native.__file__]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_several_python_threads_may_call_at_once() -> None:
    _native.set_num_threads(3)
    weight = torch.randn(1024, 512)
    inputs = [torch.randn(rows % 5 + 1, 512) for rows in range(16)]
    expected = [native.linear(x, weight) for x in inputs]
    with ThreadPoolExecutor(6) as executor:
        for _ in range(20):
            for actual, wanted in zip(executor.map(lambda x: native.linear(x, weight), inputs), expected, strict=True):
                assert_same_bits(actual, wanted)


def test_workers_wake_again_after_they_went_to_sleep() -> None:
    _native.set_num_threads(2)
    weight = torch.randn(1024, 512)
    x = torch.randn(3, 512)
    expected = native.linear(x, weight)
    for _ in range(20):
        time.sleep(0.005)
        assert_same_bits(native.linear(x, weight), expected)


def test_the_thread_count_is_at_least_one() -> None:
    for wanted, count in ((4, 4), (1, 1), (0, 1), (-3, 1)):
        _native.set_num_threads(wanted)
        assert _native.num_threads() == count


def test_the_default_is_every_hardware_thread() -> None:
    done = run_script("print(default)")
    assert int(done.stdout) >= 1
    if hasattr(os, "sched_getaffinity"):
        assert int(done.stdout) == len(os.sched_getaffinity(0))


def test_a_forked_child_computes_with_threads_of_its_own() -> None:
    done = run_script("""
        assert right()
        child = os.fork()
        if child == 0:
            all_right = all(right() for _ in range(50))
            tasks = "/proc/self/task"
            num_threads = len(os.listdir(tasks)) if os.path.isdir(tasks) else 3
            os._exit(0 if all_right and num_threads == 3 else 1)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert right()
        print("done")
    """)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "done\n"


def test_fork_while_another_thread_is_inside_the_pool() -> None:
    done = run_script("""
        other = ones(4 * 2048)
        stop = threading.Event()
        def busy():
            while not stop.is_set():
                linear(other)
        thread = threading.Thread(target=busy)
        thread.start()
        for _ in range(10):
            child = os.fork()
            if child == 0:
                os._exit(0 if right() else 1)
            _, status = os.waitpid(child, 0)
            assert os.waitstatus_to_exitcode(status) == 0
        stop.set()
        thread.join()
        print("done")
    """)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "done\n"


@pytest.mark.parametrize("pause_s", [0.0, 0.01])
def test_the_interpreter_exits_cleanly_with_workers_awake_or_asleep(pause_s: float) -> None:
    done = run_script(f"assert right()\ntime.sleep({pause_s})\n")
    assert done.returncode == 0, done.stderr


def test_the_interpreter_exits_cleanly_while_a_daemon_thread_is_calling() -> None:
    done = run_script("""
        y = ones(4 * 2048)
        def busy():
            while True:
                linear(y)
        threading.Thread(target=busy, daemon=True).start()
        time.sleep(0.05)
    """)
    assert (done.returncode, done.stderr) == (0, "")


def test_other_python_threads_run_during_a_native_call() -> None:
    _native.set_num_threads(1)
    x, weight = torch.randn(64, 1024), torch.randn(8192, 1024)
    most = 0
    with ThreadPoolExecutor(1) as executor:
        for _ in range(100):  # one call may end before a busy machine has given this thread a turn
            call = executor.submit(native.linear, x, weight)
            beats = 0
            while not call.done():
                beats += 1
                time.sleep(0.001)
            most = max(most, beats)
            if most > 3:
                break
    assert most > 3, "the call held the interpreter lock"
