"""What ranks did: records of operations, stacks, dumps, and traces read back from them."""
