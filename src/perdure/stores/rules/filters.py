"""What a filter of sessions or processes matches, said once: as conditions that read in memory and as SQL.

A condition compares a field of the filter with an attribute of the row, unless the field is not set. Stores give the
attributes: a function of the row in memory (`matches`), an expression in SQL (`where`). Neither can forget one.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

from perdure.model.process import ProcessRow
from perdure.model.session import SessionRow, labels_of
from perdure.model.write import ProcessFilter, SessionFilter

Comparison: TypeAlias = Literal["=", ">=", "<", "starts with", "one of", "contains", "contains all"]


class Condition(NamedTuple):
    """`field` of a filter, compared with `attribute` of a row. "one of": the field lists values. "contains": the
    attribute does; "contains all": both do."""

    field: str
    comparison: Comparison
    attribute: str


SESSIONS = (
    Condition("agent", "=", "agent"),
    Condition("state", "=", "state"),
    Condition("prefix", "starts with", "id"),
    Condition("before", "<", "updated"),
    Condition("since", ">=", "updated"),
    Condition("metadata", "contains all", "labels"),
    Condition("after", "<", "place"),
)
PROCESSES = (
    Condition("status", "one of", "state"),
    Condition("live", "=", "live"),
    Condition("kind", "=", "kind"),
    Condition("name", "=", "name"),
    Condition("definition", "=", "definition"),
    Condition("label", "=", "label"),
    Condition("origin", "=", "origin"),
    Condition("cause", "=", "cause"),
    Condition("session_id", "contains", "seen by"),
    Condition("parent", "=", "parent"),
    Condition("since", ">=", "created"),
    Condition("until", "<", "created"),
    Condition("before", "<", "number"),
    Condition("stuck", "=", "stuck"),
)

SESSION_ATTRIBUTES: Mapping[str, Callable[[SessionRow], Any]] = {
    "agent": lambda row: row.agent,
    "state": lambda row: row.state,
    "id": lambda row: row.id,
    "updated": lambda row: row.updated,
    "labels": lambda row: labels_of(row.settings),
    "place": lambda row: (row.updated, row.sid),
}
PROCESS_ATTRIBUTES: Mapping[str, Callable[[ProcessRow], Any]] = {
    "state": lambda row: row.state,
    "live": lambda row: row.live,
    "kind": lambda row: row.registration.kind,
    "name": lambda row: row.registration.name,
    "definition": lambda row: row.registration.definition,
    "label": lambda row: row.registration.label,
    "origin": lambda row: getattr(row.registration.origin, "session_id", ""),
    "cause": lambda row: row.registration.cause.id if row.registration.cause is not None else "",
    "parent": lambda row: row.registration.parent,
    "created": lambda row: row.created,
    "number": lambda row: row.pid,
    "stuck": lambda row: row.stuck is not None,
}
"""But for "seen by": the sessions that may see a process, which are not in its row."""


def matches(row: Any, wanted: SessionFilter | ProcessFilter, attributes: Mapping[str, Callable[[Any], Any]]) -> bool:
    """Whether a row is one of those wanted. A session that was deleted, or a pruned process, is never asked about."""
    return all(HOLDS[c.comparison](attributes[c.attribute](row), value) for c, value in _set(wanted))


HOLDS: dict[Comparison, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    ">=": operator.ge,
    "<": operator.lt,
    "starts with": lambda found, value: found.startswith(value),
    "one of": lambda found, value: found in value,
    "contains": lambda found, value: value in found,
    "contains all": lambda found, value: found.issuperset(value),
}


def where(wanted: SessionFilter | ProcessFilter, attributes: Mapping[str, str]) -> tuple[list[str], list[Any]]:
    """The clauses of a WHERE and their arguments. An attribute that is compared by "contains" is a query of the values,
    with a `?` for each part of the one that is sought."""
    clauses, args = list[str](), list[Any]()
    for condition, value in _set(wanted):
        found = attributes[condition.attribute]
        match condition.comparison:
            case "=" if isinstance(value, bool):
                clauses.append(f"{found} = {int(value)}")  # spelt out: only so is a partial index used
                continue
            case "<" if isinstance(value, tuple):
                clauses.append(f"{found} < ({', '.join('?' * len(value))})")
                args += value
                continue
            case "=" | ">=" | "<":
                clauses.append(f"{found} {condition.comparison} ?")
            case "starts with":
                clauses.append(f"substr({found}, 1, {len(value)}) = ?")
            case "one of":
                clauses.append(f"{found} IN ({', '.join('?' * len(value))})")
                args += value
                continue
            case "contains all":
                for each in value:
                    clauses.append(found)
                    args += each
                continue
            case "contains":
                clauses.append(found)
        args.append(value)
    return clauses, args


def _set(wanted: SessionFilter | ProcessFilter) -> list[tuple[Condition, Any]]:
    """The conditions whose fields are set: None, no text and no values are not."""
    conditions = SESSIONS if isinstance(wanted, SessionFilter) else PROCESSES
    found = [(condition, getattr(wanted, condition.field)) for condition in conditions]
    return [(c, value) for c, value in found if value is not None and value != () and (c.field != "prefix" or value)]
