"""Webhooks coming in: verify over the raw bytes, store, and answer; what they mean is worked out later by a worker.

`signature` (pure) checks a sender's signature, `sources/` (pure) finds tenant, topic and dedupe key, `store` writes the
delivery and its outbox rows in one transaction, `app` is the HTTP side, `normalize/` (pure) turns a stored delivery
into facts for `webhook-normalize-worker`.
"""
