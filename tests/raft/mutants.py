"""Nodes that break one rule each. The simulation must detect every one."""

from __future__ import annotations

from typing import Any

import msgspec

from cometmq.raft import (
    AppendRequest,
    AppendResponse,
    Effects,
    HardState,
    Members,
    RaftNode,
    Truncate,
    VoteRequest,
)  # fmt: skip
from cometmq.raft.log_state import Following
from cometmq.raft.messages import MAX_INDEX, LogChange


class VotesForShorterLogs(RaftNode):
    def _on_vote_request(self, request: VoteRequest) -> None:
        everything = {"last_index": MAX_INDEX, "last_term": request.term}
        super()._on_vote_request(msgspec.structs.replace(request, **everything))


class CommitsOldTermsByCounting(RaftNode):
    def _is_own(self, index: int) -> bool:
        return True


class CountsItselfBeforeSync(RaftNode):
    def _commit_more(self) -> None:
        durable, self._log_state.durable = self._log_state.durable, self._log_state.last
        super()._commit_more()
        self._log_state.durable = durable


class SpeaksBeforeItsStateIsSaved(RaftNode):
    """A node that sends votes before the state is synced."""

    def effects(self) -> Effects:
        effects = super().effects()
        if effects.state is not None:
            self.state_saved(effects.state)
        return effects


class AcknowledgesBeforeSync(RaftNode):
    def _response(self, to: str, written: int | None = None) -> AppendResponse:
        response = super()._response(to, written)
        return msgspec.structs.replace(response, match=response.written)


class StandsWithoutPreVote(RaftNode):
    def _start_pre_vote(self) -> None:
        if self._may_lead():
            self._start_election(by_transfer=False)
        else:
            super()._start_pre_vote()


class ChangesMembersAtAnyTime(RaftNode):
    """A node that accepts a change while another is pending, or before an entry of its term is committed."""

    def _require_changeable_members(self) -> Members:
        if self._leading is None:
            return super()._require_changeable_members()
        return self.members


class CutsWithoutContradiction(RaftNode):
    """A node that truncates its log at an old, late request, including committed entries."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._following = CutsBehindEveryRequest(self._log_state)


class CutsBehindEveryRequest(Following):
    def _replace(self, changes: list[LogChange], request: AppendRequest) -> list[LogChange]:
        end = request.prev_index + request.count
        if request.count and end < self._log_state.last:
            changes.append(Truncate(end + 1))
            self.cut(end + 1)
        return super()._replace(changes, request)


class TrustsWhatAgreedBefore(RaftNode):
    """A node that assumes that entries that matched a leader's log still match in the leader's next term."""

    def _become_follower(self, term: int, leader: str, reason: str = "") -> None:
        agreed = self._following.agreed if leader == self.leader else self._log_state.commit
        super()._become_follower(term, leader, reason)
        self._following.agreed = agreed


class DoesNotStandOnceRemoved(RaftNode):
    """A node that never becomes a candidate once its removal is in the log, even if it is not committed."""

    def _has_vote(self) -> bool:
        return self.me in self.members.voters


class VotesWithADamagedLog(RaftNode):
    def __init__(self, me: str, group: str, log: Any, state: HardState, *args: Any, **options: Any) -> None:
        super().__init__(me, group, log, msgspec.structs.replace(state, suspect=False), *args, **options)


class TrustsAnyLeaderWithALostDisk(RaftNode):
    """A node that, after the loss of its disk, does not ask all other members for their terms."""

    def __init__(self, me: str, group: str, log: Any, state: HardState, *args: Any, **options: Any) -> None:
        super().__init__(me, group, log, msgspec.structs.replace(state, forgot=False), *args, **options)


class AnswersOlderLeadersNothing(RaftNode):
    """A node that does not respond to leaders with a lower term, so that they never learn of its own."""

    def _is_of_this_term(self, message: Any) -> bool:
        if message.term < self.term:
            return False
        return super()._is_of_this_term(message)


MUTANTS: list[type[RaftNode]] = [
    VotesForShorterLogs, CommitsOldTermsByCounting, CountsItselfBeforeSync, SpeaksBeforeItsStateIsSaved,
    AcknowledgesBeforeSync, StandsWithoutPreVote, ChangesMembersAtAnyTime, CutsWithoutContradiction,
    TrustsWhatAgreedBefore, DoesNotStandOnceRemoved, VotesWithADamagedLog, TrustsAnyLeaderWithALostDisk,
    AnswersOlderLeadersNothing,
]  # fmt: skip
