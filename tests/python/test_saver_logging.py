"""The logger "ebbtide": lines of operations, its level, and handlers that fail, are interrupted or call back."""

import logging
import os
import threading

import pytest

torch = pytest.importorskip("torch")

from ebbtide import logs  # noqa: E402
from ebbtide.errors import StateError  # noqa: E402

BLOCK = 1 << 20  # numbers of 4 bytes


class Lines(logging.Handler):
    """Collects (level, message), and calls `then` for each record."""

    def __init__(self, then=lambda record: None):
        super().__init__()
        self.then, self.lines = then, []

    def emit(self, record):
        self.lines.append((record.levelname, record.getMessage()))
        self.then(record)

    def heads(self, level="INFO"):
        return [line.split(":")[0] for name, line in self.lines if name == level]


@pytest.fixture
def listen():
    """Adds a handler at a level; all of it is undone."""
    added, before = [], logs.logger.level

    def add(level, then=lambda record: None):
        added.append(Lines(then))
        logs.logger.addHandler(added[-1])
        logs.logger.setLevel(level)
        return added[-1]

    yield add
    for handler in added:
        logs.logger.removeHandler(handler)
    logs.logger.setLevel(before)


def block(saver, tag):
    with saver.region(tag):
        return torch.arange(BLOCK, dtype=torch.int32, device=saver.device)


def test_an_operation_that_moves_nothing_names_its_tags(saver, tag, tag2, listen):
    keep = [block(saver, tag), block(saver, tag2)]
    saver.pause(tag, tag2)
    heard = listen("INFO")
    saver.pause(tag, tag2)
    saver.trim(tag)
    saver.promote(tag2)
    saver.resume(tag)
    saver.resume(tag, wait=False).wait()
    saver.pause(tag)
    saver.swap(pause=tag, resume=tag2)
    saver.pause()
    assert heard.heads()[:3] == [f"pause {tag}, {tag2}", f"trim {tag}", f"promote {tag2}"]
    assert heard.heads()[3:6] == [f"resume {tag}", f"resume {tag}", f"pause {tag}"]
    assert f": pause {tag}: freed 0 B in " in heard.lines[6][1] and f"; resume {tag2}: claimed " in heard.lines[6][1]
    saver.resume()
    saver.resume()
    assert heard.heads()[-1] == "resume every tag" and len(keep) == 2


def test_each_operation_logs_one_line(saver, tag, tag2, listen):
    keep = [block(saver, tag), block(saver, tag2)]
    heard = listen("INFO")
    saver.prepare(tag)
    saver.prepare(tag, wait=False).wait()
    saver.pause(tag)
    saver.resume(tag)
    saver.pause(tag)
    saver.swap(pause=tag2, resume=tag)
    pending = saver.resume(tag2, wait=False)
    pending.wait()
    pending.wait()
    with saver.paused(tag):
        pass
    saver.demote(tag)
    saver.promote(tag)
    saver.trim(tag)
    ends = [line.split(":")[0].split(" in ")[0].removesuffix(f" {tag}") for _, line in heard.lines]
    expected = ["prepare", "prepare", "pause", "resume", "pause", "swap", f"resume {tag2}", "pause", "resume"]
    assert ends == [*expected, "demote", "promote", "trim"]
    assert {level for level, _ in heard.lines} == {"INFO"}
    assert int(keep[0][-1]) == int(keep[1][-1]) == BLOCK - 1


def test_a_line_has_the_numbers_of_the_report(saver, tag, listen):
    keep = block(saver, tag)
    heard = listen("DEBUG")
    report = saver.pause(tag)
    (level, line), (row_level, row) = heard.lines
    assert (level, row_level) == ("INFO", "DEBUG")
    assert line.startswith(f"pause {tag}: freed ") and f" in {report.seconds:.3f} s, " in line
    assert line.endswith(f" copied ({report.copied / report.seconds / 1e9:.3g} GB/s)")
    assert row.startswith(f"pause {tag} on device 0: ") and "copied" in row
    saver.resume(tag)
    assert int(keep[-1]) == BLOCK - 1


def test_many_tags_are_one_short_line(saver, tag, listen):
    keep = [block(saver, f"{tag}-{number}") for number in range(11)]
    heard = listen("INFO")
    saver.pause(*(f"{tag}-{number}" for number in range(11)))
    ((_, line),) = heard.lines
    assert " and 3 more: freed " in line and line.count(tag) == 8
    assert len(keep) == 11


@pytest.mark.usefixtures("quick_scans")
def test_adoption_and_large_model_support_log(saver, tag, lms, listen):
    heard = listen("INFO")
    saver.adopt(torch.ones(BLOCK, device=saver.device), tag=tag)
    assert heard.heads() == [f"adopt into {tag}"]
    lms.enable("3GiB")
    lms.enable("2GiB", host_limit="1GiB")
    lms.disable()
    lms.disable()
    assert [line for _, line in heard.lines[1:]] == [
        "lms on: limit 3.0 GiB, min_size 1.0 MiB",
        "lms changed: limit 2.0 GiB, min_size 1.0 MiB, host_limit 1.0 GiB",
        "lms off",
    ]


