"""Sites with little memory, whose users get the answers of one process that holds all experts."""

from tests.suites import Suite
from tests.system.control import Watch
from tests.system.edge.control import edge_control, swapped
from tests.system.edge.users import SITES, RightAnswers, users_at

MOVED = 6  # experts: more than an agent of 40 MB can load at once beside those that it has


async def test_every_site_answers_as_one_process_does_though_most_experts_are_elsewhere(
    tight: Suite, right_answers: RightAnswers
) -> None:
    async with edge_control(tight) as seen:
        await seen.complete()

        await right_answers.check_all(tight.url, SITES[:2])

        told = {site: await seen.profile(site) for site in SITES}
    for site in SITES[:2]:
        away = told[site].remote + told[site].cached + told[site].loaded
        assert away > told[site].local, site
        assert told[site].remote > 0


async def test_a_migration_in_stages_changes_no_answer(
    tight: Suite, right_answers: RightAnswers
) -> None:
    async with edge_control(tight) as seen, users_at(tight.url, right_answers, typed=()):
        before = await seen.complete()
        watch = Watch(tight, "scheduler")

        await seen.apply(swapped(before, MOVED, 0, 2))

        after = await seen.complete()
    assert after.slots == swapped(before, MOVED, 0, 2).slots
    epochs = [entry["epoch"] for entry in watch.entries("placement.committed")]
    assert len(epochs) > 1
    assert [entry["epoch"] for entry in watch.entries("placement.planned")] == epochs
    await right_answers.check_all(tight.url, SITES[:1])
