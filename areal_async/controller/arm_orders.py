"""Orders that add arms to a live run and take them away, and those that the settings bring along.

Which there are is the key ``arms``, which outlives every process; the controller's questions and all nodes follow it.
"""

import secrets
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from areal_async.bus import Bus, Report, ServiceEndpoint, json_object
from areal_async.config.settings import Settings
from areal_async.controller.audit import note
from areal_async.controller.steering import TEXT, text_in
from areal_async.controller.tasks import Tasks
from areal_async.errors import ConflictError, UserError
from areal_async.protocol.arms import MAX_ARMS, MAX_PATH_CHARACTERS, Arm, Arms
from areal_async.protocol.events import RunOrdered, now
from areal_async.protocol.subjects import ARMS
from areal_async.protocol.types import Admitted

ADD, REMOVE = "add-arm", "remove-arm"
ID_BYTES = 4
NUMBERS = ("share", "alpha", "reach")


class ArmOrders:
    """The endpoints of the controller at which operators add and remove arms."""

    def __init__(self, bus: Bus, settings: Settings, tasks: Tasks, admitted: Callable[[], Admitted]) -> None:
        """``admitted`` returns the record of admissions as it is."""
        self._bus = bus
        self._settings = settings
        self._tasks = tasks
        self._admitted = admitted

    @property
    def endpoints(self) -> list[ServiceEndpoint]:
        """An endpoint for each order."""
        path = {"type": "string", "maxLength": MAX_PATH_CHARACTERS}
        texts: dict[str, Any] = {"by": TEXT, "reason": TEXT, "version": TEXT}
        numbers: dict[str, Any] = {name: {"type": "number"} for name in NUMBERS}
        add = json_object(optional=[*texts, *numbers], name=TEXT, path=path, **texts, **numbers)
        remove = json_object(optional=["by", "reason"], name=TEXT, by=TEXT, reason=TEXT)
        response = json_object(optional=["path"], sentence="string", path="string")
        return [
            ServiceEndpoint(
                name=name,
                subject=self._bus.names.control(name),
                description=description,
                request=request,
                response=response,
                answer=answer,
            )
            for name, description, request, answer in (
                (ADD, "have a model answer additional prompts beside the newest weights", add, self._add),
                (REMOVE, "ask an arm nothing more, and end its servers", remove, self._remove),
            )
        ]

    async def take_up_settings(self) -> None:
        """Have the arms that the settings name, unless an operator has decided about one of that name.

        Raises:
            UserError: this run can have none.
        """
        if self._settings.arms:
            self._check_run()
        while True:
            found, revision = await self._bus.get(ARMS, Arms)
            arms = found or Arms()
            wanted = dict(arms.by_name)
            for name, own in self._settings.arms.items():
                told = {"name": name, **own.model_dump()}
                there = wanted.get(name)
                is_there = there is not None and all(getattr(there, key) == value for key, value in told.items())
                if name not in arms.ordered and not is_there:
                    wanted[name] = self._made(told | {"by": "settings"})
            if wanted == arms.by_name:
                return
            with suppress(ConflictError):
                await self._bus.compare_and_set(ARMS, msgspec.structs.replace(arms, by_name=wanted), revision)
                return

    async def _add(self, body: Report) -> Report:
        """Have an arm more.

        Raises:
            UserError: there is one of that name, there are too many, or something is no such value.
        """
        self._check_run()
        given = {name: text_in(body, name) for name in ("name", "version", "by", "reason")}
        given |= {name: body[name] for name in ("path", *NUMBERS) if name in body}
        arm = self._made(given)

        def change(arms: Arms) -> dict[str, Arm]:
            if arm.name in arms.by_name:
                raise UserError(f"arm {arm.name}: the run has one of that name; remove it first, or take another name")
            if len(arms.by_name) >= MAX_ARMS:
                raise UserError(f"arm {arm.name}: the run has {MAX_ARMS} already; remove one first")
            return {**arms.by_name, arm.name: arm}

        await self._change(arm.name, change)
        what = arm.version or arm.path
        await self._note(f"{ADD} {arm.name} {what} share={arm.share:g} alpha={arm.alpha:g}", arm.by, arm.reason)
        return {
            "sentence": f"arm {arm.name}: {what} answers {arm.share:g} prompts more for each that is admitted from now "
            "on, each beside the newest weights",
            "path": arm.path,
        }

    async def _remove(self, body: Report) -> Report:
        """Take an arm away.

        Raises:
            UserError: there is none of that name.
        """
        name, by, reason = (text_in(body, key) for key in ("name", "by", "reason"))
        removed: list[Arm] = []

        def change(arms: Arms) -> dict[str, Arm]:
            if name not in arms.by_name:
                there = ", ".join(arms.by_name) or "none"
                raise UserError(f"arm {name}: the run has none of that name; it has {there}")
            removed[:] = [arms.by_name[name]]
            return {other: arm for other, arm in arms.by_name.items() if other != name}

        await self._change(name, change)
        await self._note(f"{REMOVE} {name}", by, reason)
        return {"sentence": f"arm {name}: is asked nothing more, and its servers end", "path": removed[0].path}

    def _check_run(self) -> None:
        refuse_colocated(self._settings, "arm: got one")
        if self._tasks.names_with_images:
            raise UserError(
                f"arm: the rows of {', '.join(sorted(self._tasks.names_with_images))} have images, and arms are asked "
                "rows of text alone; compare versions by eval instead"
            )

    def _made(self, given: dict[str, Any]) -> Arm:
        """Return an arm that begins now.

        Raises:
            UserError: something is no such value.
        """
        admitted = self._admitted()
        own = {
            "arm_id": f"{given['name']}-{secrets.token_hex(ID_BYTES)}",
            "first_admission": admitted.total,
            "first_position": admitted.num_fresh,
            "at": now(),
        }
        try:
            return msgspec.convert(given | own, Arm)
        except msgspec.ValidationError as exc:
            raise UserError(f"arm: {str(exc).replace('`', '')}; see arm --help") from exc

    async def _change(self, name: str, change: Callable[[Arms], dict[str, Arm]]) -> None:
        """Write which arms there are to be, after an order about one."""
        while True:
            found, revision = await self._bus.get(ARMS, Arms)
            arms = found or Arms()
            ordered = [*(one for one in arms.ordered if one != name), name]
            with suppress(ConflictError):  # another operator was faster: theirs first, then ours
                wanted = msgspec.structs.replace(arms, by_name=change(arms), ordered=ordered)
                await self._bus.compare_and_set(ARMS, wanted, revision)
                return

    async def _note(self, order: str, by: str, reason: str) -> None:
        await note(self._bus, self._settings.run_directory, RunOrdered(order=order, by=by, reason=reason))


def refuse_colocated(settings: Settings, what: str) -> None:
    """Refuse servers that would take memory that the trainer counts on.

    Args:
        what: begins the sentence: who got what.

    Raises:
        UserError: the trainer shares its GPUs.
    """
    if settings.inference.colocate is not None:
        raise UserError(
            f"{what} with inference.colocate={settings.inference.colocate}, need servers with GPUs of their own: it "
            "would take memory that the trainer counts on"
        )
