"""The promises hold in every run that is explored, every run ends, and no planted fault goes unseen."""

import pytest

from tests.protocol.explorer import Found, explore
from tests.protocol.planted import PLANTED
from tests.protocol.world import Config

NUM_STEPS = 100_000
MAX_STEPS_TO_FIND = 200_000
PURGED = Config(min_group_size=2, steps=5, max_attempts=3)
BACK = Config(goes_back=True, steps=6, batch_groups=1, checkpoint_every=1, num_nodes=1, capacity=4, max_held=1000)
PACED = Config(steps=8, batch_groups=1, max_staleness=2, num_rows=5, is_paced=True)
WHERE = {
    "an older trainer can still record a checkpoint": Config(batch_groups=1, steps=5, checkpoint_every=1),
    "a trainer purges without asking whether a newer one has begun": PURGED,
    "a curriculum decides by what is known by now": Config(num_rows=2, steps=5, keep=0.5),
    "what was passed over is abandoned at the end": Config(num_rows=2, steps=5, keep=0.5),
    "a controller that begins leaves the record to another one": Config(num_rows=5, num_tasks=2),
    "another mix begins at once": Config(num_rows=5, steps=5, num_tasks=2),
    "tickets are chosen by another mix before it is on record": Config(num_rows=5, steps=5, num_tasks=2),
    "a purge is decided by what an old leader says of the journal": PURGED._replace(is_clustered=True),
    "a trainer reads the log from a follower": PURGED._replace(is_clustered=True),
    "a lineage reads the stream while its leader still has the older one's consumer": PURGED._replace(
        is_clustered=True, max_held=0
    ),
    "images are removed without asking whether a newer trainer has begun": Config(has_images=True),
    "a sweep takes the images of groups that the trainer has not heard of": Config(has_images=True),
    "a group is over once it is in a cut": Config(has_images=True),
    "a node stores a slot before what it shows": Config(has_images=True),
    "going back leaves what was cut since in the journal": BACK,
    "an order to go back is over before what was cut since is given up": BACK._replace(max_attempts=3),
    "the run goes back to what it has gone back behind before": BACK,
    "what was recorded trained stays so where the run goes back": BACK,
    "the credit of a group that is rolled back does not return": BACK,
    "being rolled back counts as a failed attempt": BACK._replace(group_size=1),
    "groups are held back for as long as the predictions say so, whoever waits": PACED,
    "groups are held back before anything was observed": PACED,
}
"""Settings under which a fault is looked for, where drawn ones seldom lead there."""
FIRST_SEED = {
    "a trainer purges without asking whether a newer one has begun": 21_500,
    "a curriculum decides by what is known by now": 750,
    "a zombie's cuts and outcomes count": 300,
    "a controller that ends the run trusts the cursor it remembers": 500,
    "a controller that begins leaves the record to another one": 900,
    "images are removed without asking whether a newer trainer has begun": 200,
    "a trainer takes for lost what a follower has not heard of": 500,
}
"""Where the seeds from 1 on come to a fault late."""
MET = (
    "entry branch",
    "outcome abandoned",
    "outcome dead",
    "outcome duplicate",
    "outcome late",
    "outcome rejected",
    "outcome rolled_back",
    "outcome trained",
    "payload lost",
    "went back",
    "readmission",
    "prompt passed over",
    "mix changed",
    "images removed",
    "trajectory acked",
    "trajectory purged",
    "old answer",
    "admission held back",
)
"""What must have happened for the exploration to mean anything."""


@pytest.mark.timeout(600)
def test_the_promises_hold_and_every_run_ends() -> None:
    report = explore(num_steps=NUM_STEPS, seed=1)

    assert report.num_steps >= NUM_STEPS
    assert not [kind for kind in MET if not report.seen[kind]]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    PLANTED[name](monkeypatch)

    with pytest.raises(Found):
        explore(num_steps=MAX_STEPS_TO_FIND, seed=FIRST_SEED.get(name, 1), config=WHERE.get(name))
