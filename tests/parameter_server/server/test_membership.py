"""Who takes part: claims, incarnations, leases, and what is remembered of the dead. No shard, no clock."""

from __future__ import annotations

import pytest
from support.shard_world import hello_of

from psengine.parameter_server.server.core.durable_state import merge_members
from psengine.parameter_server.server.core.membership import CLAIM_PATIENCE_S, Membership
from psengine.protocol.messages import Message, MessageType

LEASE_S = 5.0


class Room:
    """A membership and its time."""

    def __init__(self):
        self.now_s = 50.0
        self.wall_ms = 1_000_000
        self.membership = Membership(LEASE_S, wall_clock_ms=lambda: self.wall_ms)

    def greet(self, rank, nonce, *, incarnation=0, user_id="", progress=0, knows_members=False):
        hello = hello_of(rank, nonce, incarnation=incarnation, knows_members=knows_members)
        return self.membership.greet(hello, user_id, b"%d" % nonce, progress, self.now_s)

    def enter(self, rank, nonce, **options):
        greeting = self.greet(rank, nonce, **options)
        assert not isinstance(greeting, str)
        self.membership.admit(greeting.member.rank)
        return greeting.member

    def find(self, member, *, route=b"r", user_id=None):
        user_id = member.user_id if user_id is None else user_id
        message = Message(MessageType.HEARTBEAT, worker=member.rank, incarnation=member.incarnation)
        return self.membership.find(message, user_id, route, self.now_s)

    def poll(self, rank, nonce, seconds, alive=()):
        """HELLO every 0.1 s until the verdict is not "wait"; (verdict, seconds it took)."""
        start_s = self.now_s
        while self.now_s - start_s <= seconds:
            for member in alive:
                self.find(member)
            greeting = self.greet(rank, nonce)
            if greeting != "wait":
                return greeting, self.now_s - start_s
            self.now_s += 0.1
        return greeting, self.now_s - start_s


@pytest.fixture
def room():
    return Room()


class TestRanks:
    def test_free_ranks_are_given_from_the_lowest(self, room):
        assert [room.enter(None, nonce).rank for nonce in (11, 12, 13)] == [0, 1, 2]
        room.membership.remove(1, progress=0, now_s=room.now_s, forget=True)
        assert room.enter(None, 14).rank == 1

    def test_the_same_process_gets_its_rank_again(self, room):
        room.enter(None, 11)
        second = room.enter(None, 12)
        assert room.greet(None, 12).member.rank == second.rank == 1
        room.membership.remove(1, progress=0, now_s=room.now_s)
        assert room.greet(None, 12).member.rank == 1

    def test_a_rank_of_another_key_is_denied_even_with_its_nonce(self, room):
        room.enter(0, 11, user_id="alice")
        assert room.greet(0, 12, user_id="mallory") == "denied"
        assert room.greet(0, 11, user_id="mallory") == "denied"
        assert room.greet(0, 11, user_id="alice").member.rank == 0

    def test_another_key_does_not_renew_a_lease_or_take_the_route(self, room):
        member = room.enter(0, 11, user_id="alice")
        room.now_s += 1
        assert room.find(member, user_id="mallory", route=b"mallory") == "fenced"
        assert (member.route, member.last_heard_s) == (b"11", 50.0)


class TestClaims:
    def test_a_second_process_of_a_living_rank_is_a_duplicate(self, room):
        first = room.enter(0, 11)
        greeting, seconds = room.poll(0, 12, 10, alive=[first])
        assert greeting == "duplicate"
        assert seconds < CLAIM_PATIENCE_S
        assert room.find(first) is first

    def test_a_dead_rank_is_handed_over_and_its_old_process_fenced(self, room):
        first = room.enter(0, 11)
        greeting, seconds = room.poll(0, 12, 10)
        assert seconds == pytest.approx(CLAIM_PATIENCE_S, abs=0.15)
        assert not greeting.member.phase.was_live
        assert greeting.replaced_live
        assert not greeting.member.phase.is_live
        assert greeting.member.incarnation > first.incarnation
        assert room.membership.live_ranks == ()
        assert room.find(first) == "fenced"

    def test_a_message_already_under_way_does_not_count_as_life(self, room):
        first = room.enter(0, 11)
        assert room.greet(0, 12) == "wait"
        room.now_s += 0.3
        room.find(first)
        greeting, _ = room.poll(0, 12, 10)
        assert greeting.replaced_live

    def test_what_the_lead_decided_holds_at_once_elsewhere(self, room):
        first = room.enter(0, 11)
        greeting = room.greet(0, 12, incarnation=first.incarnation + 5)
        assert greeting.replaced_live
        assert greeting.member.incarnation == first.incarnation + 5
        assert room.greet(0, 11, incarnation=first.incarnation) == "replaced"

    def test_a_process_of_a_former_life_does_not_follow_one_that_has_ended(self, room):
        room.enter(0, 12)
        room.membership.remove(0, progress=0, now_s=room.now_s, forget=True)
        restarted = Room()
        restarted.membership.restore(room.membership.to_meta(), restarted.now_s)
        for one in (room, restarted):
            assert one.greet(0, 11, knows_members=True) == "replaced"
            assert one.greet(0, 13).member.rank == 0  # a new one


