"""Shares work out to subagents, all of which ask a model server over HTTP, under limits of all: what tests kill.

python -m tests.crash.spender STORE URL NAME

The server finds the process to kill by a header.
"""

from __future__ import annotations

import asyncio
import os
import sys

from perdure import Agent, Limit, ModelSettings, Price, Runtime
from perdure.providers.http import HttpProvider, no_key
from perdure.providers.openai_chat import ChatCompletions, Quirks

PID = "x-test-pid"
MANY = 25
TOKENS = 18_000
MONEY = "0.018"
LIMITS = (Limit(tokens=TOKENS, per="all"), Limit(money=MONEY, per="metadata.tenant", window="month"))
PRICES = {"house:large": Price(input=1, output=1)}
SHARE_OUT = "share it out"


async def spend(store: str, url: str, name: str) -> None:
    model = HttpProvider(
        ChatCompletions("house", Quirks()), "large", name="house", base_url=url, authorise=no_key,
        headers={PID: str(os.getpid())},
    )  # fmt: skip
    settings = ModelSettings(max_tokens=400)
    helper = Agent(model, name="helper", settings=settings)
    boss = Agent(model, name="boss", tools=[helper.as_tool()], settings=settings)
    async with Runtime(store, agents=[boss, helper], limits=LIMITS, prices=PRICES) as runtime:
        session = await runtime.session(f"root-{name}", agent="boss", metadata={"tenant": "acme"})
        result = await session.run(SHARE_OUT, key="go")
        await runtime.wait_idle()
        print(type(result.outcome).__name__, flush=True)


if __name__ == "__main__":
    asyncio.run(spend(*sys.argv[1:4]))
