"""Fixtures for all Python tests. The tests run on the simulated device and, with EBBTIDE_TEST_DRIVER=cuda, on a GPU."""

import contextlib
import functools
import gc
import importlib
import itertools
import os
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fork_server import ForkServer, open_fork_server
from other_environment import OtherEnvironment

_numbers = itertools.count(1)

# From Python 3.12 on, os.fork warns in any process that has threads, and the core has some.
FORK_WARNING = "ignore:This process:DeprecationWarning"
os.environ["PYTHONWARNINGS"] = ",".join(filter(None, [os.environ.get("PYTHONWARNINGS"), FORK_WARNING]))

os.environ.setdefault("EBBTIDE_SIM_CAPACITY", "4GiB")
# Free memory that regions have cached stays with their pools. The fixture `saver` gives it back where tests have left
# more than this.
MOST_HELD_BYTES = 1 << 30


@pytest.fixture
def tag(request: pytest.FixtureRequest) -> str:
    """A tag that no other test uses: the core keeps every tag for the life of the process."""
    return f"{re.sub(r'[^a-z0-9_]', '_', request.node.name)[:60]}-{next(_numbers)}"


@pytest.fixture
def tag2(tag: str) -> str:
    """A second such tag."""
    return f"{tag}-second"


@pytest.fixture(scope="module")
def few_objects_to_collect() -> None:
    """Exempts the objects that torch and pytest have made so far from garbage collection. Scanning them takes longer
    than most tests."""
    pytest.importorskip("torch")
    importlib.import_module("torch._dynamo")  # which the first optimizer imports: 120,000 objects
    _forget_earlier_tests()  # what is frozen is never collected
    gc.freeze()


@pytest.fixture
def saver(few_objects_to_collect: None) -> Iterator[object]:
    """`ebbtide.saver`. What earlier tests have cached is given back, since it would make room where a test wants none.
    After the test all memory is resident again, so that the next test finds nothing paused, and there is room on the
    device."""
    torch = pytest.importorskip("torch")
    from ebbtide import _core
    from ebbtide import saver as module
    from ebbtide.processes import lent, member
    from ebbtide.saver.reclaim import torch_cache

    gc.collect()
    torch_cache.give_back()
    yield module
    gc.collect()
    module.configure(device_limit=None, host_limit=None)
    module.resume()
    if member.files() is not None:  # an exportable region has joined others, which costs each pause something
        member.leave()
        lent.stop_listening()
    if _core.query_device(0).held_bytes > MOST_HELD_BYTES:
        module.trim()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@pytest.fixture
def quick_scans(saver: Any) -> Iterator[None]:
    """For tests that make ebbtide look at all living objects, which takes six times as long where gc.freeze() hides
    some. What the test makes stays in the youngest generation, so that one short collection finds all of it."""
    gc.disable()
    gc.unfreeze()
    whole_collections = gc.get_stats()[2]["collections"]
    yield
    gc.collect(1 if gc.get_stats()[2]["collections"] == whole_collections else 2)
    gc.freeze()
    gc.enable()


@pytest.fixture(params=["as here", "as on a GPU"])
def mover(request: pytest.FixtureRequest, saver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the test with the storage mover of this device, and with that of GPUs, which needs little of CUDA."""
    if request.param == "as here" or saver.device == "cuda":
        return
    torch = pytest.importorskip("torch")
    from ebbtide.saver.adoption import storage_movers

    monkeypatch.setattr(storage_movers, "CpuMover", storage_movers.CudaMover)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())


def changed_environment(changes: dict[str, str | None]) -> dict[str, str]:
    """The variables of this process with these changes. None unsets a variable."""
    return {name: value for name, value in {**os.environ, **changes}.items() if value is not None}


TORCH_FIRST = re.compile(r"\A(?:(?!.*ebbtide).*\n)*?(?!.*ebbtide)\s*import [\w, ]*\btorch\b")


@pytest.fixture
def run_python(driver_name: str, request: pytest.FixtureRequest) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a program in its own Python process: `run_python(code, EBBTIDE_DRIVER="off")`. None unsets a variable.

    A program that imports torch before ebbtide, as most do, runs in a fork of a process that has done so: this saves
    two seconds. On a GPU it imports torch itself. `trains=True` saves another second of one with an optimizer.
    `whole_exit=True` is for tests of how a process ends (fork_server.py)."""

    def run(
        code: str, timeout: float = 120, trains: bool = False, whole_exit: bool = False, **environment: str | None
    ) -> subprocess.CompletedProcess[str]:
        if driver_name == "sim" and TORCH_FIRST.match(code):
            server: ForkServer = request.getfixturevalue("training_fork_server" if trains else "fork_server")
            return server.run(code, timeout, changed_environment(environment), whole_exit)
        return subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)],
            env=changed_environment(environment),
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    return run


