"""What a trace means: which rank is at fault, which is slow, when things happened."""
