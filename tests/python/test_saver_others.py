"""What other processes and other code do to backups: forks, stopped and killed processes, files that are changed."""

import math
import os

import pytest

torch = pytest.importorskip("torch")

from ebbtide.errors import StoreError  # noqa: E402
from random_memory import random_bytes  # noqa: E402

MIB = 1 << 20

FORKED = """
    import os, signal, sys, torch
    from ebbtide import saver
    {configure}
    with saver.region("w", backup="{backup}", retain=True):
        data = torch.empty(8 << 20, dtype=torch.int64, device=saver.device).random_().view(torch.uint8)
    saver.pause("w")
    def anonymous_mib():
        lines = open("/proc/self/smaps_rollup").read().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith("Anonymous:")) >> 10
    def open_files():
        names = [os.readlink(f"/proc/self/fd/{{number}}") for number in os.listdir("/proc/self/fd") if number.isdigit()
                 and os.path.exists(f"/proc/self/fd/{{number}}")]
        mapped = open("/proc/self/maps").read().splitlines()
        return [name for name in [*names, *mapped] if "{folder}" in name]
    view = saver.backup_of(data)
    own = anonymous_mib(), len(open_files())
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.write(writer, f"{{anonymous_mib()}} {{len(open_files())}}".encode())
        os._exit(0)
    os.wait()
    print(*own, os.read(reader, 99).decode())
    del view
    print(saver.resume("w").bytes >= 64 << 20)
"""


def test_a_forked_child_keeps_no_backup(run_python, driver_name):
    code = FORKED.format(configure="", backup="ram", folder="no folder")
    done = run_python(code, EBBTIDE_DRIVER=driver_name)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    own, _, child, _ = map(int, first.split())
    assert own - child >= 60 and second == "True"


@pytest.mark.parametrize("files", ["hidden", "named"])
def test_a_forked_child_keeps_no_file(run_python, driver_name, tmp_path, files):
    configure = f"saver.configure(disk_directory={str(tmp_path)!r}, disk_files={files!r})"
    code = FORKED.format(configure=configure, backup="disk", folder=tmp_path)
    done = run_python(code, EBBTIDE_DRIVER=driver_name)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    _, own, _, child = map(int, first.split())
    assert own >= 2 and child == 0 and second == "True"
    assert not list(tmp_path.iterdir())


VIEW_IN_CHILD = """
    import gc, os, torch
    from ebbtide import saver
    saver.configure(disk_directory={folder!r})
    kept = []
    for backup in ("ram", "pinned", "disk"):
        with saver.region(backup, backup=backup):
            kept.append(torch.arange(1 << 20, device=saver.device))
    saver.pause()
    views = [saver.backup_of(each) for each in kept]
    files = set(os.listdir("/proc/self/fd"))
    child = os.fork()
    if child == 0:
        fresh = [os.open("/dev/null", os.O_RDONLY) for _ in range(20)]
        views.clear()
        gc.collect()
        os._exit(0 if all(os.fstat(number) for number in fresh) else 1)
    assert os.waitpid(child, 0)[1] == 0
    print([bool((view[:9] == torch.arange(9)).all()) for view in views])
"""


def test_a_child_may_drop_views_that_it_has_of_its_parent(run_python, driver_name, tmp_path):
    done = run_python(VIEW_IN_CHILD.format(folder=str(tmp_path)), EBBTIDE_DRIVER=driver_name)
    assert (done.returncode, done.stdout) == (0, "[True, True, True]\n"), done.stderr


TRUNCATED_LEDGER = """
    import os, torch
    from ebbtide import errors, saver
    path = os.environ["EBBTIDE_LEDGER"]
    saver.configure(host_limit="30MiB")
    data = {}
    for tag in "ab":
        with saver.region(tag):
            data[tag] = torch.randint(0, 256, (8 << 20,), dtype=torch.uint8, device=saver.device)
    copies = {tag: each.clone() for tag, each in data.items()}
    saver.pause("a")
    os.truncate(path, 0)
    saver.resume("a")
    saver.pause("b")
    os.truncate(path, 5000)
    saver.pause("a")
    print(open(path, "rb").read(8) != bytes(8))
    with saver.region("c"):
        more = torch.randint(0, 256, (8 << 20,), dtype=torch.uint8, device=saver.device)
    try:
        saver.pause("c")
    except errors.StoreError:
        print("refused")
    saver.resume()
    print(all(torch.equal(data[tag], copies[tag]) for tag in data))
"""


