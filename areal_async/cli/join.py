"""``node --join``: take part in a run that lives elsewhere, with the inference servers of this host."""

import argparse
from collections.abc import Sequence
from fnmatch import fnmatchcase

import anyio

from areal_async.cli.starting.checks import check_node
from areal_async.config.settings import RunSettings, Settings
from areal_async.config.sources import override_settings
from areal_async.errors import UserError
from areal_async.launch.join import Invitation, fresh_node_id, join
from areal_async.launch.local import LocalBackend
from areal_async.launch.supervisor import RunEnd
from areal_async.process.stdio import say
from areal_async.protocol.subjects import RUN_NAME

KILLED_STATUS = 130
OWN = ("--inference.*", "--endpoint.host", "--launch.join_wait_s", "--metrics.traces", "--metrics.prometheus_host")
"""What a host may have otherwise than the run: its interpreter, its servers' number and flags, its patience, where its
traces go, and the address that it is scraped at."""


def run(arguments: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Be one node of the run until that ends or until this is told to end."""
    invitation = read_invitation(arguments)
    names = [word.partition("=")[0] for word in overrides if word.startswith("--")]
    if foreign := [name for name in names if not any(fnmatchcase(name, own) for own in OWN)]:
        raise UserError(f"{foreign[0]}: a node has the settings of its run, all but {', '.join(OWN)}; leave it out")

    def prepare(settings: Settings) -> Settings:
        here = override_settings(settings, overrides)
        check_node(here)
        return here

    node_id = arguments.node_id or fresh_node_id()

    async def run_to_end() -> RunEnd:
        return await join(invitation, node_id=node_id, backend=LocalBackend(), prepare=prepare, notify=say)

    end = anyio.run(run_to_end, backend_options={"use_uvloop": True})
    say(f"node {node_id} {end.value}")
    return KILLED_STATUS if end is RunEnd.KILLED else 0


def read_invitation(arguments: argparse.Namespace) -> Invitation:
    """Read which run is to be joined, and how.

    Raises:
        UserError: the name is no run's, or a run directory was given as well.
    """
    if arguments.run is None or not RUN_NAME.fullmatch(arguments.run):
        raise UserError(f"--run: got {arguments.run!r}, need the name of the run to join")
    if arguments.run_directory is not None:
        raise UserError("--run-directory: got it with --join, which makes its own; leave one of them out")
    return Invitation(
        run=arguments.run,
        url=arguments.join,
        credentials=arguments.credentials,
        ca=arguments.ca,
        directory=arguments.directory or RunSettings().directory,
        allows_other_files=arguments.allow_other_files,
    )
