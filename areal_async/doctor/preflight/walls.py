"""Whether what models write can be isolated here, where a workflow has such programs or boxes run."""

from areal_async.config.settings import Settings
from areal_async.doctor.preflight.findings import PreflightFinding, good, of_mistake
from areal_async.errors import UserError
from areal_async.rollout.user_code.source_hashes import code_of_tasks, source_files
from areal_async.sandbox import sandbox
from areal_async.sandbox.keeper import BoxKeepers

CHECK = "sandbox"
MENTION = b"areal_async.sandbox"


async def check_walls(settings: Settings) -> list[PreflightFinding]:
    """Open a box, with the walls tried, where a workflow or what it imports names the sandbox."""
    if not _is_named(settings):
        return []
    keepers = BoxKeepers()
    try:
        async with sandbox(keepers=keepers) as box:
            how = "lays an empty file system over the snapshot" if box.can_overlay else "copies the snapshot"
    except UserError as mistake:
        return [of_mistake(CHECK, mistake)]
    finally:
        await keepers.aclose()
    return [good(CHECK, f"programs and boxes are isolated here; a reset {how}")]


def _is_named(settings: Settings) -> bool:
    files = source_files(code_of_tasks(settings)).values()
    return any(MENTION in file.read_bytes() for file in files)
