"""The main job, played through: webhooks in, events out, side effects, a dead letter, summaries, reconciliation."""

from afluente.local.demo.play import Options, play, stop

__all__ = ["Options", "play", "stop"]
