-- Roles, the tenant of a session, and the two procedures every later table goes through: tenancy.protect for tables with
-- tenant data, afluente.ensure_partitions for tables that are partitioned by month.

-- Roles belong to the cluster, not to this database: another database may be making them at this very moment.
DO $roles$
DECLARE
    _role text;
BEGIN
    FOREACH _role IN ARRAY ARRAY['afluente_app', 'afluente_worker', 'afluente_admin']
    LOOP
        IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = _role) THEN
            BEGIN
                EXECUTE format('CREATE ROLE %I NOLOGIN', _role);
            EXCEPTION
                WHEN duplicate_object OR unique_violation THEN
                    NULL;
            END;
        END IF;
        -- A login that is no superuser owns the tables but is bound by their forced row-level security; as a member of
        -- the worker role it sees all rows, and it can act as each role. A superuser is a member of everything already.
        FOR _attempt IN 1 .. 5
        LOOP
            EXIT WHEN pg_has_role(current_user, _role, 'SET') AND pg_has_role(current_user, _role, 'USAGE');
            BEGIN
                EXECUTE format('GRANT %I TO %I WITH INHERIT TRUE, SET TRUE', _role, current_user);
            EXCEPTION
                WHEN internal_error OR unique_violation THEN  -- "tuple concurrently updated"
                    PERFORM pg_sleep(0.05);
            END;
        END LOOP;
    END LOOP;
END;
$roles$;

CREATE SCHEMA IF NOT EXISTS auth;  -- Supabase has one already
CREATE SCHEMA tenancy;
CREATE SCHEMA afluente;

GRANT USAGE ON SCHEMA public, auth, afluente TO afluente_app, afluente_worker, afluente_admin;
REVOKE CREATE ON SCHEMA public FROM PUBLIC;
REVOKE ALL ON SCHEMA tenancy FROM PUBLIC;

-- The tenant of this transaction: the setting app.organization_id, or the claims that PostgREST and Supabase set from
-- the caller's token. NULL when there is none, and then no row of any tenant is seen.
CREATE FUNCTION auth.organization_id() RETURNS uuid
LANGUAGE sql STABLE PARALLEL SAFE
AS $$
    SELECT COALESCE(
        NULLIF(current_setting('app.organization_id', true), ''),
        NULLIF(current_setting('request.jwt.claims', true), '')::jsonb ->> 'organization_id',
        NULLIF(current_setting('request.jwt.claims', true), '')::jsonb -> 'app_metadata' ->> 'organization_id'
    )::uuid
$$;
REVOKE ALL ON FUNCTION auth.organization_id() FROM PUBLIC;
GRANT EXECUTE ON FUNCTION auth.organization_id() TO afluente_app, afluente_worker, afluente_admin;

-- Takes every privilege on a relation from everybody but its owner, default privileges of the database included.
CREATE FUNCTION tenancy.revoke_all(rel regclass) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    _grantee text;
BEGIN
    FOR _grantee IN
        SELECT DISTINCT CASE WHEN a.grantee = 0 THEN 'PUBLIC' ELSE quote_ident(a.grantee::regrole::text) END
          FROM pg_class c, aclexplode(c.relacl) a
         WHERE c.oid = revoke_all.rel
           AND a.grantee <> c.relowner
    LOOP
        EXECUTE format('REVOKE ALL ON %s FROM %s', revoke_all.rel, _grantee);
    END LOOP;
END;
$$;

-- Row-level security on and forced. Applications and operators see and write their organization's rows only; workers
-- see all. Grants are given by the caller afterwards, table by table. The sub-select is evaluated once a statement, so
-- the tenant can be an index condition.
CREATE FUNCTION tenancy.protect(rel regclass, organization_column text DEFAULT 'organization_id') RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM tenancy.revoke_all(protect.rel);
    EXECUTE format('ALTER TABLE %s ENABLE ROW LEVEL SECURITY', protect.rel);
    EXECUTE format('ALTER TABLE %s FORCE ROW LEVEL SECURITY', protect.rel);
    EXECUTE format(
        'CREATE POLICY tenant ON %1$s TO afluente_app, afluente_admin
             USING (%2$I = (SELECT auth.organization_id())) WITH CHECK (%2$I = (SELECT auth.organization_id()))',
        protect.rel, protect.organization_column);
    EXECUTE format('CREATE POLICY worker ON %s TO afluente_worker USING (true) WITH CHECK (true)', protect.rel);
