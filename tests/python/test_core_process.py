"""Forks, exits, signals and interpreter shutdown with `ebbtide._core` alone, judged by the exit status of a process."""

import signal

import pytest

pytestmark = pytest.mark.sim_only

PREAMBLE = """
import ctypes, gc, os, signal, sys, threading, time
sys.path.insert(0, os.environ["CORE_TESTS"])
from ebbtide import _core
from ebbtide.errors import StateError
from core_sim import CHUNK, Sim, content, fill, is_filled
_core.use_driver("sim")
sim = Sim()

def block(tag, value=7, size=CHUNK, backup=1):
    address = _core.alloc(tag, size, backup=backup)
    fill(address, size, value)
    return address

def wait_for(child):
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)

def in_child(body):
    child = os.fork()
    if child == 0:
        signal.alarm(30)  # a child that hangs ends with this signal
        try:
            body()
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return wait_for(child)
"""

ALL_CALLS = """
def refused_calls(address, operation, abandoned):
    return [
        lambda: _core.alloc("w", 1), lambda: _core.free(address), lambda: _core.find(address), lambda: _core.tags(),
        lambda: _core.pause([]), lambda: _core.resume([]), lambda: _core.claim("pause", []), lambda: _core.stats(),
        lambda: _core.configure("poison", b"1"), lambda: _core.Frame().open_lease("w", "x"), _core.driver_version,
        lambda: _core.events(), lambda: _core.allocations(), lambda: _core.backup_of(address, 1),
        lambda: _core.use_driver("sim"), lambda: _core.device_count(), lambda: _core.get_setting("poison"),
        lambda: _core.query_device(0), lambda: _core.capabilities(0), lambda: _core.bind_slot("w", 0, 1),
        lambda: _core.Frame().begin_capture(), operation.commit, abandoned.abandon,
    ]

def expect_refused(address, operation, abandoned, slot):
    for call in refused_calls(address, operation, abandoned):
        try:
            call()
        except StateError as error:
            assert "forked child" in str(error), error
        else:
            raise AssertionError(f"call {call} was allowed")
    torch_malloc = ctypes.CDLL(_core.loaded_library()).ebbtide_slot_alloc
    torch_malloc.restype = ctypes.c_void_p
    assert torch_malloc(slot, ctypes.c_uint64(1), None) is None
    assert _core.is_away(address, 1) is False
    assert _core.driver_name() == "sim" and _core.__version__
"""


@pytest.fixture
def run(run_python, request):
    """Runs a program after the preamble. It must end with this status and, unless told otherwise, write nothing to
    stderr."""

    def run_program(code, status=0, stderr="", **environment):
        tests = str(request.path.parent)
        done = run_python(
            PREAMBLE + code, CORE_TESTS=tests, EBBTIDE_DRIVER="sim", PYTHONFAULTHANDLER="1", **environment
        )
        assert (done.returncode, stderr in done.stderr) == (status, True), done.stdout + done.stderr
        if not stderr:
            assert done.stderr == ""
        return done

    return run_program


def test_invariant_10_a_forked_child_may_exit_or_exec_in_peace(run):
    run("""
address, stored = block("w"), block("s")
_core.pause(["s"])
assert in_child(lambda: None) == 0
assert in_child(lambda: os.execv("/bin/true", ["true"])) == 0
child = os.fork()
if child == 0:
    sys.exit(3)  # with finalisation
assert wait_for(child) == 3
_core.resume([])
assert is_filled(address, CHUNK, 7) and is_filled(stored, CHUNK, 7)
""")


def test_invariant_10_any_other_use_in_a_forked_child_raises(run):
    run(
        ALL_CALLS
        + """
address, slot = block("w"), _core.bind_slot("w", 0, 1)
block("a"), block("b"), block("c")
operation, abandoned, dropped = (_core.claim("pause", [tag]) for tag in "abc")
stored = block("s")
_core.pause(["s"])
backup = _core.backup_of(stored, CHUNK)
frame = _core.Frame(); frame.open_lease("w", "parent")
report = _core.pause(["s"])

def child():
    global dropped, backup, report
    expect_refused(address, operation, abandoned, slot)
    frame.close()  # the end of a `with` that the parent began
    del dropped, backup, report
    gc.collect()

assert in_child(child) == 0
# The parent's are whole.
assert operation.commit().bytes == CHUNK
abandoned.abandon()
assert bytes(memoryview(backup)) == content(CHUNK, 7)
frame.close()
dropped.commit()
_core.resume([])
assert is_filled(address, CHUNK, 7) and is_filled(stored, CHUNK, 7)
""",
        stderr="an allocation failed",
    )


