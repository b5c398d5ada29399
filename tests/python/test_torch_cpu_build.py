"""Building `_torch` at first use: cache, lock, and the error if it cannot be built. Scripts stand in for the
compiler."""

import os
import pickle
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from ebbtide import torch_extension
from ebbtide.errors import StateError
from ebbtide.torch_extension import build

pytestmark = pytest.mark.sim_only


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    """The build recipe of this process over a copy of the sources, with an empty cache."""
    monkeypatch.setenv(build.CACHE_VARIABLE, str(tmp_path / "cache"))
    sources = tmp_path / "csrc"
    original = build.find_sources()
    shutil.copytree(original / "torch" / "cpu", sources / "torch" / "cpu")
    (sources / "api").mkdir()
    for header in (original / "api").glob("ebbtide*.h"):
        shutil.copy(header, sources / "api")
    return replace(build.Recipe.of_this_process(), source_root=sources)


@pytest.fixture
def use_compiler(tmp_path, monkeypatch):
    """Makes a shell script the compiler; in it, $out is the file to write."""

    def use(body: str) -> Path:
        path, part = tmp_path / "compiler", tmp_path / "compiler.part"
        find_output = 'while [ $# -gt 0 ]; do [ "$1" = -o ] && out=$2; shift; done\n'
        part.write_text(f"#!/bin/sh\necho run >> {tmp_path}/runs\n{find_output}{body}\n")
        part.chmod(0o755)
        part.replace(path)  # one that a builder has started may be about to run: it can't be written to
        monkeypatch.setenv("CXX", str(path))
        return path

    return use


def run_count(tmp_path: Path) -> int:
    return len((tmp_path / "runs").read_text().splitlines()) if (tmp_path / "runs").exists() else 0


def test_a_built_extension_is_kept(recipe, use_compiler, tmp_path, capfd):
    use_compiler("echo built > $out")
    library = build.build_once(recipe)
    assert library.read_text() == "built\n"
    assert library.is_relative_to(tmp_path / "cache")
    assert re.fullmatch(
        r"ebbtide: building its torch extension for the simulated device, with torch \S+, once \(up to a minute\)\n",
        capfd.readouterr().err,
    )
    assert build.build_once(recipe) == library
    assert run_count(tmp_path) == build.compiler_count(recipe) + 1
    assert capfd.readouterr().err == ""
    assert sorted(path.name for path in library.parent.iterdir()) == ["_torch.so", "lock"]


def test_the_two_parts_say_what_they_are_for(recipe, use_compiler, capfd):
    use_compiler("echo built > $out")
    for folder in ("torch/lms", "policy/lms"):
        shutil.copytree(build.find_sources() / folder, recipe.source_root / folder)
    build.build_once(recipe)
    build.build_once(replace(recipe, module="_lms"))
    first, second = capfd.readouterr().err.splitlines()
    assert " for the simulated device, " in first and " for large model support, " in second


def test_whatever_decides_the_binary_is_in_the_key(recipe):
    other_values = {
        "torch_version": "2.6.0",
        "torch_revision": "0" * 40,
        "uses_new_abi": not recipe.uses_new_abi,
        "python_tag": "cpython-39-x86_64-linux-gnu",
        "ebbtide_version": "9.9.9",
    }
    keys = {recipe.key(), *(replace(recipe, **{name: value}).key() for name, value in other_values.items())}
    for name in ("torch/cpu/module.cpp", "torch/cpu/pool.h", "api/ebbtide.h", "api/ebbtide_queries.h"):
        path = recipe.source_root / name
        path.write_text(path.read_text() + "\n")
        keys.add(recipe.key())
    assert len(keys) == 1 + len(other_values) + 4
    assert recipe.key() == replace(recipe, core_library=Path("/elsewhere/libebbtide.so")).key(), (
        "the same wherever ebbtide is installed"
    )


def test_the_command_binds_to_the_core_and_the_abi_that_are_there(recipe, tmp_path):
    folder = tmp_path / "package"
    folder.mkdir()
    preload = replace(recipe, core_library=folder / "libebbtide_preload.so")
    assert str(folder / "libebbtide_preload.so") in build.link_line(preload, ["c++"], [], tmp_path / "out.so")
    (folder / "libebbtide.so").touch()
    command = build.link_line(replace(preload, uses_new_abi=False), ["c++", "-g"], [Path("a.o")], tmp_path / "out.so")
    assert command[:2] == ["c++", "-g"]
    assert {"a.o", "-l:libebbtide.so", f"-L{folder}", "-lc10", "-DNDEBUG", "-D_GLIBCXX_USE_CXX11_ABI=0"} <= set(command)
    assert "-ltorch_python" not in command


def test_each_module_has_sources_and_libraries_of_its_own(tmp_path):
    recipe = build.Recipe.of_this_process("_lms")
    names = {path.relative_to(recipe.source_root).as_posix() for path in recipe.sources()}
    assert {"torch/lms/module.cpp", "policy/lms/eviction.cpp"} <= names
    assert not any(name.startswith("torch/cpu/") for name in names)
    command = build.link_line(recipe, ["c++"], [], tmp_path / "out.so")
    assert {"-lc10", "-ltorch_cpu", "-ltorch_python"} <= set(command)
    assert recipe.key() != replace(recipe, module="_torch").key()


def test_a_failed_build_says_what_where_and_what_to_do(recipe, use_compiler, tmp_path):
    compiler = use_compiler("echo 'pool.cpp:1: error: no such thing' >&2; exit 3")
    with pytest.raises(StateError) as caught:
        build.build_once(recipe)
    message = str(caught.value)
    assert str(compiler) in message and "error: no such thing" in message and "g++" in message
    log = Path(re.search(r"in (\S+build\.log)", message)[1])
    assert "-std=c++20" in log.read_text() and log.read_text().endswith("status 3\n")
    assert sorted(path.name for path in log.parent.iterdir()) == ["build.log", "lock"]
    use_compiler("echo built > $out")
    assert build.build_once(recipe).exists()


