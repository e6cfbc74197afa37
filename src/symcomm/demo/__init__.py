"""What ``symcomm demo`` trains and draws."""
