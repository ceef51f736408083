"""What does the command line offer? See `millrace --help`."""
