"""`python -m polylens`: the same as the `polylens` command."""

from polylens.cli.main import main

if __name__ == "__main__":
    main()
