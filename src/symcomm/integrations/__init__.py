"""What other programs need to run on Symcomm without a change: one folder each, and operators that they share."""
