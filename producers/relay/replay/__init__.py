"""Replay: events delivered again from a place in the past.

`selection` says which events, `sources` finds and reads them, `run` sends them, each once. Which worker gets what is
the caller's matter (`consumers.replay`).
"""
