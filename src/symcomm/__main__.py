"""``python -m symcomm`` is the ``symcomm`` command."""

from symcomm.cli.main import main

if __name__ == "__main__":
    main()
