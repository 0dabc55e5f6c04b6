"""No tenant sees or touches another's rows: for every table, partition and view that the catalogue has today.

Two questions for each. With the grants as they are: does the deed fail, or find nothing? And with every grant given, in
a transaction that is rolled back: does row-level security alone hold? A grant is one line in somebody's migration.
"""

import psycopg
import pytest
from psycopg import errors
from psycopg import sql as pgsql

from tests.fixtures.postgres import clone
from tests.sql.rows import Planter, partitions, tables, views

TENANT_ROLES = ("afluente_app", "afluente_admin")

# Tables without tenant data, each with the reason. Anything else must have organization_id and a policy.
NOT_TENANT_DATA = {
    "afluente.monthly_partitioned": "names of tables",
    "afluente.relay_lane": "who publishes",
    "afluente.relay_pause": "whether it publishes",
    "afluente.relay_replay": "what a person asked to be replayed; at most the organizations' ids",
    "event_log_seal": "months",
    "worker_event_types": "the workers' subscriptions",
    "worker_process": "living processes",
    "worker_control": "which workers are paused",
    "worker_periodic": "when workers did their periodic work",
    "worker_breaker": "destinations that fail",
    "undecodable_record": "where bytes are that are no event; the bytes are in Kafka",
    "undecodable_audit": "what people did with them",
    "stream_generation": "numbers of rebuilds",
    "stream_offset": "positions in topics",
}
# Rows without an organization: the operator sees them, by a policy of their own.
SEEN_WITHOUT_ORGANIZATION = {("webhook_events", "afluente_admin")}


@pytest.fixture(scope="module")
def planted(postgres, template):
    """Two organizations with a row in every table; the owner's connection. What tests do to the rows is rolled back."""
    with clone(postgres, template) as database:
        conn = database.connect(role=None, autocommit=True)
        conn.execute("SET search_path = public")
        mine, theirs = database.organization("Mine"), database.organization("Theirs")
        yield conn, Planter(conn, [mine, theirs]), mine, theirs


class Tenant:
    """The owner's connection, being a role of one organization inside a transaction that is rolled back."""

    def __init__(self, conn, role, organization, grants_on=None):
        self.conn, self.role, self.organization, self.grants_on = conn, role, organization, grants_on

    def __enter__(self):
        self.transaction = self.conn.transaction(force_rollback=True)
        self.transaction.__enter__()
        if self.grants_on:
            self.conn.execute(
                pgsql.SQL("GRANT ALL ON {} TO {}").format(pgsql.SQL(self.grants_on), pgsql.Identifier(self.role))
            )
        self.conn.execute(pgsql.SQL("SET LOCAL ROLE {}").format(pgsql.Identifier(self.role)))
        setting = "" if self.organization is None else str(self.organization)
        self.conn.execute("SELECT set_config('app.organization_id', %s, true)", [setting])
        return self

    def __exit__(self, *exception):
        self.transaction.__exit__(None, None, None)
        return False

    def attempt(self, statement, parameters=None):
        """(rows, count), or the error; the transaction goes on."""
        try:
            with self.conn.transaction():
                cursor = self.conn.execute(statement, parameters)
                return (cursor.fetchall() if cursor.description else [], cursor.rowcount)
        except psycopg.Error as error:
            return error

    def copy_out(self, name):
        try:
            statement = pgsql.SQL("COPY {} TO STDOUT").format(pgsql.SQL(name))
            with self.conn.transaction(), self.conn.cursor() as cursor, cursor.copy(statement) as copy:
                return list(copy.rows())
        except psycopg.Error as error:
            return error

    def copy_in(self, name, columns, values):
        try:
            with self.conn.transaction(), self.conn.cursor() as cursor:
                statement = pgsql.SQL("COPY {} ({}) FROM STDIN").format(
                    pgsql.SQL(name), pgsql.SQL(", ").join(map(pgsql.Identifier, columns))
                )
                with cursor.copy(statement) as copy:
                    copy.write_row(values)
            return []
        except psycopg.Error as error:
            return error


