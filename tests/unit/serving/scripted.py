"""Arms whose versions say their own names, without servers: they start when a test lets them, or fail to."""

from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import httpx

from areal_async.config.settings import ServeSettings, Settings
from areal_async.errors import UserError
from areal_async.inference.pool import ServerHandle
from areal_async.inference.request import ref_of
from areal_async.process.host import LOOPBACK
from areal_async.protocol.types import Turn, VersionSpan
from areal_async.rollout.endpoint.admission import AdmissionLimits
from areal_async.rollout.policy.text import TextCodec
from areal_async.serving.app import ServeApp
from areal_async.serving.arms import Arm, Place
from areal_async.serving.keys import Keyring
from areal_async.serving.records import Recorder
from areal_async.serving.served_version import ServedVersion
from areal_async.serving.server import bound_socket, listening
from areal_async.serving.split import Share
from areal_async.vision.images import Image
from tests.unit.rollout.chat_templates import codec_with
from tests.unit.rollout.endpoint.scripted_endpoint import said

KEY = "sk-0123456789abcdef"
KEY_OF_BEN = "sk-fedcba9876543210"
NUM_TOKENS = len(said("1-1"))


class Voice:
    """Says the version that it is; what it says after its first letter may be held back."""

    call_parser = None

    def __init__(self, version: str) -> None:
        self.version = version
        self.stamps = [version]
        """Versions that its tokens are stamped with."""
        self.num_asked = 0
        self.num_seen: list[int] = []
        """Images in each of its prompts."""
        self.asked = anyio.Event()
        self.held: anyio.Event | None = None

    def hold(self) -> anyio.Event:
        """Hold answers back until the event is set."""
        self.held = anyio.Event()
        return self.held

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: Mapping[str, Any],
        *,
        preferred: ServerHandle | None = None,
        on_tokens: Callable[[list[int]], None] | None = None,
        images: Sequence[Image] = (),
    ) -> tuple[Turn, ServerHandle]:
        self.num_asked += 1
        self.num_seen.append(len(images))
        ids = said(self.version)
        if on_tokens is not None:
            on_tokens(ids[:1])
        self.asked.set()
        if self.held is not None:
            await self.held.wait()
        if on_tokens is not None:
            on_tokens(ids[1:])
        edges = [*range(len(self.stamps)), len(ids)]
        spans = [VersionSpan(version=stamp, start=edges[at], end=edges[at + 1]) for at, stamp in enumerate(self.stamps)]
        turn = Turn(
            prompt_ids=prompt_ids,
            output_ids=ids,
            logprobs=[-0.5] * len(ids),
            spans=spans,
            oldest=self.stamps[0],
            finish_reason="stop",
            temperature=sampling_params["temperature"],
            images=[ref_of(image) for image in images],
        )
        return turn, ServerHandle("s0")


