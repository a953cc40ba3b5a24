"""The reference scenario on machines whose clocks disagree by two hours: each incarnation has the other's time."""

from __future__ import annotations

from perdure.testing.crash import Lab
from tests.crash.process_worker import HOUR, Skewed
from tests.crash.reference import settle_the_day


async def ahead(lab: Lab) -> None:
    """Whoever dies was an hour ahead, and his successor is an hour behind."""
    await settle_the_day(lab, clock=Skewed(HOUR if lab.incarnation == 1 else -HOUR))


async def behind(lab: Lab) -> None:
    await settle_the_day(lab, clock=Skewed(-HOUR if lab.incarnation == 1 else HOUR))
