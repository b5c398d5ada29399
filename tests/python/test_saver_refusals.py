"""The text of a refusal: the holders of the memory, the limit that refused, and advice for Python."""

import re
from pathlib import Path

import pytest
from ebbtide import _core, errors
from ebbtide.errors import StoreError

torch = pytest.importorskip("torch")

MIB = 1 << 20


def noise(saver, tag, mib, **options):
    with saver.region(tag, **options):
        return torch.randn(mib * MIB // 4, device=saver.device)


def test_a_store_error_says_who_holds_the_host_memory(saver, tag, tag2):
    first, second = noise(saver, tag, 200, retain=True), noise(saver, tag2, 40)
    want = second.cpu().clone()
    saver.pause(tag)
    try:
        saver.configure(host_limit=saver.stats()["host_held_bytes"] + 8 * MIB)
        with pytest.raises(StoreError) as refused:
            saver.pause(tag2)
        text = str(refused.value)
        assert re.search(rf"backups of '{tag[:20]}[^']*'?\.* 200 MiB", text), text
        held = re.search(r"ebbtide holds ([\d.]+ [KMG]iB): ", text)
        assert held and "the pinned ring between device and host" in text, text
        for advice in ("keep backups on disk", "host_limit", 'backup="disk"', "saver.configure(host_limit=..."):
            assert advice in text
        assert len(text) < 1024 and text.count("In Python") == 1
        assert saver.pause(tag2, backup="disk").bytes >= 40 * MIB  # its advice works
        saver.configure(host_limit=None)
        saver.resume(tag, tag2)
    finally:
        saver.configure(host_limit=None)
    assert torch.equal(second.cpu(), want)
    del first


@pytest.mark.sim_only
def test_the_simulator_names_the_limit_that_refused(saver, tag, tag2):
    """The margin refused, and the message named device_limit."""

    def refusal(**options):
        with pytest.raises(torch.OutOfMemoryError) as refused:
            noise(saver, tag2, 64, **options)
        return str(refused.value)

    try:
        saver.configure(device_margin="1TiB")
        by_margin = refusal()
        saver.configure(device_margin=0, device_limit=8 * MIB)
        by_limit = refusal()
        saver.configure(host_limit=saver.stats()["host_held_bytes"])
        by_host = refusal(overflow="split")
    finally:
        saver.configure(device_margin=0, device_limit=None, host_limit=None)
    assert "of which device_margin keeps 1 TiB (configured)" in by_margin
    assert "device_limit" not in by_margin and "saver.configure(device_margin=...)" in by_margin
    assert "left of device_limit 8 MiB (configured)" in by_limit and "device_margin" not in by_limit
    assert "saver.configure(device_limit=...)" in by_limit
    for text in (by_margin, by_limit):
        assert text.count('saver.region(..., overflow="split")') == 1 and f"tag '{tag2}' asked for 64.00 MiB" in text
    assert "the host has too little for the rest" in by_host and 'overflow="split"' not in by_host
    with pytest.raises(torch.OutOfMemoryError, match=r"on the device itself .*EBBTIDE_SIM_CAPACITY"):
        noise(saver, tag, _core.query_device(0).total_bytes // MIB + 2)
    keep = noise(saver, tag, 2)
    assert keep.numel() == MIB // 2


@pytest.mark.sim_only
def test_a_request_that_nothing_refused_is_not_explained_by_an_older_refusal(saver, tag):
    with saver.region(tag):
        with pytest.raises(torch.OutOfMemoryError, match="on the device itself"):
            torch.empty(_core.query_device(0).total_bytes * 2, dtype=torch.uint8)
        with pytest.raises(torch.OutOfMemoryError) as refused:
            torch.empty(2**60, dtype=torch.uint8)  # more than is ever asked of ebbtide
    assert "on the device itself" not in str(refused.value)


def test_every_cause_of_the_core_has_its_advice():
    """Each value of ebbtide_cause but the first, which is none."""
    header = Path(__file__).parents[2] / "csrc" / "api" / "ebbtide_causes.h"
    values = [int(value) for value in re.findall(r"EBBTIDE_CAUSE_\w+ = (\d+)", header.read_text())]
    assert values == list(range(len(values)))
    assert sorted(errors._ADVICE) == values[1:]
    for cause in values[1:]:
        advised = errors.advise("it is full", cause)
        assert advised.startswith("it is full. In Python: ") and errors.neutral(StoreError(advised)) == "it is full"
    assert errors.advise("it is full", 0) == errors.advise("it is full", 999) == "it is full"


# --- the folder of disk backups, when it is read from the environment ---


def said(stderr: str) -> list[str]:
    return [line for line in stderr.splitlines() if "EBBTIDE_DISK_DIRECTORY" in line]


@pytest.mark.parametrize(
    ("folder", "words"), [("missing", "make that directory"), ("/dev/shm", "is no disk but RAM"), (".", None)]
)
def test_a_bad_folder_of_the_environment_is_said_at_the_first_use(run_python, tmp_path, folder, words):
    program = """
        from ebbtide import _core
        from ebbtide.errors import StoreError
        _core.use_driver("sim")
        _core.alloc("a", 2 << 20)
        try:
            _core.pause(["a"], backup=3)
        except StoreError as error:
            print(error)
    """
    named = tmp_path / folder
    result = run_python(program, EBBTIDE_DISK_DIRECTORY=str(named), EBBTIDE_DRIVER="sim")
    assert result.returncode == 0, result.stderr
    if words is None:
        assert result.stdout == result.stderr == ""
        return
    (line,) = said(result.stderr)
    assert line.startswith("ebbtide: EBBTIDE_DISK_DIRECTORY: ") and words in line and "saver." not in line
    pause_says = errors.neutral(StoreError(result.stdout)).strip()
    assert pause_says and pause_says in line  # the same error as at the pause, hours earlier


def test_files_with_names_may_be_in_memory_when_the_environment_says_so(run_python):
    program = "from ebbtide import _core; _core.use_driver('sim'); _core.alloc('a', 2 << 20)"
    result = run_python(program, EBBTIDE_DISK_DIRECTORY="/dev/shm", EBBTIDE_DISK_FILES="named", EBBTIDE_DRIVER="sim")
    assert (result.returncode, result.stderr) == (0, "")
