"""`python -m roundpipe_cli`: the same program as the console script `roundpipe`."""

from roundpipe_cli.cli.app import main

if __name__ == "__main__":
    main()
