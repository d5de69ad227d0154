"""`python -m dslide` is the command `dslide`."""

from dslide.cli import main

main()
