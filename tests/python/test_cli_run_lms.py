"""`ebbtide run --lms`: an unmodified program trains with large model support, and is otherwise as without it."""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from click.testing import CliRunner

torch = pytest.importorskip("torch")

from ebbtide import torch_extension  # noqa: E402
from ebbtide.cli import main  # noqa: E402

pytestmark = pytest.mark.sim_only  # tests/gpu/test_gpu_lms.py is for GPUs

MIB = 2**20
TRAIN = """
import torch


def train(steps=2, depth=16, width=128, batch=4096, has_optimizer=True):  # to import one takes a second
    torch.manual_seed(0)
    layers = [part for _ in range(depth) for part in (torch.nn.Linear(width, width), torch.nn.GELU())]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3) if has_optimizer else None
    for _ in range(steps):
        model.zero_grad()
        loss = model(torch.randn(batch, width)).pow(2).mean()
        loss.backward()
        if optimizer:
            optimizer.step()
        print(loss.item().hex())
    return 7


if __name__ == "__main__":
    raise SystemExit(train())
"""
WITHOUT_OPTIMIZER = "import train; train.train(1, has_optimizer=False)"  # its loss is the first one of the script
SHOW = "import torch, ebbtide; print(ebbtide.lms.limit, ebbtide.lms.enabled)"
SHOW_LIMIT = "import torch; from ebbtide import _core, lms; print(lms.enabled, _core.query_device(0).limit_bytes)"
# Importing torch takes seconds: whether a Python waits for it is known before.
SHOW_WAITING = "import os, sys; print(any('sitecustomize' in repr(finder) for finder in sys.meta_path), "
SHOW_WAITING += "os.environ.get('EBBTIDE_LMS'), os.environ['PYTHONPATH'].count('startup_path'))"
REPORT = "ebbtide: large model support\nlimit "


@pytest.fixture(scope="module", autouse=True)
def extension_is_built():
    """Who builds it says so on stderr, which tests compare."""
    torch_extension.load("_lms")


def plain_environment():
    kept = {"EBBTIDE_CACHE_DIR"}
    return {name: value for name, value in os.environ.items() if not name.startswith("EBBTIDE_") or name in kept}


@pytest.fixture(scope="module")
def losses(training_fork_server):
    """What the script prints without ebbtide: a line for each of its two steps."""
    done = training_fork_server.run(TRAIN, environment=plain_environment())
    assert (done.returncode, done.stderr, done.stdout.count("\n")) == (7, "", 2)
    return done.stdout.splitlines(keepends=True)


