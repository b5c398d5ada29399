"""`ebbtide --cflags --libs`, pkg-config and find_package(ebbtide) build the C example against the installed package."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner
from ebbtide.cli import main

pytestmark = pytest.mark.sim_only

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "11_from_c.c"
SIMULATED = {**os.environ, "EBBTIDE_DRIVER": "sim"}

CMAKE_PROJECT = """cmake_minimum_required(VERSION 3.24)
project(user LANGUAGES C)
find_package(ebbtide 0.1 REQUIRED)
add_executable(from_c {example})
target_link_libraries(from_c PRIVATE ebbtide::ebbtide)
"""


def ask(*options):
    result = CliRunner().invoke(main, list(options))
    assert result.exit_code == 0, result.output
    return result.output.split("\n")[:-1]


def expect_it_runs(program):
    done = subprocess.run([program], env=SIMULATED, capture_output=True, text=True, check=True)
    assert "paused: freed 67108864 bytes, 0 are left" in done.stdout


def test_flags_for_a_compiler(tmp_path):
    [flags] = ask("--cflags", "--libs")
    program = tmp_path / "from_c"
    subprocess.run(f"cc -std=c11 {EXAMPLE} -o {program} {flags}", shell=True, check=True)
    expect_it_runs(program)


@pytest.mark.skipif(shutil.which("pkg-config") is None, reason="no pkg-config here")
def test_pkg_config(tmp_path):
    [folder] = ask("--pkgconfig-dir")
    environment = {**os.environ, "PKG_CONFIG_PATH": folder}
    asked = ["pkg-config", "--cflags", "--libs", "ebbtide >= 0.1"]
    flags = subprocess.run(asked, env=environment, capture_output=True, text=True, check=True).stdout
    program = tmp_path / "from_c"
    subprocess.run(["cc", "-std=c11", EXAMPLE, "-o", program, *flags.split()], check=True)
    expect_it_runs(program)


@pytest.mark.skipif(shutil.which("cmake") is None, reason="no cmake here")
def test_find_package(tmp_path):
    [folder] = ask("--cmake-dir")
    (tmp_path / "CMakeLists.txt").write_text(CMAKE_PROJECT.format(example=EXAMPLE))
    build = tmp_path / "build"
    subprocess.run(["cmake", "-S", tmp_path, "-B", build, f"-Debbtide_DIR={folder}"], check=True, capture_output=True)
    subprocess.run(["cmake", "--build", build], check=True, capture_output=True)
    expect_it_runs(build / "from_c")


def test_flags_go_without_a_command():
    assert "Usage:" in ask()[0]
    result = CliRunner().invoke(main, ["--libs", "doctor"])
    assert result.exit_code == 2
    assert "go without a command" in result.output