@pytest.fixture
def forked_command(run_python: Callable[..., subprocess.CompletedProcess[str]]) -> Callable[..., Any]:
    """Runs `ebbtide ARGUMENTS` in a process that may have imported torch already. None unsets a variable."""

    def run(*arguments: str, **environment: str | None) -> subprocess.CompletedProcess[str]:
        code = f"import torch\nfrom ebbtide.cli import main\nmain({arguments!r}, prog_name='ebbtide')"
        return run_python(code, timeout=300, trains="demo" in arguments, **{"COLUMNS": "160", **environment})

    return run


@pytest.fixture
def run_variables(tmp_path: Path) -> dict[str, str]:
    """This process's environment without ebbtide's settings, and with a folder for ledgers of the test's own."""
    (tmp_path / "runtime").mkdir()
    ours = ("EBBTIDE_", "LD_PRELOAD", "LD_LIBRARY_PATH")
    plain = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return {**plain, "XDG_RUNTIME_DIR": str(tmp_path / "runtime")}


@pytest.fixture
def ebbtide_run(run_variables: dict[str, str]) -> Callable[..., tuple[int, str, str]]:
    """`ebbtide run ARGUMENTS`: status, stdout, stderr. Keywords are variables; None unsets one."""

    def run(*arguments: object, **environment: str | None) -> tuple[int, str, str]:
        everything = {name: value for name, value in {**run_variables, **environment}.items() if value is not None}
        command = [sys.executable, "-m", "ebbtide.cli", "run", *map(str, arguments)]
        done = subprocess.run(command, env=everything, capture_output=True, text=True, timeout=120, check=False)
        return done.returncode, done.stdout, done.stderr

    return run


@pytest.fixture
def environment(tmp_path_factory: pytest.TempPathFactory) -> OtherEnvironment:
    """A Python environment of the test's own, which may be changed."""
    return OtherEnvironment(tmp_path_factory.mktemp("environment"))


@pytest.fixture(scope="session")
def fork_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    """For programs that begin by importing torch: each runs in its own process, but without the seconds that the import
    takes."""
    with open_fork_server(tmp_path_factory.mktemp("programs"), "torch") as opened:
        yield opened


@pytest.fixture(scope="session")
def training_fork_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    """For programs with an optimizer of torch: the first one of a process imports torch's compiler, which takes a
    second. Each fork takes longer with it."""
    with open_fork_server(tmp_path_factory.mktemp("trainings"), "torch", "torch._dynamo") as opened:
        yield opened


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    torch = pytest.importorskip("torch")
    store = torch.distributed.FileStore(str(tmp_path / "ranks"), 1)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
    yield
    gc.collect()
    # A group joins its threads while it holds the GIL, and they need the GIL to end what they have done.
    time.sleep(0.1)
    torch.distributed.destroy_process_group()


def _forget_earlier_tests() -> None:
    """The tensors of one that failed, which its traceback holds, and of those that compiled something."""
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        if hasattr(sys, name):
            setattr(sys, name, None)
    if dynamo := sys.modules.get("torch._dynamo"):
        dynamo.reset()
    gc.collect()


@pytest.fixture
def lms(saver: Any) -> Iterator[Any]:
    """`ebbtide.lms`, which is off afterwards and has given all host memory back. Where a test does not say otherwise,
    it recomputes nothing, so that what does not fit leaves."""
    from ebbtide import _core
    from ebbtide import lms as module
    from ebbtide.lms.streaming.host_ranges import GRADIENTS, STATES, WEIGHTS
    from ebbtide.saver.reclaim import spilled
    from ebbtide.saver.values.arguments import backup_code

    _forget_earlier_tests()
    saver.trim()
    for own in (STATES, WEIGHTS, GRADIENTS):  # what was trimmed would come back with the next region of the tag
        spilled.dissolve(own, backup_code("ram"))
    held = {own: tag.resident_bytes for own in ("lms", STATES, WEIGHTS, GRADIENTS) if (tag := _core.query_tag(own))}
    assert not any(held.values()), f"an earlier test has left tensors, which take room of every limit: {held}"
    enable = module.enable
    module.enable = functools.partial(enable, recompute=False)
    yield module
    module.enable = enable
    module.disable()
    module.limit, module.min_size = "auto", "1MiB"
    gc.collect()
    saver.trim()
    assert module.stats()["host_bytes"] == 0
    assert saver.tags().get("lms") is None or saver.tags()["lms"].lease_count == 0
    assert _core.query_device(0).limit_bytes == _core.UNLIMITED and _core.get_setting("host_limit") == b""


