"""A listed session as a person sees it in a shell."""

from perdure.model.session import ListedSession


def test_repr_of_a_listed_session_is_what_one_looks_for() -> None:
    row = ListedSession(7, "chat", "clerk", opening="Where is my parcel?")

    assert repr(row) == "<ListedSession 'chat' of 'clerk', idle, 'Where is my parcel?'>"
