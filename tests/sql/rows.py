"""Rows for any table, from the catalogue alone: so that a table somebody adds tomorrow is covered, or fails loudly.

Values come from the foreign keys, from the lists in CHECK constraints, and from a few candidates of each type; the
server is asked which candidate satisfies its CHECK constraints.
"""

import hashlib
import itertools
import re
import uuid
from datetime import UTC, datetime
from decimal import Decimal

from psycopg import sql as pgsql
from psycopg.types.json import Jsonb

from tests.sql.catalogue import SYSTEM

# Texts of the shapes that constraints ask for; a new shape is added here.
TEXTS = (
    "x", "whatsapp", "a.b", "a-worker", "https://example.test/hook", "BRL", "pt_BR", "+5511987654321", "a@example.test",
    "prefix", "#00ff00", "{}", "0" * 64,
)  # fmt: skip


class Table:
    """One table: its columns, foreign keys and checks."""

    def __init__(self, conn, name):
        self.name = name
        self.identifier = pgsql.SQL(name)  # comes from regclass::text: quoted where it has to be
        self.columns = {
            row[0]: {"type": row[1], "null": not row[2], "default": row[3], "generated": row[4]}
            for row in conn.execute(
                """
                SELECT a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull,
                       d.adbin IS NOT NULL AND a.attgenerated = '' OR a.attidentity <> '',
                       a.attgenerated <> '' OR a.attidentity = 'a'
                  FROM pg_attribute a LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
                 WHERE a.attrelid = %s::regclass AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attnum
                """,
                [name],
            )
        }
        self.foreign_keys = conn.execute(
            """
            SELECT c.confrelid::regclass::text,
                   ARRAY(SELECT a.attname::text FROM unnest(c.conkey) WITH ORDINALITY k (n, i)
                           JOIN pg_attribute a ON a.attrelid = c.conrelid AND a.attnum = k.n ORDER BY k.i),
                   ARRAY(SELECT a.attname::text FROM unnest(c.confkey) WITH ORDINALITY k (n, i)
                           JOIN pg_attribute a ON a.attrelid = c.confrelid AND a.attnum = k.n ORDER BY k.i)
              FROM pg_constraint c WHERE c.conrelid = %s::regclass AND c.contype = 'f' AND c.conparentid = 0
            """,
            [name],
        ).fetchall()
        self.checks = conn.execute(
            """
            SELECT pg_get_expr(c.conbin, c.conrelid),
                   ARRAY(SELECT a.attname::text FROM unnest(c.conkey) k
                           JOIN pg_attribute a ON a.attrelid = c.conrelid AND a.attnum = k)
              FROM pg_constraint c WHERE c.conrelid = %s::regclass AND c.contype = 'c'
            """,
            [name],
        ).fetchall()

    @property
    def tenant_column(self):
        if "organization_id" in self.columns:
            return "organization_id"
        return "id" if self.name == "organizations" else None


def tables(conn):
    """Every table of ours but for partitions: name -> Table."""
    return {
        name: Table(conn, name)
        for (name,) in conn.execute(
            f"""
            SELECT c.oid::regclass::text FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
             WHERE {SYSTEM} AND c.relkind IN ('r', 'p') AND NOT c.relispartition ORDER BY 1
            """
        )
    }


def partitions(conn):
    """(partition, its parent) of every partition."""
    return conn.execute(
        f"""
        SELECT i.inhrelid::regclass::text, i.inhparent::regclass::text
          FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid JOIN pg_namespace n ON n.oid = c.relnamespace
         WHERE {SYSTEM} AND c.relispartition AND c.relkind = 'r' ORDER BY 1
        """
    ).fetchall()


def views(conn):
    """Every view with an organization_id."""
    return [
        name
        for (name,) in conn.execute(
            f"""
            SELECT c.oid::regclass::text FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
              JOIN pg_attribute a ON a.attrelid = c.oid AND a.attname = 'organization_id'
             WHERE {SYSTEM} AND c.relkind IN ('v', 'm') ORDER BY 1
            """
        )
    ]


