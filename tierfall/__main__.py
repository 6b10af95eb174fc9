"""``python -m tierfall`` is the command line."""

from tierfall.cli import main

if __name__ == "__main__":
    main()
