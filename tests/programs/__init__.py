"""Real programs of others, on Symcomm and on Gloo in turns: `make programs`.

Each file here is a program, except ``frame`` and ``run``. It has

    VERSION         of what it tries
    NEEDS           what pip installs for it, pinned
    PARTS           what it runs: one row of the table each
    main(backend)   runs them on every rank, and yields a Part as each is over

and, where the usual is not right for it, what ``run.Program`` lists. What it tries is imported inside functions: the
runner reads these names where it is not installed.
"""