class Planter:
    """Inserts one row for each organization into each table, as the login that owns them."""

    def __init__(self, conn, organizations):
        self.conn = conn
        self.tables = tables(conn)
        self.rows = {}  # (table, organization) -> the row as stored
        for organization in organizations:
            for name in self._order():
                if self.tables[name].tenant_column:
                    self.plant(name, organization)

    def plant(self, name, organization):
        if (name, organization) not in self.rows:
            if name == "organizations":
                found = self.conn.execute("SELECT * FROM organizations WHERE id = %s", [organization])
                self.rows[name, organization] = dict(
                    zip([c.name for c in found.description], found.fetchone(), strict=True)
                )
            else:
                self.rows[name, organization] = self.insert(name, self.values(name, organization))
        return self.rows[name, organization]

    def insert(self, name, values):
        """Insert and return the row as it is stored."""
        cursor = self.conn.execute(self.statement(name, values) + pgsql.SQL(" RETURNING *"), list(values.values()))
        return dict(zip([c.name for c in cursor.description], cursor.fetchone(), strict=True))

    def statement(self, name, values):
        return pgsql.SQL("INSERT INTO {} ({}) VALUES ({})").format(
            self.tables[name].identifier,
            pgsql.SQL(", ").join(map(pgsql.Identifier, values)),
            pgsql.SQL(", ").join(
                pgsql.SQL("%s::{}").format(pgsql.SQL(self.tables[name].columns[column]["type"])) for column in values
            ),
        )

    def values(self, name, organization):
        """A row for this organization that satisfies what the table demands. New unique values each time."""
        table = self.tables[name]
        row = {}
        if table.tenant_column:
            row[table.tenant_column] = organization
        for target, columns, references in table.foreign_keys:
            if all(table.columns[c]["null"] or table.columns[c]["default"] for c in columns if c != "organization_id"):
                continue
            found = self._referenced(target, organization)
            row |= {c: found[r] for c, r in zip(columns, references, strict=True)}
        for column, facts in table.columns.items():
            if column not in row and not (facts["null"] or facts["default"] or facts["generated"]):
                row[column] = self._first_that_fits(table, column, organization)
        return self._with_checks(table, row, organization)

    def _referenced(self, target, organization):
        if self.tables[target].tenant_column:
            return self.plant(target, organization)
        cursor = self.conn.execute(pgsql.SQL("SELECT * FROM {} LIMIT 1").format(self.tables[target].identifier))
        row = cursor.fetchone()
        if row is None:
            return self.insert(target, self.values(target, organization))
        return dict(zip([c.name for c in cursor.description], row, strict=True))

    def _first_that_fits(self, table, column, organization):
        checks = [expression for expression, columns in table.checks if columns == [column]]
        for candidate in self._candidates(table, column, organization):
            if all(self._holds(table, check, {column: candidate}) for check in checks):
                return candidate
        raise AssertionError(
            f"no candidate for {table.name}.{column} satisfies {checks}: add one of its shape to tests/sql/rows.py"
        )

    def _with_checks(self, table, row, organization):
        """Try other values for the columns of checks over several columns until all of them hold."""
        together = [(expression, columns) for expression, columns in table.checks if len(columns) > 1]
        defaults = self._defaults(table, row)

        def broken(row):
            return [c for e, c in together if not self._holds(table, e, {k: (defaults | row).get(k) for k in c})]

        for _ in range(len(together) + 1):
            wrong = broken(row)
            if not wrong:
                return row
            columns = [c for c in wrong[0] if c != table.tenant_column]
            choices = [
                [None] * table.columns[c]["null"] + list(self._candidates(table, c, organization)) for c in columns
            ]
            single = [(e, c) for e, c in table.checks if len(c) == 1 and c[0] in columns]
            for combination in itertools.islice(itertools.product(*choices), 5000):
                tried = row | dict(zip(columns, combination, strict=True))
                if len(broken(tried)) < len(wrong) and all(
                    self._holds(table, e, {c[0]: tried[c[0]]}) for e, c in single
                ):
                    row = tried
                    break
        if broken(row):
            raise AssertionError(f"no row for {table.name} satisfies {broken(row)}: help tests/sql/rows.py to find one")
        return row

    def _defaults(self, table, row):
        """What the defaults of the other columns are, as far as they are constants."""
        found = {}
        for column, facts in table.columns.items():
            if column in row or not facts["default"] or facts["generated"]:
                continue
            expression = self.conn.execute(
                "SELECT pg_get_expr(d.adbin, d.adrelid) FROM pg_attrdef d JOIN pg_attribute a"
                " ON a.attrelid = d.adrelid AND a.attnum = d.adnum WHERE d.adrelid = %s::regclass AND a.attname = %s",
                [table.name, column],
            ).fetchone()
            if expression and "nextval" not in expression[0]:
                found[column] = self.conn.execute(pgsql.SQL("SELECT " + expression[0])).fetchone()[0]
        return found

    def _holds(self, table, expression, values):
        """Whether a check holds for these columns: the server evaluates its own expression."""
        query = pgsql.SQL("SELECT ({}) IS NOT FALSE FROM (SELECT {}) row").format(
            pgsql.SQL(expression.replace("%", "%%")),
            pgsql.SQL(", ").join(
                pgsql.SQL("%s::{} AS {}").format(pgsql.SQL(table.columns[c]["type"]), pgsql.Identifier(c))
                for c in values
            ),
        )
        with self.conn.transaction():
            return self.conn.execute(query, [_adapted(v) for v in values.values()]).fetchone()[0]

    def _candidates(self, table, column, organization):
        kind = table.columns[column]["type"]
        for expression, columns in table.checks:
            if column in columns:  # 'a'::text, 'b'::text of an IN list, and numbers of one
                for text in re.findall(r"'((?:[^']|'')*)'::(?:text|character varying)", expression):
                    if _is_text(kind):
                        yield text.replace("''", "'")
        if _is_text(kind):
            yield f"x{uuid.uuid4().hex[:12]}"
            yield uuid.uuid4().hex
            yield from TEXTS
        elif kind == "uuid":
            yield uuid.uuid4()
        elif kind == "bytea":
            yield hashlib.sha256(uuid.uuid4().bytes).digest()
            yield b"x"
        elif kind == "boolean":
            yield from (False, True)
        elif kind in ("smallint", "integer", "bigint"):
            yield from (1, 0)
        elif kind.startswith("numeric") or kind in ("double precision", "real"):
            yield from (Decimal(1), Decimal(0))
        elif kind.startswith("timestamp"):
            yield datetime.now(UTC)
        elif kind == "date":
            yield datetime.now(UTC).date().replace(day=1)
        elif kind == "jsonb":
            yield from (Jsonb({}), Jsonb([]))
        elif kind == "text[]":
            yield from (["a.b"], [])
        elif kind == "xid8":
            yield "1"
        elif kind == "regclass":
            yield "pg_class"
        else:
            raise AssertionError(f"{table.name}.{column} is a {kind}: give tests/sql/rows.py a candidate for it")

    def _order(self):
        """Tables after those they point at."""
        done, left = [], sorted(self.tables)
        while left:
            ready = [
                name
                for name in left
                if all(t in done or t == name or t not in self.tables for t, _, _ in self.tables[name].foreign_keys)
            ]
            assert ready, f"foreign keys in a circle: {left}"
            done += ready
            left = [name for name in left if name not in ready]
        return done


def _is_text(kind):
    return kind == "text" or kind.startswith("character varying")


def _adapted(value):
    return Jsonb(value) if isinstance(value, (dict, list)) and not (value and isinstance(value[0], str)) else value
