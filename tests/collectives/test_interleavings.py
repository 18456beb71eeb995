"""Every order in which ranks can meet in shared memory, over memory as weak as C++ allows: interleaving/README.md."""

import pytest
from collectives.interleaving.planted_bugs import BUGS, TOLD_BY_ARRIVAL, Bug
from collectives.interleaving.program import build, explore, reason_against, story

_REASON = reason_against()
pytestmark = pytest.mark.skipif(_REASON is not None, reason=_REASON or "")

# Explored to the end in about a second each.
SMALL = [
    *(f"{way}_3_2_ranks" for way in ("small", "gather", "scatter", "broadcast")),
    *("one_chunk_1_2_ranks", "in_place_1_2_ranks", "one_chunk_1_2_ranks_leaving", "contributions_1_2_ranks"),
    *("small_1_2_ranks_sleeping", "small_1_2_ranks_late"),
    *("small_1_2_ranks_death_of_0", "small_1_2_ranks_death_of_1", "broadcast_1_2_ranks_death_of_0"),
]


def test_two_ranks_in_every_order():
    explorer = build()
    for outcome in explore(explorer, *SMALL):
        assert not outcome["failure"], story(explorer, outcome)
        assert outcome["is_exhaustive"]


# Too many states for a test: the first of them, of three ranks, of longer programs, of deaths while others sleep.
LARGE = [
    *("in_place_2_2_ranks", "mixed_3_2_ranks", "small_1_2_ranks_differing", "small_1_2_ranks_two_threads"),
    *("one_chunk_1_2_ranks_sleeping", "one_chunk_1_2_ranks_death_of_0", "one_chunk_1_2_ranks_death_of_1"),
    *("in_place_1_2_ranks_death_of_1_early", "one_chunk_2_2_ranks_leaving_sleeping"),
    *("small_1_2_ranks_two_threads_sleeping", "one_chunk_1_2_ranks_two_threads_sleeping"),
    *("small_1_3_ranks", "staged_chunk_1_3_ranks", "one_chunk_1_3_ranks", "small_1_3_ranks_sleeping"),
    *("small_1_3_ranks_death_of_1", "staged_chunk_1_3_ranks_death_of_0", "one_chunk_1_3_ranks_death_of_2"),
    *("contributions_1_2_ranks_death_of_1", "contributions_1_3_ranks"),
    *("staged_1_3_ranks_leaving_sleeping", "small_1_3_ranks_late", "small_1_3_ranks_differing"),
]
STATES = 60_000  # of each scenario, or 20 s


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_three_ranks_and_longer_programs_as_far_as_time_allows():
    explorer = build()
    for scenario in LARGE:
        (outcome,) = explore(explorer, scenario, states=STATES, seconds=20)
        end = "yes" if outcome["is_exhaustive"] else "no"
        figures = [outcome[name] for name in ("states", "executions", "deaths")]
        print(f"| {scenario} | {' | '.join(map(str, figures))} | {end} | {outcome['seconds']:.1f} |", flush=True)
        assert not outcome["failure"], story(explorer, outcome)


def find_bug(bug: Bug, seconds: float) -> str:
    """What the exploration says of an engine with ``bug``; empty if nothing."""
    (outcome,) = explore(build(bug), bug.scenario, seconds=seconds)
    print(
        f"| {bug.name} | {bug.scenario} | {outcome['failure'] or 'not found'} | {outcome['executions']} |", flush=True
    )
    return str(outcome["failure"])


def test_the_bug_that_was_there_is_found():
    assert find_bug(TOLD_BY_ARRIVAL, 10)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_planted_bug_is_found():
    assert [bug.name for bug in BUGS if not find_bug(bug, 60)] == []