def test_what_fails_or_is_refused_logs_nothing(saver, tag, listen):
    heard = listen("DEBUG")
    with pytest.raises(StateError):
        saver.pause(f"{tag}-unknown")
    with saver.region(tag), pytest.raises(StateError):
        saver.pause(tag)
    assert heard.lines == []


def test_nothing_is_built_without_a_listener(saver, tag, listen, monkeypatch):
    from ebbtide.saver.telling import log_lines

    keep = block(saver, tag)
    listen("WARNING")
    monkeypatch.setattr(log_lines, "_describe", None)
    monkeypatch.setattr(log_lines, "_log_rows", None)
    saver.pause(tag)
    saver.resume(tag)
    assert int(keep[-1]) == BLOCK - 1


def test_rows_are_not_read_at_info(saver, tag, listen):
    keep = block(saver, tag)
    listen("INFO")
    report = saver.pause(tag)
    assert not isinstance(report.__dict__["rows"], tuple)  # still the core's
    saver.resume(tag)
    assert int(keep[-1]) == BLOCK - 1


def test_a_handler_that_raises_harms_nothing(saver, tag, listen):
    def fail(record):
        raise ValueError("a broken handler")

    keep = block(saver, tag)
    heard = listen("INFO", fail)
    with pytest.warns(RuntimeWarning, match="a handler of the logger 'ebbtide' failed: ValueError"):
        report = saver.pause(tag)
    assert report.bytes > 0 and saver.is_paused(tag)
    with pytest.warns(RuntimeWarning):
        saver.resume(tag)
    assert int(keep[-1]) == BLOCK - 1 and len(heard.lines) == 2


@pytest.mark.usefixtures("quick_scans")
@pytest.mark.parametrize("way", ["pause", "resume", "swap", "wait", "trim", "prepare", "adopt"])
def test_an_interrupt_in_a_handler_leaves_the_operation_done(saver, tag, tag2, listen, way):
    def interrupt(record):
        raise KeyboardInterrupt

    keep, other = block(saver, tag), block(saver, tag2)
    loose = torch.ones(BLOCK, device=saver.device)
    if way in ("resume", "swap", "wait"):
        saver.pause(tag)
    pending = saver.resume(tag, wait=False) if way == "wait" else None
    acts = {
        "pause": lambda: saver.pause(tag),
        "resume": lambda: saver.resume(tag),
        "swap": lambda: saver.swap(pause=tag2, resume=tag),
        "wait": lambda: pending.wait(),
        "trim": lambda: saver.trim(tag),
        "prepare": lambda: saver.prepare(tag),
        "adopt": lambda: saver.adopt(loose, tag=tag),
    }
    heard = listen("INFO", interrupt)
    with pytest.raises(KeyboardInterrupt):
        acts[way]()
    heard.then = lambda record: None
    assert saver.is_paused(tag) == (way == "pause") and saver.is_paused(tag2) == (way == "swap")
    saver.pause()  # nothing is leased or claimed
    saver.resume()
    assert int(keep[-1]) == int(other[-1]) == BLOCK - 1


def test_an_interrupt_in_a_handler_of_a_scope_brings_the_tag_back(saver, tag, listen):
    left = 1

    def interrupt(record):
        nonlocal left
        left -= 1
        if left == 0:
            raise KeyboardInterrupt

    keep = block(saver, tag)
    listen("INFO", interrupt)
    for at in (1, 2):  # the line of the pause, and that of the resume
        left = at
        with pytest.raises(KeyboardInterrupt), saver.paused(tag):
            pass
        assert not saver.is_paused(tag)
    assert int(keep[-1]) == BLOCK - 1


@pytest.mark.usefixtures("quick_scans")
def test_a_handler_may_use_the_saver_and_other_threads_too(saver, tag, tag2, listen):
    """No lock of ebbtide's is held while a handler runs."""
    keep, other = block(saver, tag), block(saver, tag2)
    errors = []

    def use_everything():
        try:
            saver.tags(), saver.stats(), saver.resume(tag2, wait=False).wait()
            saver.on("before_pause", tag, print)()
            saver.pause(tag2)
            with saver.region(tag):
                torch.ones(3, device=saver.device)
        except Exception as error:
            errors.append(error)

    def call_back(record):
        if not is_first:
            return
        is_first.clear()
        use_everything()
        thread = threading.Thread(target=use_everything)
        thread.start()
        thread.join(30)
        if thread.is_alive():
            errors.append("a lock is held")

    main, is_first = threading.get_ident(), []
    heard = listen("INFO", call_back)
    heard.addFilter(lambda record: record.thread == main)  # logging holds a lock of the handler's own
    for act in (
        lambda: saver.resume(tag),
        lambda: saver.trim(tag),
        lambda: saver.resume(tag, wait=False).wait(),
        lambda: saver.prepare(tag),
        lambda: saver.adopt(torch.ones(BLOCK, device=saver.device), tag=tag),
    ):
        is_first.append(True)
        act()
        assert not is_first
    assert errors == []
    saver.resume()
    assert int(keep[-1]) == int(other[-1]) == BLOCK - 1


