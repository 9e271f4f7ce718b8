"""`python -m quantroute` is the `quantroute` command."""

from quantroute.cli import main

if __name__ == "__main__":
    main()
