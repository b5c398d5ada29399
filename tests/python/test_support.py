"""Versions of torch and Python that are refused, that give a warning, or that are simply used."""

import sys
import warnings

import pytest
from ebbtide.cli import diagnosis
from ebbtide.errors import StateError
from ebbtide.torch_support import versions


@pytest.mark.parametrize(
    ("text", "version"), [("2.11.0+cu130", (2, 11)), ("2.6.0", (2, 6)), ("2.13.0a0+git123", (2, 13))]
)
def test_versions(text, version):
    assert versions.torch_version(text) == version


def test_a_version_that_is_none():
    with pytest.raises(StateError):
        versions.torch_version("main")


def is_after(version):
    return version[0], version[1] + 1


@pytest.mark.parametrize("version", [versions.LEAST_TORCH, (2, 13), versions.NEWEST_TORCH])
def test_what_was_tried_is_used_without_a_word(version, monkeypatch):
    monkeypatch.setattr(sys, "version_info", (*versions.NEWEST_PYTHON, 0, "final", 0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        versions.check(f"{versions.format_version(version)}.1+cu130")


@pytest.mark.parametrize("text", ["2.5.1+cu124", "1.13.0"])
def test_an_older_torch_is_refused(text):
    with pytest.raises(StateError, match=r"2\.6 or newer, .* upgrade torch"):
        versions.check(text)


@pytest.mark.parametrize(
    ("torch", "python", "words"),
    [
        (is_after(versions.NEWEST_TORCH), versions.NEWEST_PYTHON, ["torch 2.16 (tried: 2.6 to 2.15)"]),
        ((3, 0), versions.LEAST_PYTHON, ["torch 3.0"]),
        (versions.NEWEST_TORCH, is_after(versions.NEWEST_PYTHON), ["Python 3.14 (tried: 3.10 to 3.13)"]),
        ((3, 0), (4, 0), ["torch 3.0", " and Python 4.0"]),
    ],
)
def test_a_version_newer_than_any_tried_is_one_warning(torch, python, words, monkeypatch):
    monkeypatch.setattr(sys, "version_info", (*python, 0, "final", 0))
    with pytest.warns(RuntimeWarning) as caught:
        versions.check(f"{versions.format_version(torch)}.0")
    (warning,) = caught
    assert all(word in str(warning.message) for word in words)
    assert ("torch" in str(warning.message).partition(":")[0].replace("ebbtide was not tried with", "")) == (
        torch > versions.NEWEST_TORCH
    )


@pytest.mark.sim_only
@pytest.mark.parametrize("is_refused", [True, False])
def test_regions_of_a_process_say_it_once(run_python, is_refused):
    """The range is faked, because another version of torch would need another extension."""
    result = run_python(
        f"""
        import ebbtide, torch
        from ebbtide import saver
        from ebbtide.torch_support import versions
        if {is_refused}:
            versions.LEAST_TORCH = (99, 0)
        else:
            versions.NEWEST_TORCH = (2, 5)
        for name in ("a", "b"):
            try:
                with saver.region(name):
                    t = torch.ones(100)
                saver.pause()
                saver.resume()
                assert t.sum() == 100
            except ebbtide.StateError as error:
                print(error)
    """,
        EBBTIDE_DRIVER="sim",
    )
    assert result.returncode == 0, result.stderr
    assert ("99.0 or newer" in result.stdout) == is_refused, result.stdout
    said = [line for line in result.stderr.splitlines() if "RuntimeWarning" in line]
    assert len(said) == (0 if is_refused else 1), result.stderr
    assert all("not tried with torch" in line for line in said)


@pytest.mark.parametrize(
    ("version", "status", "advice"),
    [
        ("2.5.1", "problem", "2.6 or newer"),
        ("2.15.0+cu132", "ok", ""),
        ("3.0.0", "note", "not tried with torch 3.0"),
        ("main", "problem", "does not begin with two numbers"),
    ],
)
def test_the_doctor_says_the_same(version, status, advice):
    finding = diagnosis._package("torch", version)
    assert (finding.status, finding.found) == (status, version)
    assert advice in finding.advice
