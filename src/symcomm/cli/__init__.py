"""The ``symcomm`` command: options in, words and exit codes out. What commands do is in the packages below.

main.py        the command itself, and the table of its subcommands
run.py         ``symcomm run`` (launcher/)
bench.py       ``symcomm bench`` (bench/)
demo.py        ``symcomm demo`` (demo/)
trace.py       ``symcomm trace`` (observe/)
top.py         ``symcomm top``: the live page of a job; top_terminal.py draws the same here
doctor.py      ``symcomm doctor``: is this machine fit, and what to change
completion.py  ``symcomm completion``: for bash, zsh and fish
simulate.py    ``symcomm simulate``: what a collective would take on a cluster that is only described
version.py     ``symcomm version``
command.py     what they share: how help looks, how commands refuse
"""
