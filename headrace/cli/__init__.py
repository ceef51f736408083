"""What does the command line offer? See `headrace --help`."""
