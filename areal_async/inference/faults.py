"""What goes wrong between a node and its servers; none of it leaves this package."""


class ServerFault(Exception):
    """A server did not do what it was asked to."""


class SilenceFault(ServerFault):
    """A server has given nobody a token for as long as one stream may wait for its next."""


class RefusalFault(ServerFault):
    """A server answered, and the answer was no: it is there."""


class StagingFault(Exception):
    """The weights of a version cannot be had (any more) as they were announced: no server's fault."""
