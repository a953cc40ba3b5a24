"""The contract of a plugin, to run on yours.

    from mainstay.testing.plugin_contract import plugin_contract

    TestAudit = plugin_contract(Audit)
    TestNotes = plugin_contract(
        lambda: Notes(limit=10),
        calls=[("add_note", {"text": "buy tea"})],  # what the model calls, so that the plugin has something to do
        options={"folder": "kitchen"},
    )

`TestNotes` is a `unittest.TestCase`: pytest finds it. Everything runs in real turns of a real Runtime in memory, with a
model that is a function; it takes a few seconds. `check_plugin` does the same and returns what it found.

    defined       the plugin can be told apart, its hooks are spelled and shaped as hooks are, its time limit is sane
    undisturbed   three turns and a restart show no fault
    arguments     no hook changes what it was only shown
    state         JSON; restored it is the same; the revision moves when the state does; nothing saved is fine; rubbish
                  is refused, or does no harm
    apart         what happens in one session is not seen in another
    disturbed     each hook × raises, answers nonsense, hangs, is cancelled, is called twice, has no services: the turn
                  ends, and the turns after it are as if nothing had happened
    replay        killed before and after every record and resumed, a session reads the same and remembers the same, and
                  no hook of a recorded step is called again
"""

from mainstay.testing.plugin_contract.checks import Report, check_plugin, check_plugin_async, plugin_contract
from mainstay.testing.plugin_contract.probe import Finding

__all__ = ["Finding", "Report", "check_plugin", "check_plugin_async", "plugin_contract"]