def test_invariant_10_a_child_never_hangs_whatever_locks_other_threads_held(run):
    run(
        ALL_CALLS
        + """
address, slot = block("w"), _core.bind_slot("w", 0, 1)
over = threading.Event()

def churn():
    while not over.is_set():
        _core.free(_core.alloc("churn", CHUNK))
        _core.stats(), _core.tags(), _core.events(), _core.configure("host_limit", None)

def operate():
    while not over.is_set():
        _core.pause(["p"])
        _core.resume(["p"])

block("p", size=2 * CHUNK), block("a"), block("b"), block("c")
operation, abandoned, dropped = (_core.claim("pause", [tag]) for tag in "abc")
threads = [threading.Thread(target=target) for target in (churn, churn, operate)]
for thread in threads:
    thread.start()

def child():
    global dropped
    expect_refused(address, operation, abandoned, slot)
    del dropped
    gc.collect()

statuses = [in_child(child) for _ in range(15)]
over.set()
[thread.join() for thread in threads]
assert statuses == [0] * 15, statuses
""",
        stderr="an allocation failed",
    )


def test_a_child_of_a_process_that_never_used_the_core_may_use_it(run):
    run("""
def child():
    address = block("w")
    _core.pause([])
    _core.resume([])
    assert is_filled(address, CHUNK, 7)
assert in_child(child) == 0
assert in_child(child) == 0
""")


