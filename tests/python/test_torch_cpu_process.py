"""Regions on the CPU and the life of a process: faults, forks and ends, judged by the exit statuses of programs."""

import re
import signal
import textwrap
from subprocess import CompletedProcess

import pytest

pytestmark = pytest.mark.sim_only

PRELUDE = """
import ctypes, faulthandler, os, signal, sys, threading, time, warnings
import torch
warnings.simplefilter("ignore", DeprecationWarning)  # from Python 3.12 on: forks beside threads
from ebbtide import _core, torch_extension
_core.use_driver("sim")
T = torch_extension.load()
T.install()
torch.set_num_threads(1)
def make_pool(tag):
    return T.pool_create(_core.bind_slot(tag, 0, 1), tag)
class inside:
    def __init__(self, pool): self.pool = pool
    def __enter__(self): T.pool_enter(self.pool)
    def __exit__(self, *_): T.pool_leave(self.pool)
W = make_pool("weights")
def make(build=lambda: torch.ones(1000)):
    with inside(W):
        return build()
"""


@pytest.fixture(scope="module")
def run(fork_server):
    """Runs a program (after `before` and the prelude) in its own process."""

    def run_one(program: str, before: str = "", timeout: float = 120) -> CompletedProcess[str]:
        return fork_server.run(before + PRELUDE + textwrap.dedent(program), timeout)

    return run_one


@pytest.fixture(scope="module")
def expect_clean(run):
    """Runs a program that must end with status 0 and an empty stderr. Returns its stdout."""

    def run_clean(program: str) -> str:
        result = run(program)
        assert result.returncode == 0, result.stderr
        assert result.stderr == ""
        return result.stdout

    return run_clean


def told(result: CompletedProcess[str]) -> bool:
    lines = [line for line in result.stderr.splitlines() if line.startswith("ebbtide: SIG")]
    assert all(
        re.fullmatch(r"ebbtide: SIG(SEGV|BUS) at 0x[0-9a-f]+: .*tag 'weights', which is paused\. Resume .*", line)
        for line in lines
    )
    assert len(lines) <= 1, "the line is written once"
    return bool(lines)


FAULT = """
x = make()
_core.pause(["weights"])
x.sum()
print("not reached")
"""


def expect_fault(result: CompletedProcess[str], has_line: bool = True) -> None:
    assert result.returncode in (-signal.SIGSEGV, -signal.SIGBUS), (result.returncode, result.stderr)
    assert told(result) == has_line, result.stderr
    assert "not reached" not in result.stdout


def test_touching_paused_memory_names_tag_and_address_and_ends_by_the_signal(run):
    expect_fault(run("print(hex(make().data_ptr() >> 32), flush=True)" + FAULT))


def test_the_address_in_the_line_is_the_tensors(run):
    result = run(
        "x = make(); print(x.data_ptr(), flush=True); _core.pause(['weights']); ctypes.memset(x.data_ptr() + 8, 1, 1)"
    )
    expect_fault(result)
    assert f"at {int(result.stdout) + 8:#x}:" in result.stderr


def test_faulthandler_that_was_there_still_prints_its_traceback(run):
    result = run(FAULT, before="import faulthandler; faulthandler.enable()")
    expect_fault(result)
    assert "Fatal Python error: " in result.stderr and 'File "<program>"' in result.stderr
    assert result.stderr.startswith("ebbtide: SIG")


def test_faulthandler_that_came_later_does_not_hide_the_line(run):
    result = run("faulthandler.enable()" + FAULT)
    expect_fault(result)
    assert "Fatal Python error: " in result.stderr


def test_a_fault_on_an_alternate_stack_thread_is_told(run):
    expect_fault(
        run(
            """
            def work():
                x = make(); _core.pause(["weights"]); x.sum()
            thread = threading.Thread(target=work); thread.start(); thread.join()
            """
        )
    )


def test_a_fault_in_a_worker_of_an_op_is_told(run):
    program = """
    torch.set_num_threads(4)
    x = make(lambda: torch.ones(4 << 20))
    _core.pause(["weights"])
    x.mul_(2)
    """
    expect_fault(run(program))
    expect_fault(run(program, before="import faulthandler; faulthandler.enable()"))


@pytest.mark.parametrize(
    "program",
    [
        "ctypes.string_at(8)",
        "x = make(); _core.pause(['weights']); ctypes.string_at(8)",
        "x = make(); _core.pause(['weights']); os.kill(os.getpid(), signal.SIGSEGV); time.sleep(60)",
        "x = make(); _core.pause(['weights']); signal.raise_signal(signal.SIGSEGV); time.sleep(60)",
    ],
    ids=["null", "null beside paused memory", "kill", "raise"],
)
def test_faults_that_are_not_ours_are_left_as_they_were(run, program):
    expect_fault(run(program), has_line=False)


