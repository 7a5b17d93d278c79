"""What makes a session with a replica, what ends it, and which credits count."""

from __future__ import annotations

from hub.replicas.session import Session
from omni_discovery import wire


def welcome(session: int = 1, epoch: int = 7) -> wire.Welcome:
    return wire.Welcome(epoch=epoch, capacity=1, queue_length=0, session=session)


def grant(session: int, epoch: int = 7) -> wire.Grant:
    return wire.Grant(epoch=epoch, session=session, credits=2, queue_length=0)


def up() -> Session:
    session = Session(("input", "output"), epoch=7)
    session.welcome("input", welcome())
    session.welcome("output", welcome())
    return session


def test_a_session_is_up_when_both_sockets_were_welcomed() -> None:
    session = Session(("input", "output"), epoch=7)
    assert not session.welcome("input", welcome())
    assert not session.welcome("input", welcome())
    assert session.welcome("output", welcome())
    assert session.up
    assert session.gated
    assert session.epochs == {7}


def test_a_replica_that_names_no_session_grants_no_credits() -> None:
    session = Session(("input", "output"), epoch=7)
    session.welcome("input", welcome(session=0))
    assert session.welcome("output", welcome(session=0))
    assert not session.gated


def test_a_welcome_for_an_earlier_session_or_another_life_is_nothing() -> None:
    session = up()
    session.begin(epoch=7)
    session.end(lost=True)
    session.welcome("input", welcome(session=1))
    assert not session.welcome("output", welcome(session=1))
    session.welcome("input", welcome(session=2, epoch=8))
    assert not session.welcome("output", welcome(session=2, epoch=8))
    session.welcome("input", welcome(session=2))
    assert session.welcome("output", welcome(session=2))


def test_credits_of_an_earlier_session_are_void() -> None:
    session = up()
    assert session.is_of_this(grant(1))
    assert session.grant(2) == 2
    session.begin(epoch=7)
    assert not session.is_of_this(grant(1))
    assert session.is_of_this(grant(2))
    assert not session.is_of_this(grant(2, epoch=8))


def test_credits_that_come_before_the_session_is_up_wait_for_it() -> None:
    session = Session(("input", "output"), epoch=7)
    session.welcome("output", welcome())
    assert session.grant(3) == 0
    assert session.welcome("input", welcome())
    assert (session.take_early_credits(), session.take_early_credits()) == (3, 0)


def test_a_loss_is_news_once_and_also_after_a_change_of_epoch() -> None:
    session = up()
    session.begin(epoch=8)
    assert session.end(lost=False)
    assert session.end(lost=True)
    assert not session.end(lost=True)
