"""The life of a job: who may claim it, who may tell its end, how many there are, and when they are deleted."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from hub.jobs import job as life
from omni_discovery.errors import ConfigError, OverloadedError
from omni_discovery.records.jobs import JobRecord, JobState


def job_of(number: int = 1, **fields: object) -> JobRecord:
    made = JobRecord(
        job_id=f"video_{number:032x}",
        state=JobState.QUEUED,
        created_at=float(number),
        expires_at=1000.0,
        secret="0" * 16,
    )
    return replace(made, **fields)


ONE, TWO = life.HubAtWork("one", 11), life.HubAtWork("two", 22)
LIVE = {"one": 11, "two": 22}


def may_claim(job: JobRecord, hub: life.HubAtWork, live: dict[str, int], now_s: float = 5.0) -> bool:
    return life.claimable([job], live, hub.hub_id, (), 1, now_s) == [job]


def test_a_job_without_an_owner_is_for_any_hub_and_those_first_that_wait_longest() -> None:
    jobs = [job_of(3), job_of(1), job_of(2)]
    assert life.claimable(jobs, LIVE, "two", (), 2, 5.0) == [jobs[1], jobs[2]]
    assert life.claimable(jobs, LIVE, "two", (), 0, 5.0) == []
    assert life.claimable(jobs, LIVE, "two", (), -1, 5.0) == []


def test_a_job_is_its_owners_for_as_long_as_the_owners_key_has_that_lease() -> None:
    """1. hub one claims it: hub two may not, and hub one does not claim what it works on
    2. hub one is gone; or its key has another lease, that of a later life: hub two may
    """
    mine = life.claimed(job_of(), ONE, 2.0)
    assert (mine.state, mine.owner, mine.owner_lease, mine.claims) == (JobState.IN_PROGRESS, "one", 11, 1)
    assert not may_claim(mine, TWO, LIVE)
    assert life.claimable([mine], LIVE, "one", {mine.job_id}, 1, 5.0) == []
    assert may_claim(mine, TWO, {"two": 22})
    assert may_claim(mine, TWO, {"one": 12, "two": 22})
    # What a former life of the same hub has left is nobody's.
    assert may_claim(mine, ONE, LIVE)


@pytest.mark.parametrize(
    "changes",
    [{"state": JobState.COMPLETED}, {"state": JobState.FAILED}, {"expires_at": 5.0}, {"hub": "three"}],
    ids=str,
)
def test_what_has_ended_has_expired_or_is_kept_by_another_hub_is_not_claimed(changes: dict[str, object]) -> None:
    assert not may_claim(job_of(**changes), ONE, {})


def test_a_hub_that_stops_gives_back_and_that_is_no_loss() -> None:
    back = life.released(life.claimed(job_of(), ONE, 2.0))
    assert (back.state, back.owner, back.owner_lease) == (JobState.QUEUED, "", 0)
    again = life.claimed(back, TWO, 3.0)
    assert (again.claims, again.losses) == (2, 0)


def test_a_job_that_has_lost_its_hubs_is_given_up() -> None:
    job = job_of()
    for number in range(life.MOST_LOSSES + 1):
        job = life.claimed(job, life.HubAtWork(f"hub-{number}", number + 1), 2.0)
        assert job.state is JobState.IN_PROGRESS
    job = life.claimed(job, TWO, 9.0)
    assert (job.state, job.error, job.result, job.owner) == (JobState.FAILED, life.LOST, 0, "")
    # Whoever had it last must not take that end for its own.
    assert life.is_lost(job, job.claims)


def test_a_claim_knows_what_is_its_own() -> None:
    mine = life.claimed(job_of(), ONE, 2.0)
    assert life.is_of_claim(mine, "one", 1)
    assert not life.is_lost(mine, 1)
    assert not life.is_lost(life.completed(mine, 3.0), 1)
    assert not life.is_lost(life.released(mine), 1)
    assert life.is_lost(None, 1)
    assert life.is_lost(life.claimed(mine, TWO, 3.0), 1)
    for other in (None, life.completed(mine, 3.0), life.released(mine), life.claimed(mine, TWO, 3.0)):
        assert not life.is_of_claim(other, "one", 1)


_steps = st.lists(st.tuples(st.sampled_from(["claim", "die", "rise", "keep", "tell", "release"]), st.integers(0, 2)))


@given(_steps)
def test_whatever_happens_a_job_ends_once_and_by_the_claim_that_had_it(steps: list[tuple[str, int]]) -> None:
    """Three hubs claim, die, come back with other leases, and tell what they have made, in any order and from any old
    claim: one end is written at most, by the last claim, and none by a hub without a lease.
    """
    job, next_lease, ends = job_of(), 100, 0
    live = {f"hub-{number}": number + 1 for number in range(3)}
    claims: list[tuple[str, int]] = []
    for what, number in steps:
        hub_id = f"hub-{number}"
        hub = life.HubAtWork(hub_id, live.get(hub_id, 0))
        of_hub = [claim for owner, claim in claims if owner == hub_id]
        if what == "die":
            live.pop(hub_id, None)
        elif what == "rise":
            next_lease += 1
            live[hub_id] = next_lease
        elif not hub.lease_id:
            continue
        elif what == "claim":
            running = {job.job_id} if of_hub and life.is_of_claim(job, hub_id, of_hub[-1]) else set()
            if life.claimable([job], live, hub_id, running, 1, 5.0):
                assert not life.is_owned(job, {each: lease for each, lease in live.items() if each != hub_id})
                job = life.claimed(job, hub, 5.0)
                claims += [(hub_id, job.claims)] if not job.has_ended else []
        else:
            for claim in of_hub:
                if life.is_of_claim(job, hub_id, claim):
                    assert (hub_id, claim) == claims[-1]
                    changed = {"keep": life.kept(job, hub), "release": life.released(job)}
                    job = changed.get(what) or life.completed(job, 6.0)
                    ends += what == "tell"
    assert ends <= 1
    assert (job.state is JobState.COMPLETED) == (ends == 1)
    if ends:
        assert job.result == claims[-1][1]
        assert not may_claim(job, ONE, {})


def test_there_is_room_for_so_many_and_for_so_many_of_each_key() -> None:
    bounds = life.JobBounds(most=3, most_per_client=2)
    jobs = [job_of(1, client="alice"), job_of(2, client="alice")]
    is_bobs, is_alices = (lambda job: job.client == "bob"), (lambda job: job.client == "alice")
    bounds.check_room(jobs, is_bobs)
    with pytest.raises(OverloadedError, match="2 videos are kept of this key"):
        bounds.check_room(jobs, is_alices)
    with pytest.raises(OverloadedError, match="3 videos are kept here"):
        bounds.check_room([*jobs, job_of(3)], is_bobs)
    # Without keys, nobody can be told from others.
    bounds.check_room([job_of(1), job_of(2)], None)


@pytest.mark.parametrize(
    "wrong",
    [{"most": 0}, {"most": 10_001}, {"most_per_client": 0}, {"most": 5, "most_per_client": 6}, {"lifetime_s": 1.0}],
    ids=str,
)
def test_bounds_out_of_range_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=r"--max-jobs|--job-lifetime"):
        life.JobBounds(**wrong)


def test_what_is_old_is_deleted_and_what_its_hub_has_left() -> None:
    assert not life.is_due(job_of(), LIVE, 999.0)
    assert life.is_due(job_of(), LIVE, 1000.0)
    assert life.is_due(job_of(hub="three"), LIVE, 5.0)
    assert not life.is_due(job_of(hub="two"), LIVE, 5.0)
    # Written by hand, to stay for ever.
    assert life.is_due(job_of(expires_at=5.0 + life.LONGEST_LIFETIME_S + 90_000), LIVE, 5.0)


def test_progress_is_the_share_of_the_stages_that_are_over() -> None:
    assert [life.percent_of(begun, 3) for begun in (0, 1, 2, 3)] == [0, 0, 33, 66]
    assert life.percent_of(9, 3) == 99
    assert life.percent_of(0, 0) == 0


def test_progress_is_written_once_a_second_and_of_eight_jobs_at_a_time() -> None:
    pace = life.ProgressPace()
    first = {f"job-{number:02}": 10 for number in range(12)}
    assert len(pace.due(first, 0.0)) == 8
    assert sorted(pace.due(first, 0.5)) == sorted(set(first) - set(sorted(first)[:8]))
    assert pace.due(first, 9.0) == []
    assert pace.due({**first, "job-00": 20}, 9.1) == ["job-00"]
    assert pace.due({**first, "job-00": 30}, 9.9) == []
    assert pace.due({**first, "job-00": 30}, 10.1) == ["job-00"]
    # What has not begun is not written: no key says the same.
    assert life.ProgressPace().due({"job-00": 0}, 0.0) == []


@given(st.lists(st.tuples(st.integers(0, 11), st.integers(0, 99), st.floats(0, 0.4)), max_size=200))
def test_no_order_of_changes_writes_more_than_the_budget(changes: list[tuple[int, int, float]]) -> None:
    pace, now_s, percents, written = life.ProgressPace(), 0.0, dict[str, int](), dict[str, list[float]]()
    for number, percent, pause_s in changes:
        now_s += pause_s
        percents[f"job-{number}"] = percent
        chosen = pace.due(percents, now_s)
        assert len(chosen) <= pace.MOST_PER_TURN
        for job in chosen:
            written.setdefault(job, []).append(now_s)
    for moments in written.values():
        assert all(later - before >= pace.INTERVAL_S for before, later in pairwise(moments))


@pytest.mark.attack("V7")
def test_who_lives_is_looked_at_once_for_all_jobs() -> None:
    """A thousand hubs and ten thousand jobs are no ten million looks."""

    class Counted(dict[str, int]):
        looks = 0

        def items(self) -> Any:
            Counted.looks += 1
            return super().items()

    live = Counted({f"hub-{number}": number + 1 for number in range(50)})
    jobs = [job_of(number, owner="hub-1", owner_lease=7) for number in range(1, 201)]
    assert len(life.claimable(jobs, live, "mine", (), 500, 5.0)) == 200
    assert Counted.looks <= 1
