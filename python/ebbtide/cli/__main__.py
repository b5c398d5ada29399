"""`python -m ebbtide.cli`: the command where it is not on PATH."""

from ebbtide.cli import main

main(prog_name="ebbtide")