@pytest.fixture
def run(tmp_path):
    """Runs a command in a folder that has `train.py`; with options, under `ebbtide run`. Keywords are variables; None
    unsets one. Gives status, stdout and stderr."""
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "runtime").mkdir()

    def run(options, *command, **variables):
        under_run = [sys.executable, "-m", "ebbtide.cli", "run", *options.split(), "--"] if options else []
        ours = {"EBBTIDE_DRIVER": "sim", "XDG_RUNTIME_DIR": str(tmp_path / "runtime")}
        everything = {**plain_environment(), **ours, **variables}
        done = subprocess.run(
            [*under_run, *command],
            env={name: value for name, value in everything.items() if value is not None},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        return done.returncode, done.stdout, done.stderr

    return run


def python(code):
    return sys.executable, "-c", code


def modules_before(folder):
    """PYTHONPATH with a folder before what this process has."""
    return os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH", "")]))


# --- it trains ---


def test_a_script_trains_in_a_third_of_what_it_needs_with_equal_losses(run, losses):
    # Its activations take 64 MiB.
    assert run("--lms 25MiB", sys.executable, "train.py") == (7, "".join(losses), "")
    # In the same memory, where nothing may leave:
    status, out, error = run("--lms 25MiB --lms-min-size 1TiB", *python(WITHOUT_OPTIMIZER))
    assert (status, out) == (1, "") and "torch.OutOfMemoryError: ebbtide: " in error
    options = "--lms 25MiB --lms-min-size 1TiB --lms-overflow --lms-recompute auto"
    assert run(options, *python(WITHOUT_OPTIMIZER))[:2] == (0, losses[0])


def test_the_scripts_own_limit_wins_and_the_summary_prints_the_report_once(run, losses):
    code = f"import ebbtide.lms\nebbtide.lms.enable('32MiB', '4KiB')\n{SHOW}\nprint(ebbtide.lms.min_size)\n"
    code += f"{WITHOUT_OPTIMIZER}\nprint(ebbtide.lms.stats()['evictions'] > 9, flush=True)\n"
    code += "import os, sys\npid = os.fork()\nos.waitpid(pid, 0) if pid else sys.exit()"
    status, out, error = run("--lms 1GiB --summary", *python(code))
    assert (status, out) == (0, f"{32 * MIB} True\n4096\n{losses[0]}True\n")
    assert re.match(rf"{REPORT} *32.0 MiB\n", error) and error.count(REPORT) == 1 and "\nstorages that left " in error
    assert REPORT not in run("--lms 64MiB --summary", *python("pass"))[2]


# --- the program is as it would be ---


def test_a_program_without_torch_is_as_ever(run):
    code = "import sys; print(sys.path, sorted(sys.modules), sys.argv, sys.flags)"
    assert run("--lms 1GiB", *python(code)) == run("", *python(code))


# `ebbtide run` is itself a Python that imports it.
OWN = """
import sys
if sys.orig_argv[1] == "-c":
    {}
"""
SHOW_ITSELF = "print('own', __name__, __spec__.origin, sys.modules[__name__].__file__, sys.path)"


def test_the_users_own_sitecustomize_runs_once_and_first(run, tmp_path):
    (tmp_path / "own").mkdir()
    path = modules_before(tmp_path / "own")
    code = "import sitecustomize; print(sitecustomize)"
    for own in (SHOW_ITSELF, "raise ValueError('mine')", "import there_is_no_such_module"):
        (tmp_path / "own" / "sitecustomize.py").write_text(OWN.format(own))
        plain = run("", *python(code), PYTHONPATH=path)
        assert ("own sitecustomize" in plain[1]) == (own is SHOW_ITSELF)
        assert run("--lms 1GiB", *python(code), PYTHONPATH=path) == plain
    (tmp_path / "own" / "sitecustomize.py").write_text(OWN.format("import torch"))
    assert run("--lms 1GiB", *python(SHOW), PYTHONPATH=path) == (0, f"{1024 * MIB} True\n", "")


def test_the_users_own_usercustomize_runs(run, tmp_path):
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    folder = tmp_path / "base" / "lib" / version / "site-packages"
    folder.mkdir(parents=True)
    (folder / "usercustomize.py").write_text("print('usercustomize')")
    python_of_user = str(Path(sys._base_executable).resolve())  # in a virtual environment there is no user's folder
    plain = run("", python_of_user, "-c", "pass", PYTHONUSERBASE=str(tmp_path / "base"))
    assert plain == (0, "usercustomize\n", "")
    assert run("--lms 1GiB", python_of_user, "-c", "pass", PYTHONUSERBASE=str(tmp_path / "base")) == plain


def test_an_import_leaves_no_trace_however_python_is_started(run, tmp_path):
    """Here a shell starts `python -c`, which starts `python -m`."""
    show_finders = "import sys; print([getattr(finder, '__name__', type(finder)) for finder in sys.meta_path])\n"
    (tmp_path / "finders.py").write_text(show_finders)
    code = """
        import importlib.util, pickle, sys
        before = len(sys.meta_path)
        importlib.util.find_spec("torch")  # as libraries do that ask whether it is there
        import torch
        import ebbtide
        spec, found = torch.__spec__, importlib.util.find_spec("torch")
        print(type(spec), type(spec.loader), sorted(vars(spec.loader)), torch.__loader__ is spec.loader, found is spec)
        print(pickle.loads(pickle.dumps(torch.nn.Linear(2, 2).state_dict())).keys())
        print(ebbtide.lms.limit, ebbtide.lms.enabled, before - len(sys.meta_path))
    """
    (tmp_path / "traces.py").write_text(textwrap.dedent(code) + show_finders)
    child = "import subprocess, sys; subprocess.run([sys.executable, '-m', 'traces'], check=True)"
    shell = f'{sys.executable} -c "{child}"; true'  # which keeps the shell from becoming Python
    status, out, error = run("--lms 1GiB", "bash", "-c", shell)
    spec = torch.__spec__
    lines = [
        f"{type(spec)} {type(spec.loader)} {sorted(vars(spec.loader))} True True",
        "odict_keys(['weight', 'bias'])",
        f"{1024 * MIB} True 1",
        run("", sys.executable, "-m", "finders")[1].strip(),
    ]
    assert (status, out.splitlines(), error) == (0, lines, "")


@pytest.mark.parametrize("text", ["import there_is_no_such_module", "1 / 0", "def f(): raise KeyError\nf()"])
def test_a_failing_import_of_torch_has_its_own_traceback(run, tmp_path, text):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(text)
    code = "def load():\n    import torch\ntry:\n    load()\nexcept KeyError:\n    load()"
    plain = run("", *python(code))
    assert plain[0] == 1 and plain[2].startswith("Traceback")
    assert run("--lms 1GiB", *python(code)) == plain


# --- ways to start Python ---


def test_a_run_inside_a_run_changes_what_it_names(run):
    inner = [sys.executable, "-m", "ebbtide.cli", "run"]
    show = python(SHOW_WAITING)
    assert run("--lms 1GiB", *inner, "--lms", "8MiB", "--", *show)[1] == f"True {8 * MIB} 1\n"
    assert run("--lms 1GiB", *inner, "--host-limit", "8MiB", "--", *show)[1] == f"True {1024 * MIB} 1\n"
    assert run("--overflow none", *show, EBBTIDE_LMS="8MiB")[1] == "True 8MiB 1\n"


# --- programs that know ebbtide ---


def test_a_region_that_imports_torch(run):
    """Afterwards, the script sets a limit of its own."""
    code = f"from ebbtide import saver\nwith saver.region('w'):\n    {SHOW}\n    tensor = torch.ones(1000)\n"
    code += f"print(saver.tags()['w'].size_bytes > 0)\nebbtide.lms.enable('32MiB')\n{SHOW}"
    assert run("--lms 1GiB", *python(code)) == (0, f"{1024 * MIB} True\nTrue\n{32 * MIB} True\n", "")


# --- multiprocessing ---

PROCESSES = """
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor

METHOD = sys.argv[1] if __name__ == "__main__" else ""
if METHOD != "forkserver":  # where the first process can do without, which saves its import
    import torch


def is_on():
    lms = sys.modules.get("ebbtide.lms")
    return lms is not None and lms.enabled


def show(name, *rest):
    print(name, is_on(), flush=True)


def rank(number):
    show("rank")


def of_worker(number):
    return is_on()


class Own(multiprocessing.get_context(METHOD or None).Process):
    def run(self):
        show("own class")
        sys.exit(9)


class Numbers:
    def __len__(self):
        return 1

    def __getitem__(self, index):
        return float(is_on())


if __name__ == "__main__":
    context = multiprocessing.get_context(METHOD)
    if METHOD == "forkserver":
        context.set_forkserver_preload(["torch"])  # the server imports it, and forks
        process = Own()
        process.start()
        process.join()
        print("status", process.exitcode)
        with ProcessPoolExecutor(1, mp_context=context) as executor:
            print("executor", list(executor.map(of_worker, [1])))
    else:
        torch.multiprocessing.start_processes(rank, nprocs=1, start_method=METHOD)
        loader = torch.utils.data.DataLoader(Numbers(), num_workers=1, multiprocessing_context=METHOD)
        print("loader", [bool(batch) for batch in loader])
        with context.Pool(1) as pool:
            print("pool", pool.map(of_worker, [1]))
    show("main")
"""


@pytest.mark.parametrize(
    ("method", "lines"),
    [
        ("spawn", ["rank True", "loader [False]", "pool [False]", "main True"]),
        ("forkserver", ["own class True", "status 9", "executor [False]", "main False"]),
    ],
)
def test_processes_that_train_have_it_and_helpers_have_not(run, tmp_path, method, lines):
    (tmp_path / "processes.py").write_text(PROCESSES)
    status, out, error = run("--lms 1GiB", sys.executable, "processes.py", method)
    assert (status, out.splitlines(), error) == (0, lines, "")


LATE = """
import multiprocessing


def late():
    import torch
    from ebbtide import lms
    print(lms.enabled)


if __name__ == "__main__":
    process = multiprocessing.get_context("forkserver").Process(target=late)
    process.start()
    process.join()
"""


def test_a_process_of_a_fork_server_that_imports_torch_late_has_it(run, tmp_path):
    (tmp_path / "late.py").write_text(LATE)
    assert run("--lms 1GiB", sys.executable, "late.py") == (0, "True\n", "")


# --- refusals, and other options ---

REFUSED = "ebbtide: large model support can't start, so the program ends: "


def test_what_can_not_start_ends_the_program(run):
    code = "try:\n    import torch\nexcept Exception:\n    pass"
    status, out, error = run("--lms 1GiB", *python(f"print('begun')\n{code}\nprint('trains')"), EBBTIDE_DRIVER="cuda")
    assert (status, out) == (1, "begun\n")
    assert error.startswith(f"{REFUSED}EBBTIDE_DRIVER=cuda, but torch is a CPU build: ") and error.count("\n") == 1


def test_a_child_that_can_not_start_ends_with_an_error(run):
    code = "import importlib, os, multiprocessing\nos.environ['EBBTIDE_LMS'] = '5x'\n"
    code += "context = multiprocessing.get_context('spawn')\n"
    code += "child = context.Process(target=importlib.import_module, args=('torch',))\n"
    code += "child.start()\nchild.join()\nprint(child.exitcode)"
    status, out, error = run("--lms 1GiB", *python(code))
    [refused] = error.splitlines()
    assert (status, out) == (0, "1\n") and refused.startswith(f"{REFUSED}EBBTIDE_LMS has the unknown unit 'x'")


def test_a_python_without_ebbtide_ends_at_torch(run, tmp_path):
    (tmp_path / "torch.py").write_text("print('imported')")
    code = "import sys\nsys.modules['ebbtide'] = None\nimport torch\nprint('trains')"
    status, out, error = run("--lms 1GiB", *python(code))
    assert (status, out) == (1, "imported\n") and error.count("\n") == 1
    assert error.startswith(f"ebbtide: no large model support for {sys.executable}, so it ends: ")


def test_python_that_ignores_the_environment_is_left_alone(run):
    for option in ("-I", "-S"):
        assert run("--lms 1GiB", sys.executable, option, "-c", SHOW_WAITING) == (0, f"False {1024 * MIB} 1\n", "")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("--lms 5x", "--lms has the unknown unit 'x'"),
        ("--lms -1", "--lms must not be negative"),
        ("--lms-min-size 1MiB", "--lms-min-size means nothing without --lms: give both or neither"),
        ("--lms 1GiB --lms-min-size x", "--lms-min-size must be a size"),
        ("--lms-overflow", "--lms-overflow means nothing without --lms: give both or neither"),
        ("--lms 1GiB --pauseable", "--lms and --pauseable each tag all of a program's memory: leave one out"),
    ],
)
def test_run_refuses_before_the_program_starts(monkeypatch, options, sentence):
    monkeypatch.setattr(os, "execve", None)  # it would take this process's place
    done = CliRunner().invoke(main, ["run", *options.split(), "--", "true"])
    assert done.exit_code == 2 and f"Error: {sentence}" in done.stderr


