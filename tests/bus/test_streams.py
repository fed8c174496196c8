"""Declaring twice changes nothing; what would lose data is refused; the numbers follow from the settings."""

import pytest

from areal_async.bus import EmbeddedBroker, Role, declare
from areal_async.bus.streams import all_streams, delete_run, list_runs
from areal_async.config.settings import BusSettings, RolloutSettings, Settings
from areal_async.errors import UserError
from tests.brokers import OpenRole

pytestmark = pytest.mark.anyio


def with_rollout(settings: Settings, **rollout: int) -> Settings:
    return settings.model_copy(update={"rollout": RolloutSettings(max_trajectory_bytes=1 << 10, **rollout)})


async def test_declaring_again_changes_nothing(open_role: OpenRole, settings: Settings) -> None:
    bus = await open_role(Role.OPERATOR)
    await bus.publish(bus.names.outcomes, b"x")
    streams = f"$JS.API.STREAM.INFO.{bus.names.trajectories_stream}"
    consumers = f"$JS.API.CONSUMER.INFO.{bus.names.tickets_stream}.{bus.names.nodes_consumer}"
    before = (await bus.api.ask(streams))["config"], (await bus.api.ask(consumers))["config"]

    await declare(bus, settings)

    assert ((await bus.api.ask(streams))["config"], (await bus.api.ask(consumers))["config"]) == before
    assert (await bus.stream_state(bus.names.outcomes_stream)).num_messages == 1


async def test_numbers_follow_from_the_settings_and_with_them(open_role: OpenRole, settings: Settings) -> None:
    bus = await open_role(Role.OPERATOR)
    changed = with_rollout(settings, max_stream_bytes=2 << 20, batch_groups=2000)

    await declare(bus, changed)

    consumer = await bus.api.ask(f"$JS.API.CONSUMER.INFO.{bus.names.tickets_stream}.{bus.names.nodes_consumer}")
    assert (await bus.stream_state(bus.names.trajectories_stream)).max_bytes == 2 << 20
    assert consumer["config"]["max_ack_pending"] >= changed.rollout.max_groups_in_flight
    assert consumer["config"]["ack_wait"] == changed.ticket_ack_wait_s * 1e9


@pytest.mark.parametrize(("deadline_s", "window_s"), [(60.0, 120), (300.0, 600)])
async def test_the_broker_holds_ids_for_twice_as_long_as_a_message_is_repeated_and_no_longer(
    open_role: OpenRole, settings: Settings, deadline_s: float, window_s: int
) -> None:
    """They are in its memory, each with some 150 bytes: a run of quick steps publishes thousands in a minute."""
    bus = await open_role(Role.OPERATOR)

    await declare(bus, settings.model_copy(update={"bus": BusSettings(operation_deadline_s=deadline_s)}))

    for stream in all_streams(bus.names):
        config = (await bus.api.ask(f"$JS.API.STREAM.INFO.{stream}"))["config"]
        assert config["duplicate_window"] == window_s * 10**9, stream


async def test_a_stream_is_not_made_smaller_than_what_it_holds(open_role: OpenRole, settings: Settings) -> None:
    bus = await open_role(Role.OPERATOR)
    await bus.publish(bus.names.trajectories("w", "0-0-0"), bytes(3 << 20))

    with pytest.raises(UserError, match=r"rollout\.max_stream_bytes"):
        await declare(bus, with_rollout(settings, max_stream_bytes=1 << 20))


async def test_a_stream_that_was_made_otherwise_is_refused(open_role: OpenRole, settings: Settings) -> None:
    bus = await open_role(Role.OPERATOR)
    stream = bus.names.tickets_stream
    await bus.api.ask(f"$JS.API.STREAM.DELETE.{stream}")
    await bus.api.ask(
        f"$JS.API.STREAM.CREATE.{stream}", {"name": stream, "subjects": ["areal.test.tickets.>"], "storage": "file"}
    )

    with pytest.raises(UserError, match="made otherwise"):
        await declare(bus, settings)


async def test_a_stream_larger_than_the_brokers_disk_is_refused(open_role: OpenRole, settings: Settings) -> None:
    bus = await open_role(Role.OPERATOR)

    with pytest.raises(UserError, match=r"bus\.max_disk_bytes"):
        await declare(bus, with_rollout(settings, max_stream_bytes=1 << 50))


async def test_a_deleted_run_is_gone_and_can_be_declared_anew(
    broker: EmbeddedBroker, open_role: OpenRole, settings: Settings
) -> None:
    bus = await open_role(Role.OPERATOR)
    await bus.publish(bus.names.outcomes, b"x")
    assert await list_runs(bus) == ["test"]

    await delete_run(bus)
    await delete_run(bus)

    assert await list_runs(bus) == []
    await declare(bus, settings)
    assert (await bus.stream_state(bus.names.outcomes_stream)).num_messages == 0


async def test_an_evaluation_of_any_size_can_be_collected_before_it_is_acked(
    open_role: OpenRole, settings: Settings
) -> None:
    bus = await open_role(Role.OPERATOR)
    names = bus.names

    consumer = await bus.api.ask(f"$JS.API.CONSUMER.INFO.{names.eval_stream}.{names.eval_controller_consumer}")

    assert consumer["config"]["max_ack_pending"] == -1
