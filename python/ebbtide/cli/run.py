"""`ebbtide run`."""

import errno
import functools
import os
import shlex
import signal
from pathlib import Path
from typing import Any, NoReturn

import click

from ebbtide import settings
from ebbtide.launch import ledger, preloading
from ebbtide.launch.preloading import LOADER_VARIABLE, UNIFIED_MEMORY_VARIABLE, drop_unified_memory
from ebbtide.launch.programs import find_program, preload_obstacle
from ebbtide.launch.run_options import options
from ebbtide.settings import Setting
from ebbtide.stderr import say


def _spell(name: str) -> str:
    return "--" + name.replace("_", "-")


class _RunCommand(click.Command):
    """Its options are settings, which the core lists: it is loaded when they are needed, not for `ebbtide --help`."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        return [*_options(), *super().get_params(ctx)]


STARTED = "_EBBTIDE_STARTED"  # the process that this one becomes (csrc/preload/unused.cpp)


@functools.cache
def _options() -> list[click.Parameter]:
    return [_option_of(setting) for setting in options()]


def _option_of(setting: Setting) -> click.Option:
    fallback = setting.fallback if setting.form else {"0": "no", "1": "yes"}[setting.fallback]
    name, words = _spell(setting.name), f"{setting.meaning} [{setting.variable}; default: {fallback}]"
    if setting.form:
        return click.Option([name], metavar=setting.form, help=words)
    return click.Option([f"{name}/{name.replace('--', '--no-', 1)}"], default=None, help=words)


@click.command(cls=_RunCommand, context_settings={"allow_interspersed_args": False}, options_metavar="[OPTIONS] [--]")
@click.option("--dry-run", is_flag=True, help="Print what would be set, as lines for a shell, and start nothing.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="COMMAND [ARGUMENTS]...")
def run(command: tuple[str, ...], dry_run: bool, **values: Any) -> None:
    """Start a program so that it goes on where it would run out of device memory.

    The preload library is loaded into the program and all that it starts; each option is a variable that the library
    reads. Options that are not given are as the environment says, so a run inside a run changes only the options that
    it names. ebbtide becomes the program (exec): arguments, files, signals and exit status are its own.

    The exit status is 2 where an option is refused, 1 where the library is missing or the driver is HIP, 126 where the
    program can't be started, and 127 where it is not found.
    """
    environment = _inherited_environment()
    given = {name: value for name, value in values.items() if value is not None}
    try:
        added = preloading.variables_for(given, environment, _spell)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    if not command and not dry_run:
        raise click.UsageError("there is no command: ebbtide run [OPTIONS] -- COMMAND [ARGUMENTS]")
    program = _find(command[0], environment) if command else None
    if dry_run:
        _print_changes(added, environment)
    elif program is not None:
        _become(program, command, added, environment)


def _inherited_environment() -> dict[str, str]:
    """The environment at the start of this process: in the C locale, Python itself adds an LC_CTYPE (PEP 538)."""
    environment = dict(os.environ)
    try:
        started_with = Path("/proc/self/environ").read_bytes().split(b"\0")
    except OSError:
        return environment
    if not any(entry.startswith(b"LC_CTYPE=") for entry in started_with):
        environment.pop("LC_CTYPE", None)
    return environment


class _NotFound(click.ClickException):
    exit_code = 127  # as shells answer


class _NotStarted(click.ClickException):
    exit_code = 126


def _find(command: str, environment: dict[str, str]) -> Path:
    try:
        return find_program(command, environment)
    except FileNotFoundError as error:
        raise _NotFound(str(error)) from None
    except PermissionError as error:
        raise _NotStarted(str(error)) from None


def _print_changes(added: dict[str, str], environment: dict[str, str]) -> None:
    lines = [f"export {name}={shlex.quote(value)}" for name, value in added.items()]
    if UNIFIED_MEMORY_VARIABLE in environment:
        lines.append(f"unset {UNIFIED_MEMORY_VARIABLE}")
    click.echo(os.fsencode("\n".join(lines)))


def _does_nothing(environment: dict[str, str]) -> bool:
    """Whether the settings leave nothing of ebbtide to the program."""
    values = {name: settings.read_or_fallback(name, environment) for name in ("driver", "lms", "compat")}
    return values == {"driver": "sim", "lms": "off", "compat": "none"}


def _become(program: Path, command: tuple[str, ...], added: dict[str, str], environment: dict[str, str]) -> NoReturn:
    """Replaces this process by the program."""
    if obstacle := preload_obstacle(program, Path(added[LOADER_VARIABLE].split(":")[0])):
        say(obstacle)
    elif _does_nothing(environment | added):
        say(
            "EBBTIDE_DRIVER=sim switches the preload library off, so nothing limits this program and nothing "
            "overflows: unset it, or use --lms"
        )
    for name, meant in settings.misspelt(environment).items():
        say(f"{name} is none of ebbtide's variables; is {meant} meant?")
    drop_unified_memory(environment)
    if settings.read_or_fallback("summary", environment | added) == "1":
        environment[STARTED] = str(os.getpid())
    ledger.sweep()
    # Python ignores these two, and an ignored signal would stay so in the program.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execve(program, command, environment | added)
    except OSError as error:
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # this process goes on, to say so
        reason = os.strerror(error.errno or 0)
        if error.errno == errno.ENOEXEC:
            reason = "it is neither a program for this machine nor a script that begins with #!"
        raise _NotStarted(f"{program} can't be started: {reason}") from None