def test_no_compiler_says_what_to_install(recipe, monkeypatch, tmp_path):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(StateError, match=r"no c\+\+, g\+\+ or clang\+\+ on PATH: install .*apt install g\+\+"):
        build.build_once(recipe)
    monkeypatch.setenv("CXX", "no-such-compiler -g")
    with pytest.raises(StateError, match="CXX=no-such-compiler -g names no program"):
        build.build_once(recipe)


def test_no_python_headers_says_what_to_install(recipe, use_compiler, tmp_path):
    use_compiler("echo built > $out")
    with pytest.raises(StateError, match=r"Python\.h is not in .* apt install python3\.\d+-dev"):
        build.build_once(replace(recipe, python_include=tmp_path))
    assert run_count(tmp_path) == 0


def test_a_cache_that_cannot_be_written_names_the_variable(recipe, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv(build.CACHE_VARIABLE, str(tmp_path / "file" / "cache"))
    with pytest.raises(StateError, match=f"set {build.CACHE_VARIABLE}"):
        build.build_once(recipe)


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.delenv(build.CACHE_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert build.cache_folder() == tmp_path / "ebbtide"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert build.cache_folder() == Path.home() / ".cache" / "ebbtide"
    monkeypatch.setenv(build.CACHE_VARIABLE, "~/elsewhere")
    assert build.cache_folder() == Path.home() / "elsewhere"


def test_several_processes_build_once(recipe, use_compiler, tmp_path):
    use_compiler("sleep 0.5; echo built > $out")
    program = f"""
import pickle
from ebbtide.torch_extension import build
print(build.build_once(pickle.loads({pickle.dumps(recipe)!r})))
"""
    children = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) for _ in range(4)]
    paths = {child.communicate(timeout=120)[0] for child in children}
    assert [child.returncode for child in children] == [0] * 4
    assert len(paths) == 1 and run_count(tmp_path) == build.compiler_count(recipe) + 1


def test_a_builder_that_was_killed_leaves_no_lock_and_no_library(recipe, use_compiler, tmp_path):
    use_compiler("echo half > $out; kill -9 $PPID; exit 0")
    pid = os.fork()
    if pid == 0:
        build.build_once(recipe)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -9
    use_compiler("echo built > $out")
    assert build.build_once(recipe).read_text() == "built\n"


def test_a_damaged_library_says_to_delete_it(recipe, use_compiler, monkeypatch):
    use_compiler("echo this is no library > $out")
    monkeypatch.setattr(build.Recipe, "of_this_process", classmethod(lambda cls, module: recipe))
    monkeypatch.delitem(sys.modules, "ebbtide._torch", raising=False)
    with pytest.raises(StateError, match=r"does not load .*\. Delete \S+ to have it built anew"):
        torch_extension.load()
    assert "ebbtide._torch" not in sys.modules


def test_missing_sources_say_where_they_were_looked_for(monkeypatch, tmp_path):
    monkeypatch.setattr(build, "__file__", str(tmp_path / "a" / "b" / "c" / "build.py"))
    with pytest.raises(StateError, match="install ebbtide again"):
        build.find_sources()


def load_with(built: Path, cache: Path, monkeypatch) -> subprocess.CompletedProcess[str]:
    """Loads `_torch` in a process whose package has this folder, and that has no compiler."""
    code = """
import sys
from pathlib import Path
import torch
from ebbtide import _core, torch_extension
from ebbtide.torch_extension import build
_core.use_driver("sim")
build.Recipe.folder_in_package = lambda recipe: Path(sys.argv[1])
print(torch_extension.load().__file__)
"""
    monkeypatch.setenv(build.CACHE_VARIABLE, str(cache))
    monkeypatch.setenv("CXX", "/nowhere")
    return subprocess.run([sys.executable, "-c", code, built], capture_output=True, text=True, check=False, timeout=100)


def test_what_a_wheel_has_built_needs_no_compiler(tmp_path, monkeypatch):
    library = build.build_once(build.Recipe.of_this_process())
    (tmp_path / "built").mkdir()
    shutil.copy(library, tmp_path / "built")
    done = load_with(tmp_path / "built", tmp_path / "cache", monkeypatch)
    assert done.stdout == f"{tmp_path}/built/_torch.so\n", done.stderr
    assert not (tmp_path / "cache").exists()
    (tmp_path / "built" / "_torch.so").write_bytes(b"of a newer system")
    done = load_with(tmp_path / "built", tmp_path / "cache", monkeypatch)
    assert "there is no c++" in done.stderr or "names no program" in done.stderr


def test_builds_of_one_release_of_torch_share_what_a_wheel_has(recipe):
    plain = replace(recipe, torch_version="2.13.0")
    assert plain.folder_in_package() == replace(recipe, torch_version="2.13.0+cu130").folder_in_package()
    for other in ({"torch_version": "2.12.0"}, {"python_tag": "cpython-399"}, {"torch_revision": "other"}):
        assert replace(plain, **other).folder_in_package() != plain.folder_in_package()
    assert plain.folder_in_package().parent.name == "built"


def test_one_for_a_wheel_names_no_folder_of_the_machine(recipe, tmp_path):
    line = build.link_line(recipe, ["c++"], [tmp_path / "a.o"], tmp_path / "out.so", is_for_wheel=True)
    assert not any("rpath" in word for word in line)