def test_a_failing_handler_leaves_large_model_support_whole(saver, lms, listen):
    def interrupt(record):
        raise KeyboardInterrupt

    heard = listen("INFO", interrupt)
    with pytest.raises(KeyboardInterrupt):
        lms.enable("3GiB")
    assert lms.enabled
    with pytest.raises(KeyboardInterrupt):
        lms.disable()
    assert not lms.enabled
    heard.then = lambda record: None
    with lms.enable("3GiB"):
        assert lms.enabled


PROGRAM = """
    import torch
    import logging
    {before}
    from ebbtide import saver
    with saver.region("w"):
        keep = torch.arange(1 << 20, device=saver.device)
    {after}
    saver.pause("w")
    logging.getLogger("ebbtide").debug("of debug")
"""


def program(before="pass", after="pass"):
    return PROGRAM.format(before=before, after=after)


@pytest.mark.parametrize(
    ("level", "before", "expected"),
    [
        (None, "pass", []),
        ("warning", "pass", []),
        ("error", "pass", []),
        ("INFO ", "pass", ["ebbtide: pause w: freed"]),
        ("debug", "pass", ["ebbtide: pause w: freed", "ebbtide: pause w on"]),
        # Handlers of the program take the lines, and stderr gets none of ours.
        ("info", "logging.basicConfig(format='mine %(message)s')", ["mine pause w: freed"]),
        (None, "logging.basicConfig(level='INFO', format='mine %(message)s')", ["mine pause w: freed"]),
        (None, "logging.basicConfig(format='mine %(message)s')", []),
        # A level that the program set is the program's.
        ("info", "logging.getLogger('ebbtide').setLevel('ERROR')", []),
        ("error", "logging.getLogger('ebbtide').setLevel('DEBUG')", ["ebbtide: pause w: freed", "ebbtide: pause w on"]),
        # Its NullHandler is no handler.
        ("info", "logging.getLogger().addHandler(logging.NullHandler())", ["ebbtide: pause w: freed"]),
    ],
)
def test_the_variable_sets_the_level_and_stderr_stands_in(run_python, driver_name, level, before, expected):
    done = run_python(program(before), EBBTIDE_DRIVER=driver_name, EBBTIDE_LOG=level)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if "of debug" not in line]
    assert len(lines) == len(expected), done.stderr
    assert all(line.startswith(start) for line, start in zip(lines, expected, strict=True)), lines


def test_warnings_are_seen_without_the_variable_and_without_handlers(run_python, driver_name):
    code = """
        import logging
        import ebbtide.saver
        logging.getLogger("ebbtide.integrations.vllm").warning("asleep already")
        logging.getLogger("ebbtide").info("not asked for")
    """
    done = run_python(code, EBBTIDE_DRIVER=driver_name, EBBTIDE_LOG=None)
    assert (done.returncode, done.stderr) == (0, "ebbtide: asleep already\n")


def test_a_malformed_level_is_none(run_python, driver_name):
    code = """
        import logging
        import ebbtide.saver
        logger = logging.getLogger("ebbtide")
        assert logger.level == logging.NOTSET, logger.level
        assert [type(each).__name__ for each in logger.handlers] == ["_StderrWithoutHandlers"]
    """
    done = run_python(code, EBBTIDE_DRIVER=driver_name, EBBTIDE_LOG="loud")
    assert done.returncode == 0, done.stderr


def test_a_lost_stderr_harms_nothing(run_python, driver_name):
    for loss in ("import sys; sys.stderr = None", "import sys; sys.stderr = open('/dev/full', 'w', buffering=1)"):
        code = program(after=loss) + "    assert saver.is_paused('w'); print('whole', end='')\n"
        done = run_python(code, EBBTIDE_DRIVER=driver_name, EBBTIDE_LOG="info")
        assert done.stdout == "whole", done.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_child_logs_by_itself(run_python, driver_name):
    """Also if another thread of the parent was logging at the fork. It rests now and then: who fills a pipe faster than
    it is read keeps others from writing.
    """
    after = """
    import os, signal, threading, time
    from ebbtide import errors, logs
    def chatter():
        while True:
            for _ in range(50):
                logs.log(logging.DEBUG, "x"), logs.log(logging.ERROR, "of debug")
            time.sleep(0.005)
    threading.Thread(target=chatter, daemon=True).start()
    for _ in range(20):
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            logs.log(logging.INFO, "a child of debug")
            try:
                saver.pause("w")
            except errors.StateError:
                os._exit(0)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
    """
    done = run_python(program(after=after), EBBTIDE_DRIVER=driver_name, EBBTIDE_LOG="info")
    assert done.returncode == 0, "\n".join(line for line in done.stderr.splitlines() if "of debug" not in line)
    assert done.stderr.count("ebbtide: a child of debug") == 20
