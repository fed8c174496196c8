"""What goes wrong between a node and its servers; none of it leaves this package."""


class ServerFault(Exception):
    """A server did not do what it was asked to."""


class StagingFault(Exception):
    """The files of a version are not (or no longer) what was announced: no server's fault."""
