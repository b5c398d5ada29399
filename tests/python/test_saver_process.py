"""Processes that end, fork and start others while regions are open or tags are paused, judged by exit status."""

import pytest

pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def extension_is_built(saver):
    """Builds the torch extension first: the build prints a line on stderr, which these tests do not expect."""
    assert saver.device


PREAMBLE = """
        import atexit, gc, os, sys, threading
        import torch
        import ebbtide
        from ebbtide import saver
        device = saver.device

        def block(tag, value=1.0):
            with saver.region(tag):
                return torch.full((300_000,), value, device=device)
"""

ENDINGS = {
    "a resident tensor": "tensor = block('a')",
    "tags in every state": """
        first = block('paused'); saver.pause('paused')
        second = block('dropped'); saver.pause('dropped', backup=None)
        third = block('resumed'); saver.pause('resumed'); saver.resume('resumed')
        tensor = block('cached free blocks, paused'); del tensor; saver.pause('cached free blocks, paused')
        tensor = block('nobody uses any more'); del tensor; gc.collect(); fourth = block('another')
        tensor = block('viewed'); saver.pause('viewed'); view = saver.backup_of(tensor); del tensor
        cycle = [block('cycle')]; cycle.append(cycle); saver.pause('cycle'); del cycle
        saver.on('before_pause', 'hooked', print); fifth = block('hooked')
        keeper = sys.modules['keeper'] = type(sys)('keeper')
        keeper.tensor = block('kept by a module'); saver.pause('kept by a module')
        model = torch.nn.Linear(300, 300).to(device)
        saver.adopt(model, tag='adopted')
        saver.pause('adopted')""",
    "inside regions": """
        thread = threading.Thread(target=lambda: saver.region('a').__enter__())
        thread.start()
        thread.join()  # it has ended inside
        entered = threading.Event()
        def stay():
            with saver.region('a'):
                entered.set()
                threading.Event().wait()
        threading.Thread(target=stay, daemon=True).start()
        entered.wait()
        scopes = [saver.region('a'), saver.region('b', threads='all'), saver.disabled(), saver.region('a')]
        [scope.__enter__() for scope in scopes]
        tensor = torch.ones(10, device=device)""",
    "sys.exit in a region": """
        with saver.region('a'):
            tensor = torch.ones(10, device=device)
            sys.exit(0)""",
    "daemon threads inside calls": """
        def ask():
            while True:
                saver.tags(), saver.stats()
        for _ in range(4):
            threading.Thread(target=ask, daemon=True).start()
        threading.Event().wait(0.1)""",
    "a pause and a region at exit": """
        tensor = block('a')
        atexit.register(lambda: block('a'))
        atexit.register(saver.pause)  # runs first
        atexit.register(lambda: block('a'))""",
    "os._exit": "tensor = block('a'); saver.pause('a'); os._exit(0)",
}


@pytest.mark.parametrize("ending", ENDINGS.values(), ids=ENDINGS.keys())
def test_every_ending_has_status_0(run_python, ending):
    result = run_python(PREAMBLE + "\n        " + ending.strip(), whole_exit=True)
    assert (result.returncode, result.stderr) == (0, "")


def test_a_program_that_dies_of_its_own_error_says_only_that(run_python):
    result = run_python(
        PREAMBLE
        + """
        with saver.region('a'):
            tensor = block('b')
            saver.pause('b')
            raise KeyError('its own')
    """,
        whole_exit=True,
    )
    assert result.returncode == 1
    assert result.stderr.rstrip().endswith("KeyError: 'its own'")
    assert "StateError" not in result.stderr


