"""The same world under hypothesis, which chooses what happens next and shortens what it finds."""

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from tests.protocol.explorer import FAULTS, GO_BACK, befall, finish
from tests.protocol.roles import Roles
from tests.protocol.world import World, any_config


class Protocol(RuleBasedStateMachine):
    """A run, one step or fault at a time; the oracle judges each."""

    def __init__(self) -> None:
        super().__init__()
        self.world: World | None = None

    @initialize(seed=st.integers(0, 2**16))
    def begin(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.world = World(any_config(self.random), seed=seed, roles=Roles())

    @rule(which=st.integers(0, 63), count=st.integers(1, 20))
    def go_on(self, which: int, count: int) -> None:
        """Let one process go on for a while."""
        assert self.world is not None
        for _ in range(count):
            threads = self.world.runnable()
            if threads:
                self.world.step(threads[which % len(threads)])

    @rule(count=st.integers(10, 100))
    def all_go_on(self, count: int) -> None:
        """Let all of them go on."""
        assert self.world is not None
        for _ in range(count):
            threads = self.world.runnable()
            if threads:
                self.world.step(self.random.choice(threads))

    @rule(fault=st.sampled_from([*sorted(FAULTS), GO_BACK]))
    def mishap(self, fault: str) -> None:
        """Let something befall it."""
        assert self.world is not None
        befall(self.world, fault, self.random)

    def teardown(self) -> None:
        """From wherever it is, the run comes to its end."""
        if self.world is not None:
            try:
                finish(self.world, self.random)
            finally:
                for process in self.world.processes:
                    process.end()


Protocol.TestCase.settings = settings(
    max_examples=12, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestProtocol = pytest.mark.timeout(600)(Protocol.TestCase)
