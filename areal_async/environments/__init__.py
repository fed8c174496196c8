"""Environments as they are: task sets and environments of other libraries, each by an adapter that trains it.

An adapter says which tasks there are (rows), plays one against a policy (an episode), and has a place for what a node
needs while it runs. ``names`` lists the kinds; nothing but the adapter imports the library that it adapts, and that not
before rows or an episode are asked for.
"""
