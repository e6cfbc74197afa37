"""The ``symcomm`` command: options in, words and exit codes out. The packages below do the work.

main.py        the command itself, and the table of its subcommands
run.py         ``symcomm run`` (launcher/)
bench.py       ``symcomm bench`` (bench/)
demo.py        ``symcomm demo`` (demo/)
trace.py       ``symcomm trace`` (observe/)
top.py         ``symcomm top``: the live page of a job; top_terminal.py draws the same here
doctor.py      ``symcomm doctor``: is this machine set up well, and what to change
completion.py  ``symcomm completion``: for bash, zsh and fish
simulate.py    ``symcomm simulate``: predicts times on a cluster that you describe
version.py     ``symcomm version``
command.py     what they share: how help looks, how commands refuse
"""
