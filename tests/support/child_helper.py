"""A process that uses one of the helpers `once`, `refill`, `leader`, `every`, and that a test can kill or stop.

It says as lines what has happened: "ready", "running" where its function was called (which then hangs), "leads".
Nothing here decides what is right.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import sys
import time
from typing import Any

from support.apis import Api
from support.child_client import LONG, NAME, ChildClient


class ChildHelper(ChildClient):
    """A process with a client. It knows these orders:

    once, refill: call it with a function that hangs. every: run a job in periods of so many seconds (`period`), which
    hangs. leader: compete; answers "leads" when it does. end: end the process as a program ends, without a `stop`.
    """

    program = __file__

    def __init__(self, api: Api, url: str, helper: str, **settings: Any) -> None:
        super().__init__(api, url, helper=helper, **settings)


async def live(api: Api, url: str, settings: dict[str, Any]) -> None:
    client, helper = api.client(url), settings.pop("helper")
    del settings["sleep"]  # of the base class

    async def hang(*_: Any) -> None:
        print("running", flush=True)
        await (asyncio.sleep(LONG) if api.is_async else api.get(time.sleep(LONG)))

    function = api.native(hang)
    if helper == "once":
        await api.get(client.once(NAME, function, ttl=LONG, **settings))
    elif helper == "refill":
        await api.get(client.refill(NAME, function, LONG, **settings))
    elif helper == "every":
        client.every(NAME, settings.pop("period"), function, **settings)
        await hang_on(api)
    else:
        election = client.leader(NAME, **settings)
        await api.get(election.wait())
        print("leads", flush=True)
        await hang_on(api)


async def hang_on(api: Api) -> None:
    """Wait for the end of the orders."""
    await (asyncio.to_thread(sys.stdin.readline) if api.is_async else api.get(sys.stdin.readline()))


if __name__ == "__main__":
    api = Api(sys.argv[1])
    body = live(api, sys.argv[2], ast.literal_eval(sys.argv[3]))
    if api.is_async:
        asyncio.run(body)
    else:
        with contextlib.suppress(StopIteration):
            body.send(None)
