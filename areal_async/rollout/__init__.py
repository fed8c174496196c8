"""The node: workflows run as coroutines on one event loop, and what they produce reaches the bus.

    ticket -> runner -> policy (inference) -> turns -> merge -> trajectory -> outbox -> stream

Invariant: a leased ticket is acknowledged only after every slot of its group is stored, as a scored
trajectory or as a recorded failure. Nothing finished is ever dropped; a full stream only slows it.
"""
