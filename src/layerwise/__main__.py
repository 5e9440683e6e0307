"""`python -m layerwise`: the same as the `layerwise` command, for launchers that want a module."""

from layerwise.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
