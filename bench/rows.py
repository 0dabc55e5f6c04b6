"""The rows to drain: one type of the catalogue, committed in small transactions as a service would."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import psycopg

EVENT_TYPE = "message.received"
ENTITY_KIND = "message"
ORGANIZATIONS = 200
PER_TRANSACTION = 10

# 383 bytes of JSON text as jsonb shows it, 6 fields; metadata as emit_event leaves it.
BODY = (
    "Oi! Queria saber se ainda tem o vestido azul no tamanho M e se entrega amanhã em Campinas, porque preciso dele "
    "para o casamento de sábado. Obrigada!"
)
_FILL = """
CREATE PROCEDURE pg_temp.fill(_transactions integer, _rows integer) LANGUAGE plpgsql AS $$
DECLARE
    _organizations uuid[] := ARRAY(SELECT id FROM organizations ORDER BY id);
BEGIN
    FOR _i IN 1.._transactions LOOP
        INSERT INTO event_log (organization_id, event_type, entity_kind, entity_id, payload, metadata)
        SELECT _organizations[1 + (_i * 7 + n * 13) % array_length(_organizations, 1)], '{event_type}', '{entity_kind}',
               gen_random_uuid(),
               jsonb_build_object('direction', 'in', 'conversation_id', gen_random_uuid(),
                                  'contact_id', gen_random_uuid(),
                                  'body', substr('{body}{body}', 1 + (_i + n) % 140, 134),
                                  'waha_message_id', 'false_55199' || 10000000 + _i || '@c.us_' || _i * 100 + n,
                                  'message_id', gen_random_uuid()),
               jsonb_build_object('request_id', gen_random_uuid(), 'source', 'waha',
                                  'emitted_at', extract(epoch FROM clock_timestamp()))
          FROM generate_series(1, _rows) n;
        COMMIT;
    END LOOP;
END;
$$
"""


@dataclass(frozen=True)
class Rows:
    """What must come out: `first` is the lowest seq, `organizations[seq - first]` a row's organization by number."""

    first: int
    organizations: array[int]
    keys: list[bytes]
    payload_bytes: float

    @property
    def count(self) -> int:
        return len(self.organizations)


def add_organizations(conn: psycopg.Connection[Any], count: int = ORGANIZATIONS) -> list[UUID]:
    found = conn.execute(
        "INSERT INTO organizations (name) SELECT 'Loja ' || n FROM generate_series(1, %s) n RETURNING id", [count]
    ).fetchall()
    return sorted(row[0] for row in found)


def fill(url: str, rows: int, per_transaction: int = PER_TRANSACTION) -> Rows:
    """Commit `rows` rows of 200 organizations, `per_transaction` in each transaction."""
    with psycopg.connect(url, autocommit=True) as conn:
        if not conn.execute("SELECT 1 FROM organizations LIMIT 1").fetchone():
            add_organizations(conn)
        conn.execute("SET synchronous_commit = off")  # they are flushed below, before anybody reads them
        conn.execute(_FILL.format(event_type=EVENT_TYPE, entity_kind=ENTITY_KIND, body=BODY))
        conn.execute("CALL pg_temp.fill(%s, %s)", [rows // per_transaction, per_transaction])
        conn.execute("SET synchronous_commit = on")
        conn.execute("VACUUM ANALYZE event_log")
        conn.execute("CHECKPOINT")
        return read(conn)


def read(conn: psycopg.Connection[Any]) -> Rows:
    """What event_log holds."""
    keys = [str(row[0]).encode() for row in conn.execute("SELECT id FROM organizations ORDER BY id").fetchall()]
    numbers = {key: number for number, key in enumerate(keys)}
    first, size = conn.execute(
        "SELECT min(seq), avg(octet_length(payload::text))::float8 FROM event_log"
    ).fetchone() or (0, 0)
    organizations = array("H")
    with conn.transaction(), conn.cursor("rows") as cursor:
        cursor.itersize = 10_000
        cursor.execute("SELECT seq, organization_id::text FROM event_log ORDER BY seq")
        for place, (seq, organization) in enumerate(cursor):
            if seq != first + place:
                raise ValueError(f"seq {seq} where {first + place} was expected: somebody else writes here")
            organizations.append(numbers[organization.encode()])
    return Rows(first, organizations, keys, size)


def payloads(url: str, seqs: list[int]) -> dict[int, Any]:
    """The payloads of some rows, as JSON values."""
    with psycopg.connect(url) as conn:
        return dict(conn.execute("SELECT seq, payload FROM event_log WHERE seq = ANY (%s)", [seqs]).fetchall())
