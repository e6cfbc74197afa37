"""Ranks as processes of this host: what ``symcomm run`` does, for any program.

job.py            what to start: checks, rank numbers, environment, the meeting port
launch.py         starts the ranks, watches them, ends them
elastic_nodes.py  the same where nodes come and go: rounds, restarts
output.py         ranks' lines with prefixes, log files
verdict.py        how a rank ended, and the words that say what happened to a job
reaper.py         finds and kills what is left, even when the launcher itself was killed
mps.py            NVIDIA's multi-process service, for ranks that share a GPU

``launch.launch(job, output)`` can be called from any program.
"""
