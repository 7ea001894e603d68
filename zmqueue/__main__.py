"""`python -m zmqueue` is the command line."""

from zmqueue.cli.main import main

if __name__ == "__main__":
    main()