@pytest.mark.sim_only
def test_invariant_10_a_forked_child_ends_in_peace(run_python):
    result = run_python(
        PREAMBLE
        + """
        from contextlib import nullcontext

        def exits(): os._exit(0)
        def exits_through_python(): sys.exit(0)
        def runs_another_program(): os.execv(sys.executable, [sys.executable, '-c', 'pass'])
        def uses_and_frees_tensors():
            assert float(tensors[0][5]) == 1
            assert torch.arange(100.0)[99] == 99
            tensors.clear()
            gc.collect()
            sys.exit(0)

        def run(child):
            pid = os.fork()
            if pid == 0:
                child()
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            assert status == 0, (child.__name__, status)

        tensors = [block('a')]
        for child in (exits, exits_through_python, runs_another_program, uses_and_frees_tensors):
            run(child)
            with saver.region('b'), saver.region('c', threads='all'):
                run(child)
            assert float(tensors[0].sum()) == 300_000
            saver.pause()
            saver.resume()
            assert float(tensors[0].sum()) == 300_000
    """,
        whole_exit=True,
    )
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.sim_only
def test_invariant_10_any_other_use_in_a_child_raises(run_python):
    result = run_python(
        PREAMBLE
        + """
        tensor = block('a')
        pid = os.fork()
        if pid == 0:
            failures = []
            uses = [lambda: saver.region('a').__enter__(), lambda: saver.region('new').__enter__(),
                    lambda: saver.pause('a'), saver.resume,
                    lambda: saver.adopt(torch.ones(3), tag='a'), lambda: saver.backup_of(tensor)]
            for number, use in enumerate(uses):
                try:
                    use()
                    failures.append(number)
                except ebbtide.StateError:
                    pass
            os._exit(1 + sum(1 << n for n in failures) if failures else 0)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        saver.pause('a')
        saver.resume('a')
        sys.exit(status)
    """
    )
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.sim_only
def test_a_child_of_a_process_that_only_imported_ebbtide_may_use_it(run_python):
    result = run_python(
        """
        import os, sys
        import torch
        from ebbtide import saver
        saver.region('a')
        pid = os.fork()
        with saver.region('a'):
            tensor = torch.ones(1000)
        saver.pause('a')
        saver.resume('a')
        assert float(tensor.sum()) == 1000
        if pid:
            sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    """
    )
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.sim_only
def test_data_loader_workers_beside_regions(run_python):
    result = run_python(
        PREAMBLE
        + """
        from torch.utils.data import DataLoader, TensorDataset

        tensor = block('a')
        data = TensorDataset(torch.arange(64.0))
        with saver.region('b'):
            got = [batch[0] for batch in DataLoader(data, batch_size=8, num_workers=2, multiprocessing_context='fork')]
        saver.pause('a')
        got += [batch[0] for batch in DataLoader(data, batch_size=8, num_workers=2, multiprocessing_context='fork')]
        saver.resume('a')
        assert float(torch.cat(got).sum()) == 2 * sum(range(64))
        assert float(tensor.sum()) == 300_000
    """
    )
    assert (result.returncode, result.stderr) == (0, "")


def test_limits_from_the_environment(run_python):
    code = """
        import torch
        from ebbtide import _core, saver
        with saver.region('a'):
            pass
        assert (_core.get_setting('device_limit'), _core.get_setting('host_limit')) == (b'67108864', b'1000000')
        assert _core.get_setting('host_margin') == b'5'
        saver.configure(host_limit=None)
        assert (_core.get_setting('device_limit'), _core.get_setting('host_limit')) == (b'67108864', b'')
    """
    limits = {"EBBTIDE_DEVICE_LIMIT": "64MiB", "EBBTIDE_HOST_LIMIT": "1000KB", "EBBTIDE_HOST_MARGIN": "5"}
    result = run_python(code, **limits)
    assert (result.returncode, result.stderr) == (0, "")
    result = run_python("import torch\nfrom ebbtide import saver; saver.configure()", EBBTIDE_HOST_LIMIT="much")
    assert "EBBTIDE_HOST_LIMIT must be a size" in result.stderr


def test_configure_goes_before_the_environment(run_python):
    code = """
        import torch
        from ebbtide import _core, saver
        saver.configure(device_limit="32MiB")
        with saver.region('a'):
            pass
        assert _core.get_setting('device_limit') == b'33554432'
    """
    result = run_python(code, EBBTIDE_DEVICE_LIMIT="64MiB")
    assert (result.returncode, result.stderr) == (0, "")


def test_check_mode_names_the_op_and_the_tag(run_python):
    result = run_python(
        PREAMBLE
        + """
        tensor = block('looked-at')
        saver.pause('looked-at')
        try:
            tensor + 1
        except ebbtide.StateError as error:
            assert 'looked-at' in str(error) and 'add' in str(error), error
        else:
            sys.exit('not noticed')
        saver.resume('looked-at')
        assert float((tensor + 1)[0]) == 2
    """,
        trains=True,  # the check of ops imports torch's compiler
        EBBTIDE_CHECK="1",
    )
    assert (result.returncode, result.stderr) == (0, "")