class TestIncarnations:
    def test_they_grow_with_each_process_even_if_the_wall_clock_goes_back(self, room):
        first = room.enter(0, 11)
        room.wall_ms -= 500_000
        greeting, _ = room.poll(0, 12, 10)
        assert greeting.member.incarnation > first.incarnation

    def test_an_evicted_worker_gets_a_new_one_from_the_lead(self, room):
        first = room.enter(0, 11)
        room.membership.remove(0, progress=3, now_s=room.now_s)
        again = room.greet(0, 11, progress=3)
        assert again.member.incarnation > first.incarnation
        assert again.missed_nothing
        assert again.member.phase.was_live

    @pytest.mark.parametrize("change", [0, -7, 7])
    def test_elsewhere_the_leads_is_taken_whatever_was_known(self, room, change):
        """Evicted here and not at the lead; or the lead came back from an older snapshot."""
        first = room.enter(0, 11, incarnation=500)
        room.membership.remove(0, progress=0, now_s=room.now_s)
        member = room.greet(0, 11, incarnation=500 + change).member
        assert member.incarnation == 500 + change
        assert room.find(member) is member
        assert first.incarnation == 500


class TestLeases:
    def test_only_silence_longer_than_the_lease_expires(self, room):
        first, second = room.enter(0, 11), room.enter(1, 12)
        room.now_s += LEASE_S
        assert room.membership.expired(room.now_s) == []
        room.find(second)
        room.now_s += 0.1
        assert room.membership.expired(room.now_s) == [first.rank]


class TestExpected:
    def test_they_are_waited_for_and_recognised_by_knowing_the_members(self, room):
        room.membership.expect([0, 1], room.now_s)
        assert room.membership.live_ranks == (0, 1)
        greeting = room.greet(1, 12, knows_members=True)
        assert greeting.member.phase.is_live
        assert greeting.member.phase.was_live
        assert greeting.member.incarnation > 0

    def test_a_process_that_knows_nobody_has_to_claim_the_rank(self, room):
        room.membership.expect([0, 1], room.now_s)
        assert room.greet(1, 12) == "wait"
        assert room.greet(1, 13, knows_members=True).member.phase.is_live


class TestSnapshots:
    def test_members_and_the_gone_come_back(self, room):
        member = room.enter(0, 11, user_id="alice")
        room.enter(1, 12)
        room.membership.remove(1, progress=0, now_s=room.now_s)
        other = Room()
        other.membership.restore(room.membership.to_meta(), other.now_s)
        assert other.membership.live_ranks == (0,)
        found = other.find(member)
        assert (found.incarnation, found.host, found.pid) == (member.incarnation, member.host, member.pid)
        other.membership.remove(0, progress=0, now_s=other.now_s, forget=True)
        assert other.membership.is_remembered(other.now_s + LEASE_S)
        again = other.greet(1, 12)
        assert again.member.phase.was_live
        assert not again.missed_nothing

    def test_merging_takes_the_newest_of_each_rank(self):
        def meta(rank, incarnation):
            return {"rank": rank, "incarnation": incarnation}

        merged = merge_members(
            [
                {"members": [meta(0, 5), meta(1, 5), meta(4, 5)], "absent": [meta(2, 5)]},
                {"members": [meta(0, 6), meta(2, 6)], "absent": [meta(1, 5), meta(3, 9), meta(4, 6)]},
            ]
        )
        assert sorted((m["rank"], m["incarnation"]) for m in merged["members"]) == [(0, 6), (1, 5), (2, 6)]
        assert merged["absent"] == [meta(4, 6), meta(3, 9)]