@dataclass
class Stage:
    """What names mean, and what becomes of versions that are started."""

    meant: dict[str, str]
    """Name -> version."""
    codec: TextCodec = field(default_factory=lambda: codec_with("hermes"))
    voices: dict[str, Voice] = field(default_factory=dict)
    broken: set[str] = field(default_factory=set)
    """Versions that do not start."""
    fault: OSError | None = None
    """Of the disk that says what is meant."""
    slow: dict[str, anyio.Event] = field(default_factory=dict)
    """Version -> when it may start."""
    num_starts: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    running: list[str] = field(default_factory=list)
    """Versions whose servers run."""
    held_folders: list[str] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    changed: anyio.Event = field(default_factory=anyio.Event)

    def resolve(self, wanted: str) -> str:
        if self.fault is not None:
            raise self.fault
        if wanted not in self.meant:
            raise UserError(f"no version {wanted}")
        return self.meant[wanted]

    @asynccontextmanager
    async def held(self, version: str) -> AsyncIterator[Path]:
        self.held_folders.append(version)
        try:
            yield Path(version)
        finally:
            self.held_folders.remove(version)

    async def tidy(self) -> None:
        """There is nothing to remove."""

    def voice(self, version: str) -> Voice:
        return self.voices.setdefault(version, Voice(version))

    def tell(self, text: str) -> None:
        self.told.append(text)
        self.changed.set()
        self.changed = anyio.Event()

    async def wait_told(self, text: str) -> None:
        while not any(text in one for one in self.told):
            await self.changed.wait()

    @property
    def kind(self) -> type[ServedVersion]:
        stage = self

        class Scripted(ServedVersion):
            async def run(self, *, task_status: "anyio.abc.TaskStatus[ServedVersion]") -> None:
                stage.num_starts[self.version] += 1
                if self.version in stage.slow:
                    await stage.slow[self.version].wait()
                if self.version in stage.broken:
                    raise UserError(f"servers of {self.version} do not start")
                stage.running.append(self.version)
                self.client, self.codec = stage.voice(self.version), stage.codec  # type: ignore[assignment]
                server = self.fleet.pool.add("s0")
                self.fleet.pool.admit(server, url="", version=self.stamp)
                task_status.started(self)
                try:
                    while not self._is_ended:
                        await self._changed.wait()
                finally:
                    stage.running.remove(self.version)

            async def change(self, version: str, folder: Path, *, deadline_s: float) -> None:
                assert self.num_requests == 0, "an answer would have two versions"
                if version in stage.broken:
                    raise TimeoutError
                stage.running[stage.running.index(self.version)] = version
                self.version, self.client = version, stage.voice(version)  # type: ignore[assignment]

        return Scripted


def settings_of(**serve: Any) -> Settings:
    return Settings(serve=ServeSettings.model_validate({"follow_s": 0.001, "port": 0, **serve}))


def place_of(stage: Stage, settings: Settings, directory: Path, *, num_arms: int = 1) -> Place:
    return Place(
        settings=settings,
        versions=stage,
        log_directory=directory / "logs",
        is_beside=settings.serve.replace != "in_place",
        num_arms=num_arms,
        tell=stage.tell,
        kind=stage.kind,
        retry_s=0.01,
    )


@dataclass
class Served:
    """An endpoint that listens."""

    app: ServeApp
    arms: list[Arm]
    url: str
    http: httpx.AsyncClient
    """Has a key, called ``ann``."""
    recorder: Recorder


@asynccontextmanager
async def served(
    stage: Stage, directory: Path, *, split: Mapping[str, float] | None = None, limits: Any = None, **serve: Any
) -> AsyncIterator[Served]:
    """Serve the versions of a stage over HTTP, with keys of ``ann`` and ``ben``."""
    settings = settings_of(**serve)
    shares = [Share(*one) for one in (split or {"champion": 1.0}).items()]
    keys = directory / "keys"
    keys.write_text(f"ann {KEY}\nben {KEY_OF_BEN}\n")
    keys.chmod(0o600)
    limits = limits or AdmissionLimits()
    with bound_socket(LOOPBACK, 0) as bound:
        async with Recorder(directory, settings.serve) as recorder, anyio.create_task_group() as tasks:
            place = place_of(stage, settings, directory, num_arms=len(shares))
            arms = [Arm(share, place, tasks) for share in shares]
            for arm in arms:
                await arm.start()
            app = ServeApp(settings, name="run", arms=arms, keyring=Keyring(keys), recorder=recorder, limits=limits)
            url = f"http://{LOOPBACK}:{bound.getsockname()[1]}"
            async with (
                listening(app, bound, limits),
                httpx.AsyncClient(
                    base_url=url, headers={"authorization": f"Bearer {KEY}"}, trust_env=False, timeout=100
                ) as http,
            ):
                for arm in arms:
                    tasks.start_soon(arm.run)
                yield Served(app, arms, url, http, recorder)
            tasks.cancel_scope.cancel()
