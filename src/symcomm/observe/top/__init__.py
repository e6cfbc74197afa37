"""The live page of a running job (``symcomm top``), for whom nothing in the job has to do anything.

============  =====================================================================
file          what it holds
============  =====================================================================
feed.py       where data comes from: flight recorders of running processes
simulate.py   a feed of a job that does not exist, of any size
find.py       which jobs run on this host
ask.py        what is asked for on demand: stacks, keys of the store
model.py      what feeds tell, put together: meetings, states, lag, stragglers
verdict.py    what is stuck, in one sentence
snapshot.py   the model as JSON, only what is new
page.py       the HTTP server, and its guards
top.html      the page: one file, nothing loaded from elsewhere
============  =====================================================================
"""
