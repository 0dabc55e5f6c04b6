-- name: named
-- The organizations that somebody may mean by a word: id, slug or name.
SELECT id
  FROM organizations
 WHERE id::text = lower(%(word)s)
    OR slug = %(word)s
    OR name = %(word)s
 LIMIT 2;

-- name: insert
INSERT INTO organizations (name)
VALUES (%(name)s)
RETURNING id;
