"""The live page of a running job (``symcomm top``), which needs no cooperation from the job.

What it shows comes from the layer around it: ``feed.py`` reads the ranks, ``verdict.py`` judges, ``ask.py`` asks.

simulate.py   a feed of a made-up job of any size
model.py      puts together what feeds report: collectives, states, lag, stragglers
snapshot.py   the model as JSON, only what is new
page.py       the HTTP server, and its guards
top.html      the page: one file, nothing loaded from elsewhere
"""