def deeds(planter, conn, role, name, organization, other, granted):
    """What `organization` can do to a table of `other`'s, as findings: none is right."""
    table = planter.tables[name]
    column = pgsql.Identifier(table.tenant_column)
    findings = []
    with Tenant(conn, role, organization, name if granted else None) as tenant:
        read = tenant.attempt(pgsql.SQL("SELECT {} FROM {}").format(column, table.identifier))
        if isinstance(read, errors.InsufficientPrivilege):
            assert not granted, f"{name}: granted and refused: {read}"
        else:
            seen = {row[0] for row in read[0]}
            allowed = {organization} | ({None} if (name, role) in SEEN_WITHOUT_ORGANIZATION else set())
            if not seen <= allowed or organization not in seen:
                findings.append(f"{role} sees rows of {seen} in {name}")
        copied = tenant.copy_out(name)
        if not isinstance(copied, errors.InsufficientPrivilege) and any(str(other) in row for row in copied):
            findings.append(f"{role} copies others' rows out of {name}")

        values = planter.values(name, other) if name != "organizations" else {"name": "x"}
        wrote = tenant.attempt(planter.statement(name, values), list(values.values()))
        if not isinstance(wrote, errors.InsufficientPrivilege):
            findings.append(f"{role} may insert into {name} for another: {wrote}")
        brought = tenant.copy_in(name, [table.tenant_column], [other])
        if not isinstance(brought, (errors.InsufficientPrivilege, errors.FeatureNotSupported)):
            findings.append(f"{role} may COPY into {name} for another: {brought}")
        for what, statement, parameters in (
            ("update", "UPDATE {table} SET {column} = {column} WHERE {column} = %s", [other]),
            ("update all of", "UPDATE {table} SET {column} = %s WHERE {column} = %s", [organization, other]),
            ("give away rows of", "UPDATE {table} SET {column} = %s WHERE {column} = %s", [other, organization]),
            ("delete from", "DELETE FROM {table} WHERE {column} = %s", [other]),
        ):
            done = tenant.attempt(pgsql.SQL(statement).format(table=table.identifier, column=column), parameters)
            harmless = isinstance(done, errors.InsufficientPrivilege) or (
                # a trigger or a key may be what stops one's own rows from leaving
                what.startswith("give") and isinstance(done, psycopg.Error)
            )
            if not harmless and (isinstance(done, psycopg.Error) or done[1] != 0):
                findings.append(f"{role} may {what} {name} of another: {done}")
    with Tenant(conn, role, None, name if granted else None) as nobody:
        read = nobody.attempt(pgsql.SQL("SELECT {} FROM {}").format(column, table.identifier))
        if not isinstance(read, errors.InsufficientPrivilege):
            seen = {row[0] for row in read[0]}
            if seen - ({None} if (name, role) in SEEN_WITHOUT_ORGANIZATION else set()):
                findings.append(f"{role} without an organization sees {name}")
    return findings


def declared(conn):
    """Tables that are not protected as they must be, by the catalogue alone."""
    findings = []
    for name, table in tables(conn).items():
        if name in NOT_TENANT_DATA:
            if table.tenant_column:
                findings.append(f"{name} has organization_id: it is tenant data")
            continue
        if table.tenant_column is None:
            findings.append(f"{name} has no organization_id: give it one, or a reason in NOT_TENANT_DATA")
            continue
        enabled, forced, policies = conn.execute(
            """
            SELECT c.relrowsecurity, c.relforcerowsecurity,
                   ARRAY(SELECT DISTINCT r::regrole::text FROM pg_policy p, unnest(p.polroles) r
                          WHERE p.polrelid = c.oid)
              FROM pg_class c WHERE c.oid = %s::regclass
            """,
            [name],
        ).fetchone()
        if not (enabled and forced and {*TENANT_ROLES, "afluente_worker"} <= set(policies)):
            findings.append(f"{name} is not protected: SELECT tenancy.protect('{name}') in its migration")
    for partition, parent in partitions(conn):
        enabled, forced, acl = conn.execute(
            "SELECT relrowsecurity, relforcerowsecurity, relacl FROM pg_class WHERE oid = %s::regclass", [partition]
        ).fetchone()
        grantees = {entry.partition("=")[0] for entry in acl or []}
        owner = conn.execute("SELECT current_user").fetchone()[0]
        if parent not in NOT_TENANT_DATA and not (enabled and forced and grantees <= {owner}):
            findings.append(f"partition {partition} is open: {grantees}")
    return findings


def test_every_table_is_declared_protected(database):
    conn = database.connect(role=None, autocommit=True)
    conn.execute("SET search_path = public")
    assert declared(conn) == []
    assert set(NOT_TENANT_DATA) <= set(tables(conn)), "an exception for a table that is gone"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("granted", [False, True], ids=["as_granted", "every_grant_given"])
