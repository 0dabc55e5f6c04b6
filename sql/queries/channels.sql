-- name: insert
INSERT INTO channels (organization_id, kind, source, external_id, name, mode, settings)
VALUES (%(organization_id)s, %(kind)s, %(source)s, %(external_id)s, %(name)s, %(mode)s, %(settings)s)
RETURNING id;

-- name: secrets
-- The secrets of one purpose, oldest first.
SELECT slot, valid_until
  FROM channel_secrets
 WHERE channel_id = %(channel_id)s
   AND purpose = %(purpose)s
 ORDER BY created_at
   FOR UPDATE;

-- name: put_secret
INSERT INTO channel_secrets (organization_id, channel_id, purpose, slot, sealed)
VALUES (%(organization_id)s, %(channel_id)s, %(purpose)s, %(slot)s, %(sealed)s)
ON CONFLICT (channel_id, purpose, slot) DO UPDATE
    SET sealed = excluded.sealed,
        valid_until = NULL,
        created_at = clock_timestamp();

-- name: end_secret
UPDATE channel_secrets
   SET valid_until = %(valid_until)s
 WHERE channel_id = %(channel_id)s
   AND purpose = %(purpose)s
   AND slot = %(slot)s;

-- name: one
SELECT id, organization_id, source, settings
  FROM channels
 WHERE id = %(channel_id)s;

-- name: settings
-- A connection's sender and name, held until the transaction ends.
SELECT source, external_id
  FROM channels
 WHERE id = %(channel_id)s
   FOR UPDATE;

-- name: change
-- What is null stays as it is.
UPDATE channels
   SET external_id = COALESCE(%(external_id)s, external_id),
       name = COALESCE(%(name)s, name),
       status = COALESCE(%(status)s, status),
       updated_at = clock_timestamp()
 WHERE id = %(channel_id)s
RETURNING id, organization_id, source, external_id, name, status;

-- name: set_settings
UPDATE channels
   SET settings = settings || %(settings)s,
       updated_at = clock_timestamp()
 WHERE id = %(channel_id)s;

-- name: mapping
SELECT settings -> 'mapping'
  FROM channels
 WHERE id = %(channel_id)s
   AND source = 'generic';

-- name: list
-- Connections for people; secrets by number only.
SELECT c.id, c.organization_id, o.name AS organization, c.source, c.external_id, c.name, c.status, c.mode,
       (SELECT count(*)
          FROM channel_secrets s
         WHERE s.channel_id = c.id
           AND s.purpose = 'signature'
           AND (s.valid_until IS NULL OR s.valid_until > clock_timestamp())) AS valid_secrets
  FROM channels c
  JOIN organizations o
    ON o.id = c.organization_id
 WHERE %(organization_id)s::uuid IS NULL OR c.organization_id = %(organization_id)s
 ORDER BY c.created_at;
