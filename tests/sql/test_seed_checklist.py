"""What the seeds say about tables, line by line, against the catalogue: columns, limits, uniques, indexes, defaults.

Where spec.md departs from a seed on purpose, the line here is what takes its place, and says so.
"""

import uuid
from datetime import UTC, datetime

import pytest
from psycopg import errors
from psycopg.types.json import Jsonb

from tests.sql.rows import Planter

# (table, column, type, may be null, default or None): Spec 07, the metrics seed, the lead seed.
COLUMNS = [
    # Spec 07, 2.1; consumed_by, attempts, last_error, next_attempt_at, status, updated_at are in event_log_status
    ("event_log", "id", "uuid", False, "uuidv7()"),
    ("event_log", "organization_id", "uuid", False, None),
    ("event_log", "event_type", "text", False, None),
    ("event_log", "entity_kind", "text", False, None),
    ("event_log", "entity_id", "uuid", True, None),
    ("event_log", "payload", "jsonb", False, "'{}'::jsonb"),
    ("event_log", "metadata", "jsonb", False, "'{}'::jsonb"),
    ("event_log", "created_at", "timestamp with time zone", False, "afluente.event_clock()"),
    # metrics seed, events (accounts are organizations; deviation 4: unique within one)
    ("contact_events", "id", "uuid", False, "uuidv7()"),
    ("contact_events", "organization_id", "uuid", False, None),
    ("contact_events", "contact_id", "uuid", False, None),
    ("contact_events", "metric_id", "uuid", True, None),
    ("contact_events", "metric_name", "text", True, None),
    ("contact_events", "properties", "jsonb", False, "'{}'::jsonb"),
    ("contact_events", "value", "numeric", True, None),
    ("contact_events", "currency", "text", True, "'BRL'::text"),
    ("contact_events", "source", "text", False, None),
    ("contact_events", "integration_id", "uuid", True, None),
    ("contact_events", "unique_event_id", "text", True, None),
    ("contact_events", "entity_type", "text", True, None),
    ("contact_events", "entity_id", "text", True, None),
    ("contact_events", "occurred_at", "timestamp with time zone", False, None),
    ("contact_events", "received_at", "timestamp with time zone", False, "clock_timestamp()"),
    ("contact_events", "schema_version", "integer", False, "1"),
    ("contact_events", "created_at", "timestamp with time zone", False, "clock_timestamp()"),
    # lead seed, the same table
    ("contact_events", "source_type", "text", False, None),
    ("contact_events", "event_type", "text", True, None),
    ("contact_events", "object_id", "text", True, None),
    ("contact_events", "object_id_ref", "text", True, None),
    ("contact_events", "raw_payload", "jsonb", True, None),
    ("contact_events", "external_event_id", "text", True, None),
    # metrics seed, metrics
    ("metrics", "id", "uuid", False, "uuidv7()"),
    ("metrics", "organization_id", "uuid", False, None),
    ("metrics", "name", "text", False, None),
    ("metrics", "display_name", "text", False, None),
    ("metrics", "category", "text", False, "'custom'::text"),
    ("metrics", "source", "text", True, None),
    ("metrics", "is_system", "boolean", False, "false"),
    ("metrics", "created_at", "timestamp with time zone", False, "clock_timestamp()"),
    # metrics seed, contact_metrics_summary: the view has the seed's columns (totals are one row for each currency)
    ("contact_metrics_summary_v", "id", "uuid", None, None),
    ("contact_metrics_summary_v", "organization_id", "uuid", None, None),
    ("contact_metrics_summary_v", "contact_id", "uuid", None, None),
    ("contact_metrics_summary_v", "metric_name", "text", None, None),
    ("contact_metrics_summary_v", "event_count", "bigint", None, None),
    ("contact_metrics_summary_v", "total_value", "numeric", None, None),
    ("contact_metrics_summary_v", "first_event_at", "timestamp with time zone", None, None),
    ("contact_metrics_summary_v", "last_event_at", "timestamp with time zone", None, None),
    ("contact_metrics_summary_v", "updated_at", "timestamp with time zone", None, None),
    # Spec 07, 2.1, by worker (deviation 1)
    ("event_log_status", "consumed_by", "text[]", None, None),
    ("event_log_status", "attempts", "smallint", None, None),
    ("event_log_status", "last_error", "text", None, None),
    ("event_log_status", "next_attempt_at", "timestamp with time zone", None, None),
    ("event_log_status", "status", "text", None, None),
    ("event_log_status", "updated_at", "timestamp with time zone", None, None),
    # Spec 07, 8.3
    ("webhook_subscriptions", "consecutive_failures", "integer", False, "0"),
    ("webhook_subscriptions", "enabled", "boolean", False, "true"),
    # data model seed: webhook_events ("origem e tópico, resultado da verificação, chaves de deduplicação, ...")
    ("webhook_events", "source", "text", False, None),
    ("webhook_events", "topic", "text", True, None),
    ("webhook_events", "verification", "text", False, None),
    ("webhook_events", "dedupe_key", "text", True, None),
    ("webhook_events", "status", "text", False, None),
    ("webhook_events", "attempts", "integer", False, "0"),
    ("webhook_events", "summary", "jsonb", False, "'{}'::jsonb"),
    # Spec 07, 6.1, 6.3
    ("messages", "waha_message_id", "text", True, None),
    ("messages", "sentiment", "text", True, None),
    ("messages", "status", "text", False, None),
    ("orders", "ns_order_id", "text", True, None),
    ("orders", "currency", "text", False, "'BRL'::text"),
    ("leads", "currency", "text", False, "'BRL'::text"),
    # metrics seed: "Buscar automações com trigger_metric = metricName", "com trigger_type ..."; automation_execution_id
    ("automations", "trigger_type", "text", False, None),
    ("automations", "trigger_metric", "text", True, None),
    ("automation_runs", "id", "uuid", False, "uuidv7()"),
]