def test_no_table_shows_or_takes_another_tenants_rows(planted, granted):
    conn, planter, mine, theirs = planted
    findings = []
    for name, table in planter.tables.items():
        if table.tenant_column is None:
            continue
        for organization in (mine, theirs):
            held = conn.execute(
                pgsql.SQL("SELECT count(*) FROM {} WHERE {} = %s").format(
                    table.identifier, pgsql.Identifier(table.tenant_column)
                ),
                [organization],
            ).fetchone()[0]
            assert held > 0, f"{name} has no row of {organization}"
        for role in TENANT_ROLES:
            findings += deeds(planter, conn, role, name, mine, theirs, granted)
    assert findings == []


def test_no_partition_is_reached_but_through_its_parent(planted):
    conn, planter, mine, _ = planted
    conn.execute("SELECT afluente.ensure_partitions((now() + interval '9 months')::date)")
    findings = [finding for finding in declared(conn) if "partition" in finding]
    reached = 0
    for partition, parent in partitions(conn):
        table = planter.tables[parent]
        if table.tenant_column is None:
            continue
        reached += 1
        identifier = pgsql.SQL(partition)
        values = planter.values(parent, mine)
        insert = pgsql.SQL("INSERT INTO {} (organization_id) VALUES (%s)").format(identifier)
        for role in (*TENANT_ROLES, "afluente_worker"):
            with Tenant(conn, role, mine) as tenant:
                for statement, parameters in (
                    (pgsql.SQL("SELECT FROM {}").format(identifier), None),
                    (insert, [mine]),
                    (pgsql.SQL("UPDATE {} SET organization_id = organization_id").format(identifier), None),
                    (pgsql.SQL("DELETE FROM {}").format(identifier), None),
                    (pgsql.SQL("TRUNCATE {}").format(identifier), None),
                ):
                    outcome = tenant.attempt(statement, parameters)
                    if not isinstance(outcome, errors.InsufficientPrivilege):
                        findings.append(f"{role} on {partition}: {outcome}")
                if not isinstance(tenant.copy_out(partition), errors.InsufficientPrivilege):
                    findings.append(f"{role} copies {partition}")
            with Tenant(conn, role, mine, partition) as tenant:  # a grant by mistake
                if tenant.attempt(pgsql.SQL("SELECT FROM {}").format(identifier))[0]:
                    findings.append(f"{role} sees {partition} once granted")
                copied = tenant.copy_out(partition)
                if copied:
                    findings.append(f"{role} copies {partition} once granted: {copied}")
                columns = {c: v for c, v in values.items()}
                wrote = tenant.attempt(
                    pgsql.SQL("INSERT INTO {} ({}) VALUES ({})").format(
                        identifier,
                        pgsql.SQL(", ").join(map(pgsql.Identifier, columns)),
                        pgsql.SQL(", ").join(pgsql.SQL("%s") for _ in columns),
                    ),
                    list(columns.values()),
                )
                if not isinstance(wrote, psycopg.Error):
                    findings.append(f"{role} writes {partition} once granted")
    assert reached >= 5
    assert findings == []


def test_no_view_shows_another_tenants_rows(planted):
    conn, _, mine, theirs = planted
    found = views(conn)
    assert found
    findings = []
    for name in found:
        select = pgsql.SQL("SELECT organization_id FROM {}").format(pgsql.SQL(name))
        everything = {row[0] for row in conn.execute(select)}
        assert {mine, theirs} <= everything, f"{name} shows no row of both, so nothing is tested"
        for role in TENANT_ROLES:
            for organization, allowed in ((mine, {mine}), (None, set())):
                for granted in (False, True):
                    with Tenant(conn, role, organization, name if granted else None) as tenant:
                        seen = tenant.attempt(select)
                        if isinstance(seen, errors.InsufficientPrivilege):
                            continue
                        if not {row[0] for row in seen[0]} <= allowed:
                            findings.append(f"{role} sees others through {name}")
                        for deed in (
                            pgsql.SQL("DELETE FROM {} WHERE organization_id = %s"),
                            pgsql.SQL("UPDATE {} SET organization_id = organization_id WHERE organization_id = %s"),
                        ):
                            done = tenant.attempt(deed.format(pgsql.SQL(name)), [theirs])
                            if not isinstance(done, psycopg.Error) and done[1] != 0:
                                findings.append(f"{role} writes others' rows through {name}")
    assert findings == []


def test_the_worker_sees_every_tenant(planted):
    conn, planter, mine, theirs = planted
    for name, table in planter.tables.items():
        if table.tenant_column is None:
            continue
        with Tenant(conn, "afluente_worker", None, name) as worker:
            read = worker.attempt(
                pgsql.SQL("SELECT {} FROM {}").format(pgsql.Identifier(table.tenant_column), table.identifier)
            )
            assert {mine, theirs} <= {row[0] for row in read[0]}, name


