"""Observability: what ranks do and did. The data path imports nothing from here.

recorder/           records of operations, stacks, dumps, and traces read back from them
analysis/           which rank is at fault, which is slow, when things happened
server/             the control plane: an HTTP server in each rank; server_registry.py finds these servers
top/                a running job, live: ``symcomm top``, metrics
health/             is a machine fit for ranks? ``symcomm doctor``
"""
