"""The command line: parse first, import what the verb needs after, show what happens meanwhile."""