@pytest.fixture
def no_states_left(saver: Any, lms: Any) -> Iterator[None]:
    """Afterwards no step and no region of optimizer states is open."""
    from ebbtide import torch_extension
    from ebbtide.lms.streaming.host_ranges import STATES

    yield
    gc.collect()
    lms.disable()
    assert STATES not in saver.tags() or saver.tags()[STATES].lease_count == 0
    assert not torch_extension.load("_lms").is_in_step()


@pytest.fixture
def no_weights_left(saver: Any, lms: Any) -> Iterator[None]:
    """Afterwards no region of weights or gradients is open, and torch's layers are its own again."""
    import torch
    from ebbtide.lms.streaming.host_ranges import GRADIENTS, WEIGHTS

    plain = torch.nn.Linear.forward, torch.nn.Conv2d.forward
    yield
    gc.collect()
    lms.disable()
    assert (torch.nn.Linear.forward, torch.nn.Conv2d.forward) == plain
    assert all(saver.tags()[tag].lease_count == 0 for tag in (WEIGHTS, GRADIENTS) if tag in saver.tags())


@pytest.fixture
def short(lms: Any) -> Iterator[Any]:
    """LMS is on, and memory was so short that weights had to leave."""
    from lms_model import SMALL, make_model
    from lms_weights import send_all_away

    lms.enable(limit="1GiB", min_size=SMALL)
    keeper = make_model(1, 512)
    assert send_all_away() > 0
    yield lms
    del keeper


@pytest.fixture
def tms_module(saver: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """ebbtide's module torch_memory_saver; afterwards no import finds it."""
    from ebbtide.compat.torch_memory_saver import install

    monkeypatch.setattr(sys, "path", [*sys.path])
    yield install()
    for name in [name for name in sys.modules if name.startswith("torch_memory_saver")]:
        del sys.modules[name]


@pytest.fixture
def tms(tms_module: Any) -> Iterator[Any]:
    """An instance of its class."""
    made = tms_module.TorchMemorySaver()
    yield made
    made.retain_cpu_backup = False


@pytest.fixture
def make_program(saver: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Makes this process a pauseable program with this tag (pauseable_model.py), on the simulated device only."""
    from pauseable_model import start

    assert saver.device  # starts the real backend first, because regions of other tests use it
    made: list[Any] = []

    def make(tag: str) -> Any:
        made.append(start(saver, monkeypatch, tag))
        return made[-1]

    yield make
    for one in made:
        one.end()


@pytest.fixture
def mine(make_program: Callable[[str], Any], tag: str) -> Any:
    """A pauseable program."""
    return make_program(tag)


# --- large model support that recomputes ---


@pytest.fixture
def lms_extension(lms: Any) -> Iterator[Any]:
    """`_lms`, which takes the bus for as fast as a test says."""
    from ebbtide import torch_extension

    module = torch_extension.load("_lms")
    yield module
    module.assume_rate(0)


@pytest.fixture
def within(lms: Any, lms_extension: Any) -> Any:
    """A function: LMS on, within a share of what a training needs. Plans take the bus for so fast."""
    from lms_calls import SLOW, peak_of
    from lms_model import SMALL

    @contextlib.contextmanager
    def enter(make: Any, share: float = 0.6, rate: float = SLOW, **options: Any) -> Iterator[None]:
        limit = int(share * peak_of(make))
        with lms.enable(limit=limit, min_size=SMALL, **{"recompute": "auto", **options}):
            lms_extension.assume_rate(rate)
            yield
            assert lms.stats()["peak_device_bytes"] <= limit
            gc.collect()
            assert lms.stats()["host_bytes"] == 0

    return enter


@pytest.fixture
def second_runs(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """A list that gets an entry for each second run."""
    from ebbtide.lms.calls import Blocks

    runs: list[None] = []
    plain = Blocks._second_run
    monkeypatch.setattr(Blocks, "_second_run", lambda *arguments: (runs.append(None), plain(*arguments))[1])
    return runs
