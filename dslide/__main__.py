"""The command `dslide`, also `python -m dslide`."""


def main() -> None:
    """Runs the command line. Ctrl-C ends it without a traceback while it is still being imported, too."""
    try:
        from dslide.cli import main as run
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    run()


if __name__ == "__main__":
    main()
