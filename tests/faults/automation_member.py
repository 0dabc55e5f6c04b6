"""Handles one event for automations as a process of its own, which may be told to kill itself on the way.

python -m tests.faults.automation_member EVENT_ID        DATABASE_URL and AFLUENTE_FAULT in the environment
"""

import asyncio
import os
import sys
from uuid import UUID

from afluente import faults, postgres
from consumers.automations import trial
from consumers.runtime import testing
from consumers.workers.automation import AutomationWorker


async def handle(event_id):
    worker = AutomationWorker("https://l.example")
    async with await postgres.connect_async(os.environ["DATABASE_URL"], autocommit=True) as conn:
        event = await trial.find_event(conn, event_id)
        for target in await testing.targets(worker, event, conn):
            ran = await testing.run(worker, event, conn, target=target)
            assert ran.outcome == "done", ran


if __name__ == "__main__":
    faults.arm_from(os.environ)
    asyncio.run(handle(UUID(sys.argv[1])))
