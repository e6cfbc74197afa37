"""Who is in a group: how ranks agree on that, whoever dies, stops or is cut off meanwhile."""
