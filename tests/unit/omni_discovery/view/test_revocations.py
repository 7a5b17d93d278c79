"""Who is revoked, decided without a registry."""

from __future__ import annotations

from omni_discovery.view.known_hubs import Revocations

NOBODY: frozenset[str] = frozenset()


def of(*hubs: str) -> frozenset[str]:
    return frozenset(hubs)


def test_a_key_that_is_deleted_revokes_no_more() -> None:
    revocations = Revocations(ttl_s=10.0)
    revocations.apply_revoked(of("a", "b"), fresh=True, regressed=False, now_s=0.0)
    assert revocations.revoked_hubs(0.0) == of("a", "b")
    revocations.apply_revoked(of("b"), fresh=True, regressed=False, now_s=1.0)
    assert revocations.revoked_hubs(1.0) == of("b")
    assert revocations.next_review_s is None


def test_what_a_wiped_registry_lost_counts_for_a_ttl_after_it_is_fresh() -> None:
    """1. wiped, and not proved: for ever; 2. proved at 100: until 110; 3. stale again meanwhile: it starts over"""
    revocations = Revocations(ttl_s=10.0)
    revocations.apply_revoked(of("a"), fresh=True, regressed=False, now_s=0.0)
    revocations.apply_revoked(NOBODY, fresh=False, regressed=True, now_s=5.0)
    assert revocations.revoked_hubs(1000.0) == of("a")
    revocations.apply_revoked(NOBODY, fresh=True, regressed=False, now_s=100.0)
    assert revocations.next_review_s == 110.0
    revocations.apply_revoked(NOBODY, fresh=False, regressed=False, now_s=105.0)
    assert revocations.revoked_hubs(120.0) == of("a")
    revocations.apply_revoked(NOBODY, fresh=True, regressed=False, now_s=200.0)
    assert revocations.revoked_hubs(209.9) == of("a")
    assert revocations.revoked_hubs(210.0) == NOBODY


def test_a_key_that_is_put_back_after_a_wipe_counts_by_itself_again() -> None:
    revocations = Revocations(ttl_s=10.0)
    revocations.apply_revoked(of("a"), fresh=True, regressed=False, now_s=0.0)
    revocations.apply_revoked(NOBODY, fresh=True, regressed=True, now_s=5.0)
    revocations.apply_revoked(of("a"), fresh=True, regressed=False, now_s=6.0)
    assert revocations.revoked_hubs(100.0) == of("a")
    revocations.apply_revoked(NOBODY, fresh=True, regressed=False, now_s=101.0)
    assert revocations.revoked_hubs(101.0) == NOBODY


def test_a_second_wipe_does_not_shorten_what_the_first_kept() -> None:
    revocations = Revocations(ttl_s=10.0)
    revocations.apply_revoked(of("a"), fresh=True, regressed=False, now_s=0.0)
    revocations.apply_revoked(NOBODY, fresh=True, regressed=True, now_s=5.0)
    revocations.apply_revoked(NOBODY, fresh=True, regressed=True, now_s=12.0)
    assert revocations.revoked_hubs(14.9) == of("a")
    assert revocations.revoked_hubs(15.0) == NOBODY
