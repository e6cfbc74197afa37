"""Seeing what ranks do: records of operations, dumps, verdicts, servers. Nothing on the data path imports this."""
