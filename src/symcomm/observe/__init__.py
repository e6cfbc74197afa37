"""Observability: what ranks do and did. The data path imports nothing from here.

recorder/           what ranks did: records of operations, stacks, dumps, and traces read back from them
analysis/           what a trace means: which rank is at fault, which is slow, when things happened
server/             the control plane: an HTTP server in each rank; server_registry.py: where such servers are
top/                a running job, live: ``symcomm top``, metrics
health/             whether a machine is fit for ranks: ``symcomm doctor``
"""