# Tables that the data model seed names and this stage has.
TABLES = [
    "organizations", "members", "api_keys", "channels", "contacts", "tags", "contact_tag_links", "conversations",
    "messages", "message_events", "templates", "webhook_events", "audit_logs", "alerts", "event_log",
    "event_idempotency", "deferred_event", "worker_event_types", "event_delivery", "contact_events", "metrics",
    "contact_metrics_summary", "stream_offset", "webhook_subscriptions", "webhook_delivery_attempts", "orders",
    "order_lines", "leads", "pipelines", "channel_secrets", "contact_identities",
]  # fmt: skip

UNIQUES = [
    ("messages", ["organization_id", "waha_message_id"]),  # Spec 07, 9.3
    ("orders", ["organization_id", "ns_order_id"]),  # Spec 07, 9.3
    ("orders", ["organization_id", "source", "external_id"]),  # the same for every other shop
    ("metrics", ["organization_id", "name"]),
    ("contact_events", ["organization_id", "unique_event_id"]),  # deviation 4
    ("contact_events", ["organization_id", "source", "external_event_id"]),  # deviation 4
    ("event_idempotency", ["organization_id", "key"]),
    ("event_log", ["id", "created_at"]),
    ("event_delivery", ["event_created_at", "worker", "event_id", "target"]),
    ("worker_event_types", ["worker", "event_type"]),
    ("api_keys", ["key_hash"]),
    ("tags", ["organization_id", "name"]),
]

# Spec 07, 2.2 (1 and 5 are event_delivery's, deviation 5), lead seed's event-type-index, relay and correlation
INDEXES = [
    ("event_log", ["organization_id", "event_type", "created_at DESC"]),
    ("event_log", ["entity_kind", "entity_id", "created_at DESC"]),
    ("event_log", ["seq"]),
    ("event_log", ["tx_id", "seq"]),
    ("event_log", ["request_id"]),
    ("event_log", ["trace_id"]),
    ("audit_logs", ["request_id"]),
    ("contact_events", ["organization_id", "contact_id", "event_type", "occurred_at", "id"]),
    ("contact_events", ["organization_id", "contact_id", "metric_name", "occurred_at", "id"]),
    ("automations", ["organization_id", "trigger_metric"]),
]

