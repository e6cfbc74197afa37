"""Random graphs of functional collectives: compiled they must give what they give uncompiled, bit for bit.

``python -m tests.compile.random_graphs --graphs 500`` makes and tries them (``make graphs``), ``--seed 17 --graphs 1``
one again; of a graph that fails the smallest part that still fails is shown, as a function to copy.

A graph is a list of steps (program.py) which write their own text (steps.py). Values are small whole numbers and
halves, so that no order of operations and no fusing rounds. What two ranks do is in trial.py.
"""
