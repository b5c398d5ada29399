"""The `ebbtide` command. A file a command; the docstring of each is its help."""

import contextlib
import errno
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

import click

import ebbtide
from ebbtide.cli import asks, compiling
from ebbtide.cli.compat import compat
from ebbtide.cli.demo import demo
from ebbtide.cli.doctor import doctor
from ebbtide.cli.ps import ps
from ebbtide.cli.run import run
from ebbtide.errors import Error
from ebbtide.stderr import say


def _show_version(context: click.Context, _parameter: click.Parameter, is_asked: bool) -> None:
    if is_asked and not context.resilient_parsing:
        click.echo(f"ebbtide {ebbtide.__version__}")
        context.exit()


class _Group(click.Group):
    """Shows ebbtide's own errors as a sentence for the user, not a traceback."""

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except Error as error:
            raise click.ClickException(str(error)) from error

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        def work() -> Any:
            return super(_Group, self).main(args, prog_name, complete_var, standalone_mode=False, **extra)

        if not standalone_mode:
            return work()
        if sys.stderr is None:  # closed: click would write to stdout
            sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115 # as long as the process
        try:
            status = work()
        except click.ClickException as refusal:
            _show(refusal)
            sys.exit(refusal.exit_code)
        except click.Abort:
            _show(click.ClickException("aborted"))
            sys.exit(1)
        except OSError as error:
            if error.filename is not None or error.errno not in _OUTPUT_ERRORS:
                raise
            _silence(sys.stdout)
            say(f"the output can't be written: {error.strerror}")
            sys.exit(1)
        sys.exit(status if isinstance(status, int) else 0)  # of an option that ends the command


_OUTPUT_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)


def _show(refusal: click.ClickException) -> None:
    try:
        refusal.show()
    except OSError:  # the status says it
        _silence(sys.stderr)


def _silence(stream: TextIO | None) -> None:
    """Drops output that could not be written: Python would try it again, and fail, as the process ends."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # type: ignore[union-attr]


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]}, invoke_without_command=True)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_version,
    help="Say which version this is.",
)
@click.option("--cflags", is_flag=True, help="Print a C compiler's flags for <ebbtide.h>.")
@click.option("--libs", is_flag=True, help="Print a linker's flags. The program finds the library where it is now.")
@click.option("--cmake-dir", is_flag=True, help="Print the folder for ebbtide_DIR, where find_package(ebbtide) looks.")
@click.option("--pkgconfig-dir", is_flag=True, help="Print the folder for PKG_CONFIG_PATH.")
@click.pass_context
def main(context: click.Context, /, **asked: bool) -> None:
    """GPU memory for PyTorch that leaves and comes back at the same addresses.

    Begin with `ebbtide doctor`: it says what works here.
    """
    if context.invoked_subcommand is None:
        click.echo(compiling.describe(**asked) if any(asked.values()) else context.get_help())
    elif any(asked.values()):
        raise click.UsageError("--cflags and its like go without a command")


main.add_command(compat)
main.add_command(demo)
main.add_command(doctor)
main.add_command(asks.pause)
main.add_command(ps)
main.add_command(asks.resume)
main.add_command(run)
main.add_command(asks.trim)
