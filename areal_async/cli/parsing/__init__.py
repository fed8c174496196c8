"""What the command line takes: its verbs, and the words after each."""