def test_the_tenant_comes_from_the_claims_of_a_token_too(planted):
    conn, _, mine, theirs = planted
    for claims in (f'{{"organization_id": "{mine}"}}', f'{{"app_metadata": {{"organization_id": "{mine}"}}}}'):
        with Tenant(conn, "afluente_app", None) as tenant:
            tenant.conn.execute("SELECT set_config('request.jwt.claims', %s, true)", [claims])
            assert tenant.attempt("SELECT id FROM organizations")[0] == [(mine,)]
            with pytest.raises(errors.DatabaseError) as refused, conn.transaction():
                conn.execute("SELECT emit_event('lead.created', 'lead', NULL, '{}', '{}', %s)", [theirs])
            assert refused.value.sqlstate == "AF002"


def test_a_new_table_without_a_policy_is_found(database):
    conn = database.connect(role=None, autocommit=True)
    conn.execute("SET search_path = public")
    conn.execute("CREATE TABLE notes (organization_id uuid NOT NULL, text text)")
    conn.execute("CREATE TABLE scraps (text text)")
    conn.execute("GRANT SELECT ON notes TO afluente_app")
    assert declared(conn) == [
        "notes is not protected: SELECT tenancy.protect('notes') in its migration",
        "scraps has no organization_id: give it one, or a reason in NOT_TENANT_DATA",
    ]
    mine, theirs = database.organization("Mine"), database.organization("Theirs")
    planter = Planter(conn, [mine, theirs])
    assert deeds(planter, conn, "afluente_app", "notes", mine, theirs, granted=True)
    conn.execute("SELECT tenancy.protect('notes')")
    conn.execute("DROP TABLE scraps")
    assert declared(conn) == []
    assert deeds(planter, conn, "afluente_app", "notes", mine, theirs, granted=True) == []


def test_nobody_else_has_a_grant(database):
    """PUBLIC, and the roles a hosted Postgres hands default privileges to, get nothing."""
    conn = database.connect(role=None, autocommit=True)
    found = conn.execute(
        """
        SELECT c.oid::regclass::text, a.privilege_type
          FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace, aclexplode(c.relacl) a
         WHERE n.nspname IN ('public', 'afluente', 'auth', 'tenancy', 'migration') AND a.grantee = 0
        UNION ALL
        SELECT p.oid::regprocedure::text, a.privilege_type
          FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace,
               aclexplode(COALESCE(p.proacl, acldefault('f', p.proowner))) a
         WHERE n.nspname IN ('public', 'afluente') AND a.grantee = 0 AND p.prosecdef
        """
    ).fetchall()
    assert found == []


def test_functions_that_run_as_their_owner_pin_the_search_path(database):
    conn = database.connect(role=None, autocommit=True)
    found = conn.execute(
        """
        SELECT p.oid::regprocedure::text FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace
         WHERE n.nspname IN ('public', 'afluente', 'auth', 'tenancy') AND p.prosecdef
           AND NOT EXISTS (SELECT FROM unnest(p.proconfig) c WHERE c LIKE 'search_path=%')
        """
    ).fetchall()
    assert found == []


def test_no_trigger_does_http(database):
    """From the catalogue: no language or extension that can leave the database, and no word of one in a function."""
    conn = database.connect(role=None, autocommit=True)
    assert (
        conn.execute(
            "SELECT extname FROM pg_extension WHERE extname ~ '(http|net|dblink|plpython|plperl|fdw|pltcl)'"
        ).fetchall()
        == []
    )
    functions = conn.execute(
        """
        SELECT p.oid::regprocedure::text, l.lanname, p.prosrc, EXISTS (SELECT FROM pg_trigger t WHERE t.tgfoid = p.oid)
          FROM pg_proc p JOIN pg_language l ON l.oid = p.prolang JOIN pg_namespace n ON n.oid = p.pronamespace
         WHERE n.nspname IN ('public', 'afluente', 'auth', 'tenancy')
            OR EXISTS (SELECT FROM pg_trigger t WHERE t.tgfoid = p.oid AND NOT t.tgisinternal)
        """
    ).fetchall()
    assert any(is_trigger for *_, is_trigger in functions)
    # Every function, not the triggers' own only: they call others.
    for name, language, source, _ in functions:
        assert language in ("sql", "plpgsql"), f"{name} is in {language}"
        for word in (
            "http_",
            "net.",
            "dblink",
            "pg_read_",
            "lo_export",
            "TO PROGRAM",
            "FROM PROGRAM",
            "pg_notify",
            "NOTIFY ",
        ):
            assert word.lower() not in source.lower(), f"{name} contains {word}"
