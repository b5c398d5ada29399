"""`ebbtide compat`."""

import click

from ebbtide.launch import preloading, site_files

_library = click.argument("library", type=click.Choice(["tms"]))


@click.group()
def compat() -> None:
    """Serve programs for another library, also where a launcher replaces PYTHONPATH.

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
    click.echo(f"{site_files.write_startup_file()}: with EBBTIDE_COMPAT={library}, this Python uses ebbtide's module")


@compat.command()
@_library
@click.option(
    "--version", default=site_files.VERSION, show_default=True, help="The version that pip is told, for a pinned one."
)
def provide(library: str, version: str) -> None:
    """Tell pip that the library is installed, and give this Python ebbtide's module under its name.

    Writes metadata and a path into site-packages. A program that requires torch_memory_saver then installs without it,
    and `import torch_memory_saver` gives ebbtide's module without a variable. Refused where torch_memory_saver itself
    is installed.
    """
    try:
        folder = site_files.provide(version)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--version") from None
    click.echo(f"{folder}: pip takes {site_files.NAME} {version} for installed, and importing it gives ebbtide's")


@compat.command()
@_library
def uninstall(library: str) -> None:
    """Remove the files that `install` and `provide` wrote."""
    removed = site_files.remove_all()
    for path in removed:
        click.echo(f"{path} is removed")
    if not removed:
        click.echo(f"nothing was installed for {library}")


@compat.command()
@_library
def path(library: str) -> None:
    """Print the folder of ebbtide's module, for a launcher's PYTHONPATH."""
    click.echo(preloading.compat_path())