# (table, column, longest value that fits)
LIMITS = [
    ("event_log", "event_type", 100),
    ("event_log", "request_id", 255),
    ("event_log", "trace_id", 255),
    ("event_idempotency", "key", 255),
    ("contact_events", "source", 100),
    ("contact_events", "event_type", 100),
    ("contact_events", "object_id", 255),
    ("contact_events", "object_id_ref", 255),
    ("contact_events", "external_event_id", 255),
    ("orders", "external_id", 255),
    ("orders", "source", 100),
    ("messages", "waha_message_id", 255),
]

# (table, column, every value it takes)
CLOSED_SETS = [
    ("contact_events", "source_type", {"EXTERNAL", "INTERNAL", "DIRECT"}),
    ("metrics", "category", {"ecommerce", "messaging", "tracking", "engagement", "contact", "custom"}),
    ("automations", "status", {"enabled", "paused", "disabled"}),
]


@pytest.fixture(scope="module")
def conn(postgres, template):
    from tests.fixtures.postgres import clone

    with clone(postgres, template) as database:
        conn = database.connect(role=None, autocommit=True)
        conn.execute("SET search_path = public")
        yield conn


@pytest.fixture(scope="module")
def planter(conn):
    organization = conn.execute("INSERT INTO organizations (name) VALUES ('Mine') RETURNING id").fetchone()[0]
    return Planter(conn, [organization]), organization


@pytest.mark.parametrize("table", TABLES)
def test_table(conn, table):
    assert conn.execute("SELECT to_regclass(%s) IS NOT NULL", [table]).fetchone() == (True,)


@pytest.mark.parametrize(("table", "column", "type_", "null", "default"), COLUMNS)
def test_column(conn, table, column, type_, null, default):
    found = conn.execute(
        """
        SELECT format_type(a.atttypid, a.atttypmod), NOT a.attnotnull, pg_get_expr(d.adbin, d.adrelid)
          FROM pg_attribute a LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
         WHERE a.attrelid = %s::regclass AND a.attname = %s AND NOT a.attisdropped
        """,
        [table, column],
    ).fetchone()
    assert found is not None, f"{table} has no {column}"
    assert found == (type_, found[1] if null is None else null, default)


@pytest.mark.parametrize(("table", "columns"), UNIQUES)
def test_unique(conn, table, columns):
    assert columns in _indexes(conn, table, unique=True)


@pytest.mark.parametrize(("table", "columns"), INDEXES)
def test_index(conn, table, columns):
    assert columns in _indexes(conn, table, unique=False)


@pytest.mark.parametrize(("table", "column", "longest"), LIMITS)
def test_limit(conn, planter, table, column, longest):
    checks = [
        expression
        for expression, columns in planter[0].tables[table].checks
        if column in columns and ("char_length" in expression or "length" in expression)
    ]
    assert checks, f"{table}.{column} has no limit"
    fits, too_long = ("a." + "b" * (n - 2) for n in (longest, longest + 1))
    held = [
        conn.execute(
            f"SELECT bool_and({' AND '.join(checks)}) FROM (SELECT %s::text AS request_id, %s::text AS trace_id) c"
            if table == "event_log" and column in ("request_id", "trace_id")
            else f"SELECT bool_and({' AND '.join(checks)}) FROM (SELECT %s::text AS {column}) c",
            [value, value] if table == "event_log" and column in ("request_id", "trace_id") else [value],
        ).fetchone()[0]
        for value in (fits, too_long)
    ]
    assert held == [True, False]


@pytest.mark.parametrize(("table", "column", "values"), CLOSED_SETS)
def test_closed_set(planter, table, column, values):
    found = set()
    for expression, columns in planter[0].tables[table].checks:
        if columns == [column] and "ANY" in expression:
            found |= set(expression.split("'")[1::2])
    assert found == values


@pytest.mark.parametrize("event_type", ["lead.stage_changed", "a.b", "x1.y_2"])
def test_event_type_regex_takes(conn, planter, event_type):
    with conn.transaction(force_rollback=True):
        _insert_event(conn, planter[1], event_type)


