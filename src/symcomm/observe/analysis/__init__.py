"""What a trace means: who is to blame, who is slow, when things happened."""
