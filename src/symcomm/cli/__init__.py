"""The ``symcomm`` command.

=============  ===========================================================================
file           what it holds
=============  ===========================================================================
main.py        the command itself, and the table of its subcommands
run.py         ``symcomm run``: options in, exit code out
job.py         what to start: checks, rank numbers, environment, the meeting port
launch.py      starts the ranks, watches them, ends them
output.py      ranks' lines with prefixes, log files
verdict.py     how a rank ended, and the words that say what happened to a job
keeper.py      finds and kills what is left, even when the launcher itself was killed
top.py         ``symcomm top``: the live page of a job; top_terminal.py draws the same here
bench.py       ``symcomm bench``: options in, tables out; bench_*.py: what it measures, each in a file of its own
demo.py        ``symcomm demo``; demo_*.py: what it trains and draws
pictures.py    curves and bars for ``--plot``
refusals.py    how commands refuse: one line and an exit code
doctor.py      ``symcomm doctor``: is this machine fit, and what to change
simulate.py    ``symcomm simulate``: what a collective would take on a cluster that is only described
version.py     ``symcomm version``
=============  ===========================================================================

Only main.py, run.py and version.py know that there is a command line; ``launch.launch(job, output)`` can be called
from any program.
"""
