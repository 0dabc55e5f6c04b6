"""REST v1: how services that have no database of ours emit events and record facts about contacts, and read them back.

`app` takes a request through its steps, `keys` says who asks, `rate` how much it may, `body` what it said, `requests`
whether that is well formed, `idempotency` whether it was said before; `events`, `contact_events` and `catalogue` do
what is asked. `problems` has every way in which it can be refused, and `openapi` describes all of it.
"""
