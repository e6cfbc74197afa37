"""What ``symcomm bench`` measures: each subject in a file of its own, and the workers it starts."""