def test_pauseable_from_an_outer_run_is_refused_too(run):
    status, _, error = run("--lms 1GiB", *python("pass"), EBBTIDE_PAUSEABLE="1")
    assert status == 2 and "Error: --lms and EBBTIDE_PAUSEABLE each tag all of a program's memory" in error
    assert run("--lms 1GiB --no-pauseable", *python("pass"), EBBTIDE_PAUSEABLE="1")[0] == 0


def test_the_lower_limit_holds_whatever_the_overflow_policy(run):
    options = "--lms 1GiB --device-limit 64MiB --overflow none --host-limit 8MiB"
    status, out, error = run(options, *python(f"{SHOW_LIMIT}; {WITHOUT_OPTIMIZER}"))
    assert (status, out) == (1, f"True {64 * MIB}\n")
    assert "torch.OutOfMemoryError" in error and "host_limit" in error  # which holds for what leaves
    options = "--lms 8MiB --device-limit 1GiB --overflow whole --report total --reserve 0"
    code = f"import multiprocessing\ndef show():\n    {SHOW_LIMIT}\n"
    code += "child = multiprocessing.get_context('fork').Process(target=show)\nchild.start()\nchild.join()"
    # In a forked child that is the first to import torch.
    assert run(options, *python(code))[:2] == (0, f"True {8 * MIB}\n")


def test_a_run_with_ebbtide_off_has_no_lms(run, losses):
    options = "--lms 8MiB --summary"
    assert run(options, *python(WITHOUT_OPTIMIZER), EBBTIDE_DRIVER="off") == (0, losses[0], "")