ENDINGS = {
    "nothing": "",
    "resident": "block('w')",
    "paused": "block('w'); _core.pause([])",
    "dropped": "block('w', backup=0); _core.pause([])",
    "resumed": "block('w'); _core.pause([]); _core.resume([])",
    "a claim in hand": "block('w'); operation = _core.claim('pause', [])",
    "a claim to resume in hand": "block('w'); _core.pause([]); operation = _core.claim('resume', [])",
    "a resume on its way": """
block('w', size=8 * CHUNK); _core.pause([])
sim.delay('ebbtide_deliver', 0.02)
going = _core.resume_async([])""",
    "a resume on its way that was dropped": """
a = block('w', size=8 * CHUNK); _core.pause([])
sim.delay('ebbtide_deliver', 0.02)
_core.resume_async([])
assert _core.is_away(a, 1)""",
    "a lease open": "frame = _core.Frame(); frame.open_lease('w', 'main')",
    "a capture open": "a = block('w'); frame = _core.Frame(); frame.begin_capture(); _core.free(a)",
    "a backup in hand": "a = block('w'); _core.pause([]); backup = _core.backup_of(a, CHUNK)",
    "a view of a backup in hand": "a = block('w'); _core.pause([]); v = memoryview(_core.backup_of(a, CHUNK))",
    "a partial tag": """
block('w'); block('w')
sim.fail('cuMemUnmap', 2, 999)
try:
    _core.pause([])
except Exception:
    pass""",
    "os._exit while paused": "block('w'); _core.pause([]); os._exit(0)",
    "exit() of C while paused": "block('w'); _core.pause([]); ctypes.CDLL(None).exit(0)",
    "quick_exit while paused": "block('w'); _core.pause([]); ctypes.CDLL(None).quick_exit(0)",
    "exec while paused": "block('w'); _core.pause([]); os.execv('/bin/true', ['true'])",
    "atexit before and after": """
import atexit
address = block('w')
atexit.register(lambda: (_core.resume([]), _core.free(address)))
atexit.register(lambda: _core.pause([]))""",
    "calls from __del__ of the last objects": """
class Last:
    def __init__(self):
        self.address, self.core = block('w'), _core
    def __del__(self):
        self.core.pause([]), self.core.resume([]), self.core.free(self.address)
last = Last()
last.itself = last
sys.modules['kept for the very end'] = last""",
    "an error at the very end": """
class Last:
    def __init__(self, core):
        self.core = core
    def __del__(self, error=ValueError):
        try:
            self.core.free(12345)
        except Exception:
            pass
last = sys.modules['kept for the very end'] = Last(_core)""",
    "the module forgotten": "block('w'); del _core; sys.modules.pop('ebbtide._core'); gc.collect()",
    "frees after the interpreter is gone": """
libc, library = ctypes.CDLL(None), ctypes.CDLL(_core.loaded_library())
for address in (block('w'), block('p')):
    assert libc.__cxa_atexit(library.ebbtide_slot_free, ctypes.c_void_p(address), None) == 0
_core.pause(["p"])""",
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_process_ends_with_status_0(run, ending):
    run(ENDINGS[ending])


IN_THE_MIDDLE = """
block('w', size=8 * CHUNK)
sim.delay('cuMemcpyDtoHAsync', 0.05)
def slow():
    _core.pause([])
thread = threading.Thread(target=slow, daemon=True)
thread.start()
while sim.calls('cuMemcpyDtoHAsync') == 0:
    time.sleep(0.001)
"""


@pytest.mark.parametrize(
    "ending",
    [
        "pass",
        "sys.exit(0)",
        "os._exit(0)",
        "ctypes.CDLL(None).exit(0)",
        "thread.join()",
        "threading.Thread(target=lambda: ctypes.CDLL(None).exit(0)).start(); time.sleep(60)",
        "threading.Thread(target=lambda: os._exit(0)).start(); time.sleep(60)",
        "os.execv('/bin/true', ['true'])",
        "assert in_child(lambda: None) == 0",
        "child = os.fork(); sys.exit(0 if child == 0 else wait_for(child))",
    ],
)
def test_invariant_4_a_process_that_ends_in_the_middle_of_a_pause_ends_with_status_0(run, ending):
    run(IN_THE_MIDDLE + ending)


def test_daemon_threads_in_every_call_at_exit(run):
    run("""
def keep(call):
    while True:
        try:
            call()
        except StateError:
            pass
block("p")
for call in (lambda: _core.free(_core.alloc("w", 1)), lambda: (_core.pause(["p"]), _core.resume(["p"])), _core.stats,
             _core.tags, lambda: _core.find(1), lambda: _core.claim("pause", ["p"]).commit(), _core.events):
    threading.Thread(target=keep, args=(call,), daemon=True).start()
time.sleep(0.2)
""")


@pytest.mark.parametrize("kind", ["pause", "resume", "commit", "claim"])
def test_ctrl_c_arrives_after_the_operation_with_state_whole(run, kind):
    run(f"""
kind = "{kind}"
address = block("w", size=8 * CHUNK)
operation = None
if kind == "resume":
    _core.pause([])
if kind == "commit":
    operation = _core.claim("pause", [])
slow_call = {{"resume": "cuMemcpyHtoDAsync", "claim": "cuStreamCreate"}}.get(kind, "cuMemcpyDtoHAsync")
sim.delay(slow_call, 0.05)
before = sim.calls(slow_call)

def interrupt():
    while sim.calls(slow_call) == before:
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGINT)

thread = threading.Thread(target=interrupt)
thread.start()
try:
    if kind == "commit":
        operation.commit()
    elif kind == "claim":
        operation = _core.claim("pause", [])
    else:
        getattr(_core, kind)([])
    time.sleep(5)
except KeyboardInterrupt:
    pass
else:
    raise AssertionError("no KeyboardInterrupt")
thread.join()
sim.delay(slow_call, 0)
(info,) = _core.tags()
assert info.state == ("resident" if kind in ("resume", "claim") else "paused"), info.state
if operation is not None and kind == "claim":
    operation.abandon()
_core.resume([])  # waits for nothing: no claim was lost
assert is_filled(address, 8 * CHUNK, 7)
_core.free(address)
assert sim.live().handles == 0
""")


def test_ctrl_c_ends_a_program_that_does_not_catch_it(run):
    run(
        """
block("w", size=8 * CHUNK)
sim.delay("cuMemcpyDtoHAsync", 0.02)
threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
_core.pause([])
time.sleep(5)
""",
        status=-signal.SIGINT,
        stderr="KeyboardInterrupt",
    )


def test_a_thread_may_end_with_whatever_it_holds(run):
    run("""
def work():
    global operation, frame
    block("w")
    frame = _core.Frame(); frame.open_lease("other", "a thread that ended")
    operation = _core.claim("pause", ["w"])
thread = threading.Thread(target=work)
thread.start()
thread.join()
operation.commit()
_core.resume(["w"])
try:
    _core.pause(["other"])
except StateError as error:
    assert "a thread that ended" in str(error)
""")


def test_multiprocessing_workers_of_every_start_method(run, tmp_path):
    (program := tmp_path / "workers.py").write_text(
        PREAMBLE
        + """
import multiprocessing
def job(number):
    return number * 2
if __name__ == "__main__":
    address = block("w")
    for method in ("fork", "spawn", "forkserver"):
        with multiprocessing.get_context(method).Pool(2) as pool:
            assert pool.map(job, range(4)) == [0, 2, 4, 6]
        _core.pause([])
        _core.resume([])
        assert is_filled(address, CHUNK, 7)
"""
    )
    run(f"import subprocess\nsys.exit(subprocess.run([sys.executable, {str(program)!r}]).returncode)")