def test_a_ledger_that_somebody_truncates_is_made_whole(run_python, driver_name, tmp_path):
    path = tmp_path / "ledger"
    done = run_python(TRUNCATED_LEDGER, EBBTIDE_DRIVER=driver_name, EBBTIDE_LEDGER=str(path))
    assert (done.returncode, done.stdout) == (0, "True\nrefused\nTrue\n"), done.stderr


QUESTIONS = """
    import fcntl, os, struct, threading, torch
    from ebbtide import saver
    ours, its = os.pipe(), os.pipe()
    if os.fork() == 0:  # a process that takes the turn, and gives it back when it ends
        os.read(ours[0], 1)
        file = os.open(os.environ["EBBTIDE_LEDGER"], os.O_RDWR)
        fcntl.fcntl(file, fcntl.F_OFD_SETLKW, struct.pack("hhqqi0q", fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0))
        os.write(its[1], b"!")
        os.read(ours[0], 1)
        os._exit(0)
    with saver.region("a"):
        a = torch.ones(1 << 20, device=saver.device)
    with saver.region("b"):
        b = torch.ones(1 << 20, device=saver.device)
    saver.pause("b")
    os.write(ours[1], b"!")
    os.read(its[0], 1)
    claim = threading.Thread(target=saver.pause, args=("a",), daemon=True)
    claim.start()
    claim.join(0.3)
    print(claim.is_alive())
    saver.stats(), saver.settings(), saver.configure(host_limit="1GiB"), saver.resume("b")
    print("answered", claim.is_alive())
    os.write(ours[1], b"!")
    claim.join()
    print("over")
"""


def test_questions_do_not_wait_for_the_turn_of_another_process(run_python, driver_name, tmp_path):
    done = run_python(QUESTIONS, EBBTIDE_DRIVER=driver_name, EBBTIDE_LEDGER=str(tmp_path / "ledger"))
    assert (done.returncode, done.stdout) == (0, "True\nanswered True\nover\n"), done.stderr


def test_a_named_file_that_another_program_truncates(saver, tag, tmp_path):
    before = {name: saver.settings()[name] for name in ("disk_directory", "disk_files")}
    saver.configure(disk_directory=tmp_path, disk_files="named")
    try:
        with saver.region(tag, backup="disk"):
            kept = [random_bytes(10 * MIB, saver.device)]
        saver.pause(tag)
        (file,) = tmp_path.iterdir()
        os.truncate(file, 4096)
        for ask in (lambda: saver.resume(tag), lambda: saver.backup_of(kept[0])):
            with pytest.raises(StoreError, match="is shorter than the backup: it was truncated"):
                ask()
        kept.clear()  # as the message says
        saver.trim(tag)
        saver.resume(tag)
    finally:
        saver.configure(**before)


FINALIZER = """
    import faulthandler, gc, threading, torch
    from ebbtide import saver
    faulthandler.dump_traceback_later(30, exit=True)
    with saver.region("a"):
        a = torch.ones(1 << 20, device=saver.device)
    saver.configure(copy_ahead=True)
    saver.pause("a")
    resumed = []
    def in_new_thread(phase, info):  # as a __del__ that the collector runs there
        if threading.current_thread() is not threading.main_thread() and not resumed:
            resumed.append(True)
            saver.resume("a")
    gc.callbacks.append(in_new_thread)
    gc.set_threshold(1)
    saver.resume("a")
    gc.set_threshold(700)
    saver.pause("a"), saver.resume("a")
    print("fine")
"""


def test_a_finalizer_in_the_thread_that_copies_ahead_may_resume(run_python, driver_name):
    done = run_python(FINALIZER, EBBTIDE_DRIVER=driver_name)
    assert (done.returncode, done.stdout) == (0, "fine\n"), done.stderr


def test_numbers_of_other_kinds(saver, tag):
    class Size(int):
        def __str__(self):
            return "some"

    before = saver.settings()["host_limit"]
    try:
        saver.configure(host_limit=Size(1 << 40))
        assert saver.settings()["host_limit"] == 1 << 40
    finally:
        saver.configure(host_limit=before)
    with saver.region(tag):
        data = torch.ones(4, device=saver.device)
    for timeout in (10**400, math.inf):
        saver.pause(tag)
        saver.resume(tag, timeout=timeout)
    assert data.sum() == 4