END;
$$;

-- A partition is reached through its parent only: no grants, row-level security on and forced, and no policy of its own,
-- so that even a grant given by mistake shows nothing.
CREATE FUNCTION tenancy.protect_partition(partition regclass) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM tenancy.revoke_all(protect_partition.partition);
    EXECUTE format('ALTER TABLE %s ENABLE ROW LEVEL SECURITY', protect_partition.partition);
    EXECUTE format('ALTER TABLE %s FORCE ROW LEVEL SECURITY', protect_partition.partition);
END;
$$;

-- All partitions of all protected tables, for those that were attached by hand.
CREATE FUNCTION tenancy.protect_partitions() RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    _partition regclass;
BEGIN
    FOR _partition IN
        SELECT i.inhrelid::regclass
          FROM pg_inherits i
          JOIN pg_class p ON p.oid = i.inhparent
         WHERE p.relkind = 'p'
           AND p.relrowsecurity
    LOOP
        PERFORM tenancy.protect_partition(_partition);
    END LOOP;
END;
$$;

-- The tables that have one partition a month (UTC), by a timestamptz column.
CREATE TABLE afluente.monthly_partitioned (
    table_name regclass PRIMARY KEY,
    floor      timestamptz NOT NULL DEFAULT '-infinity'  -- no partition is made that ends at or before this
);

-- Makes the missing monthly partitions of every registered table, from the month of `since` (default: last month) to the
-- month of `upto`; returns how many it made. Attached, not created in place: CREATE ... PARTITION OF takes an ACCESS
-- EXCLUSIVE lock on the parent, ATTACH one that readers and writers do not notice.
CREATE FUNCTION afluente.ensure_partitions(upto date, since date DEFAULT NULL) RETURNS integer
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '10s'
AS $$
DECLARE
    _table     record;
    _month     timestamp;
    _name      text;
    _made      integer := 0;
BEGIN
    PERFORM pg_advisory_xact_lock(hashtext('afluente.ensure_partitions'));
    FOR _table IN
        SELECT m.table_name, m.floor, n.nspname, c.relname
          FROM afluente.monthly_partitioned m
          JOIN pg_class c ON c.oid = m.table_name
          JOIN pg_namespace n ON n.oid = c.relnamespace
         ORDER BY m.table_name
    LOOP
        FOR _month IN
            SELECT generate_series(
                date_trunc('month', COALESCE(ensure_partitions.since,
                                             (clock_timestamp() AT TIME ZONE 'UTC')::date - interval '1 month')::timestamp),
                date_trunc('month', ensure_partitions.upto::timestamp),
                interval '1 month')
        LOOP
            _name := _table.relname || to_char(_month, '"_y"YYYY"m"MM');
            CONTINUE WHEN (_month + interval '1 month') AT TIME ZONE 'UTC' <= _table.floor
                       OR to_regclass(format('%I.%I', _table.nspname, _name)) IS NOT NULL;
            EXECUTE format(
                'CREATE TABLE %I.%I (LIKE %s INCLUDING DEFAULTS INCLUDING CONSTRAINTS INCLUDING GENERATED INCLUDING STORAGE)',
                _table.nspname, _name, _table.table_name);
            PERFORM tenancy.protect_partition(format('%I.%I', _table.nspname, _name)::regclass);
            EXECUTE format(
                'ALTER TABLE %s ATTACH PARTITION %I.%I FOR VALUES FROM (%L) TO (%L)',
                _table.table_name, _table.nspname, _name,
                to_char(_month, 'YYYY-MM-DD 00:00:00+00'),
                to_char(_month + interval '1 month', 'YYYY-MM-DD 00:00:00+00'));
            _made := _made + 1;
        END LOOP;
    END LOOP;
    RETURN _made;
END;
$$;
REVOKE ALL ON FUNCTION afluente.ensure_partitions(date, date) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION afluente.ensure_partitions(date, date) TO afluente_worker;
GRANT SELECT ON afluente.monthly_partitioned TO afluente_worker;
