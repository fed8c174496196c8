"""One process on one host: its address, output, stacks, garbage collection and files."""