@pytest.mark.parametrize("event_type", ["LeadStageChanged", "lead-stage.changed", "lead.stage.changed", "1.a", "lead."])
def test_event_type_regex_refuses(conn, planter, event_type):
    with pytest.raises(errors.CheckViolation, match="event_type_format"), conn.transaction():
        _insert_event(conn, planter[1], event_type)


def test_metadata_has_the_seeds_keys(conn, planter):
    _, organization = planter
    keys = {"request_id", "actor_id", "source", "trace_id", "idempotency_key", "schema_version"}
    with conn.transaction(force_rollback=True):
        given = dict.fromkeys(keys, "x") | {"schema_version": "1.0.0"}
        conn.execute(
            "SELECT emit_event_for(%s, 'lead.created', 'lead', NULL, '{}', %s)",
            [organization, Jsonb(given)],
        )
        (found,) = conn.execute("SELECT metadata FROM event_log ORDER BY seq DESC LIMIT 1").fetchone()
        assert set(found) == keys | {"emitted_at"}
    comment = conn.execute(
        "SELECT col_description('event_log'::regclass, attnum) FROM pg_attribute"
        " WHERE attrelid = 'event_log'::regclass AND attname = 'metadata'"
    ).fetchone()[0]
    assert all(key in comment for key in keys | {"emitted_at"})


def test_nothing_points_at_event_log_and_it_is_partitioned_from_the_first_day(conn):
    assert conn.execute("SELECT relkind FROM pg_class WHERE oid = 'event_log'::regclass").fetchone() == ("p",)
    assert conn.execute(
        "SELECT count(*) FROM pg_constraint WHERE confrelid = 'event_log'::regclass AND contype = 'f'"
    ).fetchone() == (0,)


def test_seq_has_no_cache(conn):
    assert conn.execute(
        "SELECT seqcache FROM pg_sequence WHERE seqrelid = pg_get_serial_sequence('public.event_log', 'seq')::regclass"
    ).fetchone() == (1,)


@pytest.mark.parametrize(
    ("table", "columns"),
    [(t, c) for t, c in UNIQUES if c[0] == "organization_id" and t not in ("event_idempotency", "tags")],
)
def test_two_organizations_may_have_the_same(conn, table, columns):
    """Two shops both have order 1001: a unique of a tenant's table begins with its organization."""
    plant = Planter(
        conn,
        [conn.execute("INSERT INTO organizations (name) VALUES (%s) RETURNING id", [n]).fetchone()[0] for n in "ab"],
    )
    a, b = {organization for _, organization in plant.rows}
    first = plant.values(table, a) | {columns[-1]: f"same-{uuid.uuid4().hex}"}
    if columns[-1] == "ns_order_id":
        first["source"] = "nuvemshop"
    same = {column: first[column] for column in (*columns[1:], *(["source"] if "source" in first else []))}
    with conn.transaction(force_rollback=True):
        plant.insert(table, first)
        plant.insert(table, plant.values(table, b) | same)
        again = plant.values(table, a) | same
        with pytest.raises(errors.UniqueViolation), conn.transaction():
            plant.insert(table, again)


def _insert_event(conn, organization, event_type):
    conn.execute(
        "INSERT INTO event_log (organization_id, event_type, entity_kind, created_at) VALUES (%s, %s, 'lead', %s)",
        [organization, event_type, datetime.now(UTC)],
    )


def _indexes(conn, table, *, unique):
    """The columns of each index, in order, with DESC where it is; unique ones only when asked."""
    found = conn.execute(
        """
        SELECT ARRAY(SELECT pg_get_indexdef(i.indexrelid, k, true)
                            || CASE WHEN i.indoption[k - 1] & 1 = 1 THEN ' DESC' ELSE '' END
                       FROM generate_series(1, i.indnkeyatts) k ORDER BY k)
          FROM pg_index i WHERE i.indrelid = %s::regclass AND (i.indisunique OR NOT %s)
        """,
        [table, unique],
    )
    return [row[0] for row in found]
