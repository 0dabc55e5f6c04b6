-- An automation begins with what happens from when it was switched on: a worker that is behind, or new, still has events
-- before that in hand. By the events' clock. Null: since ever, as those that were on before this was kept.
ALTER TABLE automations ADD COLUMN enabled_at timestamptz;
