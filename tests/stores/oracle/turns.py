"""What may happen to turns: who owns one, what its owner writes, how it ends, gets stuck and goes on."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import rule
from msgspec.structs import replace

from perdure.errors import Fenced, HeadMoved, InternalError
from perdure.model.limit import Ask, Settle, Spending
from perdure.model.llm import Usage
from perdure.model.session import Death, Dump, Node
from perdure.model.spending import UsageRow
from perdure.model.write import Append, Claim, Commit, Configure, Outlived, Release, ReopenTurn, Resume, SessionRef
from tests.stores.oracle.machine import StoreMachine
from tests.stores.oracle.plain import Plain
from tests.stores.oracle.values import (
    AGENTS,
    CLOSED,
    asks,
    bodies,
    bounds,
    few,
    has,
    index,
    large,
    lives,
    maybe_workers,
    names,
    settles,
    spendings,
    workers,
)


class TurnRules(StoreMachine):
    """What owners do, and those who would be."""

    # ------------------------------------------------------------------ claim

    def unowned(self) -> list[Plain]:
        return [s for s in self.claimable() if s["owner"] is None]

    @has(unowned)
    @rule(n=index, worker=workers)
    def an_unowned_turn_is_claimed(self, n: int, worker: str) -> None:
        session = self.pick(self.unowned(), n)
        answer = self.send(Claim(SessionRef(session["id"]), worker, session["generation"], self.tick()))
        # One that was stuck, and that an answer has opened again, is stuck still for what it has killed.
        assert answer["won"] or answer["suspect"] or session["state"] == "stuck"

    @has(StoreMachine.held)
    @rule(n=index, worker=workers, death=st.sampled_from(["unknown", "nobody", "its own", "another"]), lived=lives)
    def a_turn_is_taken_from_its_owner(self, n: int, worker: str, death: str, lived: int) -> None:
        session = self.pick(self.held(), n)
        suspect = {"its own": session["sid"], "another": session["sid"] + 1}.get(death)
        known = None if death == "unknown" else Death(session["owner"], lived, suspect)
        write = Claim(SessionRef(session["id"]), worker, session["generation"], self.tick(), None, known, lived)
        answer = self.send(write)
        assert not answer["won"] or answer["row"]["owner"] == worker

    @has(StoreMachine.held, lambda self: self.model.workers)
    @rule(n=index, m=index, lived=lives, long=st.booleans())
    def one_suspect_at_a_time_runs_in_an_os_process_until_it_makes_room(
        self, n: int, m: int, lived: int, long: bool
    ) -> None:
        worker = self.pick(sorted(self.model.workers), m)
        for session in [self.pick(self.held(), n), self.pick(self.held(), n + 1)]:
            for other in ("w8", "w9", worker):
                self.send(
                    Claim(SessionRef(session["id"]), other, session["generation"], self.tick(), None, None, lived)
                )
        running = self.model.workers[worker]["suspect"]
        if long and running is not None:
            self.send(Outlived(running, worker))
            self.send(Outlived(running, worker))
        self.send(Outlived(999, worker), False)

    @has(StoreMachine.turns)
    @rule(n=index, worker=workers, old=st.integers(2, 4))
    def a_claim_on_a_stale_generation_loses(self, n: int, worker: str, old: int) -> None:
        session = self.pick(self.turns(), n)
        assert not self.send(Claim(SessionRef(session["id"]), worker, session["generation"] - old, self.tick()))["won"]

    @has(lambda self: self.writes(Claim))
    @rule(n=index)
    def a_claim_is_sent_again(self, n: int) -> None:
        self.send(self.pick(self.writes(Claim), n))

    @rule(name=names, worker=workers, generation=st.integers(0, 3))
    def anything_may_be_claimed(self, name: str, worker: str, generation: int) -> None:
        self.send(Claim(SessionRef(name), worker, generation, self.tick()))

    @has(StoreMachine.claimable)
    @rule(n=index)
    def a_turn_that_kills_its_owners_gets_stuck(self, n: int) -> None:
        session = self.pick(self.claimable(), n)
        won = []
        for _ in range(6):
            worker = "w8" if session["owner"] == "w9" else "w9"
            death = Death(session["owner"] or "", suspect=session["sid"])
            claim = Claim(SessionRef(session["id"]), worker, session["generation"], self.tick(), death=death)
            won.append(self.send(claim)["won"])
        assert (won[-1], session["state"], session["owner"]) == (False, "stuck", None)

    # ------------------------------------------------------------------ append

    @has(StoreMachine.held)
    @rule(n=index, some=few)
    def records_are_appended(self, n: int, some: list[bytes]) -> None:
        session = self.pick(self.held(), n)
        assert self.send(self.appending(session, some))["cancel"] == session["cancel"]

    @has(StoreMachine.held, lambda self: self.model.blobs)
    @rule(n=index, m=index, some=few, body=bodies, blob=st.booleans(), ends=st.booleans())
    def a_dump_takes_the_place_of_the_one_before(
        self, n: int, m: int, some: list[bytes], body: bytes, blob: bool, ends: bool
    ) -> None:
        session = self.pick(self.held(), n)
        dump = Dump(digest=self.pick(sorted(self.model.blobs), m)) if blob else Dump(body)
        if ends and session["cancel"] is None:
            self.send(self.committing(session, some, dump=dump))
        else:
            self.send(self.appending(session, [*some, b"called"], dump=dump))

    @has(lambda self: self.model.dumps)
    @rule(n=index, before=st.integers(0, 3))
    def the_newest_dump_up_to_a_turn_is_read(self, n: int, before: int) -> None:
        sid = self.pick(sorted(self.model.dumps), n)
        last = max(self.model.dumps[sid]) - before
        known = [(turn, dump) for turn, dump in sorted(self.model.dumps[sid].items()) if turn <= last]
        assert self.run(self.store.dump(sid, last)) == (known[-1] if known else None)

    @has(StoreMachine.held)
    @rule(n=index, body=large, said=st.booleans())
    def a_megabyte_is_a_record_like_any_other(self, n: int, body: bytes, said: bool) -> None:
        session = self.pick(self.held(), n)
        self.send(self.accept_on(session, body) if said else self.appending(session, [body]))

    def with_inputs(self) -> list[Plain]:
        return [s for s in self.held() if self.waiting_inputs(s, "steer", "note")]

    @has(with_inputs)
    @rule(n=index, some=st.lists(bodies, min_size=1, max_size=2), all_of_it=st.booleans())
    def inputs_are_delivered_into_the_turn(self, n: int, some: list[bytes], all_of_it: bool) -> None:
        session = self.pick(self.with_inputs(), n)
        mail = self.waiting_inputs(session, "steer", "note")
        answer = self.send(self.appending(session, some, take=tuple(mail if all_of_it else mail[:1])))
        assert answer["inputs"] is (len(mail) > 1 and not all_of_it)

    @has(StoreMachine.held)
    @rule(n=index, some=few, number=st.integers(0, 2), due=st.sampled_from([None, 900, 2_000]), body=bodies)
    def waits_open(self, n: int, some: list[bytes], number: int, due: int | None, body: bytes) -> None:
        session = self.pick(self.held(), n)
        self.send(self.appending(session, some, waits=(self.new_wait(session, number, due, body),)))

    @has(StoreMachine.held)
    @rule(n=index, some=few, number=st.integers(0, 2), due=st.sampled_from([None, 900, 2_000]))
    def a_turn_parks_unless_an_answer_or_a_cancel_was_faster(
        self, n: int, some: list[bytes], number: int, due: int | None
    ) -> None:
        session = self.pick(self.held(), n)
        wait = self.new_wait(session, number, due, b"{}")
        answered = self.model.waits.get(wait.id, {"state": "open"})["state"] != "open"
        answer = self.send(self.appending(session, some, waits=(wait,), park=(wait.id,)))
        assert answer["parked"] is not (answered or answer["cancel"] is not None)

    @has(StoreMachine.held)
    @rule(n=index)
    def a_turn_does_not_park_on_a_wait_that_is_not_there(self, n: int) -> None:
        session = self.pick(self.held(), n)
        assert not self.send(self.appending(session, [], park=("wait:nothing",)))["parked"]

    @has(lambda self: self.writes(Append))
    @rule(n=index)
    def an_append_is_sent_again(self, n: int) -> None:
        write = self.pick(self.writes(Append)[-8:], n)
        if write.nodes or write.park:  # without records there is nothing to tell it from a new one
            self.send(write)

    @has(StoreMachine.held)
    @rule(n=index, some=few)
    def the_last_append_is_sent_again_and_answered_alike(self, n: int, some: list[bytes]) -> None:
        session = self.pick(self.held(), n)
        wait = self.new_wait(session, 7, None, b"{}")
        write = self.appending(session, [*some, b"end"], waits=(wait,), park=(wait.id,))
        assert self.send(write) == self.send(write)

    @has(StoreMachine.held)
    @rule(n=index, other=st.sampled_from(["owner", "generation", "later", "turn"]), ends=st.integers(0, 2))
    def a_relieved_owner_changes_nothing(self, n: int, other: str, ends: int) -> None:
        session = self.pick(self.held(), n)
        scope = self.scope(session)
        changed = {
            "owner": replace(scope, owner="a stranger"),
            "generation": replace(scope, generation=scope.generation - 1),
            "later": replace(scope, generation=scope.generation + 1),
            "turn": replace(scope, turn=session["next"]),
        }[other]
        nodes = (Node(50, CLOSED + b"by a stranger"),)
        append: Any = Append(changed, nodes, self.tick(), waits=(self.new_wait(session, 1, 5, b""),))
        commit: Any = Commit(changed, nodes, session["head"], self.tick())
        release: Any = Release(changed, self.tick(), stuck="by a stranger")
        self.send((append, commit, release)[ends], Fenced)

    @has(StoreMachine.held)
    @rule(n=index)
    def a_record_is_never_written_over(self, n: int) -> None:
        session = self.pick(self.held(), n)
        scope = self.scope(session)
        first = self.model.nodes[scope.sid, scope.turn][0]
        self.send(Append(scope, (Node(0, first + b"?"),), self.tick()), InternalError)

    # ------------------------------------------------------------------ commit

    def uncancelled(self) -> list[Plain]:
        return self.turns(owned=True, cancel=False)

    def cancelled(self) -> list[Plain]:
        return self.turns(owned=True, cancel=True)

    @has(uncancelled)
    @rule(n=index, some=few, take=st.booleans())
    def a_commit_moves_the_head_and_opens_what_waits(self, n: int, some: list[bytes], take: bool) -> None:
        session = self.pick(self.uncancelled(), n)
        turn, taken = session["turn"], tuple(self.waiting_inputs(session, "steer", "note")) if take else ()
        waiting = [m for m in self.waiting_inputs(session, "queue", "steer") if m not in taken]
        row = self.send(self.committing(session, some, take=taken))["row"]
        assert (row["head"], row["turn"]) == (turn, waiting[0] if waiting else None)

    @has(uncancelled)
    @rule(n=index, body=bodies)
    def a_full_turn_is_closed_in_the_place_of_its_last_record(self, n: int, body: bytes) -> None:
        session = self.pick(self.uncancelled(), n)
        turn, append = session["turn"], self.appending(session, [body])
        self.send(append)
        last = Node(append.nodes[-1].ordinal, CLOSED + b"%d" % self.now)
        self.seen.replaced(session["sid"], turn, last.ordinal)
        over = Commit(append.scope, (last,), session["head"], self.tick(), over=True)
        answer = self.send(over)
        assert answer["row"]["head"] == turn
        self.send(over, answer)

    @has(uncancelled)
    @rule(n=index, hour=st.sampled_from([0, 3_600_000]), some=st.lists(spendings, min_size=1, max_size=3))
    def a_commit_adds_what_the_turn_has_spent_to_the_sums_once(
        self, n: int, hour: int, some: list[tuple[str, str, Usage]]
    ) -> None:
        session = self.pick(self.uncancelled(), n)
        whose = (session["id"], session["agent"], ("root",))
        costs = [UsageRow(session["sid"], hour, label, model, "{}", *whose, usage) for label, model, usage in some]
        commit = self.committing(session, [], costs=tuple(costs))
        self.send(commit, self.send(commit))

    @has(StoreMachine.held)
    @rule(n=index, wanted=bounds, ask=asks, how=settles, name=st.sampled_from(["", "", "c1"]), end=st.booleans())
    def calls_are_reserved_for_and_settled(  # as an owner does it, whose write may be sent twice
        self, n: int, wanted: Any, ask: Ask, how: Settle, name: str, end: bool
    ) -> None:
        session = self.pick(self.held(), n)
        first = Spending(name, f"op-{self.now}", wanted, ask)
        append = self.appending(session, [], spending=(first,))
        [given] = self.send(append)["granted"]
        assert [given] == self.send(append)["granted"]
        assert given["output"] or given["short"] is not None
        if end and session["owner"] is not None:
            last = Spending(name, f"op-{self.now}-end", settle=how)
            self.send(self.appending(session, [b"reply"], spending=(last,)))

    @has(StoreMachine.held)
    @rule(n=index, wanted=bounds, ask=asks, how=settles)
    def a_write_that_settles_one_call_and_reserves_for_the_next_is_sent_twice(
        self, n: int, wanted: Any, ask: Ask, how: Settle
    ) -> None:
        session = self.pick(self.held(), n)
        op = f"op-{self.now}"
        self.send(self.appending(session, [], spending=(Spending("", f"{op}-1", wanted, ask),)))
        both = Spending("", f"{op}-2", settle=how), Spending("", f"{op}-3", wanted, ask)
        append = self.appending(session, [], spending=both)
        accounts = self.send(append)["granted"], dict(self.model.books.accounts)
        assert accounts == (self.send(append)["granted"], self.model.books.accounts)

    @has(uncancelled)
    @rule(n=index, wanted=bounds, ask=asks, how=settles)
    def a_commit_settles_the_last_call_and_leaves_nothing_reserved(
        self, n: int, wanted: Any, ask: Ask, how: Settle
    ) -> None:
        session = self.pick(self.uncancelled(), n)
        sid = session["sid"]
        self.send(self.appending(session, [], spending=(Spending("", f"op-{self.now}", wanted, ask),)))
        commit = self.committing(session, [], spending=(Spending("", f"op-{self.now}", settle=how),))
        self.send(commit, self.send(commit))
        assert not [place for place in self.model.books.reserved if place == (sid, "")]

    @rule(name=names, agent=st.sampled_from(AGENTS), wanted=bounds, ask=asks, how=settles, ends=st.booleans())
    def completions_outside_of_turns_are_reserved_for_and_settled(
        self, name: str, agent: str, wanted: Any, ask: Ask, how: Settle, ends: bool
    ) -> None:
        live = [s for s in self.model.live() if s["id"] == name and s["agent"] == agent]
        for number, spending in enumerate(
            (Spending("c9", f"op-{self.now}", wanted, ask), Spending("c9", f"op-{self.now}-end", settle=how))
        ):
            if live and (ends or not number):
                settings = b'{"label":"%d"}' % (self.now + number)
                self.send(Configure(name, agent, settings, self.tick(), spending=(spending,), worker="w1"))

    @has(StoreMachine.held)
    @rule(n=index, off=st.sampled_from([-1, 1]))
    def a_commit_on_another_head_is_refused(self, n: int, off: int) -> None:
        session = self.pick(self.held(), n)
        self.send(self.committing(session, [], head=session["head"] + off, cancelled=True), HeadMoved)

    @has(cancelled)
    @rule(n=index, some=few)
    def a_cancel_request_wins_over_a_commit(self, n: int, some: list[bytes]) -> None:
        session = self.pick(self.cancelled(), n)
        self.send(self.committing(session, some), {"cancel": session["cancel"]})

    @has(cancelled)
    @rule(n=index, some=few)
    def a_cancelled_turn_is_committed(self, n: int, some: list[bytes]) -> None:
        session = self.pick(self.cancelled(), n)
        turn = session["turn"]
        assert self.send(self.committing(session, some, cancelled=True))["row"]["head"] == turn

    @has(lambda self: self.writes(Commit))
    @rule(n=index)
    def a_commit_is_sent_again(self, n: int) -> None:
        self.send(self.pick(self.writes(Commit), n))

    @has(uncancelled)
    @rule(n=index)
    def records_that_are_there_cannot_be_committed_again(self, n: int) -> None:
        session = self.pick(self.uncancelled(), n)
        append = self.appending(session, [b"too early"])
        self.send(append)
        self.send(Commit(append.scope, append.nodes, session["head"], self.tick()), InternalError)
        self.send(self.committing(session, []))

    # ------------------------------------------------------------------ letting go

    @has(StoreMachine.held)
    @rule(n=index, why=st.sampled_from([None, "the disk hums", ""]))
    def a_turn_is_let_go_or_gets_stuck(self, n: int, why: str | None) -> None:
        session = self.pick(self.held(), n)
        write = Release(self.scope(session), self.tick(), stuck=why)
        self.send(write)
        self.send(write)
        assert session["owner"] is None
        assert (session["state"] == "stuck") is (why is not None)

    @has(lambda self: self.writes(Release))
    @rule(n=index)
    def a_release_is_sent_again(self, n: int) -> None:
        self.send(self.pick(self.writes(Release), n))

    # ------------------------------------------------------------------ going on

    def stuck(self) -> list[Plain]:
        return [s for s in self.turns() if s["state"] == "stuck"]

    @has(stuck)
    @rule(n=index, worker=maybe_workers, lived=lives)
    def a_stuck_turn_goes_on_when_a_person_says_so_and_not_before(self, n: int, worker: str | None, lived: int) -> None:
        session = self.pick(self.stuck(), n)
        generation, takeovers = session["generation"], session["takeovers"]
        assert not self.send(Claim(SessionRef(session["id"]), "w3", generation, self.tick()))["won"]
        row = self.send(Resume(SessionRef(session["id"]), self.tick(), worker, lived))
        assert (row["state"], row["owner"], row["reason"]) == ("open", worker, None)
        assert (row["generation"], row["takeovers"]) == (generation + (worker is not None), takeovers)
        self.send(Resume(SessionRef(session["id"]), self.tick(), worker), None)

    @has(StoreMachine.held)
    @rule(n=index, by=workers)
    def whoever_left_a_turn_stuck_is_fenced_when_it_goes_on(self, n: int, by: str) -> None:
        session = self.pick(self.held(), n)
        scope = self.scope(session)
        self.send(Release(scope, self.tick(), stuck="no disk"))
        self.send(Resume(SessionRef(session["id"]), self.tick(), by))
        self.send(Append(scope, self.next_nodes(scope, [b"late"]), self.tick()), Fenced)
        self.send(Release(scope, self.tick(), stuck="late"), Fenced)

    @has(lambda self: self.writes(Resume))
    @rule(n=index)
    def a_resumption_is_sent_again(self, n: int) -> None:
        self.send(self.pick(self.writes(Resume), n))

    def ended(self) -> list[Plain]:
        return [s for s in self.idle() if (s["sid"], s["head"]) in self.model.nodes]

    @has(ended)
    @rule(n=index, worker=maybe_workers, gap=st.integers(0, 1), settings=st.sampled_from([None, b"", b'{"a":1}']))
    def an_ended_turn_is_continued_once_and_without_a_gap(
        self, n: int, worker: str | None, gap: int, settings: bytes | None
    ) -> None:
        session = self.pick(self.ended(), n)
        turn, expected = session["head"], session["settings"]
        earlier = [
            number
            for (sid, number), bodies in self.model.nodes.items()
            if sid == session["sid"] and number < turn and bodies[-1].startswith(CLOSED)
        ]
        node = Node(len(self.model.nodes[session["sid"], turn]) + gap, b"again")
        write = ReopenTurn(session["id"], turn, max(earlier, default=0), node, self.tick(), worker, settings, expected)
        row = self.send(write)
        assert (row is None) is bool(gap)
        assert gap or (session["turn"], session["state"], session["owner"]) == (turn, "open", worker)
        self.send(write)

    @has(lambda self: self.writes(ReopenTurn))
    @rule(n=index)
    def a_continuation_is_sent_again(self, n: int) -> None:
        self.send(self.pick(self.writes(ReopenTurn), n))

    @rule(name=names, worker=maybe_workers)
    def anything_may_be_resumed(self, name: str, worker: str | None) -> None:
        stuck = name in [s["id"] for s in self.stuck()]
        assert (self.send(Resume(SessionRef(name), self.tick(), worker)) is not None) is stuck
