"""What the runtime tests do in processes of their own. Run as `python -m tests.runtime.child <what> <store>`.

A child says a line for everything that it can vouch for.
"""

import asyncio
import logging
import os
import resource
import sys
import threading

from perdure import Agent, ModelRequest, Runtime, tool
from perdure.errors import PerdureError
from perdure.model.write import Accept
from perdure.stores.sqlite import SqliteStore
from perdure.testing import FunctionModel
from tests.kit import agent_calling, print_line


def open_here(path: str) -> None:
    try:
        asyncio.run(SqliteStore(path).open())
    except PerdureError as error:
        print_line(type(error).__name__)
    else:
        print_line("opened")


async def opens_after_fork(path: str) -> None:
    """A forked child opens the file that its parent has open; the parent works on, leaves, and reads back."""
    async with Runtime(path, agents=[Agent("scripted")]) as runtime:
        session = await runtime.session("s")
        await session.run("one")
        child = os.fork()
        if child == 0:
            thread = threading.Thread(target=open_here, args=(path,))  # the parent's loop is of no use here
            thread.start()
            thread.join()
            os._exit(0)
        await asyncio.to_thread(os.waitpid, child, 0)
        await session.run("two")
    async with Runtime(path) as runtime:
        print_line([m.text for m in await (await runtime.session("s")).history() if m.role == "user"])


def opens_another_after_fork(path: str) -> None:
    """What the parent never had open, and what it had closed before, a forked child may open."""

    async def work(where: str) -> None:
        async with Runtime(where, agents=[Agent("scripted")]) as runtime:
            print_line((await (await runtime.session("s")).run("hello")).turn_id)

    asyncio.run(work(path))
    child = os.fork()
    if child == 0:
        asyncio.run(work(f"{path}-other"))
        asyncio.run(work(path))
        os._exit(0)
    os.waitpid(child, 0)


def ends_after_fork(path: str) -> None:
    """The parent is in a transaction, part of which is in the WAL, when a child is forked that ends normally."""
    loop, store = asyncio.new_event_loop(), SqliteStore(path)
    loop.run_until_complete(store.open())
    loop.run_until_complete(store.write(Accept("s", "clerk", b"first", "op", 1)))
    file = store._file
    assert file is not None
    file._connection.execute("PRAGMA cache_size = 10")
    file.begin()
    for number in range(3000):
        file.apply(Accept("s", "clerk", bytes(200), f"op-{number}", 1))
    child = os.fork()
    if child == 0:
        file.__dict__.clear()  # nobody refers to the connection any more
        sys.exit()
    os.waitpid(child, 0)
    for number in range(500):
        file.apply(Accept("s", "clerk", bytes(200), f"later-{number}", 1))
    file.commit()
    row = loop.run_until_complete(store.session("s"))
    print_line(None if row is None else row.next)
    loop.run_until_complete(store.close())
    loop.close()


async def without_descriptors(path: str) -> None:
    """A turn whose output needs a file while the process may open none; then it may again."""
    lines = iter(range(10))

    @tool
    async def report() -> str:
        return f"{next(lines)}\n" * 20_000

    async with Runtime(path, agents=[agent_calling("report", tools=[report])]) as runtime:
        session = await runtime.session("s")
        await session.run("warm up")
        limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 8, most))
        taken = []
        try:
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        except OSError:
            pass
        try:
            await session.run("go", key="go")
        except PerdureError as error:
            print_line(type(error).__name__)
        try:
            await Runtime(path).__aenter__()
        except PerdureError as error:
            print_line(type(error).__name__)
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))
        result = await session.run("go", key="go")
        print_line(f"{result.text} {result.tool_calls[0].attempts}")


async def as_nobody(path: str) -> None:
    """Give up the rights of root, having used all that is imported from where only root can read."""
    async with Runtime(f"{path}-warm", agents=[Agent("scripted")]) as runtime:
        await (await runtime.session("s")).run("warm up")
        logging.getLogger().error("warm up", exc_info=ValueError())
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)


def echo(request: ModelRequest) -> str:
    return f"echo {request.messages[-1].text}"


async def loses_its_file(path: str) -> None:
    """A long session is taken up while the database cannot be opened: it is read on a connection of its own."""
    await as_nobody(path)
    async with Runtime(path, agents=[Agent(FunctionModel(echo))]) as runtime:
        session = await runtime.session("s")
        for number in range(70):
            await session.run(str(number))
    async with Runtime(path, agents=[Agent(FunctionModel(echo))]) as runtime:
        session = await runtime.session("s")
        os.chmod(path, 0)
        try:
            await session.run("go", key="go")
        except Exception as error:
            print_line(type(error).__name__)
        os.chmod(path, 0o600)
        print_line((await session.run("go", key="go")).text)
        print_line(await session.resume())


async def loses_its_blobs(path: str) -> None:
    """A record refers to a blob that cannot be looked at when the record is written."""
    await as_nobody(path)
    store = SqliteStore(path)
    await store.open()
    digest = await store.blobs.put(b"a blob")
    os.chmod(f"{path}-blobs", 0)
    accept = Accept("s", "clerk", b"said", "op", 1, blobs=(digest,))
    for attempt in (store.write(accept), store.blobs.get(digest), store.sweep(0)):
        try:
            print_line(type(await attempt).__name__)
        except Exception as error:
            print_line(type(error).__name__)
    os.chmod(f"{path}-blobs", 0o700)
    print_line((await store.write(accept)).turn)
    await store.close()


async def leaves_without_its_folder(path: str) -> None:
    """A Runtime is left while its folder cannot be entered, and another is beside it that judges it."""
    await as_nobody(path)
    async with Runtime(path, agents=[Agent(FunctionModel(echo))]) as other:
        async with Runtime(path, agents=[Agent(FunctionModel(echo))]) as runtime:
            await (await runtime.session("s")).run("one")
            os.chmod(os.path.dirname(path), 0)
        print_line(len(await other._worker.gone()))
        os.chmod(os.path.dirname(path), 0o700)
        print_line((await (await other.session("s")).run("two")).text)
    print_line("left")


def short_of_memory(path: str) -> None:
    """A Runtime that may have only so many megabytes more: what its name ends with."""
    extra = int(path.rsplit("-", 1)[1]) * 2**20
    with open("/proc/self/statm", encoding="ascii") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + extra, size + extra))

    async def work() -> None:
        async with Runtime(path, agents=[Agent(FunctionModel(echo))], grace=1) as runtime:
            for number in range(6):
                try:
                    print_line((await (await runtime.session(f"s{number}")).run("go")).text)
                except PerdureError as error:
                    print_line(type(error).__name__)

    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(work())
    except PerdureError as error:
        print_line(type(error).__name__)
    print_line("left")
    os._exit(0)


if __name__ == "__main__":
    what, where = sys.argv[1:]
    program = globals()[what]
    done = program(where)
    if asyncio.iscoroutine(done):
        asyncio.run(done)
