"""Real programs of others, on Symcomm and on Gloo in turns: `make programs`.

One file a program, named as the program; each has VERSION, NEEDS (what pip installs, pinned) and
``run(python, backend)``, which says in an Outcome what ran. Environments are outside the checkout, one after the other.
"""
