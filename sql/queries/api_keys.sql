-- name: by_prefix
-- Whose a key may be. As afluente_worker: the organization is what is to be found out.
SELECT k.id, k.organization_id, k.prefix, k.key_hash, k.scopes, k.expires_at, k.revoked_at, k.rate_per_s, k.rate_burst
  FROM api_keys k
 WHERE k.prefix = %(prefix)s;

-- name: take_tokens
SELECT granted, level
  FROM afluente.take_api_tokens(%(organization_id)s, %(api_key_id)s, %(rate)s::numeric, %(burst)s, %(spent)s, %(wanted)s);

-- name: insert
INSERT INTO api_keys (organization_id, name, prefix, key_hash, scopes, expires_at, rate_per_s, rate_burst, rotated_from)
VALUES (%(organization_id)s, %(name)s, %(prefix)s, %(key_hash)s, %(scopes)s, %(expires_at)s, %(rate_per_s)s,
        %(rate_burst)s, %(rotated_from)s)
RETURNING id;

-- name: find
-- One key by its id or prefix, held so that two rotations of it do not cross.
SELECT k.id, k.organization_id, k.name, k.prefix, k.scopes, k.expires_at, k.revoked_at, k.rate_per_s, k.rate_burst,
       k.rotated_from, k.created_at
  FROM api_keys k
 WHERE k.id = %(id)s
    OR k.prefix = %(prefix)s
   FOR NO KEY UPDATE;

-- name: successor
-- The valid key that has taken a key's place. A statement of its own, after `find`: what another rotation committed while
-- its lock was waited for is seen.
SELECT s.prefix
  FROM api_keys s
 WHERE s.organization_id = %(organization_id)s
   AND s.rotated_from = %(id)s
   AND s.revoked_at IS NULL
   AND (s.expires_at IS NULL OR s.expires_at > %(now)s)
 LIMIT 1;

-- name: end_at
-- A key ends when its successor has had its time; one that ends sooner keeps its end.
UPDATE api_keys
   SET expires_at = %(ends_at)s
 WHERE id = %(id)s
   AND (expires_at IS NULL OR expires_at > %(ends_at)s);

-- name: limit
UPDATE api_keys
   SET rate_per_s = %(rate_per_s)s,
       rate_burst = %(rate_burst)s
 WHERE id = %(id)s;

-- name: revoke
UPDATE api_keys
   SET revoked_at = %(now)s
 WHERE id = %(id)s
   AND revoked_at IS NULL;

-- name: listed
SELECT k.id, k.organization_id, o.name AS organization, k.name, k.prefix, k.scopes,
       CASE
           WHEN k.revoked_at IS NOT NULL THEN 'revoked'
           WHEN k.expires_at <= %(now)s THEN 'expired'
           WHEN EXISTS (SELECT FROM api_keys s
                         WHERE s.organization_id = k.organization_id AND s.rotated_from = k.id) THEN 'ending'
           ELSE 'active'
       END AS state,
       k.rate_per_s, k.rate_burst, k.created_at, k.last_used_at, k.expires_at, k.revoked_at, k.rotated_from
  FROM api_keys k
  JOIN organizations o ON o.id = k.organization_id
 WHERE %(organization_id)s::uuid IS NULL
    OR k.organization_id = %(organization_id)s::uuid
 ORDER BY k.created_at DESC, k.id DESC;

-- name: audit
INSERT INTO audit_logs (organization_id, actor_kind, actor_id, action, entity_kind, entity_id, details)
VALUES (%(organization_id)s, 'system', %(actor_id)s, %(action)s, 'api_key', %(entity_id)s, %(details)s);
