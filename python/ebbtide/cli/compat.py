"""`ebbtide compat`."""

import click

from ebbtide.launch import preloading, startup_file

_library = click.argument("library", type=click.Choice(["tms"]))


@click.group()
def compat() -> None:
    """Serve programs for another library whose launcher replaces PYTHONPATH.

    The one library is tms: torch_memory_saver.
    """


@compat.command()
@_library
def install(library: str) -> None:
    """Make EBBTIDE_COMPAT=tms enough for this Python.

    Writes one file into its site-packages. Each start of this Python then looks at the variable: with
    EBBTIDE_COMPAT=tms, as `ebbtide run --compat tms` sets it, `import torch_memory_saver` gives ebbtide's module,
    whatever PYTHONPATH is. Without the variable nothing changes.
    """
    click.echo(f"{startup_file.install()}: with EBBTIDE_COMPAT={library}, this Python uses ebbtide's module")


@compat.command()
@_library
def uninstall(library: str) -> None:
    """Remove the file that `install` wrote."""
    removed = startup_file.uninstall()
    click.echo(f"{removed} is removed" if removed else f"nothing was installed for {library}")


@compat.command()
@_library
def path(library: str) -> None:
    """Print the folder of ebbtide's module, for a launcher's PYTHONPATH."""
    click.echo(preloading.compat_path())