def test_a_handler_of_the_programs_own_still_decides(run):
    program = """
    import ctypes, os, signal
    @ctypes.CFUNCTYPE(None, ctypes.c_int)
    def leave(number):
        os._exit(42)
    ctypes.CDLL(None).signal(signal.SIGSEGV, leave)
    ctypes.CDLL(None).signal(signal.SIGBUS, leave)
    """
    result = run(FAULT, before=textwrap.dedent(program))
    assert result.returncode == 42 and told(result), result.stderr


def test_an_ignored_signal_from_another_process_is_ignored(run):
    before = "import signal; signal.signal(signal.SIGSEGV, signal.SIG_IGN)"
    result = run("os.kill(os.getpid(), signal.SIGSEGV); print('alive')", before)
    assert (result.returncode, result.stdout) == (0, "alive\n"), result.stderr


def test_a_system_call_on_paused_memory_is_efault(expect_clean):
    out = expect_clean("""
    x = make(); _core.pause(["weights"])
    libc = ctypes.CDLL(None, use_errno=True)
    read, write = os.pipe()
    print(libc.write(write, ctypes.c_void_p(x.data_ptr()), 8), ctypes.get_errno())
    """)
    assert out == "-1 14\n"


# --- invariant 10: forked children ---


def test_invariant10_a_forked_child_changes_nothing_of_its_parents(expect_clean):
    expect_clean("""
    x, y = make(), make()
    free_before = T.pool_snapshot(W)
    with inside(W):
        pid = os.fork()
        if pid == 0:
            mine = torch.zeros(1000)
            del y
            ok = all(not start <= mine.data_ptr() < start + size for start, size, _ in T.pool_snapshot(W))
            del mine
            os._exit(0 if ok and x.sum() == 1000 else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert T.pool_snapshot(W) == free_before
    assert x.sum() == 1000 and y.sum() == 1000
    """)


def test_invariant10_a_forked_child_ends_in_peace_and_is_refused_the_rest(expect_clean):
    expect_clean("""
    from ebbtide.errors import StateError
    x = make()
    T.pool_enter(W)
    pid = os.fork()
    if pid == 0:
        T.pool_leave(W)
        for call in (lambda: T.pool_create(0), lambda: T.pool_trim(W), T.install):
            try:
                call()
            except StateError as error:
                assert "forked child" in str(error)
            else:
                os._exit(3)
        del x
        sys.exit(0)
    T.pool_leave(W)
    assert os.waitpid(pid, 0)[1] == 0
    assert x.sum() == 1000
    """)


def test_invariant10_forks_beside_allocating_threads_never_hang(expect_clean):
    expect_clean("""
    stop = threading.Event()
    def work():
        pool = make_pool("busy")
        with inside(pool):
            while not stop.is_set():
                torch.empty(5000)
    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads: thread.start()
    for _ in range(50):
        pid = os.fork()
        if pid == 0:
            torch.empty(5000)
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
    stop.set()
    for thread in threads: thread.join()
    """)


def test_invariant10_dataloader_workers(expect_clean):
    out = expect_clean("""
    data = make(lambda: torch.arange(64.0).view(16, 4))
    dataset = torch.utils.data.TensorDataset(data)
    with inside(W):
        loader = torch.utils.data.DataLoader(dataset, batch_size=4, num_workers=2)
        total = sum(float(batch.sum()) for (batch,) in loader)
    print(total, float(data.sum()))
    """)
    assert out == "2016.0 2016.0\n"


# --- ends ---


@pytest.mark.parametrize(
    "program",
    [
        "",
        "sys.exit(0)",
        "import builtins; builtins.kept = x; x = None",
        "x.append(x); del x",
        "import atexit; atexit.register(lambda kept=x: kept[0].shape)",
        "T.pool_enter(W)",
        "T.pool_enter(W, True)",
        "T.pool_suspend()",
        "threading.Thread(target=lambda: (time.sleep(0.2), x[0].shape)).start()",
        "threading.Thread(target=lambda kept=x: time.sleep(60), daemon=True).start()",
        "local = threading.local(); local.x = x; del x",
        "class Late:\n    def __del__(self): self.x = None\nlate = Late(); late.x = x; del x",
    ],
)
def test_exit_with_living_tensors_is_status_0(fork_server, program):
    """Some of them are resident and some are paused."""
    made = "W = make_pool('other'); resident = make(); x = [make(), paused]; many = [make() for _ in range(3)]"
    program = f"{PRELUDE}\npaused = make(); _core.pause(['weights']); {made}\n{program}\n"
    result = fork_server.run(program, whole_exit=True)
    assert (result.returncode, result.stderr) == (0, "")
