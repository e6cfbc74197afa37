"""Seeing what ranks do. Nothing on the data path imports this.

recorder/           what ranks did: records of operations, stacks, dumps, and traces read back from them
analysis/           what a trace means: who is to blame, who is slow, when things happened
server/             the control plane: an HTTP server in each rank; server_registry.py: where such servers are
top/                a running job, live: ``symcomm top``, metrics
health/             is a machine fit for ranks: ``symcomm doctor``
"""
