"""The `ebbtide` command. A file a command; the docstring of each is its help."""

import contextlib
import os
import sys
from typing import Any

import click

import ebbtide
from ebbtide.cli import compiling
from ebbtide.cli.compat import compat
from ebbtide.cli.demo import demo
from ebbtide.cli.doctor import doctor
from ebbtide.cli.run import run
from ebbtide.errors import Error


def _show_version(context: click.Context, _parameter: click.Parameter, is_asked: bool) -> None:
    if is_asked and not context.resilient_parsing:
        click.echo(f"ebbtide {ebbtide.__version__}")
        context.exit()


class _Group(click.Group):
    """What ebbtide raises on purpose is a sentence for the user, not a traceback."""

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except Error as error:
            raise click.ClickException(str(error)) from error

    def main(self, *arguments: Any, **options: Any) -> Any:
        try:
            return super().main(*arguments, **options)
        except OSError as error:
            if error.filename is not None or sys.stdout is None:  # another file than our output
                raise
            # What could not be written would be tried again, and fail again, as the process ends.
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            click.ClickException(f"the output can't be written: {error.strerror}").show()
            sys.exit(1)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]}, invoke_without_command=True)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_version,
    help="Say which version this is.",
)
@click.option("--cflags", is_flag=True, help="Print what a C compiler needs for <ebbtide.h>.")
@click.option("--libs", is_flag=True, help="Print what a linker needs. The program finds the library where it is now.")
@click.option("--cmake-dir", is_flag=True, help="Print the folder for ebbtide_DIR, where find_package(ebbtide) looks.")
@click.option("--pkgconfig-dir", is_flag=True, help="Print the folder for PKG_CONFIG_PATH.")
@click.option(
    "--stubs-dir",
    is_flag=True,
    help="Print the folder of a libcuda.so that programs link against where there is no CUDA toolkit.",
)
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
main.add_command(run)
