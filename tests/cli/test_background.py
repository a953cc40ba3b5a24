"""What `perdure run` and `perdure call` begin in the background is done, and told, before they leave."""

from pathlib import Path

import pytest

from tests.cli.shell import shell, shell_json


@pytest.mark.parametrize(
    ("prompt", "answer", "news"),
    [("survey", "survey: ok", "news: tea is rare"), ("ship", "ship: ok", "news: tea is on its way")],
    ids=["a background tool", "a durable function of the agent's module"],
)
def test_work_in_the_background_ends_and_wakes_its_session(prompt: str, answer: str, news: str, store: Path) -> None:
    ran = shell("run", "sample_background:clerk", prompt, "-s", "chat", store=store)

    assert (ran.exit_code, ran.stdout) == (0, f"{answer}\n")
    turns = shell_json("show", "chat", store=store)["turns"]
    assert [turn["outcome"]["text"] for turn in turns] == [answer, news]
    assert [row["status"] for row in shell_json("ps", "--all", store=store)] == ["completed"]


def test_news_are_not_shown_as_if_a_person_had_spoken(store: Path) -> None:
    shell("run", "sample_background:clerk", "survey", "-s", "chat", store=store)

    shown = shell("show", "chat", store=store).stdout
    records = shell("show", "chat", "--records", store=store).stdout

    assert "user: survey\n" in shown
    assert 'wake: [process "survey" completed]\n' in shown
    assert 'wake: [process "survey" completed]' in records


def test_a_background_tool_is_listed_by_its_name(store: Path) -> None:
    shell("run", "sample_background:clerk", "survey", "-s", "chat", store=store)

    assert "  tool survey  " in shell("ps", "--all", store=store).stdout


def test_a_turn_that_a_task_queues_is_run_before_the_call_leaves(store: Path) -> None:
    shell("run", "sample_background:clerk", "ship", "-s", "chat", store=store)

    shell("call", "sample_background:clerk", "stock.order", "-s", "chat", store=store)

    turns = shell_json("show", "chat", store=store)["turns"]
    assert [turn["outcome"]["text"] for turn in turns][2:] == ["survey: ok", "news: tea is rare"]
