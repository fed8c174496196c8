"""Orders that add hosts to a run and take them away, while it runs.

What operators want is the key ``hosts``, which outlives every process; the launcher follows it. Invariant: the
launcher's own host, those that hold ranks and the last one that generates stay.
"""

from collections.abc import Callable
from contextlib import suppress

from areal_async.bus import Bus, Report, Schema, ServiceEndpoint, json_object
from areal_async.config.launch import HOST
from areal_async.config.settings import Settings
from areal_async.controller.audit import note
from areal_async.controller.steering import TEXT, text_in
from areal_async.errors import ConflictError, UserError
from areal_async.protocol.events import RunOrdered
from areal_async.protocol.run_state import CrewState, OrderedHosts
from areal_async.protocol.subjects import HOSTS

ADD, REMOVE = "add-host", "remove-host"
NOT_THERE = ("stopped", "finished")
"""States of processes that nobody starts again."""


class HostOrders:
    """The endpoints of the controller at which operators change which hosts a run has."""

    def __init__(self, bus: Bus, settings: Settings) -> None:
        self._bus = bus
        self._settings = settings

    @property
    def endpoints(self) -> list[ServiceEndpoint]:
        """An endpoint for each order."""
        said: dict[str, Schema] = {"by": TEXT, "reason": TEXT}
        request = json_object(optional=[*said], host=TEXT, **said)
        response = json_object(sentence="string")
        descriptions = {
            ADD: "have a node with its servers on one more host",
            REMOVE: "have a host's node give back what it does not finish, and end",
        }
        return [
            ServiceEndpoint(
                name=name,
                subject=self._bus.names.control(name),
                description=descriptions[name],
                request=request,
                response=response,
                answer=answer,
            )
            for name, answer in ((ADD, self._add), (REMOVE, self._remove))
        ]

    async def _add(self, body: Report) -> Report:
        """Have a node on one more host.

        Raises:
            UserError: the run has it already, or its launcher cannot start anything there.
        """

        def change(ordered: OrderedHosts, crews: dict[str, CrewState], host: str) -> OrderedHosts:
            launch = self._settings.launch
            if host in ordered.removed:
                return OrderedHosts(added=ordered.added, removed=[one for one in ordered.removed if one != host])
            if host in ordered.added or host in _hosts_of(crews):
                raise UserError(f"host {host}: the run has it already")
            if launch.backend != "local":
                more = {"slurm": "as the job's --nodes", "ray": "by launch.num_hosts"}[launch.backend]
                raise UserError(f"host {host}: hosts are {launch.backend}'s to give; ask for more {more} at a start")
            if not launch.hosts:
                raise UserError(
                    f"host {host}: the run has been started on one host alone, where others do not reach it; start it "
                    "again with launch.hosts, or join from there with node --join"
                )
            return OrderedHosts(added=[*ordered.added, host], removed=ordered.removed)

        host = await self._change(ADD, body, change)
        return {
            "sentence": f"host {host}: a node starts there now, and takes part once its servers hold the newest weights"
        }

    async def _remove(self, body: Report) -> Report:
        """Take a host's node away.

        Raises:
            UserError: the run has no such host, or cannot do without it.
        """

        def change(ordered: OrderedHosts, crews: dict[str, CrewState], host: str) -> OrderedHosts:
            hosts = _hosts_of(crews)
            if host in ordered.removed or host not in (*hosts, *ordered.added):
                raise UserError(f"host {host}: the run has none of that name; it has {', '.join(hosts)}")
            if host in _hosts_of({"controller": crews.get("controller", CrewState(name="", state=""))}):
                raise UserError(f"host {host}: it is the launcher's own, which stays for as long as the run")
            if not self._settings.trainer.elastic and "trainer" in crews and host in crews["trainer"].hosts:
                raise UserError(
                    f"host {host}: it holds ranks of the trainer, which does not go on with fewer; trainer.elastic "
                    "lets it, from the next start on"
                )
            generating = {one for name, crew in crews.items() if name.startswith("node-") for one in crew.hosts}
            if not generating - {host}:
                raise UserError(f"host {host}: it is the last one that generates; add another first")
            return OrderedHosts(added=ordered.added, removed=[*ordered.removed, host])

        host = await self._change(REMOVE, body, change)
        return {"sentence": f"host {host}: its node takes nothing more, gives back what it does not finish, and ends"}

    async def _change(
        self, order: str, body: Report, change: Callable[[OrderedHosts, dict[str, CrewState], str], OrderedHosts]
    ) -> str:
        """Write which hosts there are to be; return the one that was spoken of."""
        by, reason, host = (text_in(body, key) for key in ("by", "reason", "host"))
        if not HOST.fullmatch(host):
            raise UserError(f"host: got {host!r:.100}, need the name of a host")
        while True:
            ordered, revision = await self._bus.get(HOSTS, OrderedHosts)
            entries = await self._bus.entries("crew.", CrewState)
            crews = {crew.name: crew for crew, _ in entries.values() if crew.state not in NOT_THERE}
            wanted = change(ordered or OrderedHosts(), crews, host)
            with suppress(ConflictError):  # another operator was faster: theirs first, then ours
                await self._bus.compare_and_set(HOSTS, wanted, revision)
                break
        event = RunOrdered(order=f"{order} {host}", by=by, reason=reason)
        await note(self._bus, self._settings.run_directory, event)
        return host


def _hosts_of(crews: dict[str, CrewState]) -> list[str]:
    """Return the hosts of processes, each once, in the order of the processes."""
    return list(dict.fromkeys(host for crew in crews.values() for host in crew.hosts))
